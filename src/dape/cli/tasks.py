"""`dape tasks`: list the generated tasks, train and test methods on them, show the results."""

from __future__ import annotations

import random
import shutil
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dape.cli.parsing import parse_action
from dape.evaluation.probes import NOISE, PROBES, TRAINED
from dape.lab.display import display
from dape.lab.experiment import RunnerSettings, make_launcher, run_experiment
from dape.lab.tasks import (
    RESULTS,
    SHORT,
    SHOWN,
    TaskRun,
    check_settings,
    paper_table,
    results_in,
    write_report,
)
from dape.methods import parse_brackets
from dape.settings import COUNT, SEED, setting
from dape.tasks import IGNORED, TASKS, ChomskyTask, build_task, generator_for

# Characters of a line that `show` prints.
WIDTH = 80

# Names of groups.
TASK_GROUPS = {
    "che": [name for name in TASKS if issubclass(TASKS[name], ChomskyTask)],
    "paper": list(paper_table()["accuracy"]),
    "suite": list(TRAINED),
    "recall": [name for name in TASKS if not issubclass(TASKS[name], ChomskyTask)],
}
METHOD_GROUPS = {"paper": paper_table()["methods"], "all": [SHORT.get(name, name) for name in SHOWN]}


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunnerSettings):
    """Train and test methods on generated tasks; runs with results in the folder are skipped."""

    names: tuple[str, ...] = setting(
        (),
        help="Tasks, with options in brackets such as associative_recall[keys=64,pairs=8] (`dape tasks list` shows them); or che "
        "(all fifteen), paper (the fourteen of the paper's table), suite (the length suite's), recall (all for decoders).",
        positional=True,
    )
    method: tuple[str, ...] = setting(
        ("kerple", "dape-kerple", "dape1x3-kerple"),
        help="Methods (`dape methods` lists them), paper (the eleven of the paper's table), or all (one for each encoding and processor).",
    )
    out: Path = setting(
        Path("tasks"),
        help="Folder for results.csv.gz, README.md, accuracy.png; unfinished runs resume.",
        writes="folder",
    )
    seed: tuple[int, ...] = setting((0,), help="Seeds; each is a run.", **SEED)
    layers: tuple[int, ...] = setting(
        (),
        help="Numbers of layers; each is a run. Default: 5 for che, 1 or 2 for others.",
        low=1,
        high=10_000,
    )
    steps: int | None = setting(
        None, help="Training steps. Default: 200000 for che, 400 for suite, else 1000.", **COUNT
    )
    batch_size: int | None = setting(
        None, help="Samples per step. Default: 128 for che, 32 for suite, else 64.", low=1, high=16777216
    )
    learning_rate: float | None = setting(None, help="Default: 1e-3 for che, else 3e-3.", above=0, high=1000)
    train_lengths: str | None = setting(
        None, help="Such as 1:40 or 8,16,24; each step draws one. Default: 1:40 for che."
    )
    test_lengths: str | None = setting(
        None, help="Such as 41:500, 41:500:51 (every 51st) or 12,24,48. Default: 41:500 for che."
    )
    samples: int | None = setting(None, help="Inputs per test length. Default: 512, 128 for suite.", **COUNT)
    randomized_positions: int | None = setting(
        None,
        help="Draw positions at random from this range, in training and tests (2048 in the original). Default: 0, 1, 2, …",
        low=1,
        high=2147483648,
    )

    def label(self, method: str, layers: int, options: dict[str, Any]) -> str:
        """Name of a variant: the method with what differs from the task's own settings; empty without."""
        parts = [f"{layers} layers"] if len(self.layers) > 1 else []
        parts += [f"{name} {value}" for name, value in options.items()]
        parts += [f"positions from {self.randomized_positions}"] if self.randomized_positions else []
        return ", ".join([method, *parts]) if parts else ""

    def runs(self) -> list[TaskRun]:
        """Every combination, in order."""
        if not self.names:
            raise ValueError(f"name a task, or {', '.join(TASK_GROUPS)}; the tasks are {', '.join(TASKS)}")
        runs = []
        given = {
            name: getattr(self, name) for name in ("steps", "batch_size", "learning_rate", "samples")
        } | {name: parse_lengths(getattr(self, name)) for name in ("train_lengths", "test_lengths")}
        changes = {name: value for name, value in given.items() if value is not None}
        for text in expand(self.names, TASK_GROUPS):
            name, options = parse_brackets(text)
            protocol = replace(build_task(name, **options).protocol, **changes)
            runs += [
                TaskRun(
                    method,
                    seed,
                    name,
                    replace(protocol, num_layers=layers),
                    options,
                    self.randomized_positions,
                    label=self.label(method, layers, options),
                )
                for layers in self.layers or (protocol.num_layers,)
                for method in expand(self.method, METHOD_GROUPS)
                for seed in self.seed
            ]
        return runs

    def run(self) -> int:
        runs, console, out = self.runs(), Console(highlight=False), self.out.absolute()
        check_settings(runs, results_in(out))
        here = self.jobs == 1 and not make_launcher(self.launcher, out).has_queue
        with display(console) as announce:
            outcome = run_experiment(
                runs, out, jobs=self.jobs, launcher=self.launcher, in_process=here, announce=announce
            )
        for run, error in outcome.failures:
            console.print(f"failed: {run.title}: {error}", style="red", markup=False)
        print_results(out, console)
        return int(bool(outcome.failures))


