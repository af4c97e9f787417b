"""Runs on generated tasks: accuracy of models that were trained on short inputs, their table and figure."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.style import context

from dape.evaluation.statistics import Estimate, mean_over_seeds, paired_mean
from dape.evaluation.table import join, make_table, means, read_table, write_table
from dape.files import parse_text, write_atomically
from dape.lab import solving
from dape.lab.figures import COLOURS, LOOK, canvas, draw_heat_map, save, style_of
from dape.lab.runs import Job, digest
from dape.lab.tables import Cell, Row, Table
from dape.methods import PRESETS, all_methods, parse_layers
from dape.positions import POSITIONS
from dape.scores.normaliser import REFERENCES
from dape.tasks.base import Protocol, Task, generator_for
from dape.tasks.registry import TASKS, build_task
from dape.training import LoopSettings, fit

# The table in a folder of runs.
RESULTS = "results.csv.gz"
# Columns with errors that a terminal of 80 characters shows.
TERMINAL_COLUMNS = 4
KERNELS = (None, (1, 1), (1, 3), (6, 11))
# One method for each encoding, processor, normaliser and preset.
SHOWN = [
    *(name for name in POSITIONS if name not in ("kerple", "relative")),
    *dict.fromkeys(m.name for m in all_methods() if m.position == "kerple" and m.kernel in KERNELS),
    *("keyshift-rope", "rope[window=128]", "selfextend[group=8]"),
    *(f"nope[normaliser={name}]" for name in REFERENCES if name != "stickbreaking"),
    *PRESETS,
]
# Of those whose options go with the training length, the same for the tasks, which train at up to 48 tokens.
SHORT = {
    "rope-id": "rope-id[original_length=48]",
    "selfextend": "selfextend[near=24]",
    "selfextend[group=8]": "selfextend[group=8,near=24]",
    "fire": "fire[threshold=24.0]",
    "rope[window=128]": "rope[window=16]",
    "nope[normaliser=ssmax]": "nope[length=48,normaliser=ssmax]",
    "nope[normaliser=logn]": "nope[length=48,normaliser=logn]",
    "swan": "swan[length=48,window=16]",
    "rnope-swa": "rnope-swa[window=16]",
}
# Settings of a protocol that the training does not depend on.
TESTS = ("test_lengths", "samples")


@dataclass(frozen=True)
class TaskRun(Job):
    """A model trained on short inputs of a generated task, and its accuracy by length, sample by sample.

    In the table, the corpus is the task, a document a sample of the test. protocol: the task's own by default.
    options: of the task. position_range: positions drawn below this number, in training and tests.
    """

    name: str
    seed: int = 0
    task: str = ""
    protocol: Protocol | None = None
    options: dict[str, Any] = field(default_factory=dict)
    position_range: int | None = None

    def __post_init__(self) -> None:
        task, plan = self.build(), self.plan
        methods = parse_layers(self.name)
        if task.model == "encoder" and any(method.direction == "causal" for method in methods):
            raise ValueError(f'"{self.name}" has no meaning where the future is visible, as in "{self.task}"')
        if not plan.train_lengths or not plan.test_lengths:
            raise ValueError("there must be at least one length to train and one to test")
        # An invalid length is reported before hours of training.
        lengths = sorted({*plan.train_lengths, *plan.test_lengths})
        longest = max(task.examples(1, length, generator_for(0)).ids.shape[1] for length in lengths)
        if self.position_range is not None and self.position_range < longest:
            raise ValueError(
                f'--randomized-positions {self.position_range} is too few for "{self.task}": at its longest length '
                f"input and output take {longest} positions, so give at least {longest}"
            )

    def build(self) -> Task:
        return build_task(self.task, **self.options)

    @property
    def plan(self) -> Protocol:
        return self.protocol or self.build().protocol

    @property
    def about(self) -> dict[str, object]:
        return {
            "method": self.label or self.name,
            "seed": self.seed,
            "corpus": self.corpus or self.task,
            "train_length": max(self.plan.train_lengths),
        }

    @property
    def steps(self) -> int:
        return self.plan.steps

    @property
    def title(self) -> str:
        return f"{self.about['corpus']}, {self.about['method']}, seed {self.seed}"

    def _words(self, tests: bool) -> str:
        plan = {name: value for name, value in asdict(self.plan).items() if tests or name not in TESTS}
        own = digest([self.task, self.name, self.seed, plan, self.options, self.position_range])
        return f"{self.task}-{self.name.replace('/', '-')}-seed{self.seed}-{own}"

    @cached_property
    def training(self) -> str:
        return self._words(tests=False)

    @cached_property
    def id(self) -> str:
        return self._words(tests=True)

    def missing(self, table: pd.DataFrame) -> list[int]:
        known = set(table.loc[table["run"] == self.id, "length"])
        return [length for length in self.plan.test_lengths if length not in known]

    def work(self, folder: Path) -> None:
        task, plan = self.build(), self.plan
        sizes = {"num_layers": plan.num_layers, "hidden_size": plan.hidden_size, "num_heads": plan.num_heads}
        model = solving.build_solver(task, self.name, **sizes, seed=self.seed)
        # Lengths differ from step to step, and with them the loss: only an enormous loss is a failure.
        settings = LoopSettings(
            steps=plan.steps, learning_rate=plan.learning_rate, final_learning_rate=plan.learning_rate, warmup_steps=0,
            betas=(0.9, 0.999), weight_decay=0.0, clip=plan.clip, seed=self.seed, keep_checkpoints=1, explosion=1000.0,
            checkpoint_every=max(100, min(5000, plan.steps // 10)),
        )  # fmt: skip
        about = {"task": self.task, "method": self.name, **sizes, **self.options}
        training = solving.GeneratedTask(
            task, model, plan.batch_size, plan.train_lengths, self.seed, self.position_range, about
        )
        path = folder / "runs" / self.training
        fitted = fit(training, settings, path, progress=False).complete()
        whole = {"steps": plan.steps, "train_seconds": fitted.seconds, "train_loss": fitted.final_loss}
        whole["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        answers = solving.answers_by_length(
            task, model, plan.test_lengths, plan.samples, position_range=self.position_range
        )
        rows: list[dict[str, object]] = [{"metric": name, "sum": value} for name, value in whole.items()]
        # Samples are the same for every method, so that methods are paired by their answers.
        rows += [
            {"length": length, "document": n, "metric": "accuracy", "sum": float(right), "count": int(asked)}
            for length, both in answers.items()
            for n, (right, asked) in enumerate(zip(*both, strict=True))
        ]
        self.add_rows(folder, make_table(rows))
        # No model is kept.
        shutil.rmtree(path, ignore_errors=True)


@cache
def paper_table() -> dict[str, Any]:
    """The paper's table: `methods`, and `accuracy` in percent by task, in the order of the methods."""
    return parse_text((resources.files("dape.tasks") / "paper.json").read_text("utf-8"))


