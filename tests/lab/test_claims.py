"""From claims to verdicts: the ledger, what looks closer, and the paper's claims on its own numbers."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
from judging import AB, BAD, GOOD, SAME, A, B, C, judged, losses
from rich.console import Console

from dape.cli import main
from dape.evaluation.inference import Estimate
from dape.lab.claims import ledger, load_claims, print_ledger, remarks, summary, verdicts_of
from dape.lab.evidence import FAILS, HOLDS, NOT_RUN, UNDECIDED, Evidence, Finding
from dape.lab.report.papers import build_report, changed, compared, findings, load_part, paper_readme
from dape.lab.stats import Trained

PAPERS = Path(__file__).parents[2] / "papers"
LOWER = f"lower(data, {A!r}, {B!r})"


def test_no_results_yet(tmp_path: Path) -> None:
    assert judged(tmp_path, None, "lower", **AB).verdict == NOT_RUN


def test_only_the_papers_scale_decides_some_claims(tmp_path: Path) -> None:
    small = made_up.language(losses({A: GOOD, B: SAME}))
    found = judged(tmp_path, small, "lower", **AB, scale="paper")
    assert (found.verdict, "Only a run at the paper's scale" in found.sentence) == (NOT_RUN, True)
    large = made_up.language(losses({A: GOOD, B: SAME}, 128, "arxiv"), scale="paper")
    found = judged(tmp_path, large, "lower", **AB, scale="paper", corpus="arxiv")
    assert (found.verdict, found.scale) == (HOLDS, "paper")


def test_the_larger_scale_decides_where_it_was_run(tmp_path: Path) -> None:
    made_up.write(tmp_path, "made_up", "trial", made_up.language(losses({A: GOOD, B: SAME}), scale="paper"))
    found = judged(tmp_path, made_up.language(losses({A: BAD, B: SAME, C: SAME})), "lower", **AB)
    assert (found.verdict, found.scale) == (HOLDS, "paper")
    found = judged(tmp_path, made_up.language(losses({A: BAD, B: SAME, C: SAME})), "lower", a=A, b=C)
    assert (found.verdict, found.scale) == (FAILS, "laptop")


def test_unfinished_results_say_so(tmp_path: Path) -> None:
    results = made_up.language(losses({A: GOOD, B: SAME}), missing=["it"])
    assert judged(tmp_path, results, "lower", **AB).sentence.startswith("So far: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"returns": "lowest(data)"}, "name 'lowest' is not defined"),
        ({"returns": "lower(data, c=3)"}, "unexpected keyword argument 'c'"),
        ({"returns": "near(data, 'kerple', 'rope')"}, "missing 1 required keyword-only argument: 'within'"),
        ({"text": ""}, "its text or its experiment is missing"),
    ],
)
def test_a_wrong_claim_is_an_error_that_names_it(tmp_path: Path, change: dict, message: str) -> None:
    claim = {
        "id": "it",
        "text": "It does.",
        "experiment": "trial",
        "returns": "lower(data, 'a', 'b')",
        **change,
    }
    made_up.write_claims(tmp_path, "made_up", [claim])
    made_up.write(tmp_path, "made_up", "trial", made_up.language(losses({A: GOOD, B: SAME})))
    with pytest.raises(ValueError, match=r"claims.py: claim it") as error:
        ledger(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "value"), [("train", "some"), ("at", "far")])
def test_a_wrong_length_is_an_error(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}="):
        judged(tmp_path, made_up.language(losses({A: GOOD, B: SAME})), "lower", **AB, **{name: value})


def test_two_claims_of_one_name_are_an_error(tmp_path: Path) -> None:
    claim = {"id": "it", "text": "It does.", "experiment": "trial", "returns": LOWER}
    with pytest.raises(ValueError, match="two claims are called it"):
        load_claims(made_up.write_claims(tmp_path, "made_up", [claim, claim]))


def closer_claims(tmp_path: Path, closer: dict | None) -> None:
    """A claim that does not hold, and one of another folder that looks into it."""
    claim = {"experiment": "trial", "returns": LOWER}
    first = {"id": "it", "text": "It does.", "closer": "beyond/longer", **claim}
    made_up.write_claims(tmp_path, "made_up", [first])
    made_up.write_claims(tmp_path, "beyond", [{"id": "longer", "text": "Later it does.", **claim}])
    made_up.write(tmp_path, "made_up", "trial", made_up.language(losses({A: BAD, B: SAME})))
    made_up.write(tmp_path, "beyond", "trial", closer)


def test_a_claim_that_looks_into_another_is_shown_with_it(tmp_path: Path) -> None:
    closer_claims(tmp_path, made_up.language(losses({A: GOOD, B: SAME})))
    first, closer = ledger(tmp_path)
    assert (first.verdict, first.closer) == (FAILS, (closer,))
    readme = paper_readme(load_part(tmp_path / "made_up"))
    assert "\n  - see also: ✓ **holds**: Later it does. *" in readme
    output = io.StringIO()
    print_ledger([first], Console(file=output, width=80))
    assert "see also: ✓ holds: Later it does." in output.getvalue()
    page = build_report(tmp_path, tmp_path / "page.html").read_text("utf-8")
    assert "See also: Later it does. Holds. " in page


def test_questions_of_our_own_are_not_counted_as_the_papers(tmp_path: Path) -> None:
    claim = {"text": "It does.", "experiment": "trial", "section": "4.9", "returns": LOWER}
    made_up.write_claims(tmp_path, "made_up", [{"id": "it", **claim}, {"id": "own", "ours": True, **claim}])
    made_up.write(tmp_path, "made_up", "trial", made_up.language(losses({A: GOOD, B: SAME})))
    verdicts = ledger(tmp_path)
    assert [verdict.claim.citation for verdict in verdicts] == ["§ 4.9", "§ 4.9 (our question)"]
    said = summary(verdicts)
    assert said.startswith("1 claim: 1 holds.")
    assert said.endswith("1 question of our own: 1 holds.")
    output = io.StringIO()
    print_ledger(verdicts, Console(file=output, width=80))
    assert "made_up: 1 claim: 1 holds." in output.getvalue()


def test_what_looks_closer_is_silent_before_it_is_run(tmp_path: Path) -> None:
    closer_claims(tmp_path, None)
    first, _ = ledger(tmp_path)
    assert not first.closer


def test_a_closer_claim_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    closer_claims(tmp_path, None)
    made_up.write_claims(tmp_path, "beyond", [])
    with pytest.raises(ValueError, match='claim it: closer="beyond/longer" names no claim'):
        ledger(tmp_path)


def test_every_folder_with_claims_is_in_the_ledger(tmp_path: Path) -> None:
    for paper in ("one", "beyond", "two"):
        claim = {"id": "it", "text": "It does.", "experiment": "trial", "returns": LOWER}
        made_up.write_claims(tmp_path, paper, [claim])
    assert [verdict.paper for verdict in ledger(tmp_path)] == ["one", "two", "beyond"]


def test_the_ledger_fits_80_columns(tmp_path: Path) -> None:
    output = io.StringIO()
    print_ledger(ledger(PAPERS), Console(file=output, width=80))
    shown = output.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    counts, rest = shown.partition("dape_v2: ")[2].partition("claims: ")[2].split(".", 1)
    assert re.fullmatch(r"\d+ hold, \d+ do not hold, .* were not run at this scale", " ".join(counts.split()))
    assert re.match(r"Pooled over settings, possible for \d+ claims: ", " ".join(rest.split()))


def test_the_papers_claims_are_many_and_name_no_unknown_task_or_method() -> None:
    """By the source: names in quotes that look like methods or tasks are some."""
    from dape.methods import parse_method
    from dape.tasks.registry import TASKS as KNOWN

    path = PAPERS / "dape_v2" / "claims.py"
    assert len(load_claims(path)) >= 30
    code = re.sub(r'""".*?"""|@claim\(.*?\)\n', "", path.read_text("utf-8"), flags=re.DOTALL)
    words = {
        "equal-time",
        "hit",
        "new",
        "arxiv",
        "books3",
        "construction",
        "settings",
        "every",
        "some",
        "most",
        "leak",
    }
    words |= {"all", "train", "within", "beyond", "shortest", "longest"}
    for name in set(re.findall(r'"([^"\n]+)"', code)) - words - set(KNOWN):
        if "{" not in name and not re.fullmatch(r"\d+x|width \d+|350m|2\.7b|dape1x3", name):
            parse_method(name)


# Where the printed numbers decide a claim of the paper's. On Arxiv, trained at 512, they contradict its text: kernel 5
# is worse than kernel 3 at 2048 and 8192 (by 0.01), and kernels 5 and 7 print the same number at 4096.
ON_ITS_OWN_NUMBERS = {"larger-kernels-arxiv": FAILS}


def test_the_papers_claims_on_its_own_tables() -> None:
    """Rules run on the printed numbers, which have no errors: rules and claims mean what the paper says."""
    found = {v.claim.id: v.printed for v in verdicts_of(PAPERS / "dape_v2") if v.printed}
    assert len(found) >= 36
    # That printed numbers agree with themselves says nothing.
    assert not any(name.startswith("values-") for name in found)
    assert {name: verdict for name, verdict in found.items() if verdict != HOLDS} == ON_ITS_OWN_NUMBERS


def test_the_ledger_of_one_experiment_and_the_width_that_is_asked_for(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    assert main(["reproduce", "time_cost", "--claims", "--papers", str(PAPERS)]) == 0
    shown = capsys.readouterr().out
    assert {line for line in shown.splitlines() if line.startswith(("dape_v2/", "beyond/"))} == {
        "dape_v2/time_cost"
    }
    assert max(map(len, shown.splitlines())) <= 64


def test_undecided_by_exceptions_says_how_far_out_they_must_lie() -> None:
    findings = [Finding(-2.5, 1.0, "a"), *(Finding(9.0, 1.0, "b") for _ in range(23))]
    verdict, sentence = Evidence(findings).verdict()
    assert verdict == UNDECIDED
    assert "1 against (one of 24 decides beyond 3.1)" in sentence


def test_the_margin_is_that_of_the_comparison_that_decides() -> None:
    findings = [Finding(value, 0.1, "", 6) for value in (0.4, 0.1, 0.3, 0.2)]
    margins = {need: Evidence(findings, need=need).margin for need in ("every", "some", "most", 2)}
    assert margins == {"every": 0.1, "some": 0.4, "most": 0.2, 2: 0.3}
    # A comparison of just this size has weight 2, the bound of a decision.
    at_resolution = Finding(Evidence(findings).resolution, 0.1, "", 6)
    assert at_resolution.weight == pytest.approx(2.0)
    assert Evidence([Finding(1.0, float("nan"), "")]).resolution == float("inf")


def test_what_the_papers_own_difference_would_not_decide_is_too_fine() -> None:
    """On the paper's own numbers kernel 3 leads on books by 0.002 at least; with the errors here 0.02 decides nothing."""
    verdicts = {verdict.claim.id: verdict for verdict in verdicts_of(PAPERS / "dape_v2")}
    kernel = verdicts["kernel-3-books"]
    assert kernel.margin == pytest.approx(0.0021, abs=1e-4)
    assert kernel.verdict == UNDECIDED
    assert kernel.is_too_fine
    assert (
        "Too fine for this scale: the smallest difference that the claim needs is 0.002 on the paper's own numbers"
        in kernel.further
    )
    assert kernel.further.endswith(" nats.")
    assert "too fine for this scale" in remarks(list(verdicts.values()))
    decided = replace(kernel, verdict=HOLDS)
    assert not decided.is_too_fine
    assert not replace(kernel, margin=float("nan")).is_too_fine


