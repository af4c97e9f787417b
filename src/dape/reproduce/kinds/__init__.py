"""Kinds of experiments: what each makes of its settings and its trained cells."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dape.reproduce.place import Place
    from dape.reproduce.runner import Plan

Body = Callable[["Plan", "Place"], dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """trains: whether it has a grid of cells; partial: results from the cells that are done, where that is possible."""

    module: str
    trains: bool
    has_partial: bool = False

    @property
    def partial(self) -> Body | None:
        return self.finish if self.has_partial else None

    def finish(self, plan: Plan, place: Place) -> dict[str, Any]:
        return importlib.import_module(f"dape.reproduce.kinds.{self.module}").body(plan, place)


KINDS = {
    "language": Kind("language", trains=True, has_partial=True),
    "maps": Kind("maps", trains=True),
    "tasks": Kind("tasks", trains=False),
    "timing": Kind("timing", trains=False),
}
