"""Claims, short functions over the results that return evidence (papers/PAPER/claims.py), and their verdicts.

    @claim("nope_rope", "4.4")
    def rope_conv_within(data):
        '''Kernel 3 improves RoPE at the training length.'''
        return lower(data, "dape1x3-rope", "rope", at="within")

The rules that claims use are in dape/lab/rules.py.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dape.lab.evidence import FAILS, HOLDS, NOT_RUN, UNDECIDED, Evidence
from dape.lab.folders import CLAIMS, Folder, load_folder, with_claims
from dape.lab.paper import Paper, load_paper, printed_results
from dape.lab.records import listed
from dape.lab.selection import Data

VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN)
STYLES = {HOLDS: ("✓", "green"), FAILS: ("✗", "red"), UNDECIDED: ("?", "yellow"), NOT_RUN: ("–", "dim")}
# Wording for one claim and for several: "21 hold, 7 do not hold, 1 is undecided".
WORDS = {
    HOLDS: ("holds", "hold"),
    FAILS: ("does not hold", "do not hold"),
    UNDECIDED: ("is undecided", "are undecided"),
    NOT_RUN: ("was not run at this scale", "were not run at this scale"),
}
# Units of differences, by kind of experiment.
UNITS = {"language": "nats", "tasks": "points"}
ONLY_AT = "Only a run at the {}'s scale can decide this."


@dataclass(frozen=True)
class Claim:
    """A result that a paper asserts, in our words.

    section: section of the paper; scale: "paper" if no smaller scale can decide it; closer: PAPER/ID of claims that
    examine this one; ours: a question of our own about the paper's experiment; decide: function from data to evidence.
    """

    id: str
    text: str
    experiment: str
    decide: Callable[[Data], Evidence] = field(compare=False)
    section: str = ""
    scale: str = ""
    closer: tuple[str, ...] = ()
    ours: bool = False

    @property
    def citation(self) -> str:
        """Where it is from: § 4.1, Appendix D, § 4.9 (our question)."""
        section = f"§ {self.section}" if self.section[:1].isdigit() else self.section
        return f"{section} (our question)" if self.ours else section


_registered: list[Claim] = []


def claim(
    experiment: str,
    section: str = "",
    *,
    scale: str = "",
    closer: str | Sequence[str] = (),
    ours: bool = False,
) -> Callable[[Callable[[Data], Evidence]], Claim]:
    """Register a function as a claim; its name, with dashes, is the claim's id, its docstring the statement."""

    def register(decide: Callable[[Data], Evidence]) -> Claim:
        name = decide.__name__.replace("_", "-")
        text = " ".join((decide.__doc__ or "").split())
        claim = Claim(name, text, experiment, decide, section, scale, tuple(listed(closer)), ours)
        _registered.append(claim)
        return claim

    return register


