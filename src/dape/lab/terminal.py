"""Plots of curves in characters, for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from dape.lab.curves import Curve
from dape.lab.figures import style_of
from dape.lab.tables import times

ROWS = 16
GUTTER = 7


def plot(curves: Sequence[Curve], train_length: int, *, columns: int = 80, rows: int = ROWS) -> Text:
    """Plot perplexity by length, both logarithmic: a marker per point, with labels at the right end."""
    shown = [(index, curve) for index, curve in enumerate(curves) if curve.points]
    values = [point.ppl for _, curve in shown for point in curve.points if math.isfinite(point.ppl)]
    if not values:
        return Text("nothing to plot: no method was evaluated")
    lengths = sorted({point.eval_length for _, curve in shown for point in curve.points})
    width = columns - GUTTER - 2 - (4 + max(len(curve.label) for _, curve in shown))
    canvas = Canvas(width, rows, lengths, values)
    for index, curve in shown:
        canvas.draw(curve, style_of(index, curve.method).letter, style_of(index, curve.method).colour)
    labels = _labels(canvas, shown)
    text = Text("perplexity", style="bold")
    text.append(
        f"  (lower is better; trained at length {train_length} = 1×; both axes logarithmic)\n", style="dim"
    )
    ticks = canvas.ticks()
    for row in range(rows):
        text.append(f"{ticks.get(row, ''):>{GUTTER}} |" if row in ticks else " " * (GUTTER + 1) + "|")
        for character, colour in canvas.cells[row]:
            text.append(character, style=colour)
        if row in labels:
            name, colour = labels[row]
            text.append(f"  {name}", style=colour)
        text.append("\n")
    text.append(" " * (GUTTER + 1) + "+" + "-" * width + "\n")
    text.append(_axis(canvas, lengths, [str(length) for length in lengths]) + "\n")
    text.append(_axis(canvas, lengths, [times(length, train_length) for length in lengths]), style="dim")
    return _stripped(text)


class Canvas:
    """Grid of (character, style), row 0 at the top."""

    def __init__(self, width: int, rows: int, lengths: Sequence[int], values: Sequence[float]) -> None:
        self.width, self.rows = width, rows
        self.cells = [[(" ", "")] * width for _ in range(rows)]
        self.left, self.right = math.log2(lengths[0]), math.log2(lengths[-1])
        self.low, self.high = math.log(min(values)), math.log(max(values))
        if self.high - self.low < 0.05:
            # Flat curves stay flat: noise is not scaled to the whole height.
            middle = (self.low + self.high) / 2
            self.low, self.high = middle - 0.025, middle + 0.025

    def column(self, length: float) -> int:
        span = self.right - self.left
        share = (math.log2(length) - self.left) / span if span else 0.5
        return round(2 + share * (self.width - 5))

    def row(self, value: float) -> int:
        share = (math.log(value) - self.low) / (self.high - self.low)
        return round((1 - min(share, 1.0)) * (self.rows - 1))

    def ticks(self) -> dict[int, str]:
        """Tick values, about one every four rows."""
        step = (self.rows - 1) / max(1, (self.rows - 1) // 4)
        rows = {round(index * step) for index in range(int((self.rows - 1) / step + 0.5) + 1)}
        return {
            row: _short(math.exp(self.high - row / (self.rows - 1) * (self.high - self.low))) for row in rows
        }

    def draw(self, curve: Curve, letter: str, colour: str) -> None:
        points = [(point.eval_length, point.ppl) for point in curve.points if math.isfinite(point.ppl)]
        for (start, low), (stop, high) in pairwise(points):
            for column in range(self.column(start) + 1, self.column(stop)):
                share = (column - self.column(start)) / (self.column(stop) - self.column(start))
                self._dot(self.row(math.exp(math.log(low) + share * math.log(high / low))), column, colour)
        for length, value in points:
            self.cells[self.row(value)][self.column(length)] = (letter, colour)

    def _dot(self, row: int, column: int, colour: str) -> None:
        if self.cells[row][column][0] == " ":
            self.cells[row][column] = (".", colour)


def _labels(canvas: Canvas, shown: Sequence[tuple[int, Curve]]) -> dict[int, tuple[str, str]]:
    """A row for each label, near its curve's last point, without overlap, the best lowest."""
    ends = sorted(shown, key=lambda entry: -entry[1].points[-1].loss.value)[-canvas.rows :]
    rows = [canvas.row(curve.points[-1].ppl) for _, curve in ends]
    for index in range(1, len(rows)):
        rows[index] = max(rows[index], rows[index - 1] + 1)
    limit = canvas.rows
    for index in reversed(range(len(rows))):
        rows[index] = limit = min(rows[index], limit - 1)
    labels = {}
    for row, (index, curve) in zip(rows, ends, strict=True):
        style = style_of(index, curve.method)
        labels[row] = (f"{style.letter} {curve.label}", style.colour)
    return labels


def _axis(canvas: Canvas, lengths: Sequence[int], names: Sequence[str]) -> str:
    """Names below their columns; one that would touch its neighbour is left out."""
    line = ""
    for length, name in zip(lengths, names, strict=True):
        start = GUTTER + 2 + canvas.column(length) - len(name) // 2
        if not line or start > len(line):
            line = line.ljust(start) + name
    return line


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def _stripped(text: Text) -> Text:
    """The text without blanks at the ends of lines."""
    lines = text.split("\n")
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)
