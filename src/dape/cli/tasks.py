"""`dape tasks`: list the generated tasks, train and test methods on them, show the results."""

from __future__ import annotations

import random
import shlex
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from dape.cli.options import Named, named
from dape.cli.parsing import parse
from dape.evaluation.probes import NOISE, PROBES, TRAINED
from dape.lab.accuracies import paper_table, write_folder
from dape.lab.display import display
from dape.lab.execute import execute, summary_of
from dape.lab.experiments import Experiment, Workspace
from dape.lab.kinds.tasks import TaskRun
from dape.lab.records import Results, find_results
from dape.lab.runner import launcher_setting, make_launcher
from dape.settings import check, check_choice, setting
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
METHOD_GROUPS = {"paper": paper_table()["methods"]}


@dataclass(frozen=True)
class RunOptions:
    """Train and test methods on generated tasks; runs with results in the folder are skipped."""

    names: tuple[str, ...] = setting(
        help="Tasks, or che (all fifteen), paper (the fourteen of the paper's table), suite (the length suite's), recall (all for decoders).",
        positional=True,
    )
    method: tuple[str, ...] = setting(
        ("kerple", "dape-kerple", "dape1x3-kerple"),
        help="Methods (`dape methods` lists them), or paper (the eleven of the paper's table).",
    )
    out: Path = setting(
        Path("tasks"),
        help="Folder for results.json, README.md, accuracy.png; unfinished runs resume.",
        writes="folder",
    )
    seed: tuple[int, ...] = setting((0,), help="Seeds; each is a run.", low=0, high=2**63 - 1)
    layers: tuple[int, ...] = setting(
        (),
        help="Numbers of layers; each is a run. Default: 5 for che, 1 or 2 for others.",
        low=1,
        high=10_000,
    )
    steps: int | None = setting(
        None,
        help="Training steps. Default: 200000 for che, 400 for suite, else 1000.",
        low=1,
        high=1000000000,
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
    samples: int | None = setting(
        None, help="Inputs per test length. Default: 512, 128 for suite.", low=1, high=1000000000
    )
    randomized_positions: int | None = setting(
        None,
        help="Draw positions at random from this range, in training and tests (2048 in the original). Default: 0, 1, 2, …",
        low=1,
        high=2147483648,
    )
    option: Named = setting(
        (), help="Options of the task, such as keys=64 pairs=8 (`dape tasks list` shows them)."
    )
    jobs: int = setting(1, help="Concurrent runs, each in its own process.", low=1, high=1024)
    launcher: str = launcher_setting()

    def __post_init__(self) -> None:
        check(self)

    def runs(self) -> list[TaskRun]:
        """Every combination, in order."""
        if not self.names:
            raise ValueError(f"name a task, or {', '.join(TASK_GROUPS)}; the tasks are {', '.join(TASKS)}")
        options = named(self.option)
        runs = []
        for name in expand(self.names, TASK_GROUPS):
            changed = {
                "steps": self.steps,
                "batch_size": self.batch_size,
                "learning_rate": self.learning_rate,
                "train_lengths": parse_lengths(self.train_lengths),
                "test_lengths": parse_lengths(self.test_lengths),
                "samples": self.samples,
            }
            protocol = replace(
                build_task(name, **options).protocol,
                **{key: value for key, value in changed.items() if value is not None},  # type: ignore[arg-type]  # by name, of several types
            )
            runs += [
                TaskRun(
                    name,
                    method,
                    seed,
                    replace(protocol, num_layers=layers),
                    options,
                    self.randomized_positions,
                )
                for layers in self.layers or (protocol.num_layers,)
                for method in expand(self.method, METHOD_GROUPS)
                for seed in self.seed
            ]
        return runs


@dataclass(frozen=True)
class TableOptions:
    """Print the results of a folder next to the paper's, and rewrite its README.md and accuracy.png."""

    folder: Path = setting(
        Path("tasks"), help="The folder with the results.json of `dape tasks run`.", positional=True
    )


def main(arguments: list[str]) -> int:
    actions: dict[str, Callable[[list[str]], int]] = {
        "list": list_tasks,
        "show": show_example,
        "run": run_tasks,
        "table": print_table,
    }
    if not arguments or arguments[0] not in actions:
        asked_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
        if arguments and not asked_for_help:
            check_choice("action", arguments[0], actions)
        print(
            "usage: dape tasks list | show NAME | run NAME… [options] | table [FOLDER]\n\n"
            "Generated tasks: the Chomsky-hierarchy benchmark, recall, the length suite.\n"
            "`dape tasks run --help` explains the options."
        )
        return 0
    return actions[arguments[0]](arguments[1:])


def list_tasks(arguments: list[str]) -> int:
    parse(ListOptions, arguments, prog="dape tasks list")
    columns = max(shutil.get_terminal_size().columns, 60)
    for level in dict.fromkeys(kind.level for kind in TASKS.values()):
        print(level)
        for name, kind in TASKS.items():
            if kind.level == level:
                task = build_task(name)
                constant = f"accuracy of a constant answer {100 * task.constant_accuracy:.0f} %"
                print(f"  {name}: {task.vocab_size} tokens, {task.num_labels} labels, {constant}")
                options = " ".join(f"{key}={value}" for key, value in task.options().items())
                summary = (kind.__doc__ or "").strip().splitlines()[0]
                for text in (summary, f"options: {options}" if options else ""):
                    print(
                        textwrap.indent(textwrap.fill(text, columns - 6), "      "), end="\n" if text else ""
                    )
        print()
    return 0


@dataclass(frozen=True)
class ListOptions:
    """List every task with its sizes, the accuracy of a constant answer, and its options."""


@dataclass(frozen=True)
class ShowOptions:
    """Print an example of a task: its tokens with the labels below them, and the same as text for any model."""

    name: str = setting(help="Name of a task, see `dape tasks list`.", positional=True)
    length: int | None = setting(
        None, help="Length of the input. Default: a short training length.", low=1, high=2**20
    )
    seed: int = setting(0, help="Another seed is another example.", low=0, high=2**62)
    option: Named = setting((), help="Options of the task, such as keys=2 values=3.")

    def __post_init__(self) -> None:
        check(self)


def show_example(arguments: list[str]) -> int:
    options: ShowOptions = parse(ShowOptions, arguments, prog="dape tasks show")
    task = build_task(options.name, **named(options.option))
    lengths = task.protocol.train_lengths
    length = options.length or max(task.minimum_length, lengths[len(lengths) // 3])
    examples = task.examples(1, length, generator_for(options.seed))
    words = [task.spell(token) for token in examples.ids[0].tolist()]
    asked = ["" if label == IGNORED else task.spell(label) for label in examples.labels[0].tolist()]
    columns = [max(len(word), len(answer)) for word, answer in zip(words, asked, strict=True)]
    for first, last in column_ranges(columns, WIDTH - len("answer  ")):
        for title, row in (("input", words), ("answer", asked)):
            cells = (f"{row[index]:>{columns[index]}}" for index in range(first, last))
            print(f"{title:<8}{' '.join(cells)}".rstrip())
    for name, probe in PROBES.items():
        if probe.task == options.name:
            example = probe.write(random.Random(options.seed), 3, NOISE)
            text = " / ".join(f"{example.prompt} →{example.answer}".splitlines())
            print()
            print(textwrap.fill(f"{name}: {text}", WIDTH))
    return 0


def column_ranges(columns: list[int], width: int) -> list[tuple[int, int]]:
    """Range (first, last + 1) of the columns in each line of `width` characters, with spaces between."""
    lines, first, used = [], 0, 0
    for index, size in enumerate(columns):
        if used + size > width and index > first:
            lines.append((first, index))
            first, used = index, 0
        used += size + 1
    return [*lines, (first, len(columns))]


def run_tasks(arguments: list[str]) -> int:
    options: RunOptions = parse(RunOptions, arguments, prog="dape tasks run")
    runs, console = options.runs(), Console(highlight=False)
    out = options.out.absolute()
    before = find_results(out / "results.json")
    commands = [
        *(before.get("commands", []) if before else []),
        shlex.join(["dape", "tasks", "run", *arguments]),
    ]
    about = {"commands": list(dict.fromkeys(commands)), "command": commands[-1], "settings": {}}
    launcher = make_launcher(options.launcher, out)
    workspace = Workspace(out, jobs=options.jobs, in_process=options.jobs == 1 and not launcher.has_queue)
    experiment = Experiment("tasks", "tasks", [], {"own": {"runs": runs}})
    with display(console, at_once=options.jobs, summary=summary_of) as announce:
        (results,) = execute([experiment], workspace, announce, launcher=launcher, about=about)
    if not results["failures"]:
        shutil.rmtree(out / "unfinished", ignore_errors=True)
    return show_results(results, options.out, console)


def print_table(arguments: list[str]) -> int:
    options: TableOptions = parse(TableOptions, arguments, prog="dape tasks table")
    results = find_results(options.folder / "results.json")
    if results is None:
        raise FileNotFoundError(f"no results in {options.folder}: `dape tasks run` makes some")
    return show_results(results, options.folder, Console(highlight=False))


def show_results(results: Results, folder: Path, console: Console) -> int:
    """Write the folder's README and figure, and print the tables; 1 if a run failed."""
    for table in write_folder(results, folder) if results["runs"] else []:
        console.print(table.rich())
        console.print()
    for failure in results["failures"]:
        console.print(f"failed: {failure['label']}: {failure['error']}", style="red", markup=False)
    written = [name for name in ("accuracy.png", "lengths.png") if (folder / name).exists()]
    console.print(f"{folder}: results.json, README.md, {', '.join(written)}")
    return int(bool(results["failures"]))


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
