"""Accuracies on generated tasks: estimates by method, length and seed, tables and figures."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.style import context

from dape.evaluation.inference import Estimate, VariancePrior, crossed_mean
from dape.files import write_atomically
from dape.lab.figures import LEGEND, LOOK, PANEL, canvas, errorbar, finish, legend, save, styles
from dape.lab.paper import Paper
from dape.lab.records import Results, listed
from dape.lab.report import render
from dape.lab.stats import (
    ERRORS,
    UNKNOWN,
    SeedVariance,
    chance,
    of_accuracies,
    of_sum,
    over_seeds,
    setting_of,
    share_error,
)
from dape.lab.tables import OURS, PAPER, Cell, Row, Table, chosen, joined, plain
from dape.tasks.registry import TASKS, build_task

# With more tasks than this, tasks are rows and methods columns; with more columns than that, errors are left out.
FEW_TASKS, FEW_COLUMNS = 3, 6
# Number of lengths in a table; results.json and the plot have all.
COLUMNS = 8
# Settings of a protocol that trainings do not depend on.
TESTS = ("test_lengths", "samples")
# Columns with errors that a terminal of 80 characters shows.
TERMINAL_COLUMNS = 4


class Solver(NamedTuple):
    """Runs of one method on one task, with all seeds."""

    task: str
    layers: int
    method: str
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method


class Accuracies:
    """Accuracies by solver and seed: rows, one per length, and means beyond the training length.

    seeds: seed variance in other settings.
    """

    def __init__(self, results: Results | None, seeds: SeedVariance | None = None) -> None:
        self.results, self.known = results or Results({"kind": "tasks"}), seeds or SeedVariance()
        self.rows: dict[Solver, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        self.means: dict[tuple[Solver, int], float] = {}
        differing = differing_settings(self.results)
        for row in self.results.lines():
            task, layers = row["corpus"], row.get("layers") or 0
            solver = Solver(task, layers, row["method"], variant_of(row, differing[task, layers]))
            if row["metric"] == "accuracy":
                self.rows[solver][row["seed"]].append(row)
            elif row["metric"] == "mean_accuracy":
                self.means[solver, row["seed"]] = row["value"]

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(solver.task for solver in self.rows))

    def layers(self, task: str) -> list[int]:
        return sorted({solver.layers for solver in self.rows if solver.task == task})

    def lengths(self, solver: Solver) -> list[int]:
        rows = self.rows.get(solver, {})
        return sorted({row["eval_length"] for seed in rows.values() for row in seed})

    def accuracy(self, solver: Solver, lengths: Sequence[int] | None = None) -> Estimate:
        """Mean accuracy over the lengths (or beyond training, if none are given) and over seeds; NaN if there is none."""
        by_seed = [self._of_seed(solver, seed, lengths) for seed in self.rows.get(solver, {})]
        known = [entry for entry in by_seed if entry is not None]
        if not known:
            return UNKNOWN
        prior = self.seed_prior(solver, [value for value, _ in known])
        return over_seeds((value for value, _ in known), (error for _, error in known), prior=prior)

    def _of_seed(
        self, solver: Solver, seed: int, lengths: Sequence[int] | None = None
    ) -> tuple[float, float] | None:
        rows = self.rows[solver][seed]
        selected = (
            _beyond(rows) or rows
            if lengths is None
            else [row for row in rows if row["eval_length"] in lengths]
        )
        if not selected:
            return None
        mean = sum(row["value"] for row in selected) / len(selected)
        squares = sum(share_error(row["value"], row.get("count") or 1) ** 2 for row in selected)
        if lengths is None and not _trained(rows):
            # Of an earlier version, which does not say which lengths are beyond those of training.
            mean = self.means.get((solver, seed), mean)
        return mean, math.sqrt(squares) / len(selected)

    def difference(self, one: Solver, other: Solver) -> Estimate:
        """Accuracy of one minus that of the other over common seeds, on the same samples if answers are known."""
        seeds = sorted(self.rows[one].keys() & self.rows[other].keys())
        pairs = [
            [self._of_seed(solver, seed, self._common(one, other, seed)) for solver in (one, other)]
            for seed in seeds
        ]
        known = [(a, b) for a, b in pairs if a and b]
        if not known:
            return UNKNOWN
        sides = zip((one, other), zip(*known, strict=True), strict=True)
        prior = of_sum(self.seed_prior(solver, [value for value, _ in side]) for solver, side in sides)
        samples = [self._samples(one, other, seed) for seed in seeds]
        paired = [pair for pair in samples if pair is not None]
        if len(paired) == len(seeds):
            return crossed_mean(np.array([gaps for gaps, _ in paired]), np.array(paired[0][1]), seeds=prior)
        errors = [math.hypot(a[1], b[1]) for a, b in known]
        return over_seeds((a[0] - b[0] for a, b in known), errors, prior=prior)

    def _samples(self, one: Solver, other: Solver, seed: int) -> tuple[list[float], list[float]] | None:
        """Differences by sample, with equal weight of all lengths, and weights; None if answers were not kept."""
        gaps: list[float] = []
        weights: list[float] = []
        lengths = self._common(one, other, seed)
        both = (
            [row for row in _beyond(self.rows[solver][seed]) if row["eval_length"] in lengths]
            for solver in (one, other)
        )
        for a, b in zip(*both, strict=True):
            if not a.get("tokens") or a["tokens"] != b.get("tokens"):
                return None
            total = sum(a["tokens"])
            gaps += [(x - y) / total for x, y in zip(a["windows"], b["windows"], strict=True)]
            weights += [asked / total for asked in a["tokens"]]
        return (gaps, weights) if gaps else None

    def _common(self, one: Solver, other: Solver, seed: int) -> list[int]:
        """Lengths beyond training at which both were tested, or all common ones if there are none."""
        rows = [self.rows[solver][seed] for solver in (one, other)]
        beyond, every = (
            sorted(set.intersection(*({row["eval_length"] for row in own} for own in selected)))
            for selected in ([_beyond(own) for own in rows], rows)
        )
        return beyond or every

    def seed_prior(self, solver: Solver, by_seed: Sequence[float]) -> VariancePrior | None:
        """Prior of the seed variance of an accuracy, from the other methods on the task and from other tasks."""
        row = next(iter(self.rows[solver].values()))[0]
        if not _protocol(row):
            # Weights by construction, not by training.
            return None
        setting = setting_of(self.results, row), (row["method"], row["variant"])
        return self.known.prior(of_accuracies(solver.task, by_seed), 1.0, setting)


def differing_settings(results: Results) -> dict[tuple[str, int], list[str]]:
    """Settings of training in which the runs of a task, with as many layers, differ."""
    protocols: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for run in results["runs"]:
        protocols[run["corpus"], run.get("layers") or 0].append(_protocol(run))
    return {
        task: [
            name
            for name in dict.fromkeys(name for one in own for name in one)
            if name not in TESTS and any(one.get(name) != own[0].get(name) for one in own)
        ]
        for task, own in protocols.items()
    }


def variant_of(run: dict[str, Any], differing: Sequence[str] = ()) -> str:
    """Variant of a run: its own name for it, or options of the task and positions; then the differing settings.

    So only trainings by the same protocol are averaged over seeds or compared.
    """
    settings, protocol = run.get("settings") or {}, _protocol(run)
    words = [f"{name}={value}" for name, value in (settings.get("options") or {}).items()]
    words += [f"positions from {maximum}"] if (maximum := settings.get("position_range")) else []
    words = [run["variant"]] if run.get("variant") else words
    for name in differing:
        value = protocol.get(name)
        text = spans(value) if isinstance(value, list) else value
        words.append(f"{text} steps" if name == "steps" else f"{name.replace('_', ' ')} {text}")
    return ", ".join(words)


def _protocol(run: dict[str, Any]) -> dict[str, Any]:
    return (run.get("settings") or {}).get("protocol") or {}


def _beyond(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of their lengths, beyond the training length if that is known."""
    trained = max(_trained(rows), default=0)
    return sorted((r for r in rows if r["eval_length"] > trained), key=lambda row: row["eval_length"])


