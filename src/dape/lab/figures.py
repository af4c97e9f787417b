"""Figures: curves by length with error bars, with a fixed style per method, as SVG, PDF and PNG.

The same results give the same bytes. On a page, figures use the page's colours, so that they are readable in light
and dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from dape.files import write_atomically
from dape.lab.curves import QUANTITIES, Curve, bars, curves, train_length, views
from dape.lab.records import VIEWS, Results
from dape.lab.tables import times
from dape.methods import parse_layers

# After Okabe and Ito, in shades that are readable on white and on dark pages.
COLOURS = ("#2a82cc", "#e69f00", "#12a57c", "#cc79a7", "#df6211", "#56b4e9", "#9478c4", "#8a8a8a")
# The same markers as matplotlib and plotly name them, and as a terminal can show them.
MARKERS = (
    ("o", "circle", "o"),
    ("s", "square", "#"),
    ("D", "diamond", "x"),
    ("^", "triangle-up", "^"),
    ("v", "triangle-down", "v"),
    ("P", "cross", "+"),
    ("X", "x", "%"),
    ("*", "star", "*"),
)
# Indices of the colours of main methods in the figures of papers; other methods take the remaining ones.
COLOUR_ORDER = {
    "dape1x3-kerple": 0,
    "kerple": 1,
    "dape-kerple": 2,
    "alibi": 3,
    "rope": 4,
    "t5": 5,
    "fire": 6,
    "nope": 7,
}
COLOUR_ORDER |= {"cope": 10}
# Of those, the colours of main methods that process the scores: their curves are solid, the others dashed.
FULL = (0, 2)
INK, FAINT, GRID = "#1a1d21", "#8f99a3", "#e3e7eb"
# CSS variables of a page for ink, faint ink and grid.
ON_PAGE = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)"}
# Sizes in inches: of a comparison's figure (one and a half columns of a two-column paper), a panel, the legend.
SIZE, PANEL, LEGEND = (5.0, 3.3), (3.6, 2.75), 1.6
# Two points whose lengths differ by more than this factor are not joined.
FAR = 4
FORMATS = ("svg", "pdf", "png")
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
LOOK: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "grid.linewidth": 0.6,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    # Labels are names, in which a dollar sign is one.
    "text.parse_math": False,
    # Without it the files would not be reproducible.
    "svg.hashsalt": "dape",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.facecolor": "none",
}


class Style(NamedTuple):
    colour: str
    marker: str
    symbol: str
    letter: str
    dashed: bool
    width: float


def style_of(index: int, method: str) -> Style:
    """Style of the method at an index of the comparison; plain scores are dashed."""
    plain = is_plain(method)
    colour, marks = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
    return Style(colour, *marks, dashed=plain, width=1.4 if plain else 2.2)


def is_plain(method: str) -> bool:
    try:
        return all(layer.is_plain for layer in parse_layers(method))
    except ValueError:  # somebody else's method is shown as well
        return True


def styles(labels: Sequence[str], methods: Sequence[str]) -> dict[str, Style]:
    """A style for every label; a main method keeps its own, and the same label looks the same in every panel."""
    fixed = {label: COLOUR_ORDER[label] for label in labels if label in COLOUR_ORDER}
    left = [index for index in range(8) if index not in fixed.values()]
    again = [index for index in range(8, 64) if index not in fixed.values()]
    assigned: dict[str, Style] = {}
    for label, method in zip(labels, methods, strict=True):
        if label in assigned:
            continue
        # When colours are used up, the colour of a dashed curve is reused by a solid one, and vice versa.
        full = not style_of(0, method).dashed
        apart = (index for index in again if (index % 8 in FULL) != full)
        index = fixed[label] if label in fixed else left.pop(0) if left else next(apart, again[0])
        if index in again:
            again.remove(index)
        style = style_of(index, method)
        # A colour that is used a second time has another marker.
        assigned[label] = style._replace(marker=MARKERS[(index + 3) % 8][0]) if index >= 8 else style
    return assigned


def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, *, ratios: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """A figure of that size in inches, and its axes [rows, columns]; ratios: of the columns' widths, by default equal."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn, drawn.subplots(rows, columns, squeeze=False, width_ratios=ratios)


def write_figures(results: Results, folder: Path) -> list[Path]:
    """A figure of perplexity for each view of a comparison, in each format; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for view in views(results):
        drawn = comparison_figure(results, view)
        for suffix in FORMATS:
            paths.append(save(drawn, folder / f"perplexity-{view}.{suffix}"))
    return paths


def save(drawn: Figure, path: Path) -> Path:
    """Write the figure in the format of the file's suffix."""
    content = io.BytesIO()
    suffix = path.suffix.removeprefix(".")
    # Fonts and salts are also read when a figure is written.
    with context(["default", LOOK]):
        drawn.savefig(content, format=suffix, metadata=NO_DATE.get(suffix, {}))
    write_atomically(path, content.getvalue())
    return path


def comparison_figure(results: Results, view: str, *, quantity: str = "ppl") -> Figure:
    """Curves over log2 of the length, paired error bars, the training length marked."""
    with context(["default", LOOK]):
        drawn, ((axes,),) = canvas(*SIZE)
        shown, unit = curves(results, view), train_length(results)
        looks = {curve.label: style_of(index, curve.method) for index, curve in enumerate(shown)}
        draw_curves(axes, shown, looks, unit, title=VIEWS[view], quantity=quantity)
        axes.set_xlabel(f"evaluation length (training length {unit} dotted)")
        baseline = results.settings.get("baseline")
        paired = any(point.difference.known for curve in shown for point in curve.points)
        said = f"bars: one standard error\nof the difference to\n{baseline}" if paired else ""
        legend(drawn, [axes], said)
        # Long names, such as those of a sweep, widen the figure; the curves keep their room.
        box = drawn.legends[0].get_window_extent()
        drawn.set_figwidth(SIZE[0] + max(0.0, box.width / drawn.dpi - LEGEND))
        return drawn


