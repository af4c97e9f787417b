"""Rules on tasks with right answers: mean accuracy over the tested lengths, and over seeds.

The standard error joins that of counting (right or wrong, by the samples) with the spread between seeds.
Arguments that rules share: tasks (all by default), layers (each number that was run by default).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from dape.report.results import Estimate, over_seeds
from dape.reproduce.evidence import ERRORS, Evidence, Finding
from dape.reproduce.folders import Folder, Results
from dape.reproduce.paper import Paper
from dape.reproduce.rules.choosing import Chosen, listed
from dape.tasks import TASKS, build_task

Row = dict[str, Any]


class Solver(NamedTuple):
    """A method on a task, over its seeds."""

    task: str
    layers: int
    method: str
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method


class Tasks:
    """The records of an experiment of kind "tasks": solver → seed → its rows, a length each."""

    def __init__(self, results: Results) -> None:
        self.rows: dict[Solver, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
        self.scores: dict[tuple[Solver, int], float] = {}
        for row in results.get("records", ()):
            self.rows[_solver(row)][row.get("seed", 0)].append(row)
        for row in results.get("scores", ()):
            self.scores[_solver(row), row.get("seed", 0)] = row["score"]

    @staticmethod
    def of(folder: Folder) -> Tasks:
        return Tasks(folder.best or {})

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(solver.task for solver in self.rows))

    def layers(self, task: str) -> list[int]:
        return sorted({solver.layers for solver in self.rows if solver.task == task})

    def lengths(self, solver: Solver) -> list[int]:
        rows = self.rows.get(solver, {})
        return sorted({row["length"] for seed in rows.values() for row in seed})

    def accuracy(self, solver: Solver, lengths: Sequence[int] | None = None) -> Estimate:
        """Over the lengths (or the score, if no lengths are asked for), and over seeds; NaN if there is none."""
        values, errors = [], []
        for seed, rows in self.rows.get(solver, {}).items():
            found = [row for row in rows if lengths is None or row["length"] in lengths]
            if not found:
                continue
            mean = sum(row["accuracy"] for row in found) / len(found)
            values.append(self.scores.get((solver, seed), mean) if lengths is None else mean)
            errors.append(math.sqrt(sum(_variance(row) for row in found)) / len(found))
        if not values:
            return Estimate(math.nan, math.nan)
        return over_seeds(values, errors)


def _solver(row: Row) -> Solver:
    layers = row.get("layers", row.get("num_layers")) or 0
    return Solver(row["task"], layers, row["method"], row.get("variant") or "")


def _variance(row: Row) -> float:
    """Of a share of right answers; a share of 0 or 1 is as uncertain as one wrong or right answer more."""
    samples = row.get("samples") or 1
    share = min(max(row["accuracy"], 1 / (samples + 2)), 1 - 1 / (samples + 2))
    return share * (1 - share) / samples


def accuracy_higher(
    folder: Folder,
    _: Paper,
    *,
    a: str,
    b: Any,
    tasks: Any = None,
    layers: Any = None,
    need: str | int = "every",
) -> Evidence:
    """On every task, or on `need` of them, a is more accurate than b."""
    data, chosen, findings = Tasks.of(folder), Chosen(), []
    for one in _chosen(data, a, tasks, layers, chosen):
        for method in listed(b):
            other = one._replace(method=method)
            if other not in data.rows:
                chosen.lack(f"{method} on {one.task}")
                continue
            findings.append(_compare(data, one, other))
    return Evidence(findings, chosen.missing, need, "tasks" if len(listed(b)) == 1 else "comparisons")


def accuracy_at_least(
    folder: Folder,
    _: Paper,
    *,
    a: Any,
    accuracy: float,
    tasks: Any = None,
    layers: Any = None,
    at: Any = "all",
) -> Evidence:
    """a is that accurate, on every task and over the lengths `at` ("all", "longest", or lengths)."""
    return _bounded(folder, a, accuracy, 1, tasks, layers, at)


def accuracy_at_most(
    folder: Folder,
    _: Paper,
    *,
    a: Any,
    accuracy: float,
    tasks: Any = None,
    layers: Any = None,
    at: Any = "all",
) -> Evidence:
    """a is no more accurate than that."""
    return _bounded(folder, a, accuracy, -1, tasks, layers, at)


def _bounded(folder: Folder, a: Any, bound: float, sign: int, tasks: Any, layers: Any, at: Any) -> Evidence:
    data, chosen, findings = Tasks.of(folder), Chosen(), []
    for method in listed(a):
        for one in _chosen(data, method, tasks, layers, chosen):
            lengths = data.lengths(one)
            wanted = {"all": lengths, "longest": lengths[-1:]}.get(at) if isinstance(at, str) else listed(at)
            for length in wanted or ():
                found = data.accuracy(one, [length])
                if math.isnan(found.value):
                    chosen.lack(f"{one.label} on {one.task} at length {length}")
                    continue
                text = f"{one.label} gives {percent(found)} right answers at length {length} ({one.task})"
                findings.append(Finding(sign * (found.value - bound), found.error, text))
    return Evidence(findings, chosen.missing)


def best_varies_by_task(
    folder: Folder, _: Paper, *, methods: Sequence[str], tasks: Any = None, layers: Any = None
) -> Evidence:
    """Two tasks have different best methods, each better than the other one's best in its own task."""
    data, chosen, findings = Tasks.of(folder), Chosen(), []
    fields = list(_fields(data, methods, tasks, layers, chosen))
    for first, second in combinations(fields, 2):
        best, rival = first[0], second[0]
        same = best.method == rival.method
        own = first[1] if same else next(one for one in first if one.method == rival.method)
        foreign = second[1] if same else next(one for one in second if one.method == best.method)
        leads = [_compare(data, best, own), _compare(data, rival, foreign)]
        lead = min(leads, key=lambda found: found.weight)
        findings.append(Finding(-lead.value, lead.error, lead.text) if same else lead)
    if len(fields) == 1:
        chosen.lack("a second task")
    return Evidence(findings, chosen.missing, "some", "pairs of tasks")


