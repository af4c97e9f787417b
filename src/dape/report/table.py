"""The comparison as tables for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dape.report.results import VIEWS, Curve, Estimate, Results, curves, views
from dape.report.style import times

# Lengths that fit beside the method, the change and the time.
COLUMNS = 5
# Change of the loss from the first length, in nats: up to where it counts as held, and as worse but usable.
HELD, WORSE = 0.01, 0.1


def print_tables(results: Results, console: Console) -> None:
    """A table for each view, what failed, and how to read the colours."""
    for view in views(results):
        console.print(table(curves(results, view), results, view))
        console.print()
    for failure in results["failures"]:
        console.print(
            f"failed: {failure['method']}, seed {failure['seed']}, {VIEWS[failure['view']]}: {failure['error']}",
            style="red",
            markup=False,
        )
    legend = Text("change: of the loss, in nats; ", style="dim").append("held", style="green")
    legend.append(f" (< {HELD:g} or 2 errors) ", style="dim").append("worse", style="yellow")
    legend.append(" ").append(f"much worse (> {WORSE:g})", style="red")
    console.print(legend)


def table(shown: Sequence[Curve], results: Results, view: str) -> Table:
    """Perplexities by length, and the change of the loss from the first length to the last."""
    train_length = results["records"][0]["train_length"]
    lengths = chosen_lengths(sorted({point.eval_length for curve in shown for point in curve.points}))
    table = Table(title=title(results, view), title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    for length in lengths:
        table.add_column(f"{times(length, train_length)}\n{length}", justify="right")
    table.add_column(
        f"change\n{times(lengths[0], train_length)} → {times(lengths[-1], train_length)}", justify="right"
    )
    table.add_column("steps", justify="right")
    table.add_column("train\ns", justify="right")
    best = best_at(shown, lengths[-1])
    for curve in shown:
        table.add_row(*row(curve, lengths, bold=curve.method == best))
    return table


def title(results: Results, view: str) -> str:
    settings = results["settings"]
    seeds = settings.get("seeds") or sorted({record["seed"] for record in results["records"]})
    tail = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
    return f"Perplexity at {VIEWS[view]}{tail}"


def row(curve: Curve, lengths: Sequence[int], *, bold: bool) -> list[Text]:
    name = Text(curve.method, style="bold" if bold else "")
    if not curve.points:
        return [name, Text("failed", style="red")]
    points = {point.eval_length: point for point in curve.points}
    cells = [
        Text(number(points[length].ppl), style=colour(points[length].change) if length in points else "")
        for length in lengths
    ]
    last = points[lengths[-1]].change
    marked = name.append(" !", style="red") if curve.failures else name
    return [marked, *cells, change(last), Text(f"{curve.steps}"), Text(f"{curve.train_seconds:.0f}")]


def change(estimate: Estimate) -> Text:
    if not math.isfinite(estimate.value):
        return Text("–")
    error = f" ± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return Text(f"{estimate.value:+.3f}{error}", style=colour(estimate))


def colour(estimate: Estimate) -> str:
    """Green: held; yellow: worse; red: much worse; none where nothing is known."""
    if not math.isfinite(estimate.value):
        return ""
    doubt = 2 * estimate.error if math.isfinite(estimate.error) else 0.0
    if estimate.value <= max(HELD, doubt):
        return "green"
    return "yellow" if estimate.value <= WORSE else "red"


def number(value: float) -> str:
    """Perplexity in at most six characters."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 1e6 else f"{value:.0e}"


def chosen_lengths(lengths: Sequence[int]) -> list[int]:
    """All lengths if they fit, else the first, the last and some evenly between."""
    if len(lengths) <= COLUMNS:
        return list(lengths)
    return [lengths[round(index * (len(lengths) - 1) / (COLUMNS - 1))] for index in range(COLUMNS)]


def best_at(shown: Sequence[Curve], length: int) -> str | None:
    scores = [
        (point.nll.value, curve.method)
        for curve in shown
        for point in curve.points
        if point.eval_length == length
    ]
    return min(scores)[1] if scores else None