def length_figure(series: Mapping[str, Sequence[tuple[int, float]]], y: str, *, unit: int) -> Figure:
    """Named series of (length, value) over log2 of the length, values on a logarithmic axis; unit is dotted.

    A series called "A → B" looks like method B.
    """
    with context(["default", LOOK]):
        drawn, ((axes,),) = canvas(*SIZE)
        methods = [label.rpartition("→ ")[2] for label in series]
        if len(set(methods)) < len(methods):
            methods = list(series)
        of_method = styles(methods, methods)
        looks = {label: of_method[method] for label, method in zip(series, methods, strict=True)}
        for label, points in series.items():
            x, values = zip(*points, strict=True)
            errorbar(axes, x, values, None, label, looks[label])
        axes.axvline(unit, color=FAINT, linestyle=":", linewidth=1)
        axes.set_yscale("log")
        lengths = sorted({length for points in series.values() for length, _ in points})
        finish(axes, lengths, y, f"evaluation length (training length {unit} dotted)", unit=unit)
        axes.yaxis.set_major_locator(_labelled(axes.get_ylim()))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        legend(drawn, [axes])
        return drawn


def draw_curves(
    axes: Any,
    shown: Sequence[Curve],
    looks: dict[str, Style],
    unit: int,
    *,
    title: str,
    quantity: str = "ppl",
    frame: tuple[float, float] | None = None,
) -> None:
    """Draw the curves of one panel, each in its style, with its axes; frame: range of values to show."""
    axes.axvline(unit, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    for curve in shown:
        points = [
            (point.eval_length, bar)
            for point, bar in zip(curve.points, bars(curve, quantity), strict=True)
            if math.isfinite(bar.value)
        ]
        if curve.points:
            # Only two points, far apart: a line would suggest values between them.
            pair = len(points) == 2 and points[1][0] > FAR * points[0][0]
            error = [[_known(bar.down) for _, bar in points], [_known(bar.up) for _, bar in points]]
            look = looks[curve.label]
            errorbar(
                axes, [n for n, _ in points], [bar.value for _, bar in points], error, curve.label, look, pair
            )
    finish(
        axes,
        sorted({point.eval_length for curve in shown for point in curve.points}),
        QUANTITIES[quantity].label,
        unit=unit,
    )
    axes.set_title(title, loc="left")
    if QUANTITIES[quantity].logarithmic:
        axes.set_yscale("log")
        axes.set_ylim(frame)
        axes.yaxis.set_major_locator(_labelled(axes.get_ylim()))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def errorbar(
    axes: Any,
    x: Sequence[float],
    y: Sequence[float],
    error: Any,
    label: str,
    look: Style,
    points: bool = False,
) -> None:
    """Draw one curve with its error bars; with `points`, only its points."""
    line = "none" if points else "--" if look.dashed else "-"
    axes.errorbar(
        x, y, yerr=error, label=label, color=look.colour, marker=look.marker, markersize=4,
        linestyle=line, linewidth=look.width * 0.7, capsize=2, elinewidth=0.8,
    )  # fmt: skip


def finish(axes: Any, lengths: Sequence[int], y: str, x: str = "", *, unit: int | None = None) -> None:
    """Format axes over log2 of the length; unit: also label lengths as multiples of it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n}\n{times(n, unit)}" if unit else str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(y)
    if x:
        axes.set_xlabel(x)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def legend(drawn: Figure, axes: Any, title: str = "") -> None:
    """Legend with one entry per label, in the order of the first panel that has it."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    drawn.legend(
        list(entries.values()), list(entries), loc="outside right upper", frameon=False, handlelength=2.6,
        title=title or None, title_fontsize=7, alignment="left",
    )  # fmt: skip


def svg(drawn: Figure) -> str:
    """The figure as SVG on white."""
    content = io.StringIO()
    with context(["default", LOOK]):
        drawn.savefig(content, format="svg", metadata={"Date": None}, facecolor="white")
    return content.getvalue()


def on_page(text: str) -> str:
    """An SVG for embedding in a page: no prologue, no background, the page's colours and width, no ids."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="patch_1">.*?</g>', "", text, count=1, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    for colour, name in ON_PAGE.items():
        text = text.replace(colour, name)
    return re.sub(r'<svg [^>]*?width="([\d.]+)pt"', _sized, text, count=1, flags=re.DOTALL)


def _sized(match: re.Match[str]) -> str:
    points = float(match[1])
    head = match[0].replace(f'width="{match[1]}pt"', f'style="max-width:{points * 4 / 3:.0f}px"')
    return re.sub(r' height="[\d.]+pt"', "", head)


def _known(error: float) -> float:
    """The error, or 0 if unknown, so that no bar is drawn."""
    return error if math.isfinite(error) else 0.0


def _labelled(limits: tuple[float, float]) -> Locator:
    """Tick labels of a logarithmic axis: more digits for fewer decades, evenly spaced within part of one."""
    decades = math.log10(limits[1] / limits[0])
    if decades < 0.3:
        return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)
    few = (1, 1.5, 2, 3, 5, 7) if decades < 1.2 else (1, 2, 5)
    return LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9) if decades < 0.5 else few)
