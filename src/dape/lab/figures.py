"""Figures: curves by length with 95 % intervals, a fixed style per method, as SVG, PDF and PNG.

The same results give the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from dape.evaluation.statistics import Estimate, perplexity
from dape.files import write_atomically
from dape.lab.tables import times
from dape.methods import parse_layers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from dape.lab.comparison import Comparison, Point

# After Okabe and Ito, in shades that are readable on white and on dark pages.
COLOURS = ("#2a82cc", "#e69f00", "#12a57c", "#cc79a7", "#df6211", "#56b4e9", "#9478c4", "#8a8a8a")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
INK, FAINT, GRID = "#1a1d21", "#8f99a3", "#e3e7eb"
# Size in inches: one and a half columns of a two-column paper.
SIZE = (5.0, 3.3)
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
    # Names of methods and files are no formulas.
    "text.parse_math": False,
    "svg.fonttype": "none",
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
}
# Value and 95 % interval of a quantity at a point.
Value = tuple[float, float, float]


class Quantity(NamedTuple):
    """A quantity by length: its name on the axis, whether that is logarithmic, and its value at a point."""

    label: str
    logarithmic: bool
    of: Callable[[Point], Value]


def _perplexity(point: Point) -> Value:
    # The interval of the difference to the baseline: that of the loss would show how documents differ.
    low, high = (bound - point.difference.value for bound in (point.difference.low, point.difference.high))
    return point.ppl, perplexity(point.loss.value + low), perplexity(point.loss.value + high)


def _interval(estimate: Estimate) -> Value:
    return estimate.value, estimate.low, estimate.high


QUANTITIES = {
    "perplexity": Quantity("perplexity", True, _perplexity),
    "change": Quantity("change of the loss from the first length", False, lambda p: _interval(p.change)),
    "difference": Quantity("loss minus the baseline's", False, lambda p: _interval(p.difference)),
}


class Style(NamedTuple):
    colour: str
    marker: str
    dashed: bool


def style_of(index: int, method: str) -> Style:
    """Style of the method at an index of the comparison; plain scores are dashed."""
    return Style(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], is_plain(method))


def is_plain(method: str) -> bool:
    try:
        return all(layer.is_plain for layer in parse_layers(method))
    except ValueError:  # a variant's name, or somebody else's method
        return True


def canvas(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of that size in inches, and its axes [rows, columns]."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn, drawn.subplots(rows, columns, squeeze=False)


def save(drawn: Figure, path: Path) -> Path:
    """Write the figure in the format of the file's suffix."""
    content = io.BytesIO()
    suffix = path.suffix.removeprefix(".")
    # Fonts and salts are also read when a figure is written.
    with context(["default", LOOK]):
        drawn.savefig(content, format=suffix, metadata=NO_DATE.get(suffix, {}))
    write_atomically(path, content.getvalue())
    return path


def comparison_figure(comparison: Comparison, view: str, quantity: str = "perplexity") -> Figure:
    """Curves over log2 of the length; bars are the intervals of the paired differences to the baseline."""
    if quantity not in QUANTITIES:
        raise ValueError(f'quantity="{quantity}": choose one of {", ".join(QUANTITIES)}')
    what = QUANTITIES[quantity]
    series = {
        curve.method: [(point.length, *what.of(point)) for point in curve.points]
        for curve in comparison.curves(view)
    }
    note = f"bars: 95 % interval of\nthe difference to\n{comparison.about.baseline}"
    return length_figure(
        series,
        what.label,
        unit=comparison.train_length,
        note="" if quantity == "change" else note,
        logarithmic=what.logarithmic,
    )


def length_figure(
    series: Mapping[str, Sequence[tuple[float, ...]]],
    y: str,
    *,
    unit: int,
    note: str = "",
    logarithmic: bool = True,
) -> Figure:
    """Named series of (length, value) or (length, value, low, high) over log2 of the length; unit is dotted."""
    with context(["default", LOOK]):
        drawn, ((axes,),) = canvas(*SIZE)
        for index, (label, points) in enumerate(series.items()):
            known = [point for point in points if math.isfinite(point[1])]
            if not known:
                continue
            look = style_of(index, label.rpartition("→ ")[2])
            bars = [[_reach(p, 2, -1) for p in known], [_reach(p, 3, 1) for p in known]]
            axes.errorbar(
                [point[0] for point in known], [point[1] for point in known], yerr=bars, label=label,
                color=look.colour, marker=look.marker, markersize=4, capsize=2, elinewidth=0.8,
                linestyle="--" if look.dashed else "-", linewidth=1.0 if look.dashed else 1.5,
            )  # fmt: skip
        if unit:
            axes.axvline(unit, color=FAINT, linestyle=":", linewidth=1, zorder=0)
        lengths = sorted({point[0] for points in series.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n:g}\n{times(n, unit)}" if unit else f"{n:g}" for n in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(f"evaluation length{f' (training length {unit} dotted)' if unit else ''}")
        axes.set_ylabel(y)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        if logarithmic:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(_ticks(axes.get_ylim()))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        drawn.legend(
            loc="outside right upper", frameon=False, handlelength=2.6, title=note or None, title_fontsize=7,
            alignment="left",
        )  # fmt: skip
        # Long names, such as those of a sweep, widen the figure; the curves keep their room.
        extra = drawn.legends[0].get_window_extent().width / drawn.dpi - 1.6
        drawn.set_figwidth(SIZE[0] + max(0.0, extra))
        return drawn


def draw_heat_map(axis: Axes, percent: pd.DataFrame) -> None:
    """Numbers from 0 to 100 as colours, with each in its cell; NaN is empty."""
    axis.imshow(percent, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(percent.to_numpy()):
        if not math.isnan(value):
            colour = "white" if value < 60 else "black"
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)
    axis.set_xticks(range(percent.shape[1]), percent.columns)
    axis.set_yticks(range(percent.shape[0]), percent.index)
    axis.tick_params(length=0, labelsize=7)


def _reach(point: Sequence[float], index: int, side: int) -> float:
    """Length of an error bar, 0 if it is unknown."""
    if len(point) <= index or not math.isfinite(point[index]):
        return 0.0
    return max(0.0, side * (point[index] - point[1]))


def _ticks(limits: tuple[float, float]) -> Locator:
    """Tick labels of a logarithmic axis: more digits for fewer decades, evenly spaced within part of one."""
    decades = math.log10(limits[1] / limits[0])
    if decades < 0.3:
        return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)
    few = (1, 1.5, 2, 3, 5, 7) if decades < 1.2 else (1, 2, 5)
    return LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9) if decades < 0.5 else few)
