"""`python -m dev.methods`: the table of methods, as records and in a page."""

import json

from dape.methods import PRESETS
from dape.positions import POSITIONS
from dape.scores import SCORES
from dev import bench_tables, methods


def test_every_encoding_processor_and_preset_is_in_the_table():
    assert {*POSITIONS, *PRESETS} - {"relative"} <= set(methods.SHOWN)
    for processor in SCORES.keys() - {"plain"}:
        assert any(name.startswith(processor) for name in methods.SHOWN)


def test_methods_are_timed_beside_plain_attention(tmp_path, capsys, monkeypatch):
    file = tmp_path / "methods.json"
    sizes = [
        "--length", "16", "--hidden-size", "16", "--rounds", "1", "--methods",
        "mta-kerple,rope[window=4],pope"
    ]  # fmt: skip
    assert methods.main([*sizes, "--json", str(file)]) == 0
    records = {record["method"]: record for record in json.loads(file.read_text())}
    # Earlier queries are cached beside keys and values; keys of twice the width.
    assert [records[name]["cache"] for name in records] == [1.5, 1.0, 1.5]
    assert records["rope[window=4]"]["encoders"] == "no"
    assert records["pope"]["parameters"] == 16
    monkeypatch.setattr(bench_tables, "records", lambda path: [*records.values()])
    heads, rows = bench_tables.methods()
    assert heads[:2] == ["method", "reference"]
    assert ["`mta-kerple`", "Golovneva et al. 2025, arXiv 2504.00927"] in [row[:2] for row in rows]
