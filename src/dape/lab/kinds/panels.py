"""Curves of language models in panels, ours and the paper's: one for each corpus and training length, or method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from matplotlib.figure import Figure

from dape.evaluation.inference import Estimate
from dape.lab.curves import Curve, Point
from dape.lab.figures import (
    FAINT,
    LEGEND,
    PANEL,
    Style,
    canvas,
    draw_curves,
    errorbar,
    finish,
    legend,
    style_of,
    styles,
)
from dape.lab.folders import Folder
from dape.lab.paper import Paper, Printed
from dape.lab.records import STEP, VIEWS
from dape.lab.stats import UNKNOWN, Losses, Trained, positions_of, signed
from dape.lab.tables import OURS, PAPER, Cell, Row, Table, change, compared, joined, perplexity, times

# With more training lengths than this, each method has a panel with a curve per training length.
FEW = 2
# The method to which bars of figures refer, where it is among the curves.
BASE, BEST = "kerple", "dape1x3-kerple"
# Lengths of a panel and letters of a name that fit into the usual width.
LENGTHS, LETTERS = 6, 18
# Slices by recall, in words.
SLICES = {"hit": "trigram seen before", "other": "all other tokens"}
# The methods of the headline figure, best last in the paper.
MAIN = ("rope", "alibi", "fire", "kerple", "dape-kerple", BEST)
# A curve whose largest value exceeds the median of its panel's by this factor may leave the frame.
FAR_ABOVE = 8


@dataclass(frozen=True)
class Line:
    """A curve: its loss by length; `method` determines its style.

    change: of the loss to the longest input; later: whether it is measured from a length beyond the training length.
    gaps: paired differences to the panel's reference by length; their errors are the bars.
    seeds: number of seeds. common: mean loss by length over the seeds that all lines of the panel have.
    """

    label: str
    method: str
    losses: dict[int, Estimate]
    change: Estimate = UNKNOWN
    later: bool = False
    gaps: dict[int, Estimate] = field(default_factory=dict)
    seeds: int = 0
    common: dict[int, Estimate] = field(default_factory=dict)

    def curve(self, reference: Line | None = None) -> Curve:
        """The curve to draw, at its differences from the reference: methods with other seeds are then comparable."""
        known = reference.losses if reference is not None else {}
        points = []
        for length, loss in sorted(self.losses.items()):
            gap = self.gaps.get(length, UNKNOWN)
            if length in known and not math.isnan(gap.value):
                loss = replace(loss, value=known[length].value + gap.value)
            points.append(Point(length, loss, difference=gap))
        return Curve(self.label, self.method, tuple(points))


@dataclass(frozen=True)
class Panel:
    """Curves that are compared with each other.

    unit: the length that is 1×, the training length or the shortest of several. key: common identifier of our panel and
    the paper's. note: description, if the claims have none.
    reference: label of the curve to which bars are errors of the difference. seeds: those that all lines have.
    """

    title: str
    key: tuple[object, ...]
    unit: int
    lines: tuple[Line, ...]
    note: str = ""
    reference: str = ""
    seeds: tuple[int, ...] = ()

    @property
    def other_seeds(self) -> bool:
        """Whether the curves are of different numbers of seeds."""
        return len({line.seeds for line in self.lines}) > 1

    def curves(self) -> list[Curve]:
        base = next((line for line in self.lines if line.label == self.reference), None)
        return [line.curve(base) for line in self.lines]

    def columns(self) -> list[float]:
        """Lengths as multiples of the unit."""
        return sorted({length / self.unit for line in self.lines for length in line.losses})


def our_panels(folder: Folder) -> list[Panel]:
    """The panels of an experiment's results, equal steps before equal time."""
    data, panels = folder.losses, []
    for view in VIEWS:
        for corpus in data.corpora():
            trained = [t for t in data.rows if (t.view, t.corpus) == (view, corpus)]
            view_title = "" if view == STEP else f", {VIEWS[view]}"
            for group in split(trained, by_method=by_method(data)):
                base = next((one for one in group.members if one.method == BASE), group.members[0])
                seeds = data.common_seeds(group.members)
                lines = tuple(our_line(data, one, label(one, group), base, seeds) for one in group.members)
                key = (view, data.paper_corpus(corpus), *group.key)
                title, note = (
                    f"{corpus}, {group.title}{view_title}",
                    gains(data, group.members) if view_title else "",
                )
                panels.append(Panel(title, key, group.unit, lines, note, label(base, group), tuple(seeds)))
    return panels