def paper_accuracy(task: str, method: str) -> float | None:
    """The paper's mean accuracy in percent, or None."""
    row = paper_table()["accuracy"].get(task)
    methods = paper_table()["methods"]
    return row[methods.index(method)] if row and method in methods else None


def score(table: pd.DataFrame) -> Estimate:
    """Mean over the lengths beyond training of the accuracy of one method on one task; seeds as in `paired_mean`."""
    rows = table[(table["metric"] == "accuracy") & (table["length"] > table["train_length"])]
    if rows.empty:
        return Estimate()
    rows = rows.assign(share=rows["sum"] / rows.groupby(["seed", "length"])["count"].transform("sum"))
    by_sample = rows.groupby(["seed", "document"])["share"].sum().unstack("document")
    counts = rows.groupby(["length"])["document"].nunique()
    values = by_sample.to_numpy() / len(counts)
    if counts.nunique() > 1 or math.isnan(values.sum()):
        return mean_over_seeds(values.sum(1))
    found = paired_mean(values * counts.iloc[0], np.ones(values.shape[1]))
    # Not zero where all answers are right: with one more of each, as Laplace has it.
    share = (found.value * values.size + 1) / (values.size + 2)
    return replace(found, error=max(found.error, math.sqrt(share * (1 - share) / (values.size + 2))))


def score_table(table: pd.DataFrame, *, errors: bool = True) -> Table:
    """Tasks by methods: mean accuracy beyond the training length in percent, with the paper's in brackets.

    Many methods are rows, best first.
    """
    tasks, methods = tasks_in(table), list(dict.fromkeys(table["method"]))
    scores = {
        (task, method): score(own) for (task, method), own in table.groupby(["corpus", "method"], sort=False)
    }
    constant = [Cell(f"{100 * build_task(task).constant_accuracy:.0f}") for task in tasks]

    def cell(task: str, method: str) -> Cell:
        found, printed = scores.get((task, method), Estimate()), paper_accuracy(task, method)
        error = (
            f" ± {100 * found.error:.1f}" if errors and found.seeds > 1 and math.isfinite(found.error) else ""
        )
        theirs = f" ({printed:.1f})" if printed is not None else ""
        text = f"{100 * found.value:.1f}{error}{theirs}" if found.known else ""
        return Cell(text, found.value if found.known else None)

    title = "mean accuracy beyond the training length, % (the paper's)"
    if len(methods) > len(COLOURS):
        rows = [Row(method, tuple(cell(task, method) for task in tasks)) for method in best_first(table)]
        return Table(title, tuple(tasks), (*rows, Row("constant", tuple(constant))), "method")
    rows = [
        Row(task, (always, *(cell(task, method) for method in methods)))
        for task, always in zip(tasks, constant, strict=True)
    ]
    return Table(title, ("constant", *methods), tuple(rows), "task")


def tasks_in(table: pd.DataFrame) -> list[str]:
    """Tasks of the table in the order of the registry."""
    return sorted(table["corpus"].unique(), key=list(TASKS).index)


def best_first(table: pd.DataFrame) -> list[str]:
    """Methods by their mean accuracy beyond the training lengths of the tasks."""
    beyond = table[table["length"] > table["train_length"]]
    by_task = [means(own, "accuracy").mean(axis=1) for _, own in beyond.groupby("corpus")]
    return [
        str(method) for method in pd.concat(by_task, axis=1).mean(axis=1).sort_values(ascending=False).index
    ]


