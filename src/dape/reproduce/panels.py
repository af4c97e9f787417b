"""Curves of language models in panels, ours and the paper's: one for each corpus and training length, or method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dape.methods import parse_method
from dape.report.results import VIEWS, Curve, Estimate, Point
from dape.reproduce.folders import Folder
from dape.reproduce.language import Language, Trained
from dape.reproduce.paper import Paper, Printed
from dape.reproduce.rules.telling import signed

# With more training lengths than this they are the curves of a method's panel.
FEW = 2
# The method to which bars of figures refer, where it is among the curves.
BASE = "kerple"
UNKNOWN = Estimate(math.nan, math.nan)


@dataclass(frozen=True)
class Line:
    """A curve: its loss by length; `method` decides how it looks.

    change: of the loss to the longest input; later: whether it counts from a length beyond the training length.
    bars: errors to draw by length; those of the losses if there are none.
    """

    label: str
    method: str
    losses: dict[int, Estimate]
    change: Estimate = UNKNOWN
    later: bool = False
    bars: dict[int, float] = field(default_factory=dict)

    def curve(self) -> Curve:
        drawn = {n: Estimate(loss.value, self.bars.get(n, loss.error)) for n, loss in self.losses.items()}
        points = [Point(n, loss, UNKNOWN, UNKNOWN) for n, loss in sorted(drawn.items())]
        return Curve(self.label, "equal-step", (), 0, math.nan, tuple(points))


@dataclass(frozen=True)
class Panel:
    """Curves that are compared with each other.

    unit: the length that is 1×, the training length or the shortest of several. key: what ours and the paper's
    panel of the same thing have in common. note: what it shows, where the claims do not say.
    reference: the label of the curve to which bars are errors of the difference.
    """

    title: str
    key: tuple[object, ...]
    unit: int
    lines: tuple[Line, ...]
    note: str = ""
    reference: str = ""

    def columns(self) -> list[float]:
        """Lengths as multiples of the unit."""
        return sorted({length / self.unit for line in self.lines for length in line.losses})


def our_panels(folder: Folder) -> list[Panel]:
    """The panels of an experiment's results, equal steps before equal time."""
    data, panels = Language.of(folder), []
    for view in VIEWS:
        for corpus in data.corpora():
            trained = [t for t in data.scores if (t.view, t.corpus) == (view, corpus)]
            named = "" if view == "equal-step" else f", {VIEWS[view]}"
            for group in split(trained, by_method=by_method(data)):
                base = next((one for one in group.members if one.method == BASE), group.members[0])
                lines = tuple(our_line(data, one, label(one, group), base) for one in group.members)
                key = (view, data.paper_corpus(corpus), *group.key)
                title, note = f"{corpus}, {group.title}{named}", gains(data, group.members) if named else ""
                panels.append(Panel(title, key, group.unit, lines, note, label(base, group)))
    return panels


def gains(data: Language, members: Sequence[Trained]) -> str:
    """What processing the scores changes for each encoding, at the training length and the longest."""
    plain = {one.method: one for one in members}
    said = []
    for one in members:
        base = plain.get(parse_method(one.method).position)
        lengths = data.lengths(one, base) if base not in (None, one) else []
        at = [n for n in dict.fromkeys((one.train_length, *lengths[-1:])) if n in lengths]
        if base is not None and at:
            gaps = (f"{signed(data.difference((1, one, n), (-1, base, n)))} at {n}" for n in at)
            said.append(f"{one.label} against {base.label} {' and '.join(gaps)}")
    return f"Difference of the loss, in nats: {'; '.join(said)}." if said else ""


def by_method(data: Language) -> bool:
    """Whether methods have panels of their own, with a curve for each of many training lengths."""
    return len({one.train_length for one in data.scores}) > FEW


@dataclass(frozen=True)
class Group:
    """What makes up a panel."""

    key: tuple[object, ...]
    title: str
    unit: int
    members: list[Trained]