def load_claims(path: Path) -> list[Claim]:
    """Load the claims in a file, in order."""
    _registered.clear()
    spec = importlib.util.spec_from_file_location(f"claims_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    claims = list(_registered)
    if twice := [name for name, count in Counter(one.id for one in claims).items() if count > 1]:
        raise ValueError(f"{path}: two claims are called {twice[0]}")
    if empty := [one.id for one in claims if not (one.text and one.experiment)]:
        raise ValueError(f"{path}: claim {empty[0]}: its text or its experiment is missing")
    return claims


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim: one of VERDICTS, a sentence with the numbers, and their scale.

    pooled:  the verdict on all settings together, pair of methods by pair, and the numbers; empty if the claim is not about their mean.
    printed: the verdict of the same rule on the numbers printed in the paper; empty if it prints too few.
    margin:  by how much the claim holds on those numbers, where it does so most narrowly; NaN without them.
    resolution: how much a comparison would need here to be decided.
    unit:    of those two.
    closer:  the verdicts on the claims that examine this one, of those that were run.
    """

    claim: Claim
    paper: str
    verdict: str
    sentence: str
    scale: str
    pooled: tuple[str, str] = ("", "")
    printed: str = ""
    margin: float = math.nan
    resolution: float = math.nan
    unit: str = ""
    closer: tuple[Verdict, ...] = ()

    @property
    def is_too_fine(self) -> bool:
        """Whether the claim is undecided, and would be if these runs differed by as much as the paper's."""
        return self.verdict == self.overall == UNDECIDED and abs(self.margin) < self.resolution

    @property
    def overall(self) -> str:
        """The pooled verdict where the strict one is undecided, else that."""
        return self.pooled[0] if self.verdict == UNDECIDED and self.pooled[0] else self.verdict

    def _size(self, difference: float) -> str:
        """A difference in the unit, without its sign."""
        return f"{100 * abs(difference):.1f}" if self.unit == "points" else f"{abs(difference):.3f}"

    @property
    def further(self) -> str:
        """The pooled verdict, the one on the paper's own numbers, and why the claim cannot be decided, as text."""
        said = [f"Pooled: {self.pooled[0]} ({self.pooled[1]})."] if self.pooled[0] else []
        said += [f"On the paper's own numbers: {self.printed}."] if self.printed else []
        if self.is_too_fine:
            said.append(
                f"Too fine for this scale: the smallest difference that the claim needs is {self._size(self.margin)} on the "
                f"paper's own numbers, the smallest that is detectable here {self._size(self.resolution)}{self.unit and f' {self.unit}'}."
            )
        return " ".join(said)


def ledger(papers: Path) -> list[Verdict]:
    """A verdict for every claim of every folder under papers/ that has claims."""
    return [verdict for folder in with_claims(papers) for verdict in verdicts_of(folder)]


def verdicts_of(paper: Path) -> list[Verdict]:
    """A verdict for every claim of the folder, in the order of its file."""
    verdicts = _judged(paper, load_claims(paper / CLAIMS))
    return [replace(verdict, closer=_closer(paper, verdict.claim)) for verdict in verdicts]


def _judged(paper: Path, claims: Sequence[Claim]) -> list[Verdict]:
    printed = load_paper(paper)
    folders = {name: load_folder(paper / name) for name in dict.fromkeys(one.experiment for one in claims)}
    return [judge(one, folders[one.experiment], printed) for one in claims]


def _closer(paper: Path, claim: Claim) -> tuple[Verdict, ...]:
    """The verdicts on the claims that examine this one, of those that were run."""
    verdicts = []
    for reference in claim.closer:
        paper_name, _, name = reference.partition("/")
        file = paper.parent / paper_name / CLAIMS
        matching = [other for other in load_claims(file) if other.id == name] if file.exists() else []
        if not matching:
            raise ValueError(f'{paper / CLAIMS}: claim {claim.id}: closer="{reference}" names no claim')
        verdicts += _judged(file.parent, matching)
    return tuple(verdict for verdict in verdicts if verdict.verdict != NOT_RUN)


def judge(claim: Claim, folder: Folder, paper: Paper) -> Verdict:
    """Decide the claim by the results of the largest scale that can, and by the numbers printed in the paper."""
    sentence = ONLY_AT.format(claim.scale) if claim.scale else "No results yet."
    verdict = Verdict(claim, folder.path.parent.name, NOT_RUN, sentence, "")
    for scale in folder.results:
        verdict = judge_at(claim, folder.at(scale), paper)
        if verdict.verdict != NOT_RUN:
            break
    theirs = printed_results(paper, folder.name, folder.kind)
    if theirs is None:
        return replace(verdict, margin=math.nan)
    printed = judge_at(claim, replace(folder, results={"paper": theirs}, seeds={}), paper)
    said = "" if printed.verdict == NOT_RUN else printed.verdict
    return replace(verdict, printed=said, margin=printed.margin)


def judge_at(claim: Claim, folder: Folder, paper: Paper) -> Verdict:
    name, scale = folder.path.parent.name, folder.scale
    if claim.scale and claim.scale != scale:
        return Verdict(claim, name, NOT_RUN, ONLY_AT.format(claim.scale), scale)
    try:
        evidence = claim.decide(Data(folder, paper))
        verdict, sentence = evidence.verdict()
    except (ValueError, TypeError, KeyError, NameError, AttributeError) as error:
        raise ValueError(f"{folder.path.parent / CLAIMS}: claim {claim.id}: {error}") from error
    if verdict != NOT_RUN and folder.best is not None and not folder.best.complete:
        sentence = f"So far: {sentence}"
    found = Verdict(claim, name, verdict, sentence, scale, evidence.pooled())
    if not evidence.findings:
        return found
    return replace(
        found, margin=evidence.margin, resolution=evidence.resolution, unit=UNITS.get(folder.kind, "")
    )


def count(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Number of each verdict."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {name: counts[name] for name in VERDICTS}


def counted(counts: dict[str, int]) -> str:
    """Format counts of verdicts: 21 hold, 7 do not hold, 1 is undecided."""
    return ", ".join(f"{number} {WORDS[name][number > 1]}" for name, number in counts.items() if number)


def numbered(verdicts: Sequence[Verdict], noun: str) -> str:
    return f"{len(verdicts)} {noun}{'' if len(verdicts) == 1 else 's'}"


def undecided_parts(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    """Of the undecided, the numbers that all settings together decide and that are too fine for this scale."""
    return sum(v.verdict != v.overall for v in verdicts), sum(v.is_too_fine for v in verdicts)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The counts of a paper's claims, remarks on them, and the counts of questions of our own."""
    claims, own = ([v for v in verdicts if v.claim.ours == ours] for ours in (False, True))
    said = [f"{numbered(claims, 'claim')}: {counted(count(claims))}.", remarks(claims)]
    said += [f"{numbered(own, 'question')} of our own: {counted(count(own))}."] if own else []
    return " ".join(filter(None, said))


def remarks(verdicts: Sequence[Verdict]) -> str:
    """What the counts do not tell: the verdicts on all settings together, and what no result here could decide."""
    said = []
    if pooled := [replace(verdict, verdict=verdict.pooled[0]) for verdict in verdicts if verdict.pooled[0]]:
        said.append(f"Pooled over settings, possible for {len(pooled)} claims: {counted(count(pooled))}.")
    settled, fine = undecided_parts(verdicts)
    parts = {
        "decided by all settings together": settled,
        "too fine for this scale: in the paper itself the differences are smaller than these runs resolve": fine,
    }
    if any(parts.values()):
        listed_parts = [
            f"{number} {'is' if number == 1 else 'are'} {text}" for text, number in parts.items() if number
        ]
        said.append(f"Of the undecided, {' and '.join(listed_parts)}.")
    return " ".join(said)


def print_ledger(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print every claim with its verdict and numbers, by paper and experiment; after each paper the counts."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.paper, verdict.claim.experiment), []).append(verdict)
    for paper in dict.fromkeys(paper for paper, _ in groups):
        for (paper_name, experiment), mine in groups.items():
            if paper_name == paper:
                console.print(Text(f"{paper}/{experiment}", style="bold"))
                for verdict in mine:
                    _print(verdict, console)
                console.print()
        console.print(f"{paper}: {summary([v for v in verdicts if v.paper == paper])}\n")


def _print(verdict: Verdict, console: Console) -> None:
    symbol, style = STYLES[verdict.verdict]
    line = Text(f"{symbol} {verdict.verdict}", style=style)
    if verdict.claim.citation:
        line.append(f"  {verdict.claim.citation}", style="dim")
    line.append(f"  {verdict.claim.id}", style="dim")
    console.print(Padding(line, (0, 0, 0, 2)))
    console.print(Padding(Text(verdict.claim.text), (0, 0, 0, 4)))
    for sentence in filter(None, (verdict.sentence, verdict.further)):
        console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 4)))
    for closer in verdict.closer:
        symbol, style = STYLES[closer.verdict]
        line = Text("see also: ").append(f"{symbol} {closer.verdict}: ", style=style)
        console.print(Padding(line.append(closer.claim.text), (0, 0, 0, 4)))
        console.print(Padding(Text(closer.sentence, style="dim"), (0, 0, 0, 4)))