def best_is_among(
    folder: Folder,
    _: Paper,
    *,
    methods: Sequence[str],
    others: Sequence[str],
    tasks: Any = None,
    layers: Any = None,
    need: str | int = "every",
) -> Evidence:
    """On every task, or on `need` of them, the best of the methods is more accurate than the best of the others."""
    data, chosen, findings = Tasks.of(folder), Chosen(), []
    for field in _fields(data, [*methods, *others], tasks, layers, chosen):
        best, rival = (next(one for one in field if one.method in group) for group in (methods, others))
        findings.append(_compare(data, best, rival))
    return Evidence(findings, chosen.missing, need, "tasks")


def _fields(
    data: Tasks, methods: Sequence[str], tasks: Any, layers: Any, chosen: Chosen
) -> list[list[Solver]]:
    """The methods on each task where all of them were run, the best first."""
    fields = []
    for one in _chosen(data, methods[0], tasks, layers, chosen):
        field = [one._replace(method=method) for method in methods]
        if absent := [other.method for other in field if other not in data.rows]:
            chosen.lack(f"{', '.join(absent)} on {one.task}")
        else:
            fields.append(sorted(field, key=lambda solver: -data.accuracy(solver).value))
    return fields


def _chosen(data: Tasks, method: str, tasks: Any, layers: Any, chosen: Chosen) -> list[Solver]:
    """The method on the tasks that the claim speaks of."""
    found = []
    for task in data.tasks() if tasks is None else listed(tasks):
        depths = data.layers(task) if layers is None else listed(layers)
        solvers = [solver for solver in data.rows if solver[:1] + solver[2:3] == (task, method)]
        solvers = [solver for solver in solvers if solver.layers in depths]
        if not solvers:
            chosen.lack(f"{method} on {task}")
        found += solvers
    return found


def _compare(data: Tasks, one: Solver, other: Solver) -> Finding:
    first, second = data.accuracy(one), data.accuracy(other)
    unlearned = not (has_learned(one.task, first) or has_learned(other.task, second))
    text = f"{one.label} {percent(first)}, {other.label} {percent(second)} ({one.task}{', neither learned' * unlearned})"
    return Finding(first.value - second.value, math.hypot(first.error, second.error), text)


def has_learned(task: str, found: Estimate) -> bool:
    """Whether an accuracy lies beyond what is reached without the input: by guessing, or by always the same answer."""
    if task not in TASKS:
        return True
    known = build_task(task)
    return found.value - max(known.random_accuracy, known.constant_accuracy) > ERRORS * found.error


def percent(estimate: Estimate) -> str:
    error = f" ± {100 * estimate.error:.1f}" if math.isfinite(estimate.error) else ""
    return f"{100 * estimate.value:.1f}{error} %"
