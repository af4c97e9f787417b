"""`dape reproduce`: the papers' tables and figures, one command each, at three scales."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from dape.compare.runs import Job, Watcher, steps_done
from dape.report.results import VIEWS
from dape.reproduce.corpora import corpora_folder, load_corpora
from dape.reproduce.experiment import Experiment, find_papers, load_experiments
from dape.reproduce.place import Place
from dape.reproduce.results import load_results
from dape.reproduce.runner import Announce, CellJob, counted, reproduce

DESCRIPTION = """Run the tables and figures of the papers, and judge their claims by the results.

  dape reproduce --list                              what there is
  dape reproduce baselines --scale smoke             everything runs, in seconds
  dape reproduce baselines --corpora TEXTS --jobs 2  real text, on a laptop
  dape reproduce baselines --scale paper --dry-run   as commands for torchrun

A training that several experiments share is done once. Results are written whenever a training is finished; given
again, the command goes on where it was interrupted and tries again what failed."""


@dataclass(frozen=True)
class Options:
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Experiments, as --list names them."""
    scale: Literal["smoke", "laptop", "paper"] = "laptop"
    """smoke: seconds; laptop: real text on two cores; paper: the published settings."""
    all: bool = False
    """Every experiment, by rank: the first seed of each before the second of any."""
    list: bool = False
    """Show the experiments, and how far each is at this scale; one that is named, with what it shows."""
    claims: bool = False
    """Print the ledger: every claim of the papers, or of the experiments named, and what the results say of it."""
    report: bool = False
    """Write the README of every experiment, and one page of all of them."""
    jobs: int = 1
    """Trainings at a time, each in a process of its own; the cores are divided among them."""
    corpora: Path | None = None
    """The folder that holds the texts, by default that of the environment variable DAPE_CORPORA."""
    papers: Path | None = None
    """The folder of experiments, by default papers/ here or beside the sources."""
    work: Path = Path("runs/reproduce")
    """The folder for runs."""
    out: Path = Path("runs/reproduce/report.html")
    """The page that --report writes."""
    dry_run: bool = False
    """Print what would be trained; at the paper's scale, as commands for torchrun."""
    slurm: Path | None = None
    """Write a Slurm script that trains what is left, one task a training."""


def main(arguments: list[str]) -> int:
    options = tyro.cli(Options, prog="dape reproduce", args=arguments, description=DESCRIPTION)
    own_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if own_width else 110)
    papers = find_papers(options.papers)
    if options.claims:
        from dape.reproduce.claims import ledger, print_ledger

        named = {(e.paper, e.name) for e in load_experiments(papers, options.names or None)}
        verdicts = [v for v in ledger(papers) if not options.names or (v.paper, v.claim.experiment) in named]
        print_ledger(verdicts, console)
        return 0
    if options.report:
        return report(papers, options.out, console)
    if not (options.names or options.all or options.list):
        raise ValueError("name an experiment, or give --all; `dape reproduce --list` shows what there is")
    experiments = load_experiments(papers, options.names or None)
    place = Place(
        papers,
        options.scale,
        options.work.absolute() / options.scale,
        load_corpora(papers),
        corpora_folder(options.corpora),
        options.jobs,
    )
    if options.list:
        print_list(experiments, place, console)
        return 0
    if options.dry_run or options.slurm:
        from dape.reproduce.launch import launch

        return launch(experiments, place, options.slurm, console)
    with display(console) as announce:
        results = reproduce(experiments, place, announce)
    return finish(experiments, results, place, console)


def report(papers: Path, out: Path, console: Console) -> int:
    from dape.reproduce.page import build_report
    from dape.reproduce.readme import write_readmes

    for path in [*write_readmes(papers), build_report(papers, out)]:
        console.print(str(path), soft_wrap=True, markup=False)
    return 0


def print_list(experiments: list[Experiment], place: Place, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("experiment", "what it is", "trainings", place.scale):
        table.add_column(name, overflow="fold", no_wrap=name != "what it is")
    for experiment in experiments:
        name, about = f"{experiment.paper}/{experiment.name}", experiment.title
        if len(experiments) == 1:
            about = f"{about}. {experiment.summary}"
        if place.scale not in experiment.scales:
            table.add_row(name, about, "–", "no such scale")
            continue
        done, count = counted(experiment, place)
        results = load_results(place.results(experiment))
        # The models behind maps are not kept with their results.
        whole = results is not None and results["complete"] and (done == count or experiment.kind == "maps")
        state = "none" if results is None else "complete" if whole else "incomplete"
        table.add_row(name, about, f"{done}/{count}" if count else "–", state)
    console.print(table)


def finish(experiments: list[Experiment], results: list[dict], place: Place, console: Console) -> int:
    """Where everything is; 1 if something failed."""
    code = 0
    for experiment, result in zip(experiments, results, strict=True):
        state = "complete" if result["complete"] else f"incomplete, {len(result['missing'])} missing"
        failed = f", {len(result['failures'])} failed" if result["failures"] else ""
        code = code or bool(result["failures"])
        console.print(
            f"{experiment.name}: {state}{failed}, {result['seconds']:.0f} s of training: {place.results(experiment)}",
            soft_wrap=True,
            markup=False,
        )
        for failure in result["failures"]:
            console.print(
                f"  {failure['cell']}: {failure['error']}", soft_wrap=True, markup=False, style="red"
            )
    return int(code)


@contextlib.contextmanager
def display(console: Console) -> Iterator[Announce]:
    columns = (
        TextColumn("{task.description:<48}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def announce(view: str, count: int, left: list[Job]) -> Watcher:
            if count:
                kept = f", {count - len(left)} already done" if len(left) < count else ""
                console.print(f"{VIEWS[view]}: {count} trainings{kept}")
            return Bars(progress, console, len(left))

        yield announce


class Bars:
    """Shows what jobs do: a bar for each if somebody watches, and a line when it ends."""

    def __init__(self, progress: Progress, console: Console, count: int) -> None:
        self.progress, self.console = progress, console
        self.done, self.count = 0, count
        self.bars: dict[Job, TaskID] = {}

    def __call__(self, job: Job, outcome: str | None) -> None:
        assert isinstance(job, CellJob)
        label = job.cell.label
        if job not in self.bars:
            self.bars[job] = self.progress.add_task(label, total=job.steps)
        if outcome is None:
            self.progress.update(self.bars[job], completed=steps_done(job.run))
            return
        self.progress.remove_task(self.bars[job])
        self.done += 1
        self.console.print(
            f"  [{self.done}/{self.count}] {label}: {f'failed: {outcome}' if outcome else 'done'}",
            style="red" if outcome else "dim",
            markup=False,
            soft_wrap=True,
        )
