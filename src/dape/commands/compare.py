"""`dape compare`: how do encodings hold up beyond their training length?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dape.commands.options import ModelOptions, check_options, training_defaults, with_options
from dape.commands.parsing import parse as parse_options
from dape.compare.comparing import compare, exit_code
from dape.compare.runs import Job, Watcher, steps_done
from dape.compare.settings import Comparison, by_recipe
from dape.report import curves, plot, print_tables, views
from dape.report.build import Paths
from dape.report.results import VIEWS, Results

DESCRIPTION = """Train methods alike and see how each holds up beyond its training length.

  dape compare --jobs 2                          five methods on Python's library
  dape compare --corpus my_texts/ --methods rope,dape1x3-kerple --seeds 0,1,2
  dape compare --preset 125m --config mine.toml  the paper's recipe, changed

Every method sees the same data in the same order and starts from the same weights where they share any; every
length is scored on the same target tokens, with standard errors over documents. Given again, the command goes
on where it was interrupted, tries again what failed and keeps what is done, so methods, seeds and lengths can
be added later. The folder then holds results.json, results.csv, figures/ and report.html."""


@dataclass(frozen=True, kw_only=True)
class CommandLine(ModelOptions, Comparison):
    pass


# What tyro calls it where it says what is wrong.
CommandLine.__name__ = "dape compare"


def main(arguments: list[str]) -> int:
    settings = parse(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    results, paths = run(settings, console)
    show(results, paths, console)
    return exit_code(results)


def parse(arguments: list[str]) -> Comparison:
    """The options: the preset's recipe, changed by the file, changed by those given."""
    changes = training_defaults(arguments)
    default = by_recipe(changes["preset"], **changes)
    parsed: CommandLine = parse_options(
        CommandLine,
        arguments,
        default=CommandLine(**asdict(default)),
        prog="dape compare",
        description=DESCRIPTION,
    )
    settings = with_options(Comparison, parsed)
    # A method that cannot be built does not keep the others from being compared; an option that does not fit does.
    has_options = settings.position_options or settings.score_options
    check_options(settings, settings.method_list if has_options else [])
    return settings


def run(settings: Comparison, console: Console) -> tuple[Results, Paths]:
    """The comparison, with a bar for every run under way, or a line for each that ends if nobody watches."""
    with display(console) as announce:
        return compare(settings, announce, progress=console.is_terminal)


def show(results: Results, paths: Paths, console: Console) -> None:
    """Tables, the plot of the first view, and where everything is."""
    if results["records"]:
        console.print()
    print_tables(results, console)
    for view in views(results)[:1]:
        console.print()
        console.print(plot(curves(results, view), results["settings"]["train_length"]))
    console.print()
    for name, path in (
        ("numbers", paths.csv),
        ("figures", paths.csv.parent / "figures"),
        ("report", paths.page),
    ):
        console.print(
            f"{name:<9}{path}", soft_wrap=True, markup=False, style="bold" if name == "report" else ""
        )


@contextlib.contextmanager
def display(console: Console) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def announce(view: str, count: int, left: list[Job]) -> Watcher:
            kept = f", {count - len(left)} already done" if len(left) < count else ""
            console.print(f"{VIEWS[view]}: {count} runs{kept}")
            return Bars(progress, console, left)

        yield announce


class Bars:
    """Shows what jobs do."""

    def __init__(self, progress: Progress, console: Console, jobs: list[Job]) -> None:
        self.progress, self.console = progress, console
        self.left, self.count = len(jobs), len(jobs)
        self.bars: dict[Job, TaskID] = {}

    def __call__(self, job: Job, outcome: str | None) -> None:
        if job not in self.bars:
            title = f"{job.method} (seed {job.seed})"
            self.bars[job] = self.progress.add_task(title, total=job.steps)
        if outcome is None:
            done = steps_done(job.run)
            title = f"{job.method} (seed {job.seed})" + (" testing" if done == job.steps else "")
            self.progress.update(self.bars[job], completed=done, description=title)
            return
        self.progress.remove_task(self.bars[job])
        self.left -= 1
        line = f"  [{self.count - self.left}/{self.count}] {job.method}, seed {job.seed}, {job.steps} steps: "
        self.console.print(
            line + (f"failed: {outcome}" if outcome else "done"),
            style="red" if outcome else "dim",
            markup=False,
        )
