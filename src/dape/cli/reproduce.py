"""`dape reproduce`: tables and figures of the papers, one command each, at three scales."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from dape.cli.parsing import parse
from dape.lab.display import display
from dape.lab.execute import (
    check_patterns,
    chosen,
    counted,
    execute,
    left_of,
    make_plan,
    settle,
    summary_of,
)
from dape.lab.experiments import (
    Experiment,
    Workspace,
    corpora_folder,
    find_papers,
    load_corpora,
    load_experiments,
)
from dape.lab.kinds import equal_time_labels
from dape.lab.records import STEP, TIME, Results, find_results
from dape.lab.runner import launcher_setting, make_launcher, torchrun_command
from dape.settings import check, setting

DESCRIPTION = """Reproduce tables and figures of the papers, and judge their claims by the results.

  dape reproduce --list                              list the experiments
  dape reproduce baselines --scale smoke             a full pass in seconds
  dape reproduce baselines --corpora TEXTS --jobs 2  real text, on a laptop (hours)
  dape reproduce baselines --scale paper --dry-run   as commands for torchrun
  dape reproduce baselines --scale paper --launcher 'slurm[partition=gpu,gpus_per_node=8]'
  dape reproduce headline --only '*, kerple, *'      some of its trainings

A training shared by several experiments runs once. Results are written after each training; the same command
resumes an interrupted reproduction and retries failed trainings."""


@dataclass(frozen=True)
class Options:
    names: tuple[str, ...] = setting((), help="Names of experiments, see --list.", positional=True)
    scale: Literal["smoke", "laptop", "paper"] = setting(
        "laptop", help="smoke: seconds; laptop: real text on two cores; paper: the published settings."
    )
    all: bool = setting(
        False, help="Every experiment, by rank: the first seed of each before the second of any."
    )
    list: bool = setting(
        False,
        help="List the experiments and their progress at this scale; for named ones, also their purpose.",
    )
    claims: bool = setting(
        False,
        help="Print the ledger: every claim of the papers, or of the named experiments, and its verdict.",
    )
    report: bool = setting(False, help="Write the README of every experiment, and one page of all of them.")
    only: tuple[str, ...] = setting(
        (),
        help="Only the runs whose labels match one of these patterns, in the order of the patterns; * stands for anything. --dry-run lists the labels.",
    )
    jobs: int = setting(
        1,
        help="Concurrent trainings, each in its own process; the cores are divided among them.",
        low=1,
        high=1024,
    )
    launcher: str = launcher_setting()
    corpora: Path | None = setting(
        None, help="Folder of the texts, by default that of the environment variable DAPE_CORPORA."
    )
    papers: Path | None = setting(
        None, help="Folder of experiments, by default papers/ here or next to the sources."
    )
    work: Path = setting(Path("runs/reproduce"), help="Folder for runs.")
    out: Path = setting(Path("runs/reproduce/report.html"), help="Page written by --report.")
    dry_run: bool = setting(
        False, help="Print the trainings that are left; at the paper's scale, as commands for torchrun."
    )

    def __post_init__(self) -> None:
        check(self)
        if self.report and self.names:
            raise ValueError(f"--report is of all experiments: leave out {' '.join(self.names)}")


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape reproduce", description=DESCRIPTION)
    own_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if own_width else 110)
    papers = find_papers(options.papers)
    if options.claims:
        from dape.lab.claims import ledger, print_ledger

        wanted = {(e.paper, e.name) for e in load_experiments(papers, options.names or None)}
        verdicts = [v for v in ledger(papers) if not options.names or (v.paper, v.claim.experiment) in wanted]
        print_ledger(verdicts, console)
        return 0
    if options.report:
        from dape.lab.report.papers import build_report, write_readmes

        for path in [*write_readmes(papers), build_report(papers, options.out)]:
            console.print(str(path), soft_wrap=True, markup=False)
        return 0
    if not (options.names or options.all or options.list):
        raise ValueError("name an experiment, or give --all; `dape reproduce --list` shows what there is")
    experiments = load_experiments(papers, options.names or None)
    work = options.work.absolute() / options.scale
    launcher = make_launcher(options.launcher, work)
    workspace = Workspace(
        work,
        options.scale,
        papers,
        load_corpora(papers),
        corpora_folder(options.corpora),
        options.jobs,
        in_process=options.scale == "smoke" and not launcher.has_queue,
    )
    if options.list:
        print_list(experiments, workspace, console)
        return 0
    if options.dry_run:
        return dry_run(experiments, workspace, console, options.only)
    with display(console, at_once=options.jobs, summary=summary_of) as announce:
        results = execute(experiments, workspace, announce, launcher=launcher, only=options.only)
    return finish(experiments, results, workspace, console)


def dry_run(
    experiments: Sequence[Experiment], workspace: Workspace, console: Console, only: Sequence[str] = ()
) -> int:
    """Print the trainings that are left; at the paper's scale, write job specs to files. Nothing is trained."""
    plans = [make_plan(experiment, workspace) for experiment in experiments]
    check_patterns(plans, only)
    for plan in plans:
        settle(plan, only_kept=True)
    left = [*left_of(plans, STEP, only), *left_of(plans, TIME, only)]
    for plan, item in left:
        job = plan.kind.job(plan, item, must_exist=False)
        console.print(f"# {job.label}, {job.steps} steps", soft_wrap=True, markup=False)
        if workspace.scale == "paper" and plan.experiment.kind != "tasks":
            console.print(torchrun_command(job.write_spec()), soft_wrap=True, markup=False)
    waiting = [(label, label) for plan in plans for group in plan.timed for label in equal_time_labels(group)]
    for label in chosen(waiting, only):
        console.print(f"# {label}, steps by the measured pace", soft_wrap=True, markup=False)
    for experiment in experiments:
        if experiment.kind in ("tasks", "timing"):
            again = f"dape reproduce {experiment.name} --scale {workspace.scale}"
            console.print(f"# {experiment.name}, by itself\n{again}", soft_wrap=True, markup=False)
    corpora = [item.corpus for _, item in left if hasattr(item, "corpus")]
    for corpus in {corpus.name: corpus for corpus in corpora}.values():
        if not corpus.exists(workspace.texts):
            console.print(f"# {corpus.missing(workspace.texts)}.", soft_wrap=True, markup=False)
    return 0