def _trained(rows: list[dict[str, Any]]) -> list[int]:
    """Training lengths, if they are known."""
    return _protocol(rows[0]).get("train_lengths") or []


def has_learned(task: str, accuracy: Estimate) -> bool:
    """Whether an accuracy exceeds that of guessing and of the best constant answer."""
    return task not in TASKS or replace(accuracy, value=accuracy.value - chance(task)).weight > ERRORS


def tables(data: Accuracies, experiment: str, paper: Paper) -> list[Table]:
    """Tables of accuracies: tasks by methods if there are many tasks, else methods by lengths, one table per task."""
    if not data.rows:
        printed = paper.shown_with(experiment, "accuracy")
        names = list(dict.fromkeys(n.get("task") for n in printed))
        methods = list(dict.fromkeys(n.get("method") for n in printed))
        return [_task_rows(data, names, methods, 0, paper)] if printed else []
    if len(data.tasks()) <= FEW_TASKS:
        return [_by_length(data, task, layers) for task in data.tasks() for layers in data.layers(task)]
    depths = sorted({solver.layers for solver in data.rows})
    made = [
        _task_rows(data, data.tasks(), _methods(data, layers), layers, paper, f", {layers} layers")
        for layers in depths
    ]
    by_steps = _tasks_by_steps(data)
    if len(by_steps) > 1:
        longest = next(iter(by_steps))
        made.append(_tasks_by_length(data, by_steps[longest], f"tasks trained for {longest:,} steps"))
    return made


