"""Tables of results, ours beside the paper's, as data that Markdown and HTML are made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dape.report.results import Estimate
from dape.report.table import number

OURS, PAPER = "ours", "paper"


@dataclass(frozen=True)
class Cell:
    """What is shown, the number behind it, its error as shown, and whether it is the best of its column."""

    text: str = ""
    value: float | None = None
    error: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    label: str
    whose: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A title, heads (the first two are of the rows' names and of whose they are), rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def has_both(self) -> bool:
        return len({row.whose for row in self.rows}) > 1


def perplexity(loss: Estimate | None, *, best: bool = False) -> Cell:
    if loss is None or math.isnan(loss.value):
        return Cell("–")
    value = math.exp(loss.value) if loss.value < 700 else math.inf
    error = f"± {value * math.expm1(loss.error):.2f}" if math.isfinite(loss.error) and loss.error < 1 else ""
    return Cell(number(value), value, error, best)


def signed(estimate: Estimate) -> Cell:
    if math.isnan(estimate.value):
        return Cell("")
    error = f"± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return Cell(f"{estimate.value:+.3f}".replace("-", "−"), estimate.value, error)


def plain(value: float | None, digits: int = 1, error: float = math.nan, *, best: bool = False) -> Cell:
    if value is None or math.isnan(value):
        return Cell("–")
    shown = f"± {error:.{digits}f}" if math.isfinite(error) else ""
    return Cell(f"{value:.{digits}f}", value, shown, best)


def markdown(table: Table) -> str:
    """The table for a README; the column that says whose a row is stands only where both are there."""
    heads = [table.heads[0], *([table.heads[1]] if table.has_both else []), *table.heads[2:]]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join('---' for _ in heads)}|"]
    for row in table.rows:
        whose = [row.whose] if table.has_both else []
        lines.append(f"| {' | '.join([_code(row), *whose, *map(_marked, row.cells)])} |")
    return "\n".join(lines)


def _code(row: Row) -> str:
    return row.label.replace("|", "\\|")


def _marked(cell: Cell) -> str:
    text = f"{cell.text} {cell.error}".strip() if cell.text.startswith(("+", "−")) else cell.text
    return f"**{text}**" if cell.best else text


def html(table: Table, colours: dict[str, str] | None = None) -> str:
    """The table for the page: the paper's rows under ours, every number with all its digits in data-value."""
    heads = [table.heads[0], *([""] if table.has_both else []), *table.heads[2:]]
    header = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    rows = "".join(_html_row(row, table, colours or {}) for row in table.rows)
    title = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    return (
        f'<div class="scroll"><table>{title}<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>'
        + (f'<p class="faint">{escape(table.note)}</p>' if table.note else "")
    )


def _html_row(row: Row, table: Table, colours: dict[str, str]) -> str:
    swatch = (
        f'<span class="swatch" style="background:{colours[row.label]}"></span>'
        if row.label in colours
        else ""
    )
    cells = [f"<td>{swatch}{escape(row.label)}</td>"]
    if table.has_both:
        cells.append(f'<td class="whose">{row.whose}</td>')
    for cell in row.cells:
        mark = ' class="best"' if cell.best else ""
        value = "" if cell.value is None else f' data-value="{cell.value!r}"'
        error = f" <small>{escape(cell.error)}</small>" if cell.error else ""
        cells.append(f"<td{mark}{value}>{escape(cell.text)}{error}</td>")
    return f'<tr class="{row.whose}">{"".join(cells)}</tr>'


def joined(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows in which a label that repeats the one above is left out."""
    before, found = "", []
    for row in rows:
        found.append(Row("" if row.label == before else row.label, row.whose, row.cells))
        before = row.label
    return tuple(found)
