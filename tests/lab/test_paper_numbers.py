"""paper.json against the paper's source, where that is at hand: every number of every table, and the sections cited."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dape.lab.claims import load_claims
from dape.lab.paper import load_paper

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "papers" / "dape_v2"
# Beside the repository, or further up.
SOURCES = [folder / "shared" / "paper" / "dape_v2.tex" for folder in REPOSITORY.parents]
CONTENT = json.loads((FOLDER / "paper.json").read_text("utf-8"))
LABELS = [table["label"] for table in CONTENT["tables"]]


@pytest.fixture(scope="module")
def tex() -> str:
    for source in SOURCES:
        if source.exists():
            return source.read_text("utf-8")
    pytest.skip("the paper's source is not at hand")


def numbers(text: str) -> list[float]:
    """The numbers of a piece of a table, without those in citations and layout."""
    text = re.sub(r"\\(?:cmidrule|citep|multirow|multicolumn|resizebox)(?:\{[^{}]*\})+", "", text)
    # 6\mathrm{e}-4, \textrm{DAPE}_{1\times3}, (Kernel Size 1x3)
    text = re.sub(r"(\d)\\mathrm\{e\}-(\d)", r"\1e-\2", text)
    text = re.sub(r"_\{[^{}]*\}|\(.*?\)|\d+x\d+", "", text)
    return [float(found) for found in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?![\w.])", text)]


def rows(tex: str, label: str) -> list[list[float]]:
    """The rows of the table of that label that have numbers, but for a first one that names the lengths."""
    end = tex.index(f"\\label{{{label}}}")
    start = tex.rindex("\\begin{tabular}", 0, end)
    body = tex[tex.index("\n", start) : tex.index("\\end{tabular}", start)]
    # The first cells name the row.
    found = [numbers("&".join(row.split("&")[1:])) for row in body.replace("\\times", " ").split("\\\\")]
    return [row for row in found if row]


@pytest.mark.parametrize("label", LABELS)
def test_every_number_of_the_table(tex: str, label: str) -> None:
    table = CONTENT["tables"][LABELS.index(label)]
    printed = rows(tex, label)
    if table["quantity"] == "perplexity":
        assert printed.pop(0) == table["columns"]
    wanted = [flat(row["values"]) for row in table["rows"]]
    if table["quantity"] == "configuration":
        assert flat(printed_by_size(printed)) == flat(by_size(wanted))
    else:
        assert printed == wanted


def flat(values: Any) -> list[float]:
    if isinstance(values, list):
        return [number for value in values for number in flat(value)]
    return [float(values)]


def by_size(wanted: list[list[float]]) -> list[list[float]]:
    """Batch size and number of GPUs are one row of the table: 32 × 8."""
    batch, gpus = wanted[1], wanted[2]
    joined = [batch[0], gpus[0], batch[1], gpus[1]]
    return [*wanted[:1], joined, *wanted[3:]]


def printed_by_size(printed: list[list[float]]) -> list[list[float]]:
    return printed


def test_every_table_is_there(tex: str) -> None:
    assert tex.count("\\begin{tabular}") == len(LABELS)


def sections(tex: str) -> dict[str, str]:
    """The text of every section by its number: 4.1, Appendix D."""
    found: dict[str, str] = {}
    section, subsection, appendix, name = 0, 0, False, ""
    for part in re.split(r"(?=\\(?:section|subsection|appendix)\b)", tex):
        if part.startswith("\\appendix"):
            section, appendix = 0, True
        elif part.startswith("\\section"):
            section, subsection = section + 1, 0
            name = f"Appendix {chr(64 + section)}" if appendix else str(section)
        elif part.startswith("\\subsection"):
            subsection += 1
            name = name if appendix else f"{section}.{subsection}"
        found[name] = found.get(name, "") + part
    return found


def test_every_number_of_a_sentence_is_in_its_section(tex: str) -> None:
    texts = sections(tex)
    for entry in CONTENT["sentences"]:
        value = entry["value"]
        pattern = rf"(?<![\d.]){re.escape(f'{value:.4f}'.rstrip('0').rstrip('.'))}0*(?![\d])"
        assert re.search(pattern, texts[entry["section"]]), entry


def test_claims_cite_sections_that_exist(tex: str) -> None:
    texts = sections(tex)
    for claim in load_claims(FOLDER / "claims.py"):
        assert claim.section in texts, claim.id


def test_no_claim_quotes_the_paper(tex: str) -> None:
    """No run of eight words is the paper's own."""
    words = re.findall(r"[a-z0-9]+", tex.lower())
    runs = {tuple(words[place : place + 8]) for place in range(len(words))}
    for claim in load_claims(FOLDER / "claims.py"):
        own = re.findall(r"[a-z0-9]+", claim.text.lower())
        assert not [own[p : p + 8] for p in range(len(own) - 7) if tuple(own[p : p + 8]) in runs], claim.id


def test_lookups_find_what_the_tables_print() -> None:
    paper = load_paper(FOLDER)
    about = {"corpus": "arxiv", "train_length": 128, "method": "kerple", "variant": ""}
    assert paper.value("perplexity", **about, eval_length=8192) == 12.59
    assert paper.value("perplexity", **about, eval_length=3) is None
    assert paper.value("accuracy", task="bucket_sort", method="fire") == 99.57
    assert paper.value("milliseconds", size="2.7b", method="t5") == 537.62
    assert paper.value("ratio", size="2.7b", method="t5") == 1.1912
    assert (
        paper.value("perplexity", corpus="books3", method="rope", variant="2.7b", eval_length=4096) == 160.59
    )
    assert paper.value("perplexity", method="dape1x3-kerple", variant="width 10", eval_length=8192) == 4.74


def test_numbers_that_stand_twice_agree() -> None:
    """A sentence that repeats a table's number gives the same one."""
    seen: dict[tuple, float] = {}
    for number in load_paper(FOLDER).numbers:
        about = {
            name: value for name, value in number.about.items() if name not in ("batch", "length", "unit")
        }
        key = (number.quantity, *sorted((name, str(value)) for name, value in about.items() if value))
        # The paper gives this ratio twice, and not the same.
        if seen.setdefault(key, number.value) != number.value:
            assert (seen[key], number.value) == (0.9667, 0.9677)


def test_the_tasks_package_has_the_same_accuracies() -> None:
    from importlib.resources import files

    own = json.loads((files("dape.tasks") / "paper.json").read_text("utf-8"))
    paper = load_paper(FOLDER)
    for task, values in own["accuracy"].items():
        found = [paper.value("accuracy", task=task, method=method) for method in own["methods"]]
        assert found == values, task
