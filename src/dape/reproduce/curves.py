"""Curves by length in panels, in a style that each method keeps from figure to figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dape.report.figures import draw_curves
from dape.report.style import MARKERS, Style, style_of
from dape.reproduce.folders import Folder
from dape.reproduce.panels import Panel, our_panels, paper_panels
from dape.reproduce.paper import Paper

# Places in the order of colours that main methods keep in every figure; others take what is left.
PLACES = {
    "dape1x3-kerple": 0,
    "kerple": 1,
    "dape-kerple": 2,
    "alibi": 3,
    "rope": 4,
    "t5": 5,
    "fire": 6,
    "nope": 7,
    "cope": 10,
}
# Of those, the colours of main methods that process the scores: their curves are full, the others dashed.
FULL = (0, 2)
INK, FAINT, GRID = "#1a1d21", "#8f99a3", "#e3e7eb"
# Inches of a panel, and of the legend beside panels.
PANEL, LEGEND = (3.6, 2.75), 1.6


def styles(labels: Sequence[str], methods: Sequence[str]) -> dict[str, Style]:
    """A style for every label; a main method keeps its own, and the same label looks the same in every panel."""
    fixed = {label: PLACES[label] for label in labels if label in PLACES}
    left = [place for place in range(8) if place not in fixed.values()]
    again = [place for place in range(8, 64) if place not in fixed.values()]
    found: dict[str, Style] = {}
    for label, method in zip(labels, methods, strict=True):
        if label in found:
            continue
        # When colours are used up, one that a dashed curve has is taken by a full one, and the other way round.
        full = not style_of(0, method).dashed
        apart = (place for place in again if (place % 8 in FULL) != full)
        place = fixed[label] if label in fixed else left.pop(0) if left else next(apart, again[0])
        if place in again:
            again.remove(place)
        style = style_of(place, method)
        # A colour that is used a second time comes with another marker.
        found[label] = style._replace(marker=MARKERS[(place + 3) % 8][0]) if place >= 8 else style
    return found


def looks_of(folder: Folder, paper: Paper) -> dict[str, Style]:
    """The style of every curve of an experiment's figure, by its label; none for figures without curves."""
    if (folder.best or {}).get("kind", folder.kind) != "language":
        return {}
    lines = [line for panel in [*our_panels(folder), *paper_panels(folder, paper)] for line in panel.lines]
    return styles([line.label for line in lines], [line.method for line in lines])


def panels_figure(panels: Sequence[Panel], looks: dict[str, Style], *, columns: int = 2) -> Figure | None:
    """The panels in columns, with one legend beside them; None if there are none."""
    if not panels:
        return None
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    drawn = Figure(figsize=(columns * PANEL[0] + LEGEND, rows * PANEL[1]), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, columns, squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place >= len(panels):
            axis.set_axis_off()
            continue
        draw_panel(axis, panels[place], looks)
        if place % columns:
            axis.set_ylabel("")
        if place < len(panels) - columns:
            axis.set_xlabel("")
    legend(drawn, axes.flat, bars_of(panels))
    return drawn


def bars_of(panels: Sequence[Panel]) -> str:
    """What the bars of our panels are."""
    names = dict.fromkeys(panel.reference for panel in panels if panel.reference and len(panel.lines) > 1)
    to = " or ".join(names) if len(names) < 3 else "one of a panel"
    return f"bars: one standard error\nof the difference to\n{to}" if names else ""


def single_figure(panel: Panel, looks: dict[str, Style], size: tuple[float, float]) -> Figure:
    """One panel with its legend below, narrow enough for any page."""
    drawn = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(drawn)
    axis = drawn.add_subplot()
    draw_panel(axis, panel, looks)
    said = bars_of([panel]).replace("\n", " ") or None
    drawn.legend(
        loc="outside lower center", ncols=3, frameon=False, handlelength=2.6, title=said, title_fontsize=8
    )
    return drawn


def draw_panel(axis: Any, panel: Panel, looks: dict[str, Style]) -> None:
    shown = [line.curve() for line in panel.lines]
    draw_curves(axis, shown, [looks[curve.method] for curve in shown], panel.unit, title=panel.title)
    axis.set_xlabel("length read")


def legend(drawn: Figure, axes: Any, title: str = "") -> None:
    """One entry a label, in the order of the first panel that has it."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    drawn.legend(
        list(entries.values()),
        list(entries),
        loc="outside right upper",
        frameon=False,
        handlelength=2.6,
        title=title or None,
        title_fontsize=7,
        alignment="left",
    )