def gains(data: Losses, members: Sequence[Trained]) -> str:
    """Effect of processing the scores for each encoding, at the training length and the longest."""
    plain_ = {one.method: one for one in members}
    said = []
    for one in members:
        base = plain_.get(positions_of(one.method))
        lengths = data.lengths(one, base) if base not in (None, one) else []
        at = [n for n in dict.fromkeys((one.train_length, *lengths[-1:])) if n in lengths]
        if base is not None and at:
            gaps = (f"{signed(data.difference((1, one, n), (-1, base, n)))} at {n}" for n in at)
            said.append(f"{one.label} against {base.label} {' and '.join(gaps)}")
    return f"Difference of the loss, in nats: {'; '.join(said)}." if said else ""


def by_method(data: Losses) -> bool:
    """Whether methods have panels of their own, with a curve for each of many training lengths."""
    return len({one.train_length for one in data.rows}) > FEW


@dataclass(frozen=True)
class Group:
    """Members of a panel."""

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
    groups = []
    for variant in apart:
        mine = [one for one in trained if variant is None or one.variant == variant]
        tail = f", {variant}" if variant else ""
        if by_method:
            for method in dict.fromkeys(one.method for one in mine):
                group = sorted((o for o in mine if o.method == method), key=lambda one: one.train_length)
                groups.append(Group(("method", method, variant or ""), f"{method}{tail}", lengths[0], group))
        else:
            for rank, length in enumerate(lengths):
                group = [one for one in mine if one.train_length == length]
                if group:
                    groups.append(Group((rank, variant or ""), f"trained at {length}{tail}", length, group))
    return groups


def label(one: Trained, group: Group) -> str:
    """Label of a curve within its panel."""
    if group.key[0] == "method":
        return f"trained at {one.train_length}"
    return one.method if len({other.variant for other in group.members}) == 1 else one.label


def our_line(data: Losses, one: Trained, name: str, base: Trained, seeds: Sequence[int]) -> Line:
    """Curve with errors of the difference to the base: those of the loss mostly reflect the choice of documents."""
    lengths = data.lengths(one)
    longest, start = lengths[-1], data.start(one)
    change, later = UNKNOWN, False
    if start is not None and longest > start:
        change, later = data.difference((1, one, longest), (-1, one, start)), start > one.train_length
    losses = {length: data.loss(one, length) for length in lengths}
    shared = set(data.lengths(one, base)) if one != base else set()
    gaps = {n: data.difference((1, one, n), (-1, base, n)) for n in lengths if n in shared}
    fewer = data.only(seeds)
    common = {n: fewer.loss(one, n) for n in fewer.lengths(one) if len(fewer.rows[one][n]) == len(seeds)}
    return Line(name, one.method, losses, change, later, gaps, len(data.seeds(one)), common)


def paper_panels(folder: Folder, paper: Paper) -> list[Panel]:
    """Panels of the numbers that the paper prints for this experiment.

    Of numbers that it prints for another experiment, only those of methods and corpora that we ran.
    """
    printed = paper.shown_with(folder.name, "perplexity")
    data = folder.losses
    if data.rows:
        methods = {one.method for one in data.rows}
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
            one = Trained(STEP, corpus, n.get("train_length"), n.get("method"), n.get("variant"))
            numbers.setdefault(one, {})[n.get("eval_length")] = n
        for group in split(list(numbers), by_method=by_method(data)):
            lines = tuple(paper_line(numbers[one], one.method, label(one, group)) for one in group.members)
            key = (STEP, corpus, *group.key)
            panels.append(Panel(f"the paper: {corpus}, {group.title}", key, group.unit, lines))
    return panels


