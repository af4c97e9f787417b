"""Numbers of the README: those of `make demo` in results/demo, and of the headline experiment."""

import json
import math
import re
from pathlib import Path

from dape.lab.records import load_results
from dape.lab.report.papers import findings

ROOT = Path(__file__).parents[1]


def test_the_headline_table_is_the_committed_result():
    frame = load_results(ROOT / "results" / "demo" / "results.json").frame
    table = (ROOT / "README.md").read_text("utf-8").split("<!-- demo -->")[1].split("<!-- /demo -->")[0]
    lengths = [int(number) for number in re.findall(r"\d+", table.splitlines()[1].split("evaluated at")[1])]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", table, re.MULTILINE))
    losses = frame[(frame["metric"] == "loss") & (frame["view"] == "equal-step")]
    expected = {(row["method"], row["eval_length"]): math.exp(row["value"]) for _, row in losses.iterrows()}
    assert {method for method, _ in expected} == set(rows)
    for method, cells in rows.items():
        shown = [cell.strip(" *") for cell in cells.split("|")]
        assert shown == [f"{expected[method, length]:.2f}" for length in lengths]


def test_the_headline_sentence_is_read_from_its_results():
    """Perplexity at the training length and at the longest, and the number of seeds."""
    results = json.loads((ROOT / "papers/dape_v2/headline/results.json").read_text("utf-8"))
    text = (ROOT / "README.md").read_text("utf-8")
    seeds = {run["seed"] for run in results["runs"] if run["corpus"] == "latex13"}
    shown = [("latex13", method) for method in ("dape1x3-kerple", "kerple", "rope")]
    shown += [("books13", method) for method in ("dape1x3-kerple", "kerple")]
    for corpus, method in shown:
        losses = {length: [] for length in (256, 8192)}
        for row in results["rows"]:
            run = results["runs"][row["run"]]
            wanted = row["metric"] == "loss" and not row.get("slice") and row["eval_length"] in losses
            if wanted and (run["corpus"], run["method"], run["view"]) == (corpus, method, "equal-step"):
                losses[row["eval_length"]].append(row["value"])
        first, last = (math.exp(sum(values) / len(values)) for values in losses.values())
        assert re.search(rf"{first:.2f}( at 256)? and {last:.2f}", text), (corpus, method)
    assert ("(one seed so far)" in text) == (len(seeds) == 1)
    (timed,) = [said for said in findings(ROOT / "papers") if said.startswith("In the same training time")]
    numbers = re.findall(r"by (\S+ ± \S+) nats at 256 tokens and (\S+ ± \S+) at 8192", timed)[0]
    assert "lower than Kerple's by {} nats at 256 tokens and {} at 8192".format(*numbers) in text
