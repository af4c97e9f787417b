"""Tables of results as data, and as Markdown, LaTeX, or for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from dape.evaluation.statistics import Estimate, perplexity

# Use one-space padding at this many columns.
MANY_COLUMNS = 7
# Smallest width to which names are wrapped.
MIN_NAME = 16
# Styles of rich for the marks of cells.
STYLES = {"held": "green", "worse": "yellow", "much-worse": "red", "failed": "red", "": ""}


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, value, error as text, whether it is the best of its column, and its mark."""

    text: str = ""
    value: float | None = None
    error: str = ""
    best: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Row:
    """A table row. colour: index of its curve's colour, if any."""

    label: str
    cells: tuple[Cell, ...]
    best: bool = False
    colour: int | None = None


@dataclass(frozen=True)
class Table:
    """A table: title, heads of the columns after the rows' names, rows. A head may have a second line."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    corner: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.heads):
                raise ValueError(
                    f'"{self.title}": row "{row.label}" has {len(row.cells)} cells, but there are {len(self.heads)} columns'
                )

    def markdown(self) -> str:
        heads = [self.corner, *(head.replace("\n", " ") for head in self.heads)]
        lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---' for _ in heads)}|"]
        for row in self.rows:
            cells = [f"**{cell_text(cell)}**" if cell.best else cell_text(cell) for cell in row.cells]
            lines.append(f"| {' | '.join([row.label.replace('|', chr(92) + '|'), *cells])} |")
        return "\n".join(lines)

    def latex(self) -> str:
        """LaTeX tabular with booktabs' rules; bold: the best of a column."""
        heads = [self.corner, *map(_tex_head, self.heads)]
        lines = [r"\begin{tabular}{l" + "r" * len(self.heads) + "}"]
        lines += [r"\toprule", " & ".join(heads) + r" \\", r"\midrule"]
        for row in self.rows:
            cells = [_tex(row.label)]
            for cell in row.cells:
                error = rf" {{\scriptsize {_tex(cell.error)}}}" if cell.error else ""
                text = _tex(cell.text)
                cells.append((rf"\textbf{{{text}}}" if cell.best else text) + error)
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{_tex(self.title)}}}"]
        return "\n".join([r"\begin{table}", r"\centering", *lines, r"\end{table}"]) + "\n"

    def rich(self, columns: Sequence[int] | None = None) -> RichTable:
        """Table for a terminal: the columns of the given indices, or all."""
        chosen = list(range(len(self.heads))) if columns is None else list(columns)
        table = RichTable(title=self.title, title_justify="left", box=None, pad_edge=False, highlight=False)
        table.padding = (0, 1) if len(chosen) < MANY_COLUMNS else (0, 1, 0, 0)
        # Where the terminal is narrow, names are wrapped, and never numbers.
        longest = max((len(row.label) for row in self.rows), default=0)
        table.add_column(self.corner, overflow="fold", min_width=min(longest, MIN_NAME))
        for index in chosen:
            table.add_column(self.heads[index], justify="right", no_wrap=True)
        for row in self.rows:
            cells: list[Any] = [Text(row.label, style="bold" if row.best else "")]
            for cell in (row.cells[index] for index in chosen):
                text = cell_text(cell) if cell.text[:1] in "+−" else cell.text
                cells.append(Text(text, style=STYLES[cell.mark]))
            table.add_row(*cells)
        return table


def cell_text(cell: Cell) -> str:
    return f"{cell.text} {cell.error}".strip()


def _tex_head(head: str) -> str:
    lines = r" \\ ".join(map(_tex, head.split("\n")))
    return rf"\shortstack[r]{{{lines}}}" if "\n" in head else lines


def _tex(text: str) -> str:
    special = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "±": r"$\pm$", "×": r"$\times$", "−": "$-$"}
    special |= {"\\": r"\textbackslash{}", "$": r"\$", "~": r"\textasciitilde{}"}
    special |= {"–": "--", "→": r"$\to$", "^": r"\^{}", "{": r"\{", "}": r"\}"}
    return "".join(special.get(character, character) for character in text)


def number(value: float) -> str:
    """Format a perplexity in at most six characters."""
    if not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 1e6 else f"{value:.0e}"


def perplexity_cell(loss: Estimate, *, best: bool = False, mark: str = "") -> Cell:
    if math.isnan(loss.value):
        return Cell("–")
    value = perplexity(loss.value)
    error = f"± {value * math.expm1(loss.error):.2f}" if math.isfinite(loss.error) and loss.error < 1 else ""
    return Cell(number(value), value, error, best, mark)


def change_cell(estimate: Estimate, *, mark: str = "") -> Cell:
    """A difference of losses, with its sign."""
    if math.isnan(estimate.value):
        return Cell("")
    error = f"± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return Cell(f"{estimate.value:+.3f}".replace("-", "−"), estimate.value, error, mark=mark)


def times(length: float, train_length: float) -> str:
    """The length as a multiple of the training length: 16×, 1.5×; the number of tokens if that is unknown, 0."""
    return f"{length / train_length:g}×" if train_length else f"{length:g} tokens"


def spread(count: int, room: int) -> list[int]:
    """All of `count` indices if they fit, else the first, the last and some evenly between."""
    if count <= room:
        return list(range(count))
    return [round(index * (count - 1) / (room - 1)) for index in range(room)]