def figure(data: Accuracies, experiment: str, paper: Paper) -> Figure | None:
    """Figure of accuracy by length for few tasks; for many, a heat map of tasks × methods, ours and the paper's."""
    if data.rows and len(data.tasks()) <= FEW_TASKS:
        return by_length_figure(data)
    fields = []
    for layers in sorted({solver.layers for solver in data.rows}):
        ours = {(s.task, s.label): data.accuracy(s).value for s in data.rows if s.layers == layers}
        fields.append((f"ours, {layers} layers", ours))
    names = set(data.tasks())
    theirs = {
        (n.get("task"), n.get("method")): n.value / 100
        for n in paper.shown_with(experiment, "accuracy")
        if not names or n.get("task") in names
    }
    if theirs:
        fields.append(("the paper", theirs))
    return fields_figure(fields) if fields else None


def _methods(data: Accuracies, layers: int) -> list[str]:
    return list(dict.fromkeys(solver.label for solver in data.rows if solver.layers == layers))


def _task_rows(
    data: Accuracies, names: Sequence[str], methods: Sequence[str], layers: int, paper: Paper, title: str = ""
) -> Table:
    rows = []
    solvers = {(s.task, s.label): s for s in data.rows if s.layers == layers}
    for task in names:
        estimates = [data.accuracy(solvers[task, m]) if (task, m) in solvers else None for m in methods]
        best = max((e.value for e in estimates if e is not None and has_learned(task, e)), default=math.nan)
        wide = len(methods) > FEW_COLUMNS
        cells = [
            Cell("–")
            if e is None
            else plain(100 * e.value, 1, math.nan if wide else 100 * e.error, best=e.value == best)
            for e in estimates
        ]
        printed = [paper.value("accuracy", task=task, method=method) for method in methods]
        if solvers:
            rows.append(Row(task.replace("_", " "), OURS, tuple(cells)))
        if any(value is not None for value in printed):
            rows.append(Row(task.replace("_", " "), PAPER, tuple(plain(value, 1) for value in printed)))
    note = "Bold: the best, where any is beyond what guessing or always the same answer reaches."
    note = f"{note}{_trainings(data)}" if solvers else ""
    return Table(f"Accuracy in percent{title}", tuple(methods), joined(rows), note)


def _tasks_by_steps(data: Accuracies) -> dict[int, list[str]]:
    """Tasks by the number of steps of their trainings, the longest first; none if steps were not recorded."""
    steps_of = {
        solver.task: _protocol(row).get("steps")
        for solver, seeds in data.rows.items()
        for rows in seeds.values()
        for row in rows[:1]
    }
    known = {steps for steps in steps_of.values() if steps}
    return {n: [task for task, own in steps_of.items() if own == n] for n in sorted(known, reverse=True)}


def _trainings(data: Accuracies) -> str:
    """Number of steps and seeds of the tasks, where tasks differ in their steps."""
    by_steps = _tasks_by_steps(data)
    said = []
    for steps, tasks in by_steps.items():
        by_seeds: dict[int, list[str]] = defaultdict(list)
        for task in tasks:
            own = {seed for solver, of_seed in data.rows.items() if solver.task == task for seed in of_seed}
            by_seeds[len(own)].append(task.replace("_", " "))
        for seeds, names in sorted(by_seeds.items(), reverse=True):
            said.append(f"{steps:,} steps and {seeds} seed{'s' if seeds > 1 else ''}: {', '.join(names)}")
    return f" Trained for {'; '.join(said)}." if len(by_steps) > 1 else ""


