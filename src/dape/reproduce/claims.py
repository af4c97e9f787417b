"""Claims as data: papers/PAPER/claims.toml, each decided by a rule from the results of one experiment."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dape.reproduce.evidence import FAILS, HOLDS, NOT_RUN, UNDECIDED, VERDICTS
from dape.reproduce.experiment import read_toml
from dape.reproduce.folders import CLAIMS, Folder, load_named, with_claims
from dape.reproduce.paper import Paper, load_paper
from dape.reproduce.rules import RULES, decide
from dape.reproduce.rules.choosing import listed

NEEDED = ("id", "text", "experiment", "rule")
FIELDS = (*NEEDED, "section", "scale", "closer")
ONLY_AT = "Only a run at the {}'s scale can decide this."
STYLES = {HOLDS: ("✓", "green"), FAILS: ("✗", "red"), UNDECIDED: ("?", "yellow"), NOT_RUN: ("–", "dim")}


@dataclass(frozen=True)
class Claim:
    """A result that a paper asserts, in our words.

    section: where it stands; scale: "paper" if nothing smaller can decide it; closer: PAPER/ID of the claims that look
    into this one; arguments: those of the rule.
    """

    id: str
    text: str
    experiment: str
    rule: str
    section: str = ""
    scale: str = ""
    closer: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What the results say of a claim: one of VERDICTS, a sentence with the numbers, and the scale they are of.

    closer: the verdicts on the claims that look into this one, those that have been run.
    """

    claim: Claim
    paper: str
    verdict: str
    sentence: str
    scale: str
    closer: tuple[Verdict, ...] = ()


def ledger(papers: Path) -> list[Verdict]:
    """A verdict for every claim of every folder under papers/ that has a claims.toml."""
    return [verdict for folder in with_claims(papers) for verdict in verdicts_of(folder)]


def verdicts_of(paper: Path) -> list[Verdict]:
    """A verdict for every claim in the folder's claims.toml, in its order."""
    verdicts = _judged(paper, load_claims(paper / CLAIMS))
    return [replace(verdict, closer=_closer(paper, verdict.claim)) for verdict in verdicts]


def _judged(paper: Path, claims: Sequence[Claim]) -> list[Verdict]:
    printed = load_paper(paper)
    folders = load_named(paper, [claim.experiment for claim in claims])
    return [judge(claim, folders[claim.experiment], printed) for claim in claims]


def _closer(paper: Path, claim: Claim) -> tuple[Verdict, ...]:
    """The verdicts on the claims that look into this one; none on what is not run."""
    verdicts = [_look(paper, claim, name) for name in claim.closer]
    return tuple(verdict for verdict in verdicts if verdict.verdict != NOT_RUN)


def _look(paper: Path, claim: Claim, named: str) -> Verdict:
    where, _, name = named.partition("/")
    file = paper.parent / where / CLAIMS
    found = [other for other in load_claims(file) if other.id == name] if file.exists() else []
    if not found:
        raise ValueError(f'{paper / CLAIMS}: claim {claim.id}: closer="{named}" names no claim')
    (verdict,) = _judged(file.parent, found)
    return verdict


def judge(claim: Claim, folder: Folder, paper: Paper) -> Verdict:
    """Decide the claim from the results of the largest scale that can."""
    sentence = ONLY_AT.format(claim.scale) if claim.scale else "No results yet."
    verdict = Verdict(claim, folder.path.parent.name, NOT_RUN, sentence, "")
    for scale in folder.results:
        verdict = judge_at(claim, folder.at(scale), paper)
        if verdict.verdict != NOT_RUN:
            break
    return verdict


def judge_at(claim: Claim, folder: Folder, paper: Paper) -> Verdict:
    (scale, results), *_ = folder.results.items()
    if claim.scale and claim.scale != scale:
        return Verdict(claim, folder.path.parent.name, NOT_RUN, ONLY_AT.format(claim.scale), scale)
    verdict, sentence = decide(claim.rule, folder, paper, claim.arguments).verdict()
    if verdict != NOT_RUN and not results.get("complete", True):
        sentence = f"So far: {sentence}"
    return Verdict(claim, folder.path.parent.name, verdict, sentence, scale)


def load_claims(path: Path) -> list[Claim]:
    """The claims in the file; whatever is wrong with one is an error that names it."""
    claims = []
    for number, entry in enumerate(read_toml(path).get("claim", []), start=1):
        try:
            claims.append(checked(entry))
        except ValueError as error:
            raise ValueError(f"{path}: claim {entry.get('id', number)}: {error}") from error
    if twice := [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]:
        raise ValueError(f"{path}: two claims are called {twice[0]}")
    return claims


def checked(entry: dict[str, Any]) -> Claim:
    if missing := [name for name in NEEDED if not entry.get(name)]:
        raise ValueError(f"{', '.join(missing)} is missing")
    if entry["rule"] not in RULES:
        raise ValueError(f'there is no rule "{entry["rule"]}": choose among {", ".join(RULES)}')
    arguments = {name: value for name, value in entry.items() if name not in FIELDS}
    try:
        inspect.signature(RULES[entry["rule"]].decide).bind(None, None, **arguments)
    except TypeError as error:
        raise ValueError(f"the rule {entry['rule']}: {error}") from error
    own = {name: entry[name] for name in FIELDS if name in entry}
    own["text"] = " ".join(entry["text"].split())
    own["closer"] = tuple(listed(entry.get("closer", ())))
    return Claim(**own, arguments=arguments)


def count(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many there are of each verdict."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {name: counts[name] for name in VERDICTS}


def print_ledger(verdicts: Sequence[Verdict], console: Console) -> None:
    """Every claim with its verdict and the numbers behind it, by paper and experiment; then the counts."""
    for paper in dict.fromkeys(verdict.paper for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.paper == paper]
        for experiment in dict.fromkeys(verdict.claim.experiment for verdict in mine):
            console.print(Text(f"{paper}/{experiment}", style="bold"))
            for verdict in (v for v in mine if v.claim.experiment == experiment):
                _print(verdict, console)
            console.print()
    total = Text(f"{len(verdicts)} claims: ")
    for place, (name, number) in enumerate(count(verdicts).items()):
        total.append(", " if place else "").append(f"{number} {name}", style=STYLES[name][1])
    console.print(total)


def _print(verdict: Verdict, console: Console) -> None:
    symbol, style = STYLES[verdict.verdict]
    line = Text(f"{symbol} {verdict.verdict}", style=style)
    if verdict.claim.section:
        line.append(f"  {place(verdict.claim.section)}", style="dim")
    line.append(f"  {verdict.claim.id}", style="dim")
    console.print(Padding(line, (0, 0, 0, 2)))
    console.print(Padding(Text(verdict.claim.text), (0, 0, 0, 4)))
    console.print(Padding(Text(verdict.sentence, style="dim"), (0, 0, 0, 4)))
    for closer in verdict.closer:
        symbol, style = STYLES[closer.verdict]
        line = Text("looked into: ").append(f"{symbol} {closer.verdict}: ", style=style)
        console.print(Padding(line.append(closer.claim.text), (0, 0, 0, 4)))
        console.print(Padding(Text(closer.sentence, style="dim"), (0, 0, 0, 4)))


def place(section: str) -> str:
    """A section as it is cited: § 4.1, Appendix D."""
    return f"§ {section}" if section[:1].isdigit() else section
