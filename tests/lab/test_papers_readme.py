"""READMEs and figures: every number from results.json or paper.json, whatever is there so far."""

from __future__ import annotations

import math
import re
from pathlib import Path

import made_up
import pytest

from dape.evaluation.inference import Estimate
from dape.lab.claims import verdicts_of
from dape.lab.folders import load_folder, with_claims
from dape.lab.records import load_results
from dape.lab.report.hypotheses import by_seed, hypotheses, joined, lower
from dape.lab.report.papers import (
    FIGURE,
    duration,
    experiment_readme,
    ladder,
    load_part,
    paper_readme,
    write_readmes,
)
from dape.lab.stats import Trained

PAPERS = Path(__file__).parents[2] / "papers"
METHODS = {"rope": 2.3, "kerple": 2.2, "dape-kerple": 2.1, "dape1x3-kerple": 2.0}


def losses() -> made_up.Losses:
    return {
        (corpus, train_length, method, ""): {
            train_length * n: start + 0.03 * n * (method == "rope") + 0.7 * (corpus == "books")
            for n in (1, 4, 16)
        }
        for corpus in ("latex", "books")
        for train_length in (64, 128)
        for method, start in METHODS.items()
    }


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paper with one experiment that was run and one that was not, and an experiment beyond it."""
    folder = tmp_path_factory.mktemp("papers")
    made_up.write(
        folder, "dape_v2", "baselines", made_up.language(losses(), seeds=(0, 1), spread=0.003), rank=1
    )
    made_up.write(folder, "dape_v2", "length_1024", None, rank=2)
    (folder / "dape_v2" / "paper.json").write_text((PAPERS / "dape_v2" / "paper.json").read_text("utf-8"))
    claims = [
        {"id": "one", "section": "4.1", "text": "It is lower.", "experiment": "baselines", "returns": "lower(data, 'dape1x3-kerple', 'kerple')"},
        {"id": "two", "section": "Appendix A", "text": "It falls.", "experiment": "length_1024", "returns": "falls(data, 'kerple')"},
    ]  # fmt: skip
    made_up.write_claims(folder, "dape_v2", claims)
    made_up.write(folder, "beyond", "further", None, title="Further | on")
    made_up.write_claims(folder, "beyond", [{**claims[1], "experiment": "further"}])
    write_readmes(folder)
    return folder


@pytest.fixture(scope="module")
def readme(papers: Path) -> str:
    return (papers / "dape_v2" / "baselines" / "README.md").read_text("utf-8")


def rows(text: str, title: str) -> dict[tuple[str, str], list[str]]:
    """(label, whose) → the cells of the table of that title."""
    table = text[text.index(f"**{title}") :].split("\n\n")[1].splitlines()[2:]
    found, label = {}, ""
    for line in table:
        name, whose, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        label = name or label
        found[label, whose] = cells
    return found


def test_our_numbers_are_those_of_the_records(papers: Path, readme: str) -> None:
    records = load_results(papers / "dape_v2" / "baselines" / "results.json").lines("loss")
    for corpus, train_length, title in (
        ("latex", 64, "the paper: arxiv, trained at 128"),
        ("books", 128, "the paper: books3, trained at 512"),
    ):
        found = rows(readme, f"Perplexity: {corpus}, trained at {train_length}; {title}")
        for method in METHODS:
            for place, multiple in enumerate((1, 4, 16)):
                losses_ = [
                    r["value"]
                    for r in records
                    if (r["corpus"], r["train_length"], r["method"]) == (corpus, train_length, method)
                    and r["eval_length"] == multiple * train_length
                ]
                wanted = f"{math.exp(sum(losses_) / len(losses_)):.2f}"
                columns = columns_of(readme, f"Perplexity: {corpus}, trained at {train_length}")
                assert (
                    found[method, "ours"][columns.index(f"{multiple}×")].split("<br>")[0].strip("*") == wanted
                ), place


def columns_of(text: str, title: str) -> list[str]:
    return [
        cell.strip()
        for cell in text[text.index(f"**{title}") :].split("\n\n")[1].splitlines()[0].strip("|").split("|")
    ][2:]


def test_the_papers_numbers_stand_under_ours(readme: str) -> None:
    found = rows(readme, "Perplexity: latex, trained at 64")
    columns = columns_of(readme, "Perplexity: latex, trained at 64")
    assert dict(zip(columns, found["kerple", "paper"], strict=True)) == {
        "1×": "8.30", "2×": "7.10", "4×": "5.85", "8×": "6.91", "16×": "9.17", "32×": "11.48", "64×": "12.59", "change": "",
    }  # fmt: skip
    assert found["dape1x3-kerple", "ours"][columns.index("1×")].startswith("**")
    assert ("rope", "paper") not in found


def test_it_says_how_it_was_run(papers: Path, readme: str) -> None:
    for wanted in (
        "dape reproduce made_up --scale laptop",
        "Seeds: 0, 1.",
        "1 h 12 min",
        "A <processor>",
        "2.13.0",
    ):
        assert wanted in readme
    assert "compare the order of methods" in readme
    (verdict, _) = verdicts_of(papers / "dape_v2")
    assert verdict.sentence in readme
    assert "**holds**, § 4.1: It is lower." in readme


def test_an_experiment_without_results_shows_the_papers_numbers(papers: Path) -> None:
    text = (papers / "dape_v2" / "length_1024" / "README.md").read_text("utf-8")
    assert "17167" in text
    assert "Not run yet" in text
    assert "not run at this scale" in text


def test_the_ledger_links_every_experiment(papers: Path) -> None:
    text = (papers / "dape_v2" / "README.md").read_text("utf-8")
    assert "2 claims: 1 holds, 1 was not run at this scale." in text
    for name in re.findall(r"\]\((\w+)/README.md\)", text):
        assert (papers / "dape_v2" / name / "README.md").exists()
    assert "Beyond the paper" in (papers / "beyond" / "README.md").read_text("utf-8")


def test_a_ladder_compares_every_method_with_the_first(papers: Path) -> None:
    folder = load_folder(papers / "dape_v2" / "length_1024")
    assert ladder(folder) == []
    folder = load_folder(PAPERS / "beyond" / "ingredients")
    base, *others = folder.losses.rows
    said, _, _, _, *rows = ladder(folder)
    shared = folder.losses.common_seeds([base, *others])
    words = f"seeds {' and '.join(map(str, shared))}" if len(shared) > 1 else f"seed {shared[0]}"
    assert said == f"Loss less that of {base.label}, in nats on the same tokens, of {words}, which all have:"
    assert [row.split(" | ")[0] for row in rows] == [f"| {one.label}" for one in others]
    data = folder.losses.only(shared)
    assert all(data.seeds(one) == shared for one in others)
    far = data.difference((1, others[-1], 8192), (-1, base, 8192))
    assert f"{abs(far.value):.3f} ± {far.error:.3f}" in rows[-1]


def test_hypotheses_have_their_numbers_from_the_results(papers: Path) -> None:
    folder = load_folder(papers / "dape_v2" / "baselines")
    template = folder.path / "hypotheses.md.j2"
    assert hypotheses(folder) is None
    try:
        template.write_text(
            "{{ latex.count('rope', 'kerple')|word }} seeds; {{ latex.gap('dape1x3-kerple', 'kerple', 128)|lower }}; "
            "{{ latex.decided('dape1x3-kerple', 'kerple') }}; {{ latex.decided('kerple', 'dape1x3-kerple') }}; "
            "{{ latex.changes('rope', 128, 2048)|by_seed(2) }}; {{ books.perplexity('kerple', 128) }}"
        )
        data = folder.losses
        one, base = (
            Trained("equal-step", "latex", 128, method, "") for method in ("dape1x3-kerple", "kerple")
        )
        gap = data.difference((1, one, 128), (-1, base, 128))
        rope = base._replace(method="rope")
        rises = [data.rows[rope][2048][n]["value"] - data.rows[rope][128][n]["value"] for n in (0, 1)]
        on_books = data.loss(Trained("equal-step", "books", 128, "kerple", ""), 128)
        assert hypotheses(folder) == (
            f"two seeds; {-gap.value:.3f} ± {gap.error:.3f}; decided at every length; not decided at any length; "
            f"{rises[0]:.2f} and {rises[1]:.2f}; {math.exp(on_books.value):.2f}"
        )
        template.write_text("{{ latex.gap('alibi', 'kerple', 128)|signed }}")
        with pytest.raises(ValueError, match=r"no training of alibi on latex .* they have rope, kerple"):
            hypotheses(folder)
        # Results that lack what the text names do not stop the report of the others.
        with pytest.warns(UserWarning, match=r"hypotheses.md is not written: .*no training of alibi"):
            assert folder.path / "README.md" in write_readmes(papers)
        assert not (folder.path / "hypotheses.md").exists()
    finally:
        template.unlink()


def test_a_difference_of_the_wrong_sign_shows() -> None:
    assert lower(Estimate(-0.0123, 0.004)) == "0.012 ± 0.004"
    assert lower(Estimate(0.0123, 0.004)) == "−0.012 ± 0.004"
    assert by_seed([0.5, -0.25]) == "0.500 and −0.250"
    assert joined(["a"]) == "a"


def test_the_table_of_the_headline_goes_between_its_marks(papers: Path) -> None:
    readme = papers.parent / "README.md"
    readme.write_text("# Name\n<!-- headline -->\nold\n<!-- /headline -->\nrest\n")
    assert readme in write_readmes(papers)
    before, table, rest = re.split(r"<!-- /?headline -->\n", readme.read_text())
    assert (before, rest) == ("# Name\n", "rest\n")
    assert table.startswith("| perplexity at | 128 | 2048 | loss − Kerple's at 128 | at 2048 | seeds |\n")
    assert "| LaTeX, `rope` |" in table
    assert "| books, `rope` |" not in table
    readme.write_text("no marks")
    assert readme not in write_readmes(papers)
    assert readme.read_text() == "no marks"
    readme.unlink()


def test_figures_are_the_same_bytes_for_the_same_results(papers: Path) -> None:
    figures = [
        papers / "headline.svg",
        papers / "dape_v2" / "baselines" / FIGURE,
        papers / "dape_v2" / "length_1024" / FIGURE,
    ]
    before = [figure.read_bytes() for figure in figures]
    write_readmes(papers)
    assert [figure.read_bytes() for figure in figures] == before
    assert b"dape1x3-kerple" in before[0]
    assert not (papers / "beyond" / "further" / FIGURE).exists()


@pytest.mark.parametrize(("seconds", "text"), [(3.4, "3 s"), (150, "2 min"), (4321, "1 h 12 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_committed_readmes_are_those_of_the_committed_results() -> None:
    for path in with_claims(PAPERS):
        part = load_part(path)
        for section in part.sections:
            folder = section.folder.path
            if not folder.is_dir():
                continue
            written = (folder / "README.md").read_text("utf-8")
            assert written == experiment_readme(section), f"dape reproduce --report: {folder}"
            if text := hypotheses(section.folder):
                assert (folder / "hypotheses.md").read_text("utf-8") == text, (
                    f"dape reproduce --report: {folder}"
                )
        written = (path / "README.md").read_text("utf-8")
        assert written == paper_readme(part), f"dape reproduce --report: {path}"
