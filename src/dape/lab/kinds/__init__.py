"""Kinds of experiments: each owns how it runs, its table and its figure.

A new kind is a file here with a class derived from `Kind`, and a line in KINDS.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

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
    "retrofit": "dape.lab.kinds.retrofit:Retrofit",
    "tasks": "dape.lab.kinds.tasks:Tasks",
    "timing": "dape.lab.kinds.timing:Timing",
}


@cache
def kind_named(name: str) -> Kind:
    module, _, attribute = KINDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()


@dataclass
class Plan:
    """An experiment and the runs it wants; those of the equal-time view come when their steps are known."""

    experiment: Experiment
    workspace: Workspace
    items: list[Any] = field(default_factory=list)
    timed: list[list[Any]] = field(default_factory=list)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    # What a kind keeps between its methods.
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        return self.experiment.at(self.workspace.scale)

    @property
    def kind(self) -> Kind:
        return kind_named(self.experiment.kind)


class Kind:
    """What the runner asks of a kind. An item is one run that the grid wants: it has id, label, view and wave.

    scale_keys: settings that a scale of an experiment may have.
    """

    scale_keys: ClassVar[frozenset[str]] = frozenset()

    def items(self, plan: Plan) -> list[Any]:
        """The runs that the grid wants."""
        return []

    def timed(self, plan: Plan) -> list[list[Any]]:
        """Groups of items that are also compared at equal training time."""
        return []

    def unite(self, one: Any, other: Any) -> Any:
        """One item that does for two experiments that want the same run."""
        return one

    def is_done(self, plan: Plan, item: Any) -> bool:
        return False

    def job(self, plan: Plan, item: Any, *, must_exist: bool = True) -> Job:
        """The item as a job of the runner."""
        raise NotImplementedError

    def work(self, spec: dict[str, Any]) -> None:
        """Carry out a job, in its process."""
        raise NotImplementedError

    def finished(self, plan: Plan, job: Job) -> None:
        """Take in what a job has left, and save it."""

    def summary(self, job: Job) -> str:
        """A few words on the result of a job."""
        return ""

    def collect(self, plan: Plan) -> dict[str, Any] | None:
        """The results so far, as entries of their file; None if they are not of the jobs alone."""
        return None

    def finish(self, plan: Plan) -> dict[str, Any]:
        """The final results."""
        return self.collect(plan) or {}

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        """The tables of the results, the paper's numbers beside ours; the paper's alone before there are any."""
        return []

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        """The figure, or None if there is nothing to draw."""
        return None


def ordered(items: Sequence[Any]) -> list[Any]:
    """By scheduling priority: the first seed of every experiment before the second of any."""
    return sorted(items, key=lambda item: item.wave)
