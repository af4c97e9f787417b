"""Claims: papers/PAPER/claims.py, short functions over the results that return evidence; and the verdicts on them.

    @claim("nope_rope", "4.4")
    def rope_conv_within(data):
        '''Kernel 3 improves RoPE at the training length.'''
        return lower(data, "dape1x3-rope", "rope", at="within")

`data` has the results as a frame (`data.frame`), and as the views that the helpers below are made of: losses,
accuracies, times. A helper returns `Evidence`: comparisons with standard errors, and what is missing.

Arguments that helpers on language models share:
    corpus  the paper's names or ours; all that were run by default
    train   training lengths: "all", "shortest", "longest", "4x" (of the shortest), or numbers
    at      lengths read: "all", "train", "within", "beyond", "shortest", "longest", multiples of training's, or several
    need    how many comparisons must be for the claim: "every", "some", "most", or a number
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dape.lab.folders import CLAIMS, Folder, load_folder, with_claims
from dape.lab.kinds.maps import measured
from dape.lab.kinds.tasks import Accuracies, Solver, has_learned
from dape.lab.kinds.timing import Times
from dape.lab.paper import Paper, load_paper
from dape.lab.records import STEP
from dape.lab.stats import ERRORS, Estimate, Losses, Trained, quotient, searched, signed
from dape.lab.tables import exp, number

if TYPE_CHECKING:
    import pandas as pd

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run at this scale"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN)
STYLES = {HOLDS: ("✓", "green"), FAILS: ("✗", "red"), UNDECIDED: ("?", "yellow"), NOT_RUN: ("–", "dim")}
ONLY_AT = "Only a run at the {}'s scale can decide this."


# --- evidence


@dataclass(frozen=True)
class Finding:
    """One comparison: `value` is how far it is for the claim (against, below zero), `error` its standard error."""

    value: float
    error: float
    text: str

    @property
    def weight(self) -> float:
        """In standard errors; 0 where the error is not known, or nothing was measured."""
        if math.isnan(self.value) or math.isnan(self.error):
            return 0.0
        return (
            self.value / self.error if self.error else math.copysign(math.inf, self.value) * bool(self.value)
        )


@dataclass(frozen=True)
class Evidence:
    """All comparisons that a claim rests on.

    need:    "every" of them must be for the claim, "some", "most", or a number of them at least.
    missing: what the claim names and the results do not have.
    """

    findings: Sequence[Finding]
    missing: Sequence[str] = ()
    need: str | int = "every"
    unit: str = "comparisons"

    def verdict(self) -> tuple[str, str]:
        """The verdict, and a sentence with the numbers behind it."""
        if not self.findings:
            return NOT_RUN, _not_run(self.missing) if self.missing else "No results yet."
        verdict = self._verdict()
        return verdict, f"{self._summary(verdict)}{f' {_not_run(self.missing)}' if self.missing else ''}"

    def _beyond(self, bound: float) -> tuple[int, int]:
        """Comparisons for and against the claim by more than so many standard errors."""
        weights = [finding.weight for finding in self.findings]
        return sum(weight > bound for weight in weights), sum(weight < -bound for weight in weights)

    def _verdict(self) -> str:
        """Three-valued: what is missing could still go either way."""
        total = len(self.findings) + len(self.missing)
        sure, against = self._beyond(searched(len(self.findings)))
        wins, losses = self._beyond(ERRORS)
        open_ = NOT_RUN if self.missing else UNDECIDED
        if self.need == "every":
            if against:
                return FAILS
            return HOLDS if wins == total else open_
        if self.need == "some":
            if sure:
                return HOLDS
            return FAILS if losses == total else open_
        wanted = total // 2 + 1 if self.need == "most" else int(self.need)
        if wins >= wanted:
            return HOLDS
        return FAILS if total - losses < wanted else open_

    def _summary(self, verdict: str) -> str:
        weights = [finding.weight for finding in self.findings]
        # The comparison that decides: the weakest where every one counts, the strongest where one is enough.
        shown = self.findings[weights.index(max(weights) if self.need == "some" else min(weights))]
        if len(self.findings) == 1:
            return f"{shown.text}."
        wins, losses = self._beyond(ERRORS)
        counts = f"{len(self.findings)} {self.unit}: {wins} for, {losses} against"
        within = len(self.findings) - wins - losses
        counts += f", {within} within two standard errors" if within else ""
        if verdict == UNDECIDED and (wins if self.need == "some" else losses if self.need == "every" else 0):
            counts += f" (one of {len(self.findings)} decides beyond {searched(len(self.findings)):.1f})"
        strongest = "Strongest against it" if min(weights) < 0 else "Closest"
        return f"{counts}. {'Strongest for it' if self.need == 'some' else strongest}: {shown.text}."


def _not_run(missing: Sequence[str]) -> str:
    shown = list(dict.fromkeys(missing))
    rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"Not run: {', '.join(shown[:3])}{rest}."


# --- claims and verdicts


@dataclass(frozen=True)
class Claim:
    """A result that a paper asserts, in our words.

    section: where it stands; scale: "paper" if nothing smaller can decide it; closer: PAPER/ID of the claims that look
    into this one; decide: from data to evidence.
    """

    id: str
    text: str
    experiment: str
    decide: Callable[[Data], Evidence] = field(compare=False)
    section: str = ""
    scale: str = ""
    closer: tuple[str, ...] = ()


_registered: list[Claim] = []


def claim(
    experiment: str, section: str = "", *, scale: str = "", closer: str | Sequence[str] = ()
) -> Callable[[Callable[[Data], Evidence]], Claim]:
    """Make a claim of a function; its name, with dashes, is the claim's id, and its docstring is what is claimed."""

    def register(decide: Callable[[Data], Evidence]) -> Claim:
        name = decide.__name__.replace("_", "-")
        text = " ".join((decide.__doc__ or "").split())
        made = Claim(name, text, experiment, decide, section, scale, tuple(listed(closer)))
        _registered.append(made)
        return made

    return register


