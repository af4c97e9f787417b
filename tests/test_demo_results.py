"""Numbers of the README: those of `make demo` in results/demo, and of the headline experiment."""

import math
import re
from pathlib import Path

from dape.lab.folders import load_folder
from dape.lab.records import STEP, TIME, load_results
from dape.lab.stats import Trained, signed

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
    timed = frame[(frame["metric"] == "loss") & (frame["view"] == "equal-time")]
    losses = timed[timed["method"] == "dape1x3-kerple"].set_index("eval_length")["value"]
    said = f"`dape1x3-kerple` has {math.exp(losses[64]):.2f} at 64 and {math.exp(losses[1024]):.2f} at 1024"
    assert said in (ROOT / "README.md").read_text("utf-8")


def test_the_headline_table_is_read_from_its_results():
    """Perplexity at the training length and at the longest, paired differences, and the number of seeds."""
    text = (
        (ROOT / "README.md").read_text("utf-8").split("<!-- headline -->")[1].split("<!-- /headline -->")[0]
    )
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert lines == headline_rows()


def headline_rows():
    """The rows of README's table of the headline experiment."""
    data = load_folder(ROOT / "papers/dape_v2/headline").losses
    rows = []
    for corpus, name in (("latex13", "LaTeX"), ("books13", "books")):
        for view, method in (
            (STEP, "kerple"),
            (STEP, "rope"),
            (STEP, "dape1x3-kerple"),
            (TIME, "dape1x3-kerple"),
        ):
            one, base = (Trained(view, corpus, 256, m, "") for m in (method, "kerple"))
            if one not in data.rows or (corpus, method) == ("books13", "rope"):
                continue
            cells = [f"{math.exp(data.loss(one, n).value):.2f}" for n in (256, 8192)]
            gaps = [data.difference((1, one, n), (-1, base, n)) for n in (256, 8192)]
            cells += ["", ""] if one == base else [signed(gap) for gap in gaps]
            time = ", in Kerple's training time" if view == TIME else ""
            rows.append(f"| {name}, `{method}`{time} | {' | '.join(cells)} | {len(data.seeds(one))} |")
    return rows


def test_the_hypotheses_have_the_numbers_of_the_results():
    """The differences that papers/dape_v2/headline/hypotheses.md reports of what was found."""
    data = load_folder(ROOT / "papers/dape_v2/headline").losses
    text = " ".join((ROOT / "papers/dape_v2/headline/hypotheses.md").read_text("utf-8").split())

    def trained(method, corpus="latex13", view=STEP):
        return Trained(view, corpus, 256, method, "")

    def size(*terms):
        return signed(data.difference(*terms)).removeprefix("−").removeprefix("+")

    best, base = trained("dape1x3-kerple"), trained("kerple")
    timed = trained("dape1x3-kerple", view=TIME), trained("kerple", view=TIME)
    books = trained("dape1x3-kerple", "books13"), trained("kerple", "books13")
    ends = [((1, best, n), (-1, base, n)) for n in (256, 8192)]
    assert "is −{} at 256 and −{} at 8192 tokens".format(*(size(*pair) for pair in ends)) in text
    assert f"of `dape1x3-kerple` falls by {size((1, best, 2048), (-1, best, 256))}" in text
    by_seed = [f"{-value:.3f}" for value in data.differences((1, best, 2048), (-1, best, 256)).values()]
    assert f"they fall by {', '.join(by_seed[:-1])} and {by_seed[-1]}" in text
    assert f"{signed(data.difference((1, base, 8192), (-1, base, 256)))} for `kerple`" in text
    alibi = trained("alibi")
    assert f"{signed(data.difference((1, alibi, 8192), (-1, alibi, 256)))} for `alibi`" in text
    grows = (1, best, 8192), (-1, base, 8192), (-1, best, 256), (1, base, 256)
    assert f"the gap grows by {size(*grows)}" in text
    gaps = [size((1, timed[0], n), (-1, timed[1], n)) for n in (256, 8192)]
    assert "lower by {} at 256 and by {} at 8192 tokens".format(*gaps) in text
    gaps = [size((1, books[0], n), (-1, books[1], n)) for n in (256, 8192)]
    assert "by {} nats at 256 tokens and {} at 8192".format(*gaps) in text
    assert f"({signed(data.difference((1, books[0], 8192), (-1, books[0], 256)))} from 256 to 8192" in text
