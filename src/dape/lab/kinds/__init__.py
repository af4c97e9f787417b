"""Kinds of experiments: each defines its runs, tables and figure.

A new kind is a file here with a class derived from `Kind`, and a line in KINDS.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from dape.lab.records import TIME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dape.lab.experiments import Experiment, Workspace
    from dape.lab.folders import Folder
    from dape.lab.paper import Paper
    from dape.lab.runner import Job
    from dape.lab.tables import Table

KINDS = {
    "language": "dape.lab.kinds.language:Language",
    "maps": "dape.lab.kinds.maps:Maps",
    "tasks": "dape.lab.kinds.tasks:Tasks",
    "timing": "dape.lab.kinds.timing:Timing",
}


@cache
def kind_named(name: str) -> Kind:
    module, _, attribute = KINDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


@dataclass
class Plan:
    """An experiment and its required runs; those of the equal-time view are added when their steps are known."""

    experiment: Experiment
    workspace: Workspace
    items: list[Any] = field(default_factory=list)
    timed: list[list[Any]] = field(default_factory=list)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    # State that a kind keeps between its methods.
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return self.experiment.at(self.workspace.scale)

    @property
    def kind(self) -> Kind:
        return kind_named(self.experiment.kind)


class Kind:
    """Interface of a kind. An item is one run of the grid: it has id, label, view and wave.

    scale_keys: settings that a scale of an experiment may have.
    """

    scale_keys: ClassVar[frozenset[str]] = frozenset()

    def items(self, plan: Plan) -> list[Any]:
        """Runs of the grid."""
        return []

    def timed(self, plan: Plan) -> list[list[Any]]:
        """Groups of items to compare at equal training time, too."""
        return []

    def unite(self, one: Any, other: Any) -> Any:
        """Merge the items of two experiments that require the same run."""
        return one

    def is_done(self, plan: Plan, item: Any) -> bool:
        return False

    def job(self, plan: Plan, item: Any, *, must_exist: bool = True) -> Job:
        """Job of an item for the runner."""
        raise NotImplementedError

    def work(self, spec: dict[str, Any]) -> None:
        """Execute a job, in its process."""
        raise NotImplementedError

    def finished(self, plan: Plan, job: Job) -> None:
        """Collect the output of a finished job, and save it."""

    def summary(self, job: Job) -> str:
        """Short summary of a job's result."""
        return ""

    def collect(self, plan: Plan) -> dict[str, Any] | None:
        """Results so far, as entries of their file; None if they are not derived from the jobs alone."""
        return None

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Final results."""
        return self.collect(plan) or {}

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        """Tables of the results with the paper's numbers; only the paper's before there are results."""
        return []

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        """Figure, or None if there is nothing to draw."""
        return None


def ordered(items: Sequence[Any]) -> list[Any]:
    """By scheduling priority: the first seed of every experiment before the second of any."""
    return sorted(items, key=lambda item: item.wave)


def equal_time_labels(group: Sequence[Any]) -> list[str]:
    """Labels of the group's runs in the equal-time view, before their steps are known."""
    return [replace(item, view=TIME).label for item in group]
