"""`run_experiment`: a list of runs → one table. Runs in processes of their own, here or on a cluster.

Finished runs are skipped; an interrupted one resumes from its checkpoints; one that fails does not affect the others.
Under the folder: runs/ (trainings), data/ (packed texts), evaluations/ (rows by run), jobs/ (specs, output, reasons of
failures).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import torch

from dape.errors import install, sentence
from dape.evaluation.table import join, read_table, write_table
from dape.files import write_atomically
from dape.lab.environment import threads_of
from dape.lab.runs import Job, spec_of
from dape.methods import parse_brackets
from dape.settings import check_choice, setting
from dape.training import TrainingStopped

SECONDS_BETWEEN_LOOKS = 0.2
WORKER = "dape.lab.run_job"


@dataclass
class Outcome:
    """Rows of all finished runs, and those that failed with the reasons."""

    table: pd.DataFrame
    failures: list[tuple[Job, str]] = field(default_factory=list)


# Called with a run that is running (None), has succeeded (""), or has failed (the reason).
Watcher = Callable[[Job, str | None], None]
# Called with a title, all runs, those that are left, and their folder; returns a watcher of these.
Announce = Callable[[str, Sequence[Job], Sequence[Job], Path], Watcher]


def silent(title: str, runs: Sequence[Job], left: Sequence[Job], folder: Path) -> Watcher:
    """No display."""
    return lambda job, outcome: None


def run_experiment(
    runs: Sequence[Job],
    folder: str | Path,
    *,
    results: str | Path | None = None,
    jobs: int = 1,
    launcher: str = "local",
    only: Sequence[str] = (),
    in_process: bool = False,
    announce: Announce = silent,
    title: str = "",
) -> Outcome:
    """Execute or resume the runs, in their order of priority; returns the table of all that are finished.

    results:    file of the table, written after every run; runs with rows in it are finished.
    jobs:       concurrent runs. launcher: "local", or "slurm[partition=gpu,…]".
    only:       patterns of titles: only runs that match one, in the order of the patterns.
    in_process: one run after the other in this process, without workers.
    title:      of the experiment, for the display.
    """
    folder = Path(folder).absolute()
    check_distinct(runs)
    before = read_table(results) if results is not None and Path(results).exists() else None
    outcome = Outcome(collect(runs, folder, before))
    left = [job for job in matching(runs, only) if job.missing(outcome.table)]
    watch = announce(title, matching(runs, only), left, folder)

    def save() -> None:
        if results is not None and len(outcome.table):
            write_table(outcome.table, results)

    def heed(job: Job, said: str | None) -> None:
        if said:
            outcome.failures.append((job, said))
        elif said is not None:
            outcome.table = ordered(join([outcome.table, job.done(folder)]), runs)
            save()
        watch(job, said)

    save()
    if in_process:
        run_here(left, folder, heed)
    else:
        run_jobs(left, folder, at_once=jobs, watch=heed, launcher=make_launcher(launcher, folder))
    return outcome


def check_distinct(runs: Sequence[Job]) -> None:
    """Raise for two runs that do not differ."""
    seen: dict[str, Job] = {}
    for job in runs:
        other = seen.setdefault(job.id, job)
        if other is not job:
            raise ValueError(
                f"{other.title} and {job.title} are the same run: they differ by nothing that changes the result"
            )


def matching(runs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """The runs whose titles match a pattern, in the order of the patterns; raises for one that matches none."""
    chosen: dict[str, Job] = {}
    for pattern in only:
        found = [job for job in runs if fnmatchcase(job.title, pattern)]
        if not found:
            raise ValueError(
                f'--only "{pattern}" matches none of the {len(runs)} runs, such as "{runs[0].title}"; * stands for anything'
            )
        chosen |= {job.id: job for job in found if job.id not in chosen}
    return list(chosen.values()) if only else list(runs)


def collect(runs: Sequence[Job], folder: Path, before: pd.DataFrame | None = None) -> pd.DataFrame:
    """Rows of the runs: of an existing table, and of the folder."""
    tables = [job.done(folder) for job in runs]
    if before is not None:
        tables.append(before[before["run"].isin({job.id for job in runs})])
    return ordered(join(tables), runs)


def ordered(table: pd.DataFrame, runs: Sequence[Job]) -> pd.DataFrame:
    """The rows in the order of the runs, with their present names."""
    rank = {job.id: number for number, job in enumerate(runs)}
    table = table[table["run"].isin(rank)]
    return (
        table.assign(rank=table["run"].map(rank))
        .sort_values(["rank", "length", "metric", "slice", "document"], ignore_index=True, kind="stable")
        .drop(columns="rank")
    )


class Handle(Protocol):
    """Handle of a started run."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def end(self) -> None:
        """Request the run to save and end, and wait for it."""


class Launcher(Protocol):
    """Starts runs; a class in LAUNCHERS, built with the folder of all runs and the options in brackets.

    has_queue: it accepts all runs at once, schedules them itself and executes them on other machines than this one.
    """

    has_queue: bool

    def __init__(self, folder: Path, options: dict[str, Any]) -> None: ...

    def start(self, job: Job, at_once: int) -> Handle: ...


def note(job: Job, folder: Path, suffix: str) -> Path:
    return folder / "jobs" / f"{job.id}.{suffix}"


def write_spec(job: Job, folder: Path) -> Path:
    path = note(job, folder, "json")
    note(job, folder, "failure").unlink(missing_ok=True)
    write_atomically(path, spec_of(job))
    return path


