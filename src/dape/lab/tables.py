"""Tables of results as data, and as Markdown, LaTeX, a rich table or (in the templates) HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from dape.evaluation.inference import Estimate

OURS, PAPER = "ours", "paper"
# From this many columns on, a terminal's are one space apart.
MANY_COLUMNS = 7
# Styles of rich for the marks of cells.
STYLES = {"held": "green", "worse": "yellow", "much-worse": "red", "failed": "red", "": ""}


class Label:
    """A name in a terminal's table; where it is wrapped, it is at an option in brackets or a space."""

    def __init__(self, text: str, style: str) -> None:
        self.parts, self.style = re.split(r"(?<=[, ])|(?=\[)", text), style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self.parts)), sum(map(len, self.parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [""]
        for part in self.parts:
            if lines[-1] and len(lines[-1] + part) > options.max_width:
                lines.append("")
            lines[-1] += part
        yield Text("\n".join(lines), style=self.style, overflow="fold")


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
    """A table row. label: its name; whose: ours or the paper's; colour: of its curve, if any."""

    label: str
    whose: str
    cells: tuple[Cell, ...]
    colour: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table: title, heads of the columns after the rows' names, rows. A head may have a second line."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""
    corner: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.heads):
                raise ValueError(
                    f'"{self.title}": row "{row.label}" has {len(row.cells)} cells, but there are {len(self.heads)} columns'
                )

    @property
    def has_both(self) -> bool:
        return len({row.whose for row in self.rows}) > 1

    def markdown(self) -> str:
        """Markdown for a README, with a column for ours or the paper's only if there are both."""
        heads = [self.corner, *([""] if self.has_both else []), *(h.replace("\n", " ") for h in self.heads)]
        lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---' for _ in heads)}|"]
        for row in self.rows:
            whose = [row.whose] if self.has_both else []
            cells = [row.label.replace("|", "\\|"), *whose, *map(_marked, row.cells)]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def latex(self, label: str = "") -> str:
        """LaTeX tabular with booktabs' rules; bold: the best of a column."""
        heads = [self.corner, *([""] if self.has_both else []), *map(_tex_head, self.heads)]
        lines = [r"\begin{tabular}{l" + ("l" if self.has_both else "") + "r" * len(self.heads) + "}"]
        lines += [r"\toprule", " & ".join(heads) + r" \\", r"\midrule"]
        for row in self.rows:
            cells = [_tex(row.label), *([row.whose] if self.has_both else [])]
            for cell in row.cells:
                error = rf" {{\scriptsize {_tex(cell.error)}}}" if cell.error else ""
                text = _tex(cell.text)
                cells.append((rf"\textbf{{{text}}}" if cell.best else text) + error)
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        caption = [rf"\caption{{{_tex(self.title)}}}"] + ([rf"\label{{{label}}}"] if label else [])
        return "\n".join([r"\begin{table}", r"\centering", *lines, *caption, r"\end{table}"]) + "\n"

    def rich(self, columns: Sequence[int] | None = None) -> RichTable:
        """Table for a terminal: the columns of the given indices, or all."""
        shown = list(range(len(self.heads))) if columns is None else list(columns)
        table = RichTable(title=self.title, title_justify="left", box=None, pad_edge=False, highlight=False)
        table.padding = (0, 1) if len(shown) < MANY_COLUMNS else (0, 1, 0, 0)
        # Where the terminal is narrow, names are wrapped, and never numbers.
        table.add_column(self.corner or "method")
        for index in shown:
            table.add_column(self.heads[index], justify="right", no_wrap=True)
        for row in self.rows:
            cells: list[Any] = [Label(row.label, style="bold" if row.best else "")]
            for index in shown:
                cell = row.cells[index]
                text = f"{cell.text} {cell.error}".strip() if cell.text[:1] in "+−" else cell.text
                cells.append(Text(text, style=STYLES[cell.mark]))
            table.add_row(*cells)
        return table


def _marked(cell: Cell) -> str:
    text = f"{cell.text} {cell.error}".strip() if cell.text.startswith(("+", "−")) else cell.text
    paired = f"<br>{cell.error}" if cell.error.startswith(("+", "−")) else ""
    return (f"**{text}**" if cell.best else text) + paired


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


def exp(loss: float) -> float:
    """Perplexity of a loss, infinite on overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def perplexity(loss: Estimate | None, *, best: bool = False, mark: str = "") -> Cell:
    if loss is None or math.isnan(loss.value):
        return Cell("–")
    value = exp(loss.value)
    error = f"± {value * math.expm1(loss.error):.2f}" if math.isfinite(loss.error) and loss.error < 1 else ""
    return Cell(number(value), value, error, best, mark)


def compared(loss: Estimate | None, gap: Estimate, *, best: bool = False) -> Cell:
    """Perplexity, with the paired difference of the loss to another's, if any, instead of its error."""
    paired = change(gap)
    return replace(perplexity(loss, best=best), error=f"{paired.text} {paired.error}".strip())


def change(estimate: Estimate, *, mark: str = "") -> Cell:
    """A difference of losses, with its sign."""
    if math.isnan(estimate.value):
        return Cell("")
    error = f"± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return Cell(f"{estimate.value:+.3f}".replace("-", "−"), estimate.value, error, mark=mark)


def plain(value: float | None, digits: int = 1, error: float = math.nan, *, best: bool = False) -> Cell:
    if value is None or math.isnan(value):
        return Cell("–")
    shown = f"± {error:.{digits}f}" if math.isfinite(error) else ""
    return Cell(f"{value:.{digits}f}", value, shown, best)


def joined(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows without labels that repeat the one above."""
    before, kept = "", []
    for row in rows:
        kept.append(Row("" if row.label == before else row.label, row.whose, row.cells, row.colour))
        before = row.label
    return tuple(kept)


def times(length: float, train_length: float) -> str:
    """The length as a multiple of the training length: 16×, 1.5×."""
    return f"{length / train_length:g}×"


def chosen(count: int, room: int) -> list[int]:
    """All of `count` indices if they fit, else the first, the last and some evenly between."""
    if count <= room:
        return list(range(count))
    return [round(index * (count - 1) / (room - 1)) for index in range(room)]
