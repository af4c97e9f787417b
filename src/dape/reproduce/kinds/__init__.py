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
    """partial: results from the cells that are done, for kinds whose results come from the cells alone."""

    module: str
    has_partial: bool = False

    @property
    def partial(self) -> Body | None:
        return self.finish if self.has_partial else None

    def finish(self, plan: Plan, place: Place) -> dict[str, Any]:
        return importlib.import_module(f"dape.reproduce.kinds.{self.module}").body(plan, place)


KINDS = {
    "language": Kind("language", has_partial=True),
    "maps": Kind("maps"),
    "tasks": Kind("tasks"),
    "timing": Kind("timing"),
}