def worker_command(job: Job, *, processes: int | None = None) -> list[str]:
    """Command of the worker, without the spec; under torchrun if distributed."""
    if not job.distributed:
        return [sys.executable, "-m", WORKER]
    count = processes or max(1, torch.cuda.device_count())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={count}", "-m", WORKER]


@dataclass
class Process:
    """A worker on this machine. It ends when its standard input is closed, and so with this process."""

    popen: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.popen.poll()

    def end(self) -> None:
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        try:
            self.popen.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


@dataclass
class Local:
    """Launcher of processes on this machine, which share its cores."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    has_queue = False

    def __post_init__(self) -> None:
        if self.options:
            raise ValueError(
                f"processes on this machine have no options, but {', '.join(self.options)} is given"
            )

    def start(self, job: Job, at_once: int) -> Handle:
        command = [*worker_command(job), str(write_spec(job, self.folder))]
        # MKL and OpenMP read this when they are loaded, before the worker can set it.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads_of(at_once))}
        with open(note(job, self.folder, "log"), "ab") as log:
            return Process(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )


@dataclass
class Submitted:
    """A worker submitted by submitit."""

    job: Any

    def poll(self) -> int | None:
        if not self.job.done():
            return None
        return 0 if self.job.exception() is None else 1

    def end(self) -> None:
        if not self.job.done():
            self.job.cancel()


@dataclass
class Slurm:
    """Launcher of Slurm jobs, submitted through submitit (the extra `slurm`).

    options: those of submitit's executor, such as slurm_partition, gpus_per_node, timeout_min, or of sbatch
    (partition, account …). cluster: "slurm", or "local" to test on this machine.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    cluster: str = "slurm"
    has_queue = True

    def start(self, job: Job, at_once: int) -> Handle:
        try:
            import submitit
        except ImportError as error:
            raise ImportError(f"Slurm jobs are submitted through submitit: {install('slurm')}") from error
        known = {"timeout_min", "gpus_per_node", "cpus_per_task", "mem_gb", "tasks_per_node", "nodes"}
        parameters = {
            key if key in known or key.startswith("slurm_") else f"slurm_{key}": value
            for key, value in {"timeout_min": 48 * 60, **self.options}.items()
        }
        executor = submitit.AutoExecutor(folder=self.folder / "submitted", cluster=self.cluster)
        executor.update_parameters(name=f"dape-{job.training}"[:60], **parameters)
        command = worker_command(job, processes=self.options.get("gpus_per_node"))
        command += ["--alone", str(write_spec(job, self.folder))]
        return Submitted(executor.submit(submitit.helpers.CommandFunction(command)))


LAUNCHERS: dict[str, type[Launcher]] = {"local": Local, "slurm": Slurm}


def make_launcher(text: str, folder: Path = Path()) -> Launcher:
    """The launcher that the text names, with its options in brackets: slurm[partition=gpu,gpus_per_node=8]."""
    name, options = parse_brackets(text)
    check_choice("launcher", name, LAUNCHERS)
    return LAUNCHERS[name](folder, options)


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """Options of commands that run experiments."""

    jobs: int = setting(
        1,
        help="Concurrent runs, each in its own process; the cores are divided among them.",
        low=1,
        high=1024,
    )
    launcher: str = setting(
        "local",
        help=f"How runs are started: {' or '.join(LAUNCHERS)}. Options in brackets, such as "
        f"slurm[partition=gpu,gpus_per_node=8] (those of submitit or sbatch).",
        test=make_launcher,
        fixes_run=False,
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_jobs(jobs: Sequence[Job], folder: Path, *, at_once: int, watch: Watcher, launcher: Launcher) -> None:
    """Run every job in a process of its own; on Ctrl-C and SIGTERM they save and end."""
    waiting = list(jobs)
    running: list[tuple[Job, Handle]] = []
    most = max(1, len(waiting)) if launcher.has_queue else at_once
    with interruptible():
        try:
            while waiting or running:
                # Evaluations of the same training come one after the other.
                busy = {job.training for job, _ in running}
                while len(running) < most and (
                    job := next((one for one in waiting if one.training not in busy), None)
                ):
                    waiting.remove(job)
                    busy.add(job.training)
                    running.append((job, launcher.start(job, at_once)))
                time.sleep(SECONDS_BETWEEN_LOOKS)
                for job, handle in list(running):
                    code = handle.poll()
                    if code is not None:
                        running.remove((job, handle))
                        handle.end()
                    watch(job, None if code is None else why(job, folder, code) if code else "")
        finally:
            for _, handle in running:
                handle.end()


def run_here(jobs: Sequence[Job], folder: Path, watch: Watcher) -> None:
    """Run short jobs in this process, without the cost of starting others."""
    for job in jobs:
        watch(job, None)
        write_spec(job, folder)
        try:
            job.work(folder)
        except Exception as error:
            if type(error) is TrainingStopped:
                raise KeyboardInterrupt from error
            watch(job, sentence(error))
        else:
            watch(job, "")


def why(job: Job, folder: Path, code: int) -> str:
    """Reason why the worker ended with this code."""
    failure, log = note(job, folder, "failure"), note(job, folder, "log")
    if failure.exists():
        return failure.read_text("utf-8").strip()
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; its output is in {log}"
    return f"the process ended with code {code}; its output is in {log}"