@dataclass(frozen=True)
class TableOptions:
    """Print the results of a folder next to the paper's, and rewrite its README.md and accuracy.png."""

    folder: Path = setting(Path("tasks"), help="The folder of `dape tasks run`.", positional=True)

    def run(self) -> int:
        if results_in(self.folder).empty:
            raise FileNotFoundError(f"no results in {self.folder}: `dape tasks run` makes some")
        print_results(self.folder, Console(highlight=False))
        return 0


@dataclass(frozen=True)
class ListOptions:
    """List every task with its sizes, the accuracy of a constant answer, and its options."""

    def run(self) -> int:
        columns = max(shutil.get_terminal_size().columns, 60) - 6
        for level in dict.fromkeys(kind.level for kind in TASKS.values()):
            print(level)
            for name, kind in TASKS.items():
                if kind.level == level:
                    task = build_task(name)
                    constant = f"accuracy of a constant answer {100 * task.constant_accuracy:.0f} %"
                    print(f"  {name}: {task.vocab_size} tokens, {task.num_labels} labels, {constant}")
                    options = " ".join(f"{key}={value}" for key, value in task.options().items())
                    summary = (kind.__doc__ or "").strip().splitlines()[0]
                    for text in (summary, f"options: {options}") if options else (summary,):
                        print(textwrap.indent(textwrap.fill(text, columns), "      "))
            print()
        return 0


@dataclass(frozen=True)
class ShowOptions:
    """Print an example of a task: its tokens with the labels below them, and the same as text for any model."""

    name: str = setting(help="A task with its options, see `dape tasks list`.", positional=True)
    length: int | None = setting(
        None, help="Length of the input. Default: a short training length.", low=1, high=2**20
    )
    seed: int = setting(0, help="Seed of the example.", low=0, high=2**62)

    def run(self) -> int:
        name, options = parse_brackets(self.name)
        task = build_task(name, **options)
        lengths = task.protocol.train_lengths
        length = self.length or max(task.minimum_length, lengths[len(lengths) // 3])
        examples = task.examples(1, length, generator_for(self.seed))
        tokens = [task.spell(token) for token in examples.ids[0].tolist()]
        labels = ["" if n == IGNORED else task.spell(n) for n in examples.labels[0].tolist()]
        columns = [max(len(token), len(label)) for token, label in zip(tokens, labels, strict=True)]
        for first, last in column_ranges(columns, WIDTH - len("answer  ")):
            for title, row in (("input", tokens), ("answer", labels)):
                cells = (f"{row[index]:>{columns[index]}}" for index in range(first, last))
                print(f"{title:<8}{' '.join(cells)}".rstrip())
        for probe_name, probe in PROBES.items():
            if probe.task == name:
                example = probe.write(random.Random(self.seed), 3, NOISE)
                text = " / ".join(f"{example.prompt} →{example.answer}".splitlines())
                print()
                print(textwrap.fill(f"{probe_name}: {text}", WIDTH))
        return 0


ACTIONS = {"list": ListOptions, "show": ShowOptions, "run": RunOptions, "table": TableOptions}


def main(arguments: list[str]) -> int:
    about = "Generated tasks: the Chomsky-hierarchy benchmark, recall, the length suite."
    return parse_action(ACTIONS, arguments, prog="dape tasks", description=about).run()


def print_results(folder: Path, console: Console) -> None:
    tables = write_report(folder)
    for one in tables:
        console.print(one.rich())
        console.print()
    if tables:
        console.print(f"{folder}: {RESULTS}, README.md, accuracy.png", soft_wrap=True)


def column_ranges(columns: list[int], width: int) -> list[tuple[int, int]]:
    """Range (first, last + 1) of the columns in each line of `width` characters, with spaces between."""
    lines, first, used = [], 0, 0
    for index, size in enumerate(columns):
        if used + size > width and index > first:
            lines.append((first, index))
            first, used = index, 0
        used += size + 1
    return [*lines, (first, len(columns))]


def expand(names: tuple[str, ...], known: dict[str, list[str]]) -> list[str]:
    """Names with groups replaced by their members, each once."""
    return list(dict.fromkeys(member for name in names for member in known.get(name, [name])))


def parse_lengths(text: str | None) -> tuple[int, ...] | None:
    """Parse lengths: 1:40 (both ends included), 41:500:51, or 12,24,48."""
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.replace(",", ":").split(":")]
    except ValueError:
        numbers = []
    if not numbers or ("," in text and ":" in text) or (":" in text and len(numbers) > 3):
        raise ValueError(
            f'lengths "{text}" are neither first:last, first:last:step nor a list such as 12,24,48'
        )
    if ":" not in text:
        return tuple(sorted(set(numbers)))
    first, last, step = (*numbers, 1)[:3]
    if step < 1 or last < first:
        raise ValueError(f'lengths "{text}" are empty: first:last:step needs first ≤ last and step ≥ 1')
    return tuple(range(first, last + 1, step))
