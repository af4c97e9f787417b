"""`dape bench methods`: the table of methods, on the screen, as records and in a page."""

import json

from dape.bench import methods
from dape.cli import main
from dape.methods import PRESETS
from dape.positions import POSITIONS
from dape.scores import SCORES


def test_every_encoding_processor_and_preset_is_in_the_table():
    assert {*POSITIONS, *PRESETS} - {"relative"} <= set(methods.SHOWN)
    assert all(
        any(name.startswith(processor) for name in methods.SHOWN)
        for processor in SCORES
        if processor != "plain"
    )


def test_the_table_is_written_into_a_page(tmp_path, capsys):
    page, file = tmp_path / "page.md", tmp_path / "methods.json"
    page.write_text(f"before\n{methods.START}\nold\n{methods.END}\nafter\n")
    arguments = [
        "--methods",
        "mta-kerple,rope[window=4],pope",
        "--length",
        "16",
        "--hidden-size",
        "16",
        "--rounds",
        "1",
    ]
    assert main(["bench", "methods", *arguments, "--json", str(file), "--page", str(page)]) == 0
    records = {record["method"]: record for record in json.loads(file.read_text())}
    # Earlier queries are cached beside keys and values; keys of twice the width.
    assert [records[name]["cache"] for name in records] == [1.5, 1.0, 1.5]
    assert records["rope[window=4]"]["encoders"] == "no"
    assert records["pope"]["parameters"] == 4
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{methods.END}\nafter\n")
    assert "old" not in text
    assert "| `mta-kerple` | Golovneva et al. 2025, arXiv 2504.00927 |" in text