def paper_line(numbers: dict[int, Printed], method: str, name: str) -> Line:
    return Line(name, method, {length: Estimate(math.log(n.value)) for length, n in sorted(numbers.items())})


def partner(panel: Panel, others: Sequence[Panel]) -> Panel | None:
    """The paper's panel with the same key, or None."""
    return next((other for other in others if other.key == panel.key), None)


def side_by_side(ours: Sequence[Panel], theirs: Sequence[Panel]) -> list[Panel]:
    """Each of our panels followed by the paper's with the same key; then those without a partner."""
    pairs = [(panel, other) for panel in ours if (other := partner(panel, theirs))]
    paired = [panel for pair in pairs for panel in pair]
    return [*paired, *(panel for panel in [*ours, *theirs] if panel not in paired)]


# --- tables


def tables(folder: Folder, paper: Paper) -> list[Table]:
    """Tables of perplexity by length, one per panel, the paper's curve below ours; then those of the paper alone."""
    ours, theirs = our_panels(folder), paper_panels(folder, paper)
    colours = {name: look.colour for name, look in looks_of(ours, theirs).items()}
    shown = [panel_table(panel, partner(panel, theirs), colours) for panel in ours]
    keys = {panel.key for panel in ours}
    shown += [panel_table(panel, None, colours, whose=PAPER) for panel in theirs if panel.key not in keys]
    return shown


def panel_table(panel: Panel, other: Panel | None, colours: dict[str, str], whose: str = OURS) -> Table:
    columns = sorted({*panel.columns(), *(other.columns() if other else ())})
    best = {column: _best(panel, column) for column in columns}
    changes = whose == OURS and any(line.change.known for line in panel.lines)
    theirs = {line.label: line for line in other.lines} if other else {}
    rows = []
    for line in panel.lines:
        lengths = [round(column * panel.unit) for column in columns]
        losses = line.common if panel.seeds else line.losses
        cells = [
            compared(losses.get(length), line.gaps.get(length, UNKNOWN), best=line is best[column])
            for length, column in zip(lengths, columns, strict=True)
        ]
        cells += [change(line.change)] if changes else []
        rows.append(Row(line.label, whose, tuple(cells), colours.get(line.label, "")))
        if other and line.label in theirs:
            rows.append(_paper_row(theirs.pop(line.label), other, columns, changes))
    if other:
        rows += [_paper_row(line, other, columns, changes) for line in theirs.values()]
    shown = (times(round(column * panel.unit), panel.unit) for column in columns)
    title = f"Perplexity: {panel.title}" + (f"; {other.title}" if other else "")
    heads = (*shown, *(["change"] if changes else []))
    return Table(title, heads, joined(rows), _note(panel, other, changes))


def _paper_row(line: Line, panel: Panel, columns: Sequence[float], changes: bool) -> Row:
    cells = [perplexity(line.losses.get(round(column * panel.unit))) for column in columns]
    return Row(line.label, PAPER, (*cells, *([Cell()] if changes else [])))


def _best(panel: Panel, column: float) -> Line | None:
    """The line with the lowest loss over the seeds that all lines have; without such seeds, the lowest curve."""
    length = round(column * panel.unit)
    values = [
        (line.common[length].value, index) for index, line in enumerate(panel.lines) if length in line.common
    ]
    if not panel.seeds:
        values = [
            (point.loss.value, index)
            for index, curve in enumerate(panel.curves())
            for point in curve.points
            if point.eval_length == length
        ]
    return panel.lines[min(values)[1]] if len(values) > 1 else None


