"""What a folder of runs shows: tables beside the paper's, a plot of accuracy by length, a README."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from dape.files import replacing, write_atomically
from dape.tasks.base import Task
from dape.tasks.registry import TASKS, build_task
from dape.tasks.results import Result, Results

# Lengths that a table shows; results.json has all, and the plot.
COLUMNS = 8


@cache
def paper() -> dict[str, Any]:
    """The paper's table: `methods`, and `accuracy` in percent by task, in the order of the methods."""
    return json.loads((resources.files("dape.tasks") / "paper.json").read_text())


def paper_accuracy(task: str, method: str) -> float | None:
    """The paper's score in percent, None where it has none."""
    row = paper()["accuracy"].get(task)
    methods = paper()["methods"]
    return row[methods.index(method)] if row and method in methods else None


class Group:
    """The runs of a folder that differ by seed alone: their scores and their accuracy by length."""

    def __init__(self, runs: Sequence[Result], records: Sequence[dict[str, Any]]) -> None:
        first = runs[0]
        self.task, self.method, self.num_layers = first["task"], first["method"], first["num_layers"]
        self.position_range = first["settings"]["position_range"]
        self.options = first["settings"]["options"]
        self.protocol = first["settings"]["protocol"]
        self.longest_trained = max(self.protocol["train_lengths"])
        self.seeds = sorted(run["seed"] for run in runs)
        self.scores = [100 * run["score"] for run in runs if run["score"] is not None]
        names = {run["name"] for run in runs}
        by_length: dict[int, list[float]] = {}
        for record in records:
            if record["run"] in names:
                by_length.setdefault(record["length"], []).append(100 * record["accuracy"])
        self.accuracy = {length: statistics.mean(values) for length, values in sorted(by_length.items())}
        self.spread = {length: deviation(values) for length, values in sorted(by_length.items())}
        self.seconds = statistics.mean(run["train_seconds"] + run["test_seconds"] for run in runs)

    @property
    def variant(self) -> tuple[Any, ...]:
        """What else distinguishes groups of one task and method."""
        return self.num_layers, self.position_range, json.dumps(self.options, sort_keys=True)

    @property
    def label(self) -> str:
        positions = f", positions from {self.position_range}" if self.position_range else ""
        return f"{self.method}{positions}"

    def task_object(self) -> Task:
        return build_task(self.task, **self.options)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over seeds; not a number for one."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def groups(results: Results) -> list[Group]:
    """The groups of a folder, in the order of the registry, then of the runs."""
    members: dict[str, list[Result]] = {}
    for run in results.runs:
        members.setdefault(run["name"].rpartition("-seed")[0], []).append(run)
    order = list(TASKS)
    found = [Group(runs, results.records) for runs in members.values()]
    return sorted(found, key=lambda group: (order.index(group.task), group.num_layers))


