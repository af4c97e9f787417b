"""The README's commands and code are real."""

import json
import re
from pathlib import Path

import dape
from dape import POSITIONS, SCORES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_python_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block.replace("1024", "64"), "README.md", "exec"), names)
    del dape.SCORES["mixed"]


def test_it_is_short_leads_with_two_commands_and_its_targets_and_links_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"make ([a-z-]+)", README)) <= targets
    assert README.index("make demo") < README.index("pip install") < README.index("<!-- papers: code -->")
    assert "[CITATION.bib](CITATION.bib)" in README
    assert "2410.04798" in (ROOT / "CITATION.bib").read_text()
    assert "arxiv.org/abs/2410.04798" in README.split("##")[0]
    assert len(README.splitlines()) <= 110
    assert max(map(len, README.splitlines())) <= 260
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link


def test_every_encoding_and_every_processor_is_in_the_table():
    table = README.split("| position encoding, score processor")[1].split("\n\n")[0]
    named = {re.sub(r"\dx\d$", "", name) for name in re.findall(r"`([\w-]+)`", table)}
    assert {*POSITIONS, *SCORES} - {"plain"} <= named


def test_the_recall_table_of_the_first_page_is_the_committed_result():
    """On the site's first page, beside the picture that the same command drew."""
    found = json.loads((ROOT / "docs" / "idea.json").read_text())
    text = (ROOT / "docs" / "index.md").read_text()
    table = text.split("| accuracy at length |")[1].split("\n\n")[0].replace("*", "")
    for method, title in {"nope": "plain attention", "dape1x3-nope": "with the 1×3 convolution"}.items():
        cells = re.search(rf"\| {title} \|(.*)\|", table)
        assert cells
        shown = [cell.strip() for cell in cells[1].split("|")]
        assert shown == [f"{100 * share:.0f} %" for share in found["accuracy"][method].values()]


def test_the_encoding_of_the_contributing_guide_works():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    code = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert code
    import torch

    from dape import Positions
    from dape.positions import DistanceEncoding

    names: dict = {"DistanceEncoding": DistanceEncoding, "Tensor": torch.Tensor}
    exec(code[1], names)
    q = torch.zeros(1, 2, 5, 4)
    bias = names["Linear"](2).bias(q, q, Positions.of(5), scale=1.0)
    assert bias.values.tolist() == [[0.0, -1.0, -2.0, -3.0, -4.0]] * 2
