"""Drawings by kind of experiment: curves by length, fields of accuracies, times, shares of the weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dape.report.style import Style, style_of
from dape.reproduce.content import FEW_TASKS
from dape.reproduce.curves import FAINT, LEGEND, PANEL, legend, looks_of, panels_figure, styles
from dape.reproduce.folders import Folder
from dape.reproduce.panels import our_panels, paper_panels, side_by_side
from dape.reproduce.paper import Paper
from dape.reproduce.rules.maps import measured
from dape.reproduce.rules.tasks import Tasks
from dape.reproduce.rules.timing import Timing


def language(folder: Folder, paper: Paper) -> Figure | None:
    """Perplexity by length, ours beside the paper's where it prints more than one length."""
    theirs = [panel for panel in paper_panels(folder, paper) if len(panel.columns()) > 1]
    return panels_figure(side_by_side(our_panels(folder), theirs), looks_of(folder, paper))


def tasks(folder: Folder, paper: Paper) -> Figure | None:
    """Accuracy by length for few tasks; for many, a field of tasks × methods, ours and the paper's."""
    data = Tasks.of(folder)
    if data.rows and len(data.tasks()) <= FEW_TASKS:
        return _accuracy_by_length(data)
    fields = []
    for layers in sorted({solver.layers for solver in data.rows}):
        ours = {(s.task, s.label): data.accuracy(s).value for s in data.rows if s.layers == layers}
        fields.append((f"ours, {layers} layers", ours))
    names = set(data.tasks())
    printed = paper.shown_with(folder.name, "accuracy")
    theirs = {
        (n.get("task"), n.get("method")): n.value / 100
        for n in printed
        if not names or n.get("task") in names
    }
    if theirs:
        fields.append(("the paper", theirs))
    return _fields_figure(fields) if fields else None


def _accuracy_by_length(data: Tasks) -> Figure:
    panels = [(task, layers) for task in data.tasks() for layers in data.layers(task)]
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    drawn = Figure(figsize=(columns * PANEL[0] + LEGEND, rows * PANEL[1]), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, columns, squeeze=False)
    labels = list(dict.fromkeys(solver.label for solver in data.rows))
    looks = styles(labels, [label.split(" ")[0] for label in labels])
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    for axis, (task, layers) in zip(axes.flat, panels, strict=False):
        for solver in (s for s in data.rows if (s.task, s.layers) == (task, layers)):
            lengths = data.lengths(solver)
            found = [data.accuracy(solver, [length]) for length in lengths]
            bars = [100 * estimate.error if math.isfinite(estimate.error) else 0.0 for estimate in found]
            values = [100 * estimate.value for estimate in found]
            _errorbar(axis, lengths, values, bars, solver.label, looks[solver.label])
        axis.set_title(f"{task.replace('_', ' ')}, {layers} layer{'s' if layers > 1 else ''}", loc="left")
        _finish(axis, "accuracy, %", "length")
        axis.set_ylim(-4, 104)
    legend(drawn, axes.flat)
    return drawn