def score_table(found: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """Tasks by methods, the fewer as columns: our score, and the paper's in brackets where it has one."""
    methods = list(dict.fromkeys(group.label for group in found))
    rows = []
    for title, members in panels(found).items():
        here = {group.label: group for group in members}
        cells = [score_cell(here[method]) if method in here else "" for method in methods]
        rows.append([title, f"{100 * members[0].task_object().constant_accuracy:.0f}", *cells])
    head = ["task", "constant", *methods]
    if len(rows) >= len(methods):
        return head, rows
    turned = [list(column) for column in zip(head, *rows, strict=True)]
    return turned[0], turned[1:]


def score_cell(group: Group) -> str:
    if not group.scores:
        return ""
    theirs = paper_accuracy(group.task, group.method) if group.position_range is None else None
    beside = "" if theirs is None else f" ({theirs:.1f})"
    spread = f" ± {deviation(group.scores):.1f}" if len(group.scores) > 1 else ""
    return f"{statistics.mean(group.scores):.1f}{spread}{beside}"


def length_tables(found: Sequence[Group]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """A table a task and number of layers: methods by some lengths, mean over seeds ± standard deviation."""
    tables = {}
    for title, here in panels(found).items():
        lengths = thinned(sorted({length for group in here for length in group.accuracy}), COLUMNS)
        rows = [[group.label, *(length_cell(group, length) for length in lengths)] for group in here]
        tables[title] = (["method", *map(str, lengths)], rows)
    return tables


def length_cell(group: Group, length: int) -> str:
    if length not in group.accuracy:
        return ""
    spread = group.spread[length]
    return f"{group.accuracy[length]:.1f}" + ("" if math.isnan(spread) else f" ± {spread:.1f}")


def panels(found: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups by task and number of layers, which is named where a task has several."""
    members: dict[str, list[Group]] = {}
    for group in found:
        several = len({other.num_layers for other in found if other.task == group.task}) > 1
        layers = f", {group.num_layers} layer{'s' if group.num_layers > 1 else ''}" if several else ""
        members.setdefault(group.task + layers, []).append(group)
    return members


def thinned(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, evenly picked, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def write_plot(results: Results) -> None:
    """accuracy.png: a panel a task and number of layers, a line a method, a dashed line where training ended."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(results)
    shown = panels(found)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 2.9 * rows), squeeze=False, layout="constrained"
    )
    methods = list(dict.fromkeys(group.label for group in found))
    palette = pyplot.get_cmap("tab10" if len(methods) <= 10 else "tab20")
    colours = {method: palette(index) for index, method in enumerate(methods)}
    for axis, (title, here) in zip(axes.flat, shown.items(), strict=False):
        for group in here:
            axis.plot(
                list(group.accuracy), list(group.accuracy.values()), ".-", color=colours[group.label], lw=1.2
            )
        axis.axvline(here[0].longest_trained, color="grey", ls="--", lw=0.8)
        axis.axhline(100 * here[0].task_object().constant_accuracy, color="grey", ls=":", lw=0.8)
        axis.set(title=title, ylim=(0, 103))
        axis.title.set_size("small")
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    figure.supxlabel("length")
    figure.supylabel("accuracy, %")
    handles = [pyplot.Line2D([], [], color=colour, marker=".") for colour in colours.values()]
    figure.legend(
        handles, list(colours), loc="outside upper center", ncols=min(4, len(colours)), fontsize="small"
    )
    with replacing(results.folder / "accuracy.png") as temporary:
        figure.savefig(temporary, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def write_readme(results: Results) -> None:
    """README.md: what was run, where, and what came out, all read from results.json; notes.md is included."""
    found = groups(results)
    about = results.content["environment"]
    tasks_of: dict[str, list[str]] = {}
    for group in found:
        named = tasks_of.setdefault(describe(group.protocol), [])
        named.extend([group.task] if group.task not in named else [])
    protocols = [f"{', '.join(named)}: {text}" for text, named in tasks_of.items()]
    seconds = sum(run["train_seconds"] + run["test_seconds"] for run in results.runs)
    notes = results.folder / "notes.md"
    hardware = about["gpu"] or f"{about['processor']}, {about['threads']} of {about['cores']} cores"
    versions = ", ".join(
        f"{name} {about[name]}" for name in ("dape", "python", "torch", "numpy", "transformers")
    )
    seeds = sorted({run["seed"] for run in results.runs})
    parts = [
        "# Generated tasks",
        f"{len(results.runs)} runs, {seconds / 60:.0f} minutes in all, seeds {', '.join(map(str, seeds))}. This page is "
        "written by the command from results.json.",
        "```\n" + "\n".join(results.content["commands"]) + "\n```",
        "\n".join(f"- {line}" for line in [*protocols, hardware, versions]),
        *([notes.read_text().strip()] if notes.exists() else []),
        "## Score: mean accuracy beyond the training length, %",
        "The paper's value in brackets (200k steps, lengths 41 to 500) where it has one; *constant* is what always "
        "giving the same answer scores.",
        markdown(*score_table(found)),
        "![accuracy by length](accuracy.png)",
        "## Accuracy by length, %",
        *(f"### {title}\n\n{markdown(*table)}" for title, table in length_tables(found).items()),
    ]
    write_atomically(results.folder / "README.md", "\n\n".join(parts) + "\n")


def describe(protocol: dict[str, Any]) -> str:
    """A protocol in a line."""
    return (
        f"{protocol['num_layers']} layer(s) of width {protocol['hidden_size']}, {protocol['num_heads']} heads; "
        f"{protocol['steps']} steps of Adam {protocol['learning_rate']:g}, clip {protocol['clip']:g}, batch "
        f"{protocol['batch_size']}, lengths {spans(protocol['train_lengths'])}; tested at lengths "
        f"{spans(protocol['test_lengths'])}, {protocol['samples']} samples each"
    )


def spans(lengths: Sequence[int]) -> str:
    """12, 24, 48; or 1…40 and 41…500 by 51 where the steps are equal."""
    if len(lengths) < 4:
        return ", ".join(map(str, lengths))
    step = lengths[1] - lengths[0]
    if list(lengths) != list(range(lengths[0], lengths[-1] + 1, step)):
        return ", ".join(map(str, lengths))
    return f"{lengths[0]}…{lengths[-1]}" + (f" by {step}" if step > 1 else "")
