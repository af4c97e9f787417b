"""printed.json: its own sums, orders and repetitions, and every number of the paper's source where that is at hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from papers.dape_v2.claims import CLAIMS

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "papers" / "dape_v2"
# Beside the repository, or further up.
SOURCES = [folder / "shared" / "paper" / "dape_v2.tex" for folder in REPOSITORY.parents]
CONTENT = json.loads((FOLDER / "printed.json").read_text("utf-8"))
TABLES = {table["label"]: table for table in CONTENT["tables"]}
LABELS = list(TABLES)


def rows_of(label: str) -> dict[tuple[str, str], list[Any]]:
    """Values by (corpus, method or task or setting)."""
    table = TABLES[label]
    name = next(key for key in ("method", "task", "setting") if key in table["rows"][0])
    return {(row.get("corpus", table.get("corpus", "")), row[name]): row["values"] for row in table["rows"]}


# --- without the source


@pytest.mark.parametrize("label", LABELS)
def test_rows_are_as_long_as_the_heads(label: str) -> None:
    assert all(len(values) == len(TABLES[label]["columns"]) for values in rows_of(label).values())


SUMS = [20510.341, 609.29, 1224.17, 592.82, 8706.86, 9645.936, 864.87]


def test_sums_of_the_tables() -> None:
    """Checksums by table, so that a changed digit shows without the source."""
    sums = {
        label: round(sum(sum(values) for values in rows_of(label).values()), 3)
        for label in LABELS
        if TABLES[label]["quantity"] != "configuration"
    }
    assert list(sums.values()) == SUMS


def test_numbers_of_the_claims_are_printed() -> None:
    """Every number that a claim's paper column gives by hand stands in a table or sentence."""
    cells = [cell for label in LABELS for values in rows_of(label).values() for cell in values]
    known = {float(cell) for cell in cells if isinstance(cell, int | float)}
    known |= {one["value"] for one in CONTENT["sentences"]}
    for claim in CLAIMS:
        for found in re.findall(r"\d+\.\d\d+", claim.paper):
            ratio = any(abs(float(found) - a / b) < 6e-3 for a, b in ratios())
            assert float(found) in known or ratio, (claim.name, found)


def ratios() -> list[tuple[float, float]]:
    times = rows_of("table:time_cost")
    steps = [one["value"] for one in CONTENT["sentences"] if one["experiment"] == "step_time"]
    pairs = [("dape1x3-kerple", "kerple"), ("t5", "dape1x3-kerple")]
    found = [(times["", a][i], times["", b][i]) for a, b in pairs for i in (0, 2, 4)]
    return [*found, (steps[-1], steps[0])]


# --- against the source


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
    """The rows of the table of that label that have numbers."""
    end = tex.index(f"\\label{{{label}}}")
    start = tex.rindex("\\begin{tabular}", 0, end)
    body = tex[tex.index("\n", start) : tex.index("\\end{tabular}", start)]
    # The first cells name the row.
    found = [numbers("&".join(row.split("&")[1:])) for row in body.replace("\\times", " ").split("\\\\")]
    return [row for row in found if row]


def flat(values: Any) -> list[float]:
    if isinstance(values, list):
        return [number for value in values for number in flat(value)]
    return [float(values)]


@pytest.mark.parametrize("label", LABELS)
def test_every_number_of_the_table(tex: str, label: str) -> None:
    table, printed = TABLES[label], rows(tex, label)
    if table["quantity"] == "perplexity":
        assert printed.pop(0) == table["columns"]
    wanted = [flat(row["values"]) for row in table["rows"]]
    if table["quantity"] == "configuration":
        # Batch size and number of GPUs are one row of the table: 32 × 8.
        batch, gpus = wanted[1], wanted[2]
        wanted = [*wanted[:1], [batch[0], gpus[0], batch[1], gpus[1]], *wanted[3:]]
        assert flat(printed) == flat(wanted)
    else:
        assert printed == wanted


def test_every_table_is_there(tex: str) -> None:
    assert tex.count("\\begin{tabular}") == len(LABELS)


def sections(tex: str) -> dict[str, str]:
    """The text of every section by its number: 4.1, D."""
    found: dict[str, str] = {}
    section, subsection, appendix, name = 0, 0, False, ""
    for part in re.split(r"(?=\\(?:section|subsection|appendix)\b)", tex):
        if part.startswith("\\appendix"):
            section, appendix = 0, True
        elif part.startswith("\\section"):
            section, subsection = section + 1, 0
            name = chr(64 + section) if appendix else str(section)
        elif part.startswith("\\subsection"):
            subsection += 1
            name = name if appendix else f"{section}.{subsection}"
        found[name] = found.get(name, "") + part
    return found


def test_every_number_of_a_sentence_is_in_its_section(tex: str) -> None:
    texts = sections(tex)
    for entry in CONTENT["sentences"]:
        value = f"{entry['value']:.4f}".rstrip("0").rstrip(".")
        pattern = rf"(?<![\d.]){re.escape(value)}0*(?![\d])"
        assert re.search(pattern, texts[entry["section"].removeprefix("Appendix ")]), entry


def test_claims_cite_sections_that_exist(tex: str) -> None:
    texts = sections(tex)
    for claim in CLAIMS:
        for section in re.split(r", |–", claim.section):
            assert section in texts, claim.name


def test_no_claim_quotes_the_paper(tex: str) -> None:
    """No run of eight words is the paper's own."""
    words = re.findall(r"[a-z0-9]+", tex.lower())
    runs = {tuple(words[place : place + 8]) for place in range(len(words))}
    for claim in CLAIMS:
        own = re.findall(r"[a-z0-9]+", claim.text.lower())
        assert not [own[p : p + 8] for p in range(len(own) - 7) if tuple(own[p : p + 8]) in runs], claim.name
