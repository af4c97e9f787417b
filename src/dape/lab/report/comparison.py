"""report.html of a comparison: verdict, plot, tables, loss curves, samples, settings, and the data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.style import context
from matplotlib.ticker import MaxNLocator

from dape.files import write_atomically
from dape.lab.curves import (
    QUANTITIES,
    Curve,
    bars,
    curves,
    difference_table,
    loss_table,
    recall_table,
    train_length,
    verdict,
    views,
    warnings,
)
from dape.lab.figures import LOOK, canvas, legend, on_page, style_of, svg
from dape.lab.records import VIEWS, Results
from dape.lab.report import method_summary, render
from dape.lab.tables import times

NOTES = (
    "Every loss is of the same target tokens: the last ones of each window, with more context to their left as "
    "the length grows. Differences and changes are paired: the same tokens on both sides, so their errors are "
    "smaller than those of the losses themselves; where there are several seeds, the variance between them is part "
    "of every error. Methods share data order and initial weights. Equal training time: every method is trained "
    "anew for as long as the fastest needs, its number of steps by the time of a step, measured in turns, with a "
    "schedule of that many steps; methods within 5 % of the fastest keep their run."
)


def write_page(results: Results, path: Path) -> Path:
    """Write the page; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(results))
    return path


def page(results: Results) -> str:
    """The page as HTML; its numbers are also embedded as JSON, under the ids results and curves."""
    shown, settings = views(results), results.settings
    drawn = {view: curves(results, view) for view in shown}
    colours = {c.label: style_of(i, c.method).colour for v in shown for i, c in enumerate(drawn[v])}
    tables = {view: loss_table(results, view, colours) for view in shown}
    paired = any(point.difference.known for view in shown for curve in drawn[view] for point in curve.points)
    names = {"ppl": "perplexity", "nll": "loss", "change": "change"}
    names |= {"difference": "against baseline"} if paired else {}
    error = (
        f"Bars: one standard error of the paired difference to {settings.get('baseline')}." if paired else ""
    )
    unit = train_length(results)
    return render(
        "comparison.html.j2",
        title=title(results),
        subtitle=subtitle(results),
        verdicts=[verdict(results, view) for view in shown],
        warnings=warnings(results),
        failures=results["failures"],
        view_names=VIEWS,
        views=shown,
        quantities=names,
        bars=f"{error} Dotted: the training length, {unit}." if shown else "",
        tables=tables,
        differences={view: difference_table(results, view, colours) for view in shown},
        recall={view: recall_table(results, view) for view in shown},
        loss_curves=loss_curves(results, colours),
        samples=results.get("samples", {}),
        methods=described(drawn[shown[0]] if shown else []),
        notes=NOTES,
        command=results.get("command", ""),
        settings=settings,
        environment=results["environment"],
        results=results.content,
        plotted=plotted(results, drawn),
        latex="\n".join(table.latex() for table in tables.values()),
    )


def described(shown: list[Curve]) -> dict[str, str]:
    """One-line descriptions of the methods."""
    descriptions = {}
    for curve in shown:
        try:
            descriptions[curve.method] = method_summary(curve.method)
        except ValueError:  # a name of somebody else's method says nothing to us
            continue
    return descriptions


def title(results: Results) -> str:
    lengths = [row["eval_length"] for row in results["rows"] if row["metric"] == "loss"]
    if not lengths:
        return "Length extrapolation: no results"
    unit = train_length(results)
    return f"Trained at {unit} tokens, evaluated to {max(lengths)} ({times(max(lengths), unit)})"


def subtitle(results: Results) -> str:
    settings = results.settings
    seeds = len(settings.get("seeds", ())) or 1
    methods = f"{len(settings.get('methods', ()))} methods, {seeds} seed{'s' if seeds > 1 else ''}"
    return f"Corpus {settings.get('corpus', 'unknown')} · {methods} · {settings.get('steps', '?')} steps"


def loss_curves(results: Results, colours: dict[str, str]) -> str:
    """Figure of training and validation loss by step, one line per run of the first view; empty if not recorded."""
    entries = [entry for entry in results.get("training", []) if len(entry["curve"]) > 1]
    if not entries:
        return ""
    with context(["default", LOOK]):
        drawn, ((axes,),) = canvas(7.2, 3.0)
        for entry in entries:
            steps, losses = zip(*entry["curve"], strict=True)
            smooth, last = [], losses[0]
            for loss in losses:
                last += 0.2 * (loss - last)
                smooth.append(last)
            colour = colours.get(entry["label"], "#8a8a8a")
            axes.plot(steps, smooth, color=colour, linewidth=1.2, label=entry["label"])
            if validation := entry.get("validation"):
                axes.plot(
                    *zip(*validation, strict=True),
                    color=colour,
                    linewidth=0.8,
                    linestyle=":",
                    marker="o",
                    markersize=3,
                )
        axes.set_xlabel("step")
        validated = any(entry.get("validation") for entry in entries)
        axes.set_ylabel(f"training loss, smoothed{'; dots: validation' if validated else ''}")
        axes.grid(axis="y")
        legend(drawn, [axes])
        return on_page(svg(drawn))


def plotted(results: Results, shown: dict[str, list[Curve]]) -> dict[str, Any]:
    """Data of the page's plot: for every view and method, value and error bar of every quantity."""
    points = [point for group in shown.values() for curve in group for point in curve.points]
    lengths = sorted({point.eval_length for point in points})
    unit = train_length(results)
    perplexities = [point.ppl for point in points if math.isfinite(point.ppl)]
    return {
        "views": list(shown),
        "train_length": unit,
        "lengths": lengths,
        "ticks": [f"{length}<br>{times(length, unit)}" for length in lengths],
        "quantities": {
            name: {
                "label": quantity.label,
                "logarithmic": quantity.logarithmic,
                "ticks": _ticks(perplexities) if quantity.logarithmic else [],
            }
            for name, quantity in QUANTITIES.items()
        },
        "curves": {view: [_plotted(*entry) for entry in enumerate(group)] for view, group in shown.items()},
    }


def _plotted(index: int, curve: Curve) -> dict[str, Any]:
    style = style_of(index, curve.method)
    look = {"colour": style.colour, "symbol": style.symbol, "dashed": style.dashed, "width": style.width}
    hover = {
        name: [
            f"{QUANTITIES[name].label}: {bar.value:.4g}"
            + (f" (+{bar.up:.2g}, −{bar.down:.2g})" if math.isfinite(bar.up) else "")
            for bar in bars(curve, name)
        ]
        for name in QUANTITIES
    }
    values = {name: bars(curve, name) for name in QUANTITIES}
    lengths = [point.eval_length for point in curve.points]
    return {"method": curve.label, "lengths": lengths, "hover": hover, **look, **values}


def _ticks(values: list[float]) -> list[float]:
    """Round perplexities over the range: equally spaced if it is narrow, else by their first digits."""
    if not values:
        return []
    low, high = min(values), max(values)
    if high / low < 4:
        return [float(f"{value:.6g}") for value in MaxNLocator(6).tick_values(low, high) if value > 0]
    digits = (1, 2, 3, 4, 5, 7) if high / low < 40 else (1, 2, 5) if high / low < 4000 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    candidates = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    return [float(f"{value:.6g}") for value in candidates if 0.9 * low <= value <= 1.1 * high]
