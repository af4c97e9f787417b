"""The README's first table is what `make demo` wrote into results/demo."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_headline_table_is_the_committed_result():
    results = json.loads((ROOT / "results" / "demo" / "results.json").read_text("utf-8"))
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- demo -->")[1].split("<!-- /demo -->")[0]
    lengths = [int(number) for number in re.findall(r"\d+", table.splitlines()[1].split("read at")[1])]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", table, re.MULTILINE))
    expected = {
        (record["method"], record["eval_length"]): record["ppl"]
        for record in results["records"]
        if record["view"] == "equal-step"
    }
    assert {method for method, _ in expected} == set(rows)
    for method, cells in rows.items():
        shown = [cell.strip(" *") for cell in cells.split("|")]
        assert shown == [f"{expected[method, length]:.2f}" for length in lengths]
