"""Language models: the loss of every window at every length, for each cell of the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dape.reproduce.results import language_body

if TYPE_CHECKING:
    from dape.reproduce.place import Place
    from dape.reproduce.runner import Plan


def body(plan: Plan, place: Place) -> dict[str, Any]:
    """Records of the cells that are done; the others are named."""
    return language_body(plan.cells, place.scores, list(plan.failures.values()), plan.waiting)