def _fields_figure(fields: Sequence[tuple[str, dict[tuple[str, str], float]]]) -> Figure:
    names = list(dict.fromkeys(task for _, field in fields for task, _ in field))
    methods = list(dict.fromkeys(method for _, field in fields for _, method in field))
    size = (1.8 + len(fields) * (0.36 * len(methods) + 0.3), 1.2 + 0.26 * len(names))
    drawn = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(1, len(fields), squeeze=False)[0]
    for place, (axis, (title, field)) in enumerate(zip(axes, fields, strict=True)):
        values = [[100 * field.get((task, method), math.nan) for method in methods] for task in names]
        axis.imshow(values, cmap="Blues", vmin=0, vmax=125, aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if not math.isnan(value):
                    colour = "#ffffff" if value > 70 else "#1b2733"
                    axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axis.set_xticks(range(len(methods)), methods, rotation=90)
        axis.set_yticks(range(len(names)), [task.replace("_", " ") for task in names] if not place else [])
        axis.tick_params(length=0)
        axis.set_title(f"accuracy, %: {title}", loc="left")
        for spine in axis.spines.values():
            spine.set_visible(False)
    return drawn


def timing(folder: Folder, paper: Paper) -> Figure | None:
    """Time relative to a method, a point a size or a length: ours and the paper's."""
    data, fields = Timing.of(folder), []
    if data.times:
        ours = {
            (data.name_of(place), method): (ratio.value, ratio.error or math.nan)
            for place, ratios in data.ratios.items()
            for method, ratio in ratios.items()
        }
        fields.append((f"ours, relative to {data.base}", ours))
    printed = paper.shown_with(folder.name, "ratio")
    if printed:
        theirs = {(n.get("size"), n.get("method")): (n.value, math.nan) for n in printed}
        fields.append((f"the paper, relative to {printed[0].get('ratio_to')}", theirs))
    if not fields:
        return None
    methods = list(dict.fromkeys(method for _, field in fields for _, method in field))
    drawn = Figure(figsize=(len(fields) * PANEL[0] + LEGEND, 1.0 + 0.28 * len(methods)), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(1, len(fields), squeeze=False)[0]
    sizes = list(dict.fromkeys(size for _, field in fields for size, _ in field))
    looks = {size: style_of(place, "dape-kerple") for place, size in enumerate(sizes)}
    for place, (axis, (title, field)) in enumerate(zip(axes, fields, strict=True)):
        axis.axvline(1, color=FAINT, linewidth=0.8, linestyle=":")
        for size in dict.fromkeys(size for size, _ in field):
            rows = [(methods.index(m), *field[size, m]) for m in methods if (size, m) in field]
            errors = [error if math.isfinite(error) else 0.0 for _, _, error in rows]
            look = looks[size]
            axis.errorbar(
                [value for _, value, _ in rows], [row for row, _, _ in rows], xerr=errors, label=size,
                color=look.colour, marker=look.marker, markersize=5, linestyle="none", elinewidth=0.8, capsize=2,
            )  # fmt: skip
        axis.set_yticks(range(len(methods)), methods if not place else [""] * len(methods))
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.grid(axis="both")
        axis.set_axisbelow(True)
        axis.set_title(title, loc="left")
    legend(drawn, axes)
    return drawn


def maps(folder: Folder, _: Paper) -> Figure | None:
    """The share of the weight on the first token by length."""
    shares = measured(folder.best or {}, "sink_share")
    if not shares:
        return None
    methods = list(dict.fromkeys(method for method, _ in shares))
    looks = styles(methods, methods)
    drawn = Figure(figsize=(PANEL[0] + LEGEND + 0.6, PANEL[1]), layout="constrained")
    FigureCanvasAgg(drawn)
    axis = drawn.add_subplot()
    for method in methods:
        lengths = sorted(length for name, length in shares if name == method)
        found = [shares[method, length] for length in lengths]
        bars = [100 * e.error if math.isfinite(e.error) else 0.0 for e in found]
        _errorbar(axis, lengths, [100 * e.value for e in found], bars, method, looks[method])
    axis.set_title("weight on the first token", loc="left")
    _finish(axis, "% of the attention", "length")
    legend(drawn, [axis])
    return drawn


def _errorbar(
    axis: Any, x: Sequence[float], y: Sequence[float], bars: Sequence[float], label: str, look: Style
) -> None:
    axis.errorbar(
        x, y, yerr=bars, label=label, color=look.colour, marker=look.marker, markersize=4,
        linestyle="--" if look.dashed else "-", linewidth=look.width * 0.7, capsize=2, elinewidth=0.8,
    )  # fmt: skip


def _finish(axis: Any, y: str, x: str) -> None:
    lengths = sorted({round(value) for line in axis.lines for value in line.get_xdata()})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_ylabel(y)
    axis.set_xlabel(x)
    axis.grid(axis="y")
    axis.set_axisbelow(True)


KINDS: dict[str, Callable[[Folder, Paper], Figure | None]] = {
    "language": language,
    "tasks": tasks,
    "timing": timing,
    "maps": maps,
}