def _tasks_by_length(data: Accuracies, tasks: Sequence[str], title: str) -> Table:
    """Tasks and methods by some of the lengths, with errors."""
    solvers = {
        f"{solver.task.replace('_', ' ')}, {solver.label}": solver
        for task in tasks
        for solver in data.rows
        if solver.task == task
    }
    table = _length_table(data, solvers, f"Accuracy in percent: {title}")
    rows = tuple(replace(row, cells=tuple(map(_spelled, row.cells))) for row in table.rows)
    said = "; ".join(leads(data, task) for task in tasks)
    return replace(table, rows=rows, note=f"Over the lengths beyond training, in points: {said}.")


def leads(data: Accuracies, task: str) -> str:
    """The most accurate method of a task, and by how much it leads the others, as far as that is decided."""
    best, *others = sorted(
        (solver for solver in data.rows if solver.task == task),
        key=lambda solver: -data.accuracy(solver).value,
    )
    gaps = {other.label: data.difference(best, other) for other in others}
    name, sure = task.replace("_", " "), [label for label, gap in gaps.items() if gap.weight > ERRORS]
    if not has_learned(task, data.accuracy(best)):
        return f"on {name} no method is better than the best constant answer"
    if not sure:
        return f"on {name} {best.label} is not clearly better than the others"
    ahead = [f"{label} by {100 * gaps[label].value:.1f} ± {100 * gaps[label].error:.1f}" for label in sure]
    rest = [label for label in gaps if label not in sure]
    unsure = f", not clearly {' or '.join(rest)}" if rest else ""
    single = len(data.rows[best]) == 1 and data.seed_prior(best, [0.0]) is None
    alone = " (one seed: the error is that of the samples)" if single else ""
    return f"on {name} {best.label} is better than {' and '.join(ahead)}{unsure}{alone}"


def _by_length(data: Accuracies, task: str, layers: int, title: str = "") -> Table:
    """Methods by some of the lengths."""
    solvers = {s.label: s for s in data.rows if (s.task, s.layers) == (task, layers)}
    corner = "method" if title else ""
    title = title or f"Accuracy in percent: {task.replace('_', ' ')}{depth_of(layers)}"
    return _length_table(data, solvers, title, corner)


def _length_table(data: Accuracies, solvers: dict[str, Solver], title: str, corner: str = "") -> Table:
    """Solvers, by the names of their rows, by some of the lengths."""
    known = sorted({length for solver in solvers.values() for length in data.lengths(solver)})
    lengths = [known[index] for index in chosen(len(known), COLUMNS)]
    rows = [
        Row(name, OURS, tuple(_share(data, solver, n) for n in lengths)) for name, solver in solvers.items()
    ]
    return Table(title, tuple(f"length {length}" for length in lengths), tuple(rows), corner=corner)


def _share(data: Accuracies, solver: Solver, length: int) -> Cell:
    accuracy = data.accuracy(solver, [length])
    return plain(100 * accuracy.value, 1, 100 * accuracy.error)


def _spelled(cell: Cell) -> Cell:
    """The cell with its error in the text, for tables that compare seeds."""
    return replace(cell, text=f"{cell.text} {cell.error}".strip(), error="")


def depth_of(layers: int) -> str:
    return f", {layers} layer{'s' if layers > 1 else ''}" if layers else ""


