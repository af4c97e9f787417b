"""Pieces of the page: tables, cards and lists as HTML, every number with all its digits in data-value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from dape.report.results import VIEWS, Curve, Estimate, Results
from dape.report.series import perplexity
from dape.report.style import style_of, times
from dape.report.table import best_at, colour, number

CLASSES = {"green": "held", "yellow": "worse", "red": "much-worse", "": ""}


def score_table(shown: Sequence[Curve], train_length: int) -> str:
    """Perplexity with its error at every length, the change to the longest, and what the training took."""
    lengths = _lengths(shown)
    span = f"{times(lengths[0], train_length)} → {times(lengths[-1], train_length)}"
    heads = ["method", *(_length_head(length, train_length) for length in lengths)]
    heads += [f"change<small>{span}, nats</small>", "steps", "seconds<small>of training</small>"]
    best = best_at(shown, lengths[-1])
    rows = [_score_row(index, curve, lengths, best=best) for index, curve in enumerate(shown)]
    return _table("scores", heads, rows)


def _score_row(index: int, curve: Curve, lengths: Sequence[int], *, best: str | None) -> str:
    if not curve.points:
        return f'<tr>{_name(index, curve)}<td class="failed" colspan="{len(lengths) + 3}">failed</td></tr>'
    points = {point.eval_length: point for point in curve.points}
    cells = [_name(index, curve)]
    for length in lengths:
        point = points[length]
        error = perplexity(point).up
        shown = (
            f"{number(point.ppl)} <small>± {error:.2f}</small>" if math.isfinite(error) else number(point.ppl)
        )
        cells.append(_cell(point.ppl, shown, CLASSES[colour(point.change)]))
    change = points[lengths[-1]].change
    cells.append(_cell(change.value, signed(change), CLASSES[colour(change)]))
    cells.append(_cell(curve.steps, f"{curve.steps}"))
    cells.append(_cell(curve.train_seconds, f"{curve.train_seconds:.1f}"))
    mark = ' class="best"' if curve.method == best else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def differences_table(shown: Sequence[Curve], train_length: int) -> str:
    """Paired differences of the loss to the baseline's, at every length."""
    lengths = _lengths(shown)
    heads = ["method", *(_length_head(length, train_length) for length in lengths)]
    rows = []
    for index, curve in enumerate(shown):
        if any(math.isfinite(point.difference.value) for point in curve.points):
            cells = [_cell(point.difference.value, signed(point.difference)) for point in curve.points]
            rows.append(f"<tr>{_name(index, curve)}{''.join(cells)}</tr>")
    return _table("differences", heads, rows)


def cards(shown: dict[str, list[Curve]], baseline: str | None) -> str:
    """The result in a few numbers: the best at the longest length in each view, and what it gains."""
    entries = []
    for view, group in shown.items():
        longest = _lengths(group)[-1]
        best = next(curve for curve in group if curve.method == best_at(group, longest))
        point = best.points[-1]
        entries.append(
            (best.method, f"best at {longest} tokens and {VIEWS[view]}: perplexity {number(point.ppl)}")
        )
        if math.isfinite(point.difference.value):
            entries.append(
                (signed(point.difference), f"its loss minus {baseline}'s, in nats, at {VIEWS[view]}")
            )
    tiles = (
        f'<div class="card"><b>{escape(head)}</b><span>{escape(text)}</span></div>' for head, text in entries
    )
    return f'<div class="cards">{"".join(tiles)}</div>'


def failures(results: Results) -> str:
    """What failed and why; nothing if nothing did."""
    if not results["failures"]:
        return ""
    items = "".join(
        f"<li><b>{escape(row['method'])}</b>, seed {row['seed']}, {VIEWS[row['view']]}: {escape(row['error'])}</li>"
        for row in results["failures"]
    )
    count = len(results["failures"])
    return f'<div class="failures"><b>{count} run{"s" if count > 1 else ""} failed</b><ul>{items}</ul></div>'


def definitions(entries: dict[str, Any]) -> str:
    rows = (
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>"
        for name, value in entries.items()
    )
    return f"<dl>{''.join(rows)}</dl>"


def signed(estimate: Estimate) -> str:
    error = f" ± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return f"{estimate.value:+.3f}{error}".replace("-", "−")


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None or value == "" else str(value)


def _table(kind: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    header = "".join(f'<th scope="col">{head}</th>' for head in heads)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{header}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _length_head(length: int, train_length: int) -> str:
    return f"{times(length, train_length)}<small>{length}</small>"


def _name(index: int, curve: Curve) -> str:
    swatch = f'<span class="swatch" style="background:{style_of(index, curve.method).colour}"></span>'
    return f'<td data-value="{escape(curve.method)}">{swatch}{escape(curve.method)}</td>'


def _cell(value: float, shown: str, name: str = "") -> str:
    mark = f' class="{name}"' if name else ""
    return f'<td{mark} data-value="{value!r}">{shown}</td>'


def _lengths(shown: Sequence[Curve]) -> list[int]:
    return sorted({point.eval_length for curve in shown for point in curve.points})