def print_list(experiments: Sequence[Experiment], workspace: Workspace, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("experiment", "what it is", "runs", workspace.scale):
        table.add_column(name, overflow="fold", no_wrap=name != "what it is")
    for experiment in experiments:
        name, about = f"{experiment.paper}/{experiment.name}", experiment.title
        if len(experiments) == 1:
            about = f"{about}. {experiment.summary}"
        if workspace.scale not in experiment.scales:
            table.add_row(name, about, "–", "no such scale")
            continue
        done, count = counted(experiment, workspace)
        results = find_results(workspace.results(experiment))
        # The models behind maps are not kept with their results.
        count = 0 if experiment.kind == "maps" else count
        whole = results is not None and results.complete and (done == count or not count)
        state = "none" if results is None else "complete" if whole else "incomplete"
        table.add_row(name, about, f"{done}/{count}" if count else "–", state)
    console.print(table)


def finish(
    experiments: Sequence[Experiment], results: Sequence[Results], workspace: Workspace, console: Console
) -> int:
    """Print the paths of the results; 1 if something failed."""
    for experiment, result in zip(experiments, results, strict=True):
        state = "incomplete, " + f"{len(result['missing'])} missing" if result["missing"] else "complete"
        failed = f", {len(result['failures'])} failed" if result["failures"] else ""
        text = f"{experiment.name}: {state}{failed}, {result['seconds']:.0f} s of training: {workspace.results(experiment)}"
        console.print(text, soft_wrap=True, markup=False)
        for failure in result["failures"]:
            text = f"  {failure['label']}: {failure['error']}"
            console.print(text, soft_wrap=True, markup=False, style="red")
    return int(any(result["failures"] for result in results))
