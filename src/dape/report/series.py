"""What is plotted: numbers with error bars by length, the same for paper and page."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dape.report.results import Curve, Estimate, Point


class Bar(NamedTuple):
    """A value and how far its error bar reaches up and down."""

    value: float
    up: float
    down: float


class Quantity(NamedTuple):
    label: str
    logarithmic: bool
    of: Callable[[Point], Bar]


def symmetric(estimate: Estimate) -> Bar:
    return Bar(estimate.value, estimate.error, estimate.error)


def perplexity(point: Point) -> Bar:
    """exp of the loss; the error bar is exp of the loss's, so it reaches further up than down."""
    error = point.nll.error
    return Bar(point.ppl, point.ppl * math.expm1(error), -point.ppl * math.expm1(-error))


QUANTITIES = {
    "ppl": Quantity("perplexity", True, perplexity),
    "nll": Quantity("loss (nats a token)", False, lambda point: symmetric(point.nll)),
    "change": Quantity(
        "change of the loss from the first length", False, lambda point: symmetric(point.change)
    ),
    "difference": Quantity("loss minus the baseline's", False, lambda point: symmetric(point.difference)),
}


def bars(curve: Curve, quantity: str) -> list[Bar]:
    """A bar for each of the curve's points."""
    return [QUANTITIES[quantity].of(point) for point in curve.points]
