"""Numbers of the README: those of `make demo` in results/demo."""

import math
import re
from pathlib import Path

from dape.lab.records import load_results

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_headline_table_is_the_committed_result():
    frame = load_results(ROOT / "results" / "demo" / "results.json").frame
    table = README.split("<!-- demo -->")[1].split("<!-- /demo -->")[0]
    lengths = [int(number) for number in re.findall(r"\d+", table.splitlines()[1].split("evaluated at")[1])]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", table, re.MULTILINE))
    losses = frame[(frame["metric"] == "loss") & (frame["view"] == "equal-step")]
    expected = {(row["method"], row["eval_length"]): math.exp(row["value"]) for _, row in losses.iterrows()}
    assert {method for method, _ in expected} == set(rows)
    for method, cells in rows.items():
        shown = [cell.strip(" *") for cell in cells.split("|")]
        assert shown == [f"{expected[method, length]:.2f}" for length in lengths]
    timed = frame[(frame["metric"] == "loss") & (frame["view"] == "equal-time")]
    losses = timed[timed["method"] == "dape1x3-kerple"].set_index("eval_length")["value"]
    said = f"`dape1x3-kerple` has {math.exp(losses[64]):.2f} at 64 and {math.exp(losses[1024]):.2f} at 1024"
    assert said in README
