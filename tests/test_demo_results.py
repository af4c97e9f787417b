"""Numbers of the README: those of `make demo` in results/demo, and of the headline experiment."""

import math
import re
from pathlib import Path

from dape.lab.folders import load_folder
from dape.lab.records import STEP, TIME, load_results
from dape.lab.report.hypotheses import hypotheses
from dape.lab.report.papers import overview
from dape.lab.stats import Trained

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


def test_the_headline_table_is_the_one_of_its_results():
    """Perplexity at the training length and at the longest, paired differences, and the number of seeds."""
    folder = load_folder(ROOT / "papers/dape_v2/headline")
    assert "\n".join(["<!-- headline -->", *overview(folder), "<!-- /headline -->"]) in README, (
        "dape reproduce --report writes it"
    )
    frame = folder.best.frame
    chosen = frame[(frame["metric"] == "loss") & (frame["view"] == STEP) & (frame["corpus"] == "latex13")]
    means = chosen[chosen["method"] == "dape1x3-kerple"].groupby("eval_length")["value"].mean()
    assert f"| LaTeX, `dape1x3-kerple` | {math.exp(means[256]):.2f} | {math.exp(means[8192]):.2f} |" in README


def test_the_hypotheses_have_the_numbers_of_the_results():
    folder = load_folder(ROOT / "papers/dape_v2/headline")
    written = (folder.path / "hypotheses.md").read_text("utf-8")
    assert written == hypotheses(folder), "dape reproduce --report writes it"
    data, one = folder.losses, Trained(STEP, "latex13", 256, "dape1x3-kerple", "")
    by_seed = [
        data.rows[one][2048][seed]["value"] - data.rows[one][256][seed]["value"] for seed in data.seeds(one)
    ]
    assert ", ".join(f"{-value:.3f}" for value in by_seed[:-1]) in written


def test_the_readme_says_what_a_training_step_costs():
    frame = load_folder(ROOT / "papers/dape_v2/step_time").best.frame
    times = frame[frame["metric"] == "milliseconds"].set_index(["method", "eval_length"])["value"]
    shown = re.search(
        r"A whole training step takes (.*?) × that of plain Kerple at (\d+) tokens, (.*?) \(tiny", README
    )
    pairs = [(shown[1], shown[2]), *re.findall(r"([\d.]+) × at (\d+)", shown[3])]
    assert len(pairs) == 4
    for ratio, length in pairs:
        assert ratio == f"{times['dape1x3-kerple', int(length)] / times['kerple', int(length)]:.2f}"
    runs = load_folder(ROOT / "papers/dape_v2/headline").best["runs"]
    timed = {r["method"]: r["steps"] for r in runs if r["view"] == TIME and r["corpus"] == "latex13"}
    assert f"one thread, takes {timed['kerple'] / timed['dape1x3-kerple']:.2f} × at 256" in README
