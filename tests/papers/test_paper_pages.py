"""Pages: every number is that of the tables, and a reader can take them in."""

import re
import subprocess
from pathlib import Path

import pytest

from papers.pages import HERE, compute

ROOT = HERE.parent


def words(text: str) -> int:
    """Words of a page; numbers, code and addresses are none."""
    text = re.sub(r"<!--.*?-->|```.*?```|\]\([^)]*\)", " ", text, flags=re.S).replace("<br>", " ")
    return sum(bool(re.search("[A-Za-z]", word)) for word in re.split(r"[\s|]+", text))


@pytest.mark.parametrize("paper", ["dape_v2", "beyond"])
def test_pages_are_short(paper: str) -> None:
    text = (HERE / paper / "README.md").read_text("utf-8")
    before, _, _ = text.partition("# Appendix")
    assert words(before) <= 900
    assert words(text) <= 2500


@pytest.mark.parametrize("paper", ["dape_v2", "beyond"])
def test_links_of_pages_lead_somewhere(paper: str) -> None:
    text = (HERE / paper / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (HERE / paper / target).exists(), target


def test_the_ten_lines_of_pandas_redo_a_number() -> None:
    text = (HERE / "dape_v2" / "README.md").read_text("utf-8")
    [program] = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len([line for line in program.splitlines() if line]) <= 10
    found: dict[str, object] = {}
    exec(program.replace('"papers/', f'"{HERE}/').replace("print(", "shown = ("), found)
    value = compute("gap LaTeX dape1x3-kerple kerple 8192").split(" ")[0].replace("−", "-")
    assert f"{found['shown'][0]:+.3f}" == value  # type: ignore[index]


def test_papers_stay_small() -> None:
    listed = subprocess.check_output(["git", "ls-files", "papers"], cwd=ROOT, text=True)
    files = [Path(line) for line in listed.splitlines()]
    assert len(files) <= 120
    python = {path: len((ROOT / path).read_text().splitlines()) for path in files if path.suffix == ".py"}
    assert sum(python.values()) <= 2500
    assert sum(n for path, n in python.items() if path.name in ("ledger.py", "claims.py")) <= 900