def length_tables(table: pd.DataFrame) -> list[Table]:
    """For each task, methods by lengths: accuracy in percent, mean over seeds."""
    tables = []
    for task in tasks_in(table):
        found = 100 * means(table[table["corpus"] == task], "accuracy")
        rows = [
            Row(str(method), tuple(Cell("" if math.isnan(v) else f"{v:.1f}", v) for v in values))
            for method, values in zip(found.index, found.to_numpy(), strict=True)
        ]
        heads = tuple(map(str, found.columns))
        tables.append(Table(f"{task}, accuracy by length, %", heads, tuple(rows), "method"))
    return tables


def accuracy_figure(table: pd.DataFrame) -> Figure:
    """A panel for each task: accuracy by length, the longest training length dotted; many methods as a heat map."""
    tasks, methods = tasks_in(table), list(dict.fromkeys(table["method"]))
    if len(methods) > len(COLOURS):
        return heat_map(table, tasks, best_first(table))
    columns = min(3, len(tasks))
    with context(["default", LOOK]):
        rows = math.ceil(len(tasks) / columns)
        drawn, axes = canvas(3.0 * columns + 1.8, 2.4 * rows, rows, columns)
        for axis in axes.flat[len(tasks) :]:
            axis.set_visible(False)
        for axis, task in zip(axes.flat, tasks, strict=False):
            own = table[table["corpus"] == task]
            for method, values in means(own, "accuracy").iterrows():
                look = style_of(methods.index(str(method)), str(method))
                (100 * values.dropna()).plot(
                    ax=axis, color=look.colour, marker=look.marker, markersize=3, xlabel="", label=method,
                    linestyle="--" if look.dashed else "-",
                )  # fmt: skip
            axis.axvline(own["train_length"].max(), color="0.6", linestyle=":", linewidth=1)
            axis.axhline(100 * build_task(task).constant_accuracy, color="0.8", linewidth=0.8)
            axis.set_title(task, loc="left")
            axis.set_ylim(-3, 103)
        known = [axis.get_legend_handles_labels() for axis in axes.flat]
        handles = {label: handle for pair in known for handle, label in zip(*pair, strict=True)}
        drawn.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return drawn


def heat_map(table: pd.DataFrame, tasks: list[str], methods: list[str]) -> Figure:
    """A panel for each task: accuracy of methods (rows) by length (columns) in percent, a line after the training lengths."""
    with context(["default", LOOK]):
        drawn, axes = canvas(1.5 * len(tasks) + 2.4, 0.19 * len(methods) + 0.6, 1, len(tasks))
        for axis, task in zip(axes.flat, tasks, strict=True):
            own = table[table["corpus"] == task]
            found = 100 * means(own, "accuracy").reindex(methods)
            draw_heat_map(axis, found if axis is axes.flat[0] else found.set_axis([""] * len(methods)))
            axis.axvline((found.columns <= own["train_length"].max()).sum() - 0.5, color="white")
            axis.set_title(task, loc="left")
    return drawn


def check_settings(runs: list[TaskRun], table: pd.DataFrame) -> None:
    """Raise for a run of which the table has one with other settings."""
    for run in runs:
        same = pd.Series({name: run.about[name] for name in ("method", "corpus", "seed")})
        own = table[(table[list(same.index)] == same).all(axis=1)]
        if len(own) and run.id not in set(own["run"]):
            raise ValueError(f"the folder has {run.title} with other settings: use another --out")


def results_in(folder: Path) -> pd.DataFrame:
    """Rows of all runs in the folder, finished in earlier commands or after them."""
    paths = [folder / RESULTS, *sorted((folder / "evaluations").glob("*.csv.gz"))]
    return join([read_table(path) for path in paths if path.exists()] or [make_table()])


def write_report(folder: Path) -> list[Table]:
    """Gather the table of all results in the folder, write its README.md and accuracy.png; tables for a terminal."""
    table = results_in(folder)
    if table.empty:
        return []
    write_table(table, folder / RESULTS)
    tables = [score_table(table), *length_tables(table)]
    save(accuracy_figure(table), folder / "accuracy.png")
    minutes = table.loc[table["metric"] == "train_seconds", "sum"].sum() / 60
    parts = [
        "# Generated tasks",
        f"{table['run'].nunique()} runs, {minutes:.0f} minutes of training. `dape tasks` writes this page from {RESULTS}, a "
        "table for pandas; the settings of every run are in jobs/.",
        "In brackets: the paper's value (200k steps, lengths 41 to 500). *Constant*: always the same answer. ±: one standard "
        "error over samples and seeds.",
    ]
    for one in tables:
        parts += [f"## {one.title[0].upper()}{one.title[1:]}", one.markdown()]
    write_atomically(
        folder / "README.md", "\n\n".join([*parts, "![accuracy by length](accuracy.png)"]) + "\n"
    )
    narrow = score_table(table, errors=table["method"].nunique() <= TERMINAL_COLUMNS)
    return [narrow, *(tables[1:] if len(tables) <= TERMINAL_COLUMNS else [])]
