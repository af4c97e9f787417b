"""The README's table of perplexities is that of the committed results in results/demo."""

import re
from pathlib import Path

from dape.evaluation.table import perplexities, read_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def test_the_table_is_the_committed_result():
    expected = perplexities(read_table(ROOT / "results" / "demo" / "results.csv.gz"))
    table = README.split("<!-- demo -->")[1].split("<!-- /demo -->")[0]
    lengths = [int(number) for number in re.findall(r"\d+", table.splitlines()[1].split("evaluated at")[1])]
    rows = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", table, re.MULTILINE))
    assert set(expected.index) == set(rows)
    for method, cells in rows.items():
        shown = [cell.strip(" *") for cell in cells.split("|")]
        assert shown == [f"{expected.loc[method, length]:.2f}" for length in lengths]


def test_what_equal_time_gives_is_the_committed_result():
    timed = perplexities(read_table(ROOT / "results" / "demo" / "equal-time.csv.gz")).loc["dape1x3-kerple"]
    assert f"`dape1x3-kerple` has {timed[64]:.2f} at 64 and {timed[1024]:.2f} at 1024" in README