def load_claims(path: Path) -> list[Claim]:
    """The claims in the file, in its order."""
    _registered.clear()
    spec = importlib.util.spec_from_file_location(f"claims_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    found = list(_registered)
    if twice := [name for name, count in Counter(one.id for one in found).items() if count > 1]:
        raise ValueError(f"{path}: two claims are called {twice[0]}")
    if empty := [one.id for one in found if not (one.text and one.experiment)]:
        raise ValueError(f"{path}: claim {empty[0]}: its text or its experiment is missing")
    return found


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
    """The verdicts on the claims that look into this one; none on what is not run."""
    found = []
    for named in claim.closer:
        where, _, name = named.partition("/")
        file = paper.parent / where / CLAIMS
        matching = [other for other in load_claims(file) if other.id == name] if file.exists() else []
        if not matching:
            raise ValueError(f'{paper / CLAIMS}: claim {claim.id}: closer="{named}" names no claim')
        found += _judged(file.parent, matching)
    return tuple(verdict for verdict in found if verdict.verdict != NOT_RUN)


def judge(claim: Claim, folder: Folder, paper: Paper) -> Verdict:
    """Decide the claim from the results of the largest scale that can."""
    sentence = ONLY_AT.format(claim.scale) if claim.scale else "No results yet."
    found = Verdict(claim, folder.path.parent.name, NOT_RUN, sentence, "")
    for scale in folder.results:
        found = judge_at(claim, folder.at(scale), paper)
        if found.verdict != NOT_RUN:
            break
    return found


def judge_at(claim: Claim, folder: Folder, paper: Paper) -> Verdict:
    name, scale = folder.path.parent.name, folder.scale
    if claim.scale and claim.scale != scale:
        return Verdict(claim, name, NOT_RUN, ONLY_AT.format(claim.scale), scale)
    try:
        verdict, sentence = claim.decide(Data(folder, paper)).verdict()
    except (ValueError, TypeError, KeyError, NameError, AttributeError) as error:
        raise ValueError(f"{folder.path.parent / CLAIMS}: claim {claim.id}: {error}") from error
    if verdict != NOT_RUN and folder.best is not None and not folder.best.complete:
        sentence = f"So far: {sentence}"
    return Verdict(claim, name, verdict, sentence, scale)


def count(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many there are of each verdict."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    return {name: counts[name] for name in VERDICTS}


def place(section: str) -> str:
    """A section as it is cited: § 4.1, Appendix D."""
    return f"§ {section}" if section[:1].isdigit() else section


def print_ledger(verdicts: Sequence[Verdict], console: Console) -> None:
    """Every claim with its verdict and the numbers behind it, by paper and experiment; then the counts."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.paper, verdict.claim.experiment), []).append(verdict)
    for paper in dict.fromkeys(paper for paper, _ in groups):
        for (where, experiment), mine in groups.items():
            if where == paper:
                console.print(Text(f"{paper}/{experiment}", style="bold"))
                for verdict in mine:
                    _print(verdict, console)
                console.print()
    total = Text(f"{len(verdicts)} claims: ")
    for index, (name, number_) in enumerate(count(verdicts).items()):
        total.append(", " if index else "").append(f"{number_} {name}", style=STYLES[name][1])
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


# --- what a claim chooses from


@dataclass(frozen=True)
class Pick:
    """A method with the variant or the training length that is meant."""

    method: str
    variant: str | None = None
    train: Any = None


Choice = str | Pick


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass(frozen=True)
class Setting:
    """A corpus, a training length that the claim is about, and all training lengths there."""

    corpus: str
    train_length: int
    available: list[int]


@dataclass
class Data:
    """The results of one experiment at one scale; `missing` collects what a claim names and they do not have."""

    folder: Folder
    paper: Paper = field(default_factory=Paper)
    missing: list[str] = field(default_factory=list)

    @property
    def frame(self) -> pd.DataFrame:
        assert self.folder.best is not None
        return self.folder.best.frame

    @property
    def losses(self) -> Losses:
        return self.folder.losses

    @cached_property
    def accuracies(self) -> Accuracies:
        return Accuracies(self.folder.best)

    @cached_property
    def times(self) -> Times:
        return Times(self.folder.best)

    def lack(self, what: str) -> None:
        if what not in self.missing:
            self.missing.append(what)

    def settings(self, corpus: Any, train: Any, view: str) -> Iterator[Setting]:
        """Corpora and training lengths that the claim is about."""
        for name in listed(corpus) if corpus is not None else ():
            if not self.losses.corpora([name]):
                self.lack(name)
        for name in self.losses.corpora(listed(corpus) if corpus is not None else None):
            available = self.losses.train_lengths(view, name)
            found = train_lengths(available, train)
            if not found:
                self.lack(f"training length {train} on {name}")
            for length in found:
                yield Setting(name, length, available)

    def models(self, choice: Choice, setting: Setting, view: str, like: str | None = None) -> list[Trained]:
        """What the choice names in that setting: under the variant that it or `like` names, else without any if there
        is such a training, else under every variant it has."""
        pick = Pick(choice) if isinstance(choice, str) else choice
        lengths = (
            [setting.train_length] if pick.train is None else train_lengths(setting.available, pick.train)
        )
        found = []
        for length in lengths:
            where = (view, setting.corpus, length, pick.method)
            variants = [trained.variant for trained in self.losses.rows if trained[:4] == where]
            own = pick.variant if pick.variant is not None else like
            if own is None and "" in variants:
                own = ""
            found += [Trained(*where, variant) for variant in variants if own is None or variant == own]
        if not found:
            of = f" ({pick.variant})" if pick.variant else ""
            at = setting.train_length if pick.train is None else pick.train
            self.lack(f"{pick.method}{of} on {setting.corpus}, training length {at}")
        return found

    def lengths(self, *trained: Trained, at: Any) -> list[int]:
        """The lengths that the claim is about, of those that all were read at."""
        found = eval_lengths(self.losses.lengths(*trained), trained[0].train_length, at)
        if not found:
            self.lack(f"{trained[0].label} at {at}")
        return found

    def pairs(
        self, a: Choice, b: Any, corpus: Any, train: Any, view: str
    ) -> Iterator[tuple[Trained, Trained]]:
        """Every a with every b of the same corpus, training length and variant, unless the choice says which."""
        for setting in self.settings(corpus, train, view):
            for one in self.models(a, setting, view):
                for choice in listed(b):
                    for other in self.models(choice, setting, view, like=one.variant):
                        yield one, other

    def fields(
        self, methods: Sequence[Choice], corpus: Any, train: Any, at: Any, view: str
    ) -> list[tuple[list[Trained], int]]:
        """All methods side by side, for every corpus, training length and length read where all of them were run."""
        fields = []
        for setting in self.settings(corpus, train, view):
            found = [self.models(choice, setting, view) for choice in methods]
            if all(found):
                options = [models[0] for models in found]
                fields += [(list(options), length) for length in self.lengths(*options, at=at)]
        return fields

    def gap(self, one: Trained, other: Trained, length: int) -> tuple[Estimate, str]:
        """Loss of one minus that of the other, and both in words."""
        gap = self.losses.difference((1, one, length), (-1, other, length))
        both = one.train_length == other.train_length
        names = [f"{t.label}{'' if both else f' trained at {t.train_length}'}" for t in (one, other)]
        where = f"{_where(one)}, read at {length}" if both else f"{one.corpus}, read at {length}"
        seeds = len({*self.losses.seeds(one)} & {*self.losses.seeds(other)})
        text = (
            f"{names[0]} has perplexity {self.ppl(one, length)}, {names[1]} {self.ppl(other, length)} "
            f"({where}; loss {signed(gap)}, {seeds} seed{'s' if seeds > 1 else ''})"
        )
        return gap, text

    def ppl(self, one: Trained, length: int) -> str:
        return number(exp(self.losses.loss(one, length).value))

    def evidence(
        self, findings: Sequence[Finding], need: str | int = "every", unit: str = "comparisons"
    ) -> Evidence:
        return Evidence(findings, self.missing, need, unit)


def _where(one: Trained) -> str:
    return f"{one.corpus}, trained at {one.train_length}"


def train_lengths(available: Sequence[int], wanted: Any) -> list[int]:
    """Among the lengths trained at: "all", "shortest", "longest", "4x" (of the shortest), or numbers."""
    if not available:
        return []
    named = {"all": list(available), "shortest": [available[0]], "longest": [available[-1]]}
    if isinstance(wanted, str) and wanted in named:
        return named[wanted]
    numbers = [
        int(one[:-1]) * available[0] if isinstance(one, str) and one.endswith("x") else one
        for one in listed(wanted)
    ]
    if bad := [one for one in numbers if not isinstance(one, int)]:
        raise ValueError(f'train={bad[0]!r}: use "all", "shortest", "longest", "4x" or a length')
    return [length for length in available if length in numbers]


def eval_lengths(available: Sequence[int], train_length: int, wanted: Any) -> list[int]:
    """Among the lengths read: see the head of this file."""
    if not available:
        return []
    named = {
        "all": list(available),
        "train": [length for length in available if length == train_length],
        "within": [length for length in available if length <= train_length],
        "beyond": [length for length in available if length > train_length],
        "shortest": [available[0]],
        "longest": [available[-1]],
    }
    found: set[int] = set()
    for one in listed(wanted):
        if isinstance(one, str) and one not in named:
            raise ValueError(f'at="{one}": use {", ".join(named)}, or multiples of the training length')
        found.update(named[one] if isinstance(one, str) else [round(one * train_length)])
    return [length for length in available if length in found]


# --- helpers on language models


def lower(
    data: Data,
    a: Choice | None = None,
    b: Any = None,
    *,
    pairs: Sequence[tuple[Choice, Any]] = (),
    corpus: Any = None,
    train: Any = "all",
    at: Any = "all",
    factor: float = 1.0,
    need: str | int = "every",
    view: str = STEP,
) -> Evidence:
    """a's perplexity is below b's (each of them), by a factor at least; `pairs`: several such pairs (a, b).

    A factor below 1 allows a to be that much worse: 0.95 says that a is at most 5 % worse.
    """
    if not pairs and (a is None or b is None):
        raise ValueError("lower compares a with b: give both, or several such pairs")
    findings = []
    compared: list[tuple[Any, Any]] = list(pairs) or [(a, b)]
    for first, second in compared:
        for one, other in data.pairs(first, second, corpus, train, view):
            for length in data.lengths(one, other, at=at):
                gap, text = data.gap(one, other, length)
                findings.append(Finding(-gap.value - math.log(factor), gap.error, text))
    return data.evidence(findings, need)


def ordered(data: Data, methods: Sequence[Choice], **chosen: Any) -> Evidence:
    """Every method is better than the one named before it."""
    return lower(data, pairs=[(after, before) for before, after in pairwise(methods)], **chosen)


def near(
    data: Data,
    a: Choice,
    b: Any,
    *,
    within: float,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "all",
    view: str = STEP,
) -> Evidence:
    """The perplexities of a and b differ by no more than the factor `within`, either way."""
    findings = []
    for one, other in data.pairs(a, b, corpus, train, view):
        for length in data.lengths(one, other, at=at):
            gap, text = data.gap(one, other, length)
            findings.append(Finding(math.log(within) - abs(gap.value), gap.error, text))
    return data.evidence(findings)


def falls(data: Data, a: Any, **chosen: Any) -> Evidence:
    """From the training length (see `Losses.start`) to the lengths `at`, perplexity falls, by a factor at least."""
    return _changes(data, a, -1, **chosen)


def rises(data: Data, a: Any, **chosen: Any) -> Evidence:
    """From the training length to the lengths `at`, perplexity rises, by a factor at least."""
    return _changes(data, a, 1, **chosen)


def _changes(
    data: Data,
    a: Any,
    sign: int,
    *,
    factor: float = 1.0,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "longest",
    need: str | int = "every",
    view: str = STEP,
) -> Evidence:
    losses, findings, short = data.losses, [], []
    for one in _chosen(data, a, corpus, train, view):
        start, lengths = losses.start(one), data.lengths(one, at=at)
        if one.train_length not in losses.rows[one]:
            data.lack(f"{one.label} at its training length {one.train_length}")
            continue
        if start is None or lengths[-1:] <= [start]:
            short.append(f"{one.label} beyond {start or 2 * losses.last} tokens")
            continue
        for length in (n for n in lengths if n > start):
            change = losses.difference((1, one, length), (-1, one, start))
            text = (
                f"{one.label} has perplexity {data.ppl(one, start)} at {start} and {data.ppl(one, length)} at "
                f"{length} tokens ({one.corpus}; change of the loss {signed(change)})"
            )
            findings.append(Finding(sign * change.value - math.log(factor), change.error, text))
    # A setting whose inputs are too short to tell is left out if others can.
    data.missing += [] if findings else short
    return data.evidence(findings, need)


def _chosen(data: Data, a: Any, corpus: Any, train: Any, view: str) -> Iterator[Trained]:
    for setting in data.settings(corpus, train, view):
        for choice in listed(a):
            yield from data.models(choice, setting, view)


def at_most(
    data: Data,
    a: Any,
    perplexity: float,
    *,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "all",
    view: str = STEP,
) -> Evidence:
    """The perplexity of a is at most that."""
    findings = []
    for one in _chosen(data, a, corpus, train, view):
        for length in data.lengths(one, at=at):
            loss = data.losses.loss(one, length)
            text = f"{one.label} has perplexity {data.ppl(one, length)} at {length} tokens ({_where(one)})"
            findings.append(Finding(math.log(perplexity) - loss.value, loss.error, text))
    return data.evidence(findings)


def some_lower(
    data: Data,
    methods: Sequence[Choice],
    b: Choice,
    *,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "longest",
    need: str | int = "every",
    view: str = STEP,
    unit: str = "comparisons",
) -> Evidence:
    """In every setting the best of the methods is better than b."""
    findings = []
    for (*options, base), length in data.fields([*methods, b], corpus, train, at, view):
        best = min(options, key=lambda one: data.losses.loss(one, length).value)
        gap, text = data.gap(best, base, length)
        findings.append(Finding(-gap.value, gap.error, text))
    return data.evidence(findings, need, unit)


def best_varies(
    data: Data,
    methods: Sequence[Choice],
    *,
    corpus: Any = None,
    train: Any = "all",
    at: Any = "longest",
    view: str = STEP,
) -> Evidence:
    """Two settings have different best methods, each better than the other one's best in its own setting.

    Two settings with the same best method are against it, by as much as that method leads in both.
    """

    def alike(one: Trained, options: Sequence[Trained]) -> Trained:
        return next(o for o in options if (o.method, o.variant) == (one.method, one.variant))

    fields = data.fields(methods, corpus, train, at, view)
    ranked = [
        (sorted(options, key=lambda one: data.losses.loss(one, length).value), length)
        for options, length in fields
    ]
    findings = []
    for (first, at_first), (second, at_second) in combinations(ranked, 2):
        same = (first[0].method, first[0].variant) == (second[0].method, second[0].variant)
        rivals = (first[1], second[1]) if same else (alike(second[0], first), alike(first[0], second))
        leads = [data.gap(first[0], rivals[0], at_first), data.gap(second[0], rivals[1], at_second)]
        gap, text = min(leads, key=lambda lead: -lead[0].value / (lead[0].error or 1e-12))
        findings.append(Finding(gap.value if same else -gap.value, gap.error, text))
    if len(fields) == 1:
        data.lack("a second setting")
    return data.evidence(findings, "some", "pairs of settings")


def best_train_length(data: Data, a: Choice, *, corpus: Any = None, view: str = STEP) -> Evidence:
    """At each of the training lengths, the model trained at it reads better than those trained at another."""
    findings = []
    for setting in data.settings(corpus, "shortest", view):
        found = data.models(
            Pick(a, train="all") if isinstance(a, str) else replace(a, train="all"), setting, view
        )
        for one in found:
            length = one.train_length
            for other in (model for model in found if model.train_length != length):
                if length in data.losses.lengths(one, other):
                    gap = data.losses.difference((1, one, length), (-1, other, length))
                    text = (
                        f"{one.label} read at {length} has perplexity {data.ppl(one, length)} if trained at {length}, "
                        f"{data.ppl(other, length)} if trained at {other.train_length} ({one.corpus}; loss {signed(gap)})"
                    )
                    findings.append(Finding(-gap.value, gap.error, text))
        if len(found) == 1:
            data.lack(f"{found[0].label} at a second training length")
    return data.evidence(findings)


def gain_grows(
    data: Data, a: Choice, b: Any, *, corpus: Any = None, train: Any = "all", view: str = STEP
) -> Evidence:
    """What a gains over b is more at the longest length than at the training length."""
    losses, findings = data.losses, []
    for one, other in data.pairs(a, b, corpus, train, view):
        lengths, start = losses.lengths(one, other), losses.start(one)
        if start not in lengths or lengths[-1] <= start:
            data.lack(f"{one.label} and {other.label} at two lengths")
            continue
        terms = ((1.0, one), (-1.0, other))
        near_, far = (losses.difference(*((f, model, n) for f, model in terms)) for n in (start, lengths[-1]))
        growth = losses.difference(
            *((f, model, lengths[-1]) for f, model in terms), *((-f, model, start) for f, model in terms)
        )
        text = (
            f"{one.label} minus {other.label}: loss {signed(near_)} at {start} and {signed(far)} at {lengths[-1]} "
            f"tokens ({one.corpus}; difference {signed(growth)})"
        )
        findings.append(Finding(-growth.value, growth.error, text))
    return data.evidence(findings)


def faster_steps(
    data: Data,
    a: Choice,
    b: Any,
    *,
    factor: float = 1.0,
    corpus: Any = None,
    train: Any = "shortest",
    view: str = STEP,
) -> Evidence:
    """A training step of a takes less time than one of b, by a factor at least."""
    findings = []
    for one, other in data.pairs(a, b, corpus, train, view):
        fast, slow = data.losses.step_seconds(one), data.losses.step_seconds(other)
        if not (fast.known and slow.known):
            data.lack(f"times of {one.label} and {other.label}")
            continue
        error = math.hypot(fast.error / fast.value, slow.error / slow.value)
        text = (
            f"{one.label} takes {1e3 * fast.value:.0f} ms for a step at length {one.train_length}, {other.label} "
            f"{1e3 * slow.value:.0f} ms at length {other.train_length} ({one.corpus})"
        )
        findings.append(Finding(math.log(slow.value / fast.value) - math.log(factor), error, text))
    return data.evidence(findings)


def matches_paper(
    data: Data,
    methods: Sequence[str],
    *,
    corpus: Any,
    train_length: int,
    lengths: Sequence[int],
    variants: Sequence[str] = ("",),
    within: float = 1.03,
    view: str = STEP,
) -> Evidence:
    """Perplexities are the paper's, within a factor, wherever it prints one."""
    findings = []
    for setting in data.settings(corpus, train_length, view):
        name = data.losses.paper_corpus(setting.corpus)
        for method, variant in ((method, variant) for method in methods for variant in variants):
            about = {"corpus": name, "train_length": train_length, "method": method, "variant": variant}
            printed = {n.get("eval_length"): n.value for n in data.paper.find("perplexity", **about)}
            for length in (n for n in lengths if n in printed):
                for one in data.models(Pick(method, variant), setting, view):
                    loss = data.losses.loss(one, length)
                    value = math.log(within) - abs(loss.value - math.log(printed[length]))
                    text = f"{one.label} {data.ppl(one, length)}, the paper's {printed[length]} ({_where(one)}, read at {length})"
                    findings.append(Finding(value, loss.error, text))
    return data.evidence(findings)


# --- helpers on tasks: mean accuracy over the tested lengths and over seeds; tasks and layers: all by default


def more_accurate(
    data: Data, a: str, b: Any, *, tasks: Any = None, layers: Any = None, need: str | int = "every"
) -> Evidence:
    """On every task, or on `need` of them, a is more accurate than b."""
    findings = []
    for one in _solvers(data, a, tasks, layers):
        for method in listed(b):
            other = one._replace(method=method)
            if other not in data.accuracies.rows:
                data.lack(f"{method} on {one.task}")
                continue
            findings.append(_lead(data, one, other))
    return data.evidence(findings, need, "tasks" if len(listed(b)) == 1 else "comparisons")


def accuracy_bound(
    data: Data,
    a: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    tasks: Any = None,
    layers: Any = None,
    at: Any = "all",
) -> Evidence:
    """a is at least, or at most, that accurate, at every length `at` ("all", "longest", or lengths)."""
    bound, sign = (least, 1) if least is not None else (most, -1)
    assert bound is not None
    findings = []
    for method in listed(a):
        for one in _solvers(data, method, tasks, layers):
            lengths = data.accuracies.lengths(one)
            wanted = {"all": lengths, "longest": lengths[-1:]}.get(at) if isinstance(at, str) else listed(at)
            for length in wanted or ():
                found = data.accuracies.accuracy(one, [length])
                if not found.known:
                    data.lack(f"{one.label} on {one.task} at length {length}")
                    continue
                text = f"{one.label} gives {percent(found)} right answers at length {length} ({one.task})"
                findings.append(Finding(sign * (found.value - bound), found.error, text))
    return data.evidence(findings)


def best_varies_by_task(
    data: Data, methods: Sequence[str], *, tasks: Any = None, layers: Any = None
) -> Evidence:
    """Two tasks have different best methods, each better than the other one's best in its own task."""
    findings = []
    fields = _task_fields(data, methods, tasks, layers)
    for first, second in combinations(fields, 2):
        best, rival = first[0], second[0]
        same = best.method == rival.method
        own = first[1] if same else next(one for one in first if one.method == rival.method)
        foreign = second[1] if same else next(one for one in second if one.method == best.method)
        lead = min((_lead(data, best, own), _lead(data, rival, foreign)), key=lambda found: found.weight)
        findings.append(replace(lead, value=-lead.value) if same else lead)
    if len(fields) == 1:
        data.lack("a second task")
    return data.evidence(findings, "some", "pairs of tasks")


def best_is_among(
    data: Data,
    methods: Sequence[str],
    others: Sequence[str],
    *,
    tasks: Any = None,
    layers: Any = None,
    need: str | int = "every",
) -> Evidence:
    """On every task, or on `need` of them, the best of the methods is more accurate than the best of the others."""
    findings = []
    for solvers in _task_fields(data, [*methods, *others], tasks, layers):
        best, rival = (next(one for one in solvers if one.method in group) for group in (methods, others))
        findings.append(_lead(data, best, rival))
    return data.evidence(findings, need, "tasks")


def _task_fields(data: Data, methods: Sequence[str], tasks: Any, layers: Any) -> list[list[Solver]]:
    """The methods on each task where all of them were run, the best first."""
    fields = []
    for one in _solvers(data, methods[0], tasks, layers):
        solvers = [one._replace(method=method) for method in methods]
        if absent := [other.method for other in solvers if other not in data.accuracies.rows]:
            data.lack(f"{', '.join(absent)} on {one.task}")
        else:
            fields.append(sorted(solvers, key=lambda solver: -data.accuracies.accuracy(solver).value))
    return fields


def _solvers(data: Data, method: str, tasks: Any, layers: Any) -> list[Solver]:
    """The method on the tasks that the claim is about."""
    found = []
    for task in data.accuracies.tasks() if tasks is None else listed(tasks):
        depths = data.accuracies.layers(task) if layers is None else listed(layers)
        mine = [
            s for s in data.accuracies.rows if (s.task, s.method) == (task, method) and s.layers in depths
        ]
        if not mine:
            data.lack(f"{method} on {task}")
        found += mine
    return found


def _lead(data: Data, one: Solver, other: Solver) -> Finding:
    first, second = data.accuracies.accuracy(one), data.accuracies.accuracy(other)
    unlearned = not (has_learned(one.task, first) or has_learned(other.task, second))
    text = f"{one.label} {percent(first)}, {other.label} {percent(second)} ({one.task}{', neither learned' * unlearned})"
    return Finding(first.value - second.value, math.hypot(first.error, second.error), text)


def percent(estimate: Estimate, digits: int = 1) -> str:
    error = f" ± {100 * estimate.error:.{digits}f}" if math.isfinite(estimate.error) else ""
    return f"{100 * estimate.value:.{digits}f}{error} %"


# --- helpers on times and maps


def slower(data: Data, a: str, b: Any, *, sizes: Any = None, factor: float = 1.0) -> Evidence:
    """A step of a takes longer than one of b, by a factor at least, at every size."""
    findings = []
    for method in listed(b):
        for where in _places(data, a, method, sizes):
            ratio = data.times.ratio(where, a, method)
            one, other = data.times.times[where][a], data.times.times[where][method]
            text = (
                f"{a} takes {one.value:.1f} ms and {method} {other.value:.1f} ms at {data.times.name_of(where)} "
                f"({_ratio(ratio)} times)"
            )
            findings.append(Finding(ratio.value - factor, ratio.error, text))
    return data.evidence(findings)


def overhead_falls(data: Data, a: str, b: str, *, sizes: Any = None) -> Evidence:
    """The time of a over the time of b is less for each larger size; sizes in the order of b's times."""
    findings = []
    places = sorted(_places(data, a, b, sizes), key=lambda where: data.times.times[where][b].value)
    for length in dict.fromkeys(length for _, length in places):
        for small, large in pairwise(where for where in places if where[1] == length):
            before, after = data.times.ratio(small, a, b), data.times.ratio(large, a, b)
            text = (
                f"{a} takes {_ratio(before)} times as long as {b} at {small[0]}, "
                f"{_ratio(after)} times at {large[0]}"
            )
            error = math.hypot(before.error, after.error)
            findings.append(Finding(before.value - after.value, error, text))
    if places and not findings:
        data.lack("a second size")
    return data.evidence(findings)


def slower_when_longer(data: Data, a: str, *, times: int, factor: float = 1.0) -> Evidence:
    """A step of a at so many times the shortest length takes longer than one at that, by a factor at least."""
    known, findings = data.times, []
    for size in dict.fromkeys(size for size, _ in known.times):
        lengths = [length for name, length in known.times if name == size and a in known.times[name, length]]
        short = min(lengths, default=0)
        if short * times not in lengths:
            data.lack(f"{a} at {times} times the shortest length")
            continue
        few, many = (size, short), (size, short * times)
        ratio = quotient(known.ratios[many][a], known.ratios[few][a])
        text = (
            f"{a} takes {known.times[few][a].value:.1f} ms for a step at length {few[1]} and "
            f"{known.times[many][a].value:.1f} ms at {many[1]} ({_ratio(ratio)} times, {size})"
        )
        findings.append(Finding(ratio.value - factor, ratio.error, text))
    if not known.times:
        data.lack(a)
    return data.evidence(findings)


def _places(data: Data, a: str, b: str, sizes: Any) -> list[tuple[str, int]]:
    """Sizes and lengths where both were timed."""
    wanted, known = None if sizes is None else listed(sizes), data.times.times
    for size in wanted or ():
        if all(name != size for name, _ in known):
            data.lack(f"size {size}")
    found = [where for where in known if wanted is None or where[0] in wanted]
    for name in (a, b):
        if not any(name in known[where] for where in found):
            data.lack(name)
    return [where for where in found if {a, b} <= set(known[where])]


def _ratio(ratio: Estimate) -> str:
    return f"{ratio.value:.3f}" + (f" ± {ratio.error:.3f}" if math.isfinite(ratio.error) else "")


def sink_higher(data: Data, a: str, b: str, *, lengths: Any = None) -> Evidence:
    """More of the weight goes to the first token in a than in b, at every length."""
    found, findings = measured(data.folder.best, "sink_share"), []
    for method in (a, b):
        if all(name != method for name, _ in found):
            data.lack(method)
    for length in sorted({length for _, length in found} if lengths is None else set(lengths)):
        if (a, length) in found and (b, length) in found:
            one, other = found[a, length], found[b, length]
            text = f"{a} gives the first of {length} tokens {percent(one, 3)} of the weight, {b} {percent(other, 3)}"
            findings.append(Finding(one.value - other.value, math.hypot(one.error, other.error), text))
    return data.evidence(findings)