def test_what_was_found_on_each_text_is_said() -> None:
    latex, about, lengths, *_, books = findings(PAPERS)
    number = r"0\.\d+ ± 0\.\d+"
    assert re.match(
        rf"On LaTeX, Kerple with the 1×3 convolution \(dape1x3-kerple\) has a loss that is lower than that of kerple by "
        rf"{number} nats at 256 tokens and {number} at 8192\.$",
        latex,
    )
    assert re.match(
        r"Trained at 256 tokens, 3 seeds \(at 8192 tokens, by seed .*\); evaluated on 13 documents: .*LaTeX",
        about,
    )
    assert re.search(
        f"loss of dape1x3-kerple falls by {number} \\(by seed .*, that of rope.* rises by", lengths
    )
    # The error of a change takes in the seed variance of other experiments; by these three seeds it would be larger.
    assert "by themselves these seeds would not decide it" in lengths
    assert re.match(r"On The Diary of .* it is .* that of kerple.*, and from 256 to 8192 tokens it ", books)


@pytest.mark.parametrize(
    ("near", "far", "said"),
    [
        (-0.2, -0.3, "lower than that of b by 0.200 ± 0.010 nats at 1 tokens and 0.300 ± 0.010 at 2"),
        (0.2, 0.3, "higher than that of b by 0.200 ± 0.010 nats at 1 tokens and 0.300 ± 0.010 at 2"),
        (0.0, -0.01, "not clearly different from that of b: +0.000 ± 0.010 nats at 1 tokens and −0.010 ± 0.010 at 2"),
        (0.0, -0.3, "not clearly different from that of b at 1 tokens (+0.000 ± 0.010 nats), and lower at 2 (−0.300 ± 0.010)"),
    ],
)  # fmt: skip
def test_findings_say_what_is_decided_and_what_is_not(near, far, said) -> None:
    class Differences:
        def difference(self, term, _):
            return Estimate({1: near, 2: far}[term[2]], 0.01)

    one, other = (Trained("", "", 1, name, "") for name in "ab")
    assert compared(Differences(), one, other, 1, 2) == said
    assert changed(Estimate(near, 0.01)).startswith(
        {-0.2: "falls by 0.200", 0.2: "rises by"}.get(near, "does not")
    )


def test_what_does_not_hold_has_been_looked_into() -> None:
    """Of the claims as shipped: with longer training, at another length, or by another measurement."""
    verdicts = ledger(PAPERS)
    looks = {name.partition("/")[2] for verdict in verdicts for name in verdict.claim.closer}
    failed = [v for v in verdicts if v.verdict == FAILS and v.claim.id not in looks]
    assert [verdict.claim.id for verdict in failed if not verdict.closer] == []