def _note(panel: Panel, other: Panel | None, changes: bool) -> str:
    unit = f"1× is {panel.unit} tokens" + (f" for us, {other.unit} in the paper." if other else ".")
    later = any(line.later for line in panel.lines)
    text = " Change: of the loss, in nats, from the training length to the longest" if changes else ""
    text += ", from twice it where the target tokens fill it" if changes and later else ""
    paired = any(line.gaps for line in panel.lines)
    text = (
        f" Below a perplexity: the loss less that of {panel.reference}, in nats, on the same tokens." + text
        if paired
        else text
    )
    text += "." if changes else ""
    if panel.other_seeds:
        own = ", ".join(f"{line.label} {line.seeds}" for line in panel.lines)
        text += f" Seeds: {own}. Perplexities are of "
        text += (
            f"the seeds that all have, {', '.join(map(str, panel.seeds))}"
            if panel.seeds
            else "all seeds of a method"
        )
        text += ", differences of all that both methods have."
    elif panel.lines[0].seeds:
        text += f" Seeds: {panel.lines[0].seeds} of each."
    return f"{unit}{text}" + (f" {panel.note}" if panel.note else "")


# --- figures


def looks_of(ours: Sequence[Panel], theirs: Sequence[Panel]) -> dict[str, Style]:
    lines = [line for panel in [*ours, *theirs] for line in panel.lines]
    return styles([line.label for line in lines], [line.method for line in lines])


def figure(folder: Folder, paper: Paper) -> Figure | None:
    """Figure of perplexity by length, with the paper's panels if it prints more than one length."""
    ours, theirs = our_panels(folder), paper_panels(folder, paper)
    looks = looks_of(ours, theirs)
    panels = side_by_side(ours, [panel for panel in theirs if len(panel.columns()) > 1])
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    # Labels of many lengths, and long names in the legend, need room.
    many = max(len(panel.columns()) for panel in panels) - LENGTHS
    long = max(len(name) for name in looks) - LETTERS
    width = columns * (PANEL[0] + 0.3 * max(0, many)) + LEGEND + 0.06 * max(0, long)
    drawn, axes = canvas(width, rows * PANEL[1], rows, columns)
    for index, axis in enumerate(axes.flat):
        if index >= len(panels):
            axis.set_axis_off()
            continue
        draw_panel(axis, panels[index], looks)
        if index % columns:
            axis.set_ylabel("")
        if index < len(panels) - columns:
            axis.set_xlabel("")
    legend(drawn, axes.flat, bars_of(panels))
    return drawn


def draw_panel(axis: object, panel: Panel, looks: dict[str, Style]) -> None:
    draw_curves(
        axis,
        panel.curves(),
        looks,
        panel.unit,
        title=panel.title,
        frame=frame_of(panel),
    )
    axis.set_xlabel("evaluation length")  # type: ignore[attr-defined]  # matplotlib's axes


