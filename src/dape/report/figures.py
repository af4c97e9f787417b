"""Figures for a paper: curves with error bars as SVG, PDF and PNG, the same bytes for the same results."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from dape.files import write_atomically
from dape.report.results import VIEWS, Curve, Results, curves, views
from dape.report.series import QUANTITIES, bars
from dape.report.style import Style, style_of, times

FORMATS = ("svg", "pdf", "png")
# A column and a half of a two-column paper, in inches.
SIZE = (5.0, 3.3)
# Two points whose lengths differ by more than this factor are not joined.
FAR = 4
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
    "grid.color": "0.92",
    "grid.linewidth": 0.6,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    # Without these the files would differ from run to run.
    "svg.hashsalt": "dape",
}
NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def write_figures(results: Results, folder: Path) -> list[Path]:
    """A figure of perplexity for each view, in each format; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    train_length = results["records"][0]["train_length"]
    for view in views(results):
        with context(["default", LOOK]):
            drawn = figure(curves(results, view), train_length, title=f"{VIEWS[view]}")
            for suffix in FORMATS:
                content = io.BytesIO()
                drawn.savefig(content, format=suffix, metadata=NO_DATE[suffix])
                paths.append(folder / f"perplexity-{view}.{suffix}")
                write_atomically(paths[-1], content.getvalue())
    return paths


def figure(shown: Sequence[Curve], train_length: int, *, title: str, quantity: str = "ppl") -> Figure:
    """Curves over log2 of the length, error bars of one standard error, the training length marked."""
    drawn = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    styles = [style_of(index, curve.method) for index, curve in enumerate(shown)]
    draw_curves(axes, shown, styles, train_length, title=title, quantity=quantity)
    axes.set_xlabel(f"evaluation length (training length {train_length} dotted)")
    drawn.legend(loc="outside right upper", frameon=False, handlelength=2.6)
    return drawn


def draw_curves(
    axes: Any,
    shown: Sequence[Curve],
    styles: Sequence[Style],
    train_length: int,
    *,
    title: str,
    quantity: str = "ppl",
) -> None:
    """The curves of one panel, each in its style, with its axes."""
    axes.axvline(train_length, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
    for curve, style in zip(shown, styles, strict=True):
        if curve.points:
            _draw(axes, style, curve, quantity)
    lengths = sorted({point.eval_length for curve in shown for point in curve.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length}\n{times(length, train_length)}" for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(QUANTITIES[quantity].label)
    axes.set_title(title, loc="left")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if QUANTITIES[quantity].logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(_labelled(axes.get_ylim()))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw(axes: Any, style: Style, curve: Curve, quantity: str) -> None:
    shown = [
        (point.eval_length, bar)
        for point, bar in zip(curve.points, bars(curve, quantity), strict=True)
        if math.isfinite(bar.value)
    ]
    axes.errorbar(
        [length for length, _ in shown],
        [bar.value for _, bar in shown],
        # An unknown error has no bar.
        yerr=[[_known(bar.down) for _, bar in shown], [_known(bar.up) for _, bar in shown]],
        label=curve.method,
        color=style.colour,
        marker=style.marker,
        markersize=4,
        linestyle="none" if _is_a_pair(shown) else "--" if style.dashed else "-",
        linewidth=style.width * 0.7,
        capsize=2,
        elinewidth=0.8,
    )


def _is_a_pair(shown: Sequence[tuple[int, Any]]) -> bool:
    """Whether there are two points alone, far apart: a line would tell of what lies between."""
    return len(shown) == 2 and shown[1][0] > FAR * shown[0][0]


def _known(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def _labelled(limits: tuple[float, float]) -> Locator:
    """Where a logarithmic axis is labelled: at more digits the fewer decades it spans, evenly within part of one."""
    decades = math.log10(limits[1] / limits[0])
    if decades < 0.3:
        return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3)
    few = (1, 1.5, 2, 3, 5, 7) if decades < 1.2 else (1, 2, 5)
    return LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9) if decades < 0.5 else few)