def by_length_figure(data: Accuracies) -> Figure:
    panels = [(task, layers) for task in data.tasks() for layers in data.layers(task)]
    columns = min(2 if len(panels) <= 6 else 4, len(panels))
    rows = math.ceil(len(panels) / columns)
    drawn, axes = canvas(columns * PANEL[0] + LEGEND, rows * PANEL[1], rows, columns)
    labels = list(dict.fromkeys(solver.label for solver in data.rows))
    looks = styles(labels, [label.split(" ")[0] for label in labels])
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    for axis, (task, layers) in zip(axes.flat, panels, strict=False):
        solvers = [s for s in data.rows if (s.task, s.layers) == (task, layers)]
        for solver in solvers:
            lengths = data.lengths(solver)
            estimates = [data.accuracy(solver, [length]) for length in lengths]
            bars = [100 * estimate.error if math.isfinite(estimate.error) else 0.0 for estimate in estimates]
            values = [100 * estimate.value for estimate in estimates]
            errorbar(axis, lengths, values, bars, solver.label, looks[solver.label])
        if trained := _trained(data.rows[solvers[0]][min(data.rows[solvers[0]])]):
            axis.axvline(max(trained), color="grey", ls="--", lw=0.8)
        if task in TASKS:
            axis.axhline(100 * build_task(task).constant_accuracy, color="grey", ls=":", lw=0.8)
        axis.set_title(f"{task.replace('_', ' ')}{depth_of(layers)}", loc="left")
        finish(axis, sorted({n for s in solvers for n in data.lengths(s)}), "accuracy, %", "length")
        axis.set_ylim(-4, 104)
    legend(drawn, axes.flat)
    return drawn


def by_multiple(data: Accuracies, label: str) -> dict[tuple[str, str], float]:
    """Accuracies of a method by task and by multiple of the longest training length of the task."""
    accuracies = {}
    for solver in data.rows:
        trained = max(_trained(next(iter(data.rows[solver].values()))), default=0)
        if solver.label != label or not trained:
            continue
        for length in data.lengths(solver):
            if length >= trained:
                accuracies[solver.task, f"{round(length / trained)}×"] = data.accuracy(solver, [length]).value
    return accuracies


def lengths_figure(data: Accuracies) -> Figure:
    """A heat map of tasks × lengths for each method, lengths in multiples of the training length."""
    labels = list(dict.fromkeys(solver.label for solver in data.rows))
    return fields_figure([(label, by_multiple(data, label)) for label in labels])