def split(trained: Sequence[Trained], *, by_method: bool) -> list[Group]:
    """The panels of a corpus."""
    lengths = sorted({one.train_length for one in trained})
    variants = list(dict.fromkeys(one.variant for one in trained))
    shared = [v for v in variants if sum(one.variant == v for one in trained) > len(lengths)]
    # Variants that several methods have are panels; a method's own are curves.
    apart = variants if len(shared) > 1 or len(variants) == 1 else [None]
    found = []
    for variant in apart:
        mine = [one for one in trained if variant is None or one.variant == variant]
        tail = f", {variant}" if variant else ""
        if by_method:
            for method in dict.fromkeys(one.method for one in mine):
                group = sorted((o for o in mine if o.method == method), key=lambda one: one.train_length)
                found.append(Group(("method", method, variant or ""), f"{method}{tail}", lengths[0], group))
        else:
            for rank, length in enumerate(lengths):
                group = [one for one in mine if one.train_length == length]
                if group:
                    found.append(Group((rank, variant or ""), f"trained at {length}{tail}", length, group))
    return found


def label(one: Trained, group: Group) -> str:
    """What tells the curve from the others of its panel."""
    if group.key[0] == "method":
        return f"trained at {one.train_length}"
    return one.method if len({other.variant for other in group.members}) == 1 else one.label


def our_line(data: Language, one: Trained, name: str, base: Trained) -> Line:
    """Bars are errors of the difference to the base: those of the loss are mostly of which documents are hard."""
    lengths = data.lengths(one)
    longest, start = lengths[-1], data.start(one)
    change, later = UNKNOWN, False
    if start is not None and longest > start:
        change, later = data.difference((1, one, longest), (-1, one, start)), start > one.train_length
    losses = {length: data.loss(one, length) for length in lengths}
    shared = set(data.lengths(one, base)) if one != base else set()
    bars = {
        n: data.difference((1, one, n), (-1, base, n)).error if n in shared else math.nan for n in lengths
    }
    return Line(name, one.method, losses, change, later, bars)


def paper_panels(folder: Folder, paper: Paper) -> list[Panel]:
    """The panels of the numbers that the paper prints for this experiment.

    Of those that it prints for another one, which also belong here, only the methods and corpora that we ran.
    """
    printed = paper.shown_with(folder.name, "perplexity")
    data = Language.of(folder)
    if data.scores:
        methods = {one.method for one in data.scores}
        corpora = {data.paper_corpus(name) for name in data.corpora()}
        printed = [
            n
            for n in printed
            if n.experiments[0] == folder.name or (n.get("method") in methods and n.get("corpus") in corpora)
        ]
    panels = []
    for corpus in dict.fromkeys(n.get("corpus") for n in printed):
        numbers: dict[Trained, dict[int, Printed]] = {}
        for n in (n for n in printed if n.get("corpus") == corpus):
            one = Trained("equal-step", corpus, n.get("train_length"), n.get("method"), n.get("variant"))
            numbers.setdefault(one, {})[n.get("eval_length")] = n
        for group in split(list(numbers), by_method=by_method(data)):
            lines = tuple(paper_line(numbers[one], one.method, label(one, group)) for one in group.members)
            key = ("equal-step", corpus, *group.key)
            panels.append(Panel(f"the paper: {corpus}, {group.title}", key, group.unit, lines))
    return panels


def paper_line(numbers: dict[int, Printed], method: str, name: str) -> Line:
    losses = {length: Estimate(math.log(n.value), math.nan) for length, n in sorted(numbers.items())}
    return Line(name, method, losses)


def partner(panel: Panel, others: Sequence[Panel]) -> Panel | None:
    """The panel of the same thing among the paper's."""
    return next((other for other in others if other.key == panel.key), None)


def side_by_side(ours: Sequence[Panel], theirs: Sequence[Panel]) -> list[Panel]:
    """Each of ours followed by the paper's of the same thing; then ours, and theirs, that have no partner."""
    pairs = [(panel, other) for panel in ours if (other := partner(panel, theirs))]
    paired = [panel for pair in pairs for panel in pair]
    return [*paired, *(panel for panel in [*ours, *theirs] if panel not in paired)]