def frame_of(panel: Panel) -> tuple[float, float] | None:
    """Range of perplexities to show, if a curve is far above the others: only its lowest point then; None to show all."""
    values = [[math.exp(loss.value) for loss in line.losses.values()] for line in panel.lines]
    middle = sorted(map(max, values))[len(values) // 2]
    far = [own for own in values if max(own) > FAR_ABOVE * middle]
    top = max(min(own) if own in far else max(own) for own in values)
    return (0.93 * min(map(min, values)), 1.2 * top) if far else None


def bars_of(panels: Sequence[Panel]) -> str:
    """Legend text of the bars in our panels."""
    names = dict.fromkeys(panel.reference for panel in panels if panel.reference and len(panel.lines) > 1)
    to = " or ".join(names) if len(names) < 3 else "one of a panel"
    bars = f"bars: one standard error\nof the difference to\n{to}" if names else ""
    if names and any(panel.other_seeds for panel in panels):
        bars += "\n(curves: that one plus the\ndifference, common seeds)"
    return bars


def main_models(data: Losses, view: str = STEP, corpus: str = "") -> dict[str, Trained]:
    """The main methods on a text, the first by default, at the longest training length, by name; empty without Kerple."""
    text = corpus or data.corpora()[0]
    found = [t for t in data.rows if t.view == view and not t.variant and t.corpus == text]
    longest = max((t.train_length for t in found), default=0)
    models = {t.method: t for t in found if t.train_length == longest}
    return {name: models[name] for name in MAIN if name in models} if BASE in models else {}


def share_of(name: str, sliced: Mapping[str, Losses], one: Trained) -> str:
    """Share of the tokens in a slice, at the shortest and at the longest input."""
    counts = {part: data.rows[one] for part, data in sliced.items()}
    ends = sorted(counts[name])[:: max(1, len(counts[name]) - 1)]
    tokens = {
        part: [sum(next(iter(rows[n].values()))["tokens"]) for n in ends] for part, rows in counts.items()
    }
    shares = [tokens[name][i] / sum(own[i] for own in tokens.values()) for i in range(len(ends))]
    return f"{' to '.join(f'{100 * share:.0f}' for share in shares)} % of tokens"


def headline(folder: Folder) -> Figure | None:
    """Figure of the loss minus Kerple's by length, for the main methods; and for the best of them, on recall slices."""
    data, models = folder.losses, main_models(folder.losses)
    if len(models) < 2:
        return None
    base = models[BASE]
    sliced = {name: folder.losses_on(name) for name in SLICES}
    sliced = (
        {name: part for name, part in sliced.items() if {base, models[BEST]} <= set(part.rows)}
        if BEST in models
        else {}
    )
    drawn, (axes,) = canvas(4.2 + 2.6 * bool(sliced), 3.6, 1, 1 + bool(sliced))
    looks = styles(list(models), list(models))
    curves = {
        name: {n: data.difference((1, one, n), (-1, base, n)) for n in data.lengths(one, base)}
        for name, one in models.items()
        if one != base
    }
    # A curve far above would flatten the others: of it, the frame has to show only the lengths of training.
    size = max((abs(gap.value) for gap in curves.get(BEST, {}).values()), default=math.inf)
    reach = [0.0]
    for name, gaps in curves.items():
        far = max(gap.value for gap in gaps.values()) > 2 * size
        inside = [gap for n, gap in gaps.items() if not far or n <= base.train_length]
        reach += [g.value + s * (g.error if math.isfinite(g.error) else 0.0) for g in inside for s in (-1, 1)]
        values, errors = [gap.value for gap in gaps.values()], [gap.error for gap in gaps.values()]
        said = f"{name} (+{values[-1]:.1f} at {max(gaps)})" if far else name
        errorbar(axes[0], list(gaps), values, errors, said, looks[name])
    panels = [(axes[0], f"{base.corpus}, trained at {base.train_length}")]
    for index, (name, part) in enumerate(sliced.items()):
        one = models[BEST]
        gaps = {n: part.difference((1, one, n), (-1, base, n)) for n in part.lengths(one, base)}
        look = style_of(5 + index, BEST)
        errorbar(
            axes[1],
            list(gaps),
            [g.value for g in gaps.values()],
            [g.error for g in gaps.values()],
            f"{SLICES[name]} ({share_of(name, sliced, one)})",
            look,
        )
    panels += [(axes[1], f"{BEST}, by recall")] if sliced else []
    for axis, title in panels:
        axis.axhline(0, color=FAINT, linewidth=0.8)
        axis.axvline(base.train_length, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        finish(axis, data.lengths(base), f"loss minus {BASE}'s, nats", "input length")
        axis.set_title(title, loc="left")
    room = 0.05 * (max(reach) - min(reach) or 0.1)
    axes[0].set_ylim(min(reach) - room, max(reach) + room)
    drawn.legend(loc="outside lower center", ncols=3 if sliced else 2, frameon=False, handlelength=2.6)
    return drawn