def fields_figure(fields: Sequence[tuple[str, dict[tuple[str, str], float]]]) -> Figure:
    names = list(dict.fromkeys(task for _, shares in fields for task, _ in shares))
    methods = dict.fromkeys(method for _, shares in fields for _, method in shares)
    columns = [[m for m in methods if any(m == own for _, own in shares)] for _, shares in fields]
    # A title is wider than two methods.
    ratios = [max(4, len(own)) for own in columns]
    width, height = 1.8 + 0.36 * sum(ratios) + 0.3 * len(fields), 1.2 + 0.26 * len(names)
    drawn, (axes,) = canvas(width, height, 1, len(fields), ratios=ratios)
    for index, (axis, own, (title, shares)) in enumerate(zip(axes, columns, fields, strict=True)):
        values = [[100 * shares.get((task, method), math.nan) for method in own] for task in names]
        axis.imshow(values, cmap="Blues", vmin=0, vmax=125, aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if not math.isnan(value):
                    colour = "#ffffff" if value > 70 else "#1b2733"
                    axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axis.set_xticks(range(len(own)), own, rotation=90)
        axis.set_yticks(range(len(names)), [task.replace("_", " ") for task in names] if not index else [])
        axis.tick_params(length=0)
        axis.set_title(f"{title}, %", loc="left")
        for spine in axis.spines.values():
            spine.set_visible(False)
    return drawn


# --- the folder of `dape tasks run`


@cache
def paper_table() -> dict[str, Any]:
    """The paper's table: `methods`, and `accuracy` in percent by task, in the order of the methods."""
    return json.loads((resources.files("dape.tasks") / "paper.json").read_text("utf-8"))


def paper_accuracy(task: str, method: str) -> float | None:
    """The paper's mean accuracy in percent, or None."""
    row = paper_table()["accuracy"].get(task)
    methods = paper_table()["methods"]
    return row[methods.index(method)] if row and method in methods else None


def mean_table(data: Accuracies, *, errors: bool = True) -> Table:
    """Tasks by methods: our mean accuracy, with its error over samples and seeds, and the paper's, if any, in brackets."""
    methods = list(dict.fromkeys(solver.label for solver in data.rows))
    rows = []
    for (task, layers), title in titles(data).items():
        here = {s.label: s for s in data.rows if (s.task, s.layers) == (task, layers)}
        cells = [Cell(f"{100 * build_task(task).constant_accuracy:.0f}")]
        for method in methods:
            solver = here.get(method)
            printed = paper_accuracy(task, method)
            theirs = f" ({printed:.1f})" if printed is not None else ""
            cells.append(Cell(percents(data, solver, errors) + theirs) if solver else Cell())
        rows.append(Row(title, OURS, tuple(cells)))
    title = "mean accuracy beyond the training length, % (the paper's)"
    return Table(title, ("constant", *methods), tuple(rows), corner="task")


def percents(data: Accuracies, solver: Solver, errors: bool) -> str:
    accuracy = data.accuracy(solver)
    several = errors and len(data.rows[solver]) > 1 and math.isfinite(accuracy.error)
    return f"{100 * accuracy.value:.1f}" + (f" ± {100 * accuracy.error:.1f}" if several else "")


def titles(data: Accuracies) -> dict[tuple[str, int], str]:
    """Titles of tasks and numbers of layers, in the order of the registry; with layers if a task has several."""
    pairs = sorted(
        {(s.task, s.layers) for s in data.rows}, key=lambda entry: (list(TASKS).index(entry[0]), entry[1])
    )
    return {(task, n): task + (depth_of(n) if len(data.layers(task)) > 1 else "") for task, n in pairs}


def write_folder(results: Results, folder: Path) -> list[Table]:
    """Write README.md, accuracy.png and lengths.png from the results; notes.md is included. Returns the tables.

    lengths.png: lengths × tasks for each method, if there are many tasks.
    """
    data, runs = Accuracies(results), results["runs"]
    about = {
        name: ", ".join(str(one or "–") for one in listed(value))
        for name, value in results["environment"].items()
        if value
    }
    tasks_of: dict[str, dict[str, None]] = {}
    for run in runs:
        tasks_of.setdefault(describe(run["settings"]["protocol"]), {})[run["corpus"]] = None
    notes = folder / "notes.md"
    tables = [_by_length(data, *entry, title) for entry, title in titles(data).items()]
    means, many = mean_table(data), len(data.tasks()) > FEW_TASKS
    text = render(
        "tasks.md.j2",
        runs=runs,
        minutes=sum(run["train_seconds"] + run["test_seconds"] for run in runs) / 60,
        seeds=sorted({run["seed"] for run in runs}),
        commands=results.get("commands", []),
        protocols=[f"{', '.join(names)}: {text}" for text, names in tasks_of.items()],
        hardware=about.get("gpu") or f"{about['cpu']}, {about['threads']} of {about['cores']} cores",
        versions=[f"{n} {about[n]}" for n in ("dape", "python", "torch", "numpy", "transformers")],
        notes=notes.read_text("utf-8").strip() if notes.exists() else "",
        means=means,
        tables=tables,
        many=many,
        printed=any(paper_accuracy(s.task, s.method) is not None for s in data.rows),
    )
    write_atomically(folder / "README.md", text)
    with context(["default", LOOK]):
        save(by_length_figure(data), folder / "accuracy.png")
        if many:
            save(lengths_figure(data), folder / "lengths.png")
    # A terminal has room for the errors of a few methods.
    return [*tables, mean_table(data, errors=len(means.heads) <= TERMINAL_COLUMNS)]


def describe(protocol: dict[str, Any]) -> str:
    """One-line description of a protocol."""
    return (
        f"{protocol['num_layers']} layer(s) of width {protocol['hidden_size']}, {protocol['num_heads']} heads; "
        f"{protocol['steps']} steps of Adam {protocol['learning_rate']:g}, clip {protocol['clip']:g}, batch "
        f"{protocol['batch_size']}, lengths {spans(protocol['train_lengths'])}; tested at lengths "
        f"{spans(protocol['test_lengths'])}, {protocol['samples']} samples each"
    )


def spans(lengths: Sequence[int]) -> str:
    """Format lengths: 12, 24, 48; or 1…40 and 41…500 by 51 if the steps are equal."""
    if len(lengths) < 4:
        return ", ".join(map(str, lengths))
    step = lengths[1] - lengths[0]
    if list(lengths) != list(range(lengths[0], lengths[-1] + 1, step)):
        return ", ".join(map(str, lengths))
    return f"{lengths[0]}…{lengths[-1]}" + (f" by {step}" if step > 1 else "")
