"""The runner: jobs of a grid, each in its own process, on this machine or on a cluster.

A job is a spec in a file and the file that its worker writes. Finished jobs are skipped; an interrupted job resumes
from its checkpoints; a failure or crash of one job does not affect the others.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from dape.errors import install
from dape.files import parse_text, write_atomically
from dape.lab.environment import threads_of
from dape.methods import parse_brackets
from dape.settings import check_choice, setting

SECONDS_BETWEEN_LOOKS = 0.2
WORKER = "dape.lab.worker"
# GPUs per node in printed commands; the batch is that of all processes, so the number does not change results.
GPUS = 8


@dataclass(frozen=True, eq=False)
class Job:
    """One training and its evaluation.

    kind:   the kind whose `work` executes it; spec: argument of `work`.
    folder: of all runs; the job's own is runs/NAME, its spec, output and, if it failed, the reason are jobs/NAME.*
    result: the file that the worker writes. steps: of the training, for the display.
    distributed: whether it runs under torchrun.
    """

    name: str
    label: str
    kind: str
    spec: dict[str, Any]
    folder: Path
    result: Path
    steps: int = 0
    distributed: bool = False

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def note(self, suffix: str) -> Path:
        return self.folder / "jobs" / f"{self.name}.{suffix}"

    def write_spec(self, at_once: int = 1) -> Path:
        """Write the job spec for the worker, with the number of concurrent jobs."""
        for path in (self.note("json"), self.result):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.note("failure").unlink(missing_ok=True)
        shared = {"kind": self.kind, "jobs": at_once, "threads": threads_of(at_once), "run": str(self.run)}
        shared |= {"result": str(self.result), "failure": str(self.note("failure"))}
        write_atomically(self.note("json"), json.dumps({**shared, **self.spec}, indent=1, default=list))
        return self.note("json")

    def command(self, *, processes: int | None = None) -> list[str]:
        """Command of the worker, without the spec; under torchrun if distributed."""
        if not self.distributed:
            return [sys.executable, "-m", WORKER]
        count = processes or max(1, torch.cuda.device_count())
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, f"--nproc-per-node={count}", "-m", WORKER]


def torchrun_command(spec: Path) -> str:
    """Shell command for the training and its evaluation on a node with several GPUs."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={GPUS}", "-m", WORKER, "--alone", str(spec)]
    return shlex.join(words)


# Called with a job that is running (None), has succeeded (""), or has failed (the reason).
Watcher = Callable[[Job, str | None], None]


class Handle(Protocol):
    """Handle of a started job."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def end(self) -> None:
        """Request the job to save and end, and wait for it."""


class Launcher(Protocol):
    """Starts jobs; a class in LAUNCHERS, built with the folder of all runs and the options in brackets.

    has_queue: it accepts all jobs at once, schedules them itself and runs them on other machines than this one.
    """

    has_queue: bool

    def __init__(self, folder: Path, options: dict[str, Any]) -> None: ...

    def start(self, job: Job, at_once: int) -> Handle: ...


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


class Local:
    """Launcher of processes on this machine, which share its cores."""

    has_queue = False

    def __init__(self, folder: Path | None = None, options: dict[str, Any] | None = None) -> None:
        if options:
            raise ValueError(f"processes on this machine have no options, but {', '.join(options)} is given")

    def start(self, job: Job, at_once: int) -> Handle:
        spec = job.write_spec(at_once)
        # MKL and OpenMP read this when they are loaded, before the worker can set it.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads_of(at_once))}
        with open(job.note("log"), "ab") as log:
            return Process(
                subprocess.Popen(
                    [*job.command(), str(spec)],
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
            raise ValueError(f"--launcher slurm needs submitit: {install('slurm')}") from error
        known = {"timeout_min", "gpus_per_node", "cpus_per_task", "mem_gb", "nodes", "tasks_per_node"}
        parameters = {
            key if key in known or key.startswith("slurm_") else f"slurm_{key}": value
            for key, value in {"timeout_min": 48 * 60, **self.options}.items()
        }
        executor = submitit.AutoExecutor(folder=self.folder / "submitted", cluster=self.cluster)
        executor.update_parameters(name=f"dape-{job.name}"[:60], **parameters)
        gpus = self.options.get("gpus_per_node")
        command = [*job.command(processes=gpus), "--alone", str(job.write_spec())]
        return Submitted(executor.submit(submitit.helpers.CommandFunction(command)))


LAUNCHERS: dict[str, type[Launcher]] = {"local": Local, "slurm": Slurm}


def make_launcher(text: str, folder: Path = Path()) -> Launcher:
    """The launcher that the text names, with its options in brackets: slurm[partition=gpu,gpus_per_node=8]."""
    name, options = parse_brackets(text)
    check_choice("launcher", name, LAUNCHERS)
    return LAUNCHERS[name](folder, options)


def launcher_setting() -> Any:
    """The setting `launcher` of commands that run jobs."""
    return setting(
        "local",
        help=f"How runs are started: {' or '.join(LAUNCHERS)}. Options in brackets, such as "
        f"slurm[partition=gpu,gpus_per_node=8] (those of submitit or sbatch).",
        test=make_launcher,
        fixes_run=False,
    )


def run_jobs(
    jobs: Iterable[Job], *, at_once: int, watch: Watcher, launcher: Launcher | None = None
) -> dict[Job, str]:
    """Run every job; returns those that failed, with the reason.

    On Ctrl-C and SIGTERM the jobs save and end, and KeyboardInterrupt is raised.
    """
    waiting, failed = list(jobs), {}
    running: list[tuple[Job, Handle]] = []
    launcher = launcher or Local()
    if launcher.has_queue:
        at_once = max(1, len(waiting))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if _in_main_thread() else None
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running.append((job, launcher.start(job, at_once)))
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for job, handle in list(running):
                code = handle.poll()
                if code is None:
                    watch(job, None)
                    continue
                running.remove((job, handle))
                handle.end()
                if code:
                    failed[job] = why(job, code)
                watch(job, failed.get(job, ""))
    finally:
        for _, handle in running:
            handle.end()
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    return failed


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def run_here(jobs: Sequence[Job], watch: Watcher) -> dict[Job, str]:
    """Run short jobs in this process, without the cost of starting others."""
    from dape.lab.worker import sentence, work
    from dape.training import TrainingStopped

    failed = {}
    for job in jobs:
        watch(job, None)
        try:
            work(json.loads(job.write_spec().read_text("utf-8")))
        except Exception as error:
            if type(error) is TrainingStopped:
                raise KeyboardInterrupt from error
            failed[job] = sentence(error)
        watch(job, failed.get(job, ""))
    return failed


def why(job: Job, code: int) -> str:
    """Reason why the job's process ended with this code."""
    note = job.note("failure")
    if note.exists():
        return note.read_text("utf-8").strip()
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; its output is in {job.note('log')}"
    return f"the process ended with code {code}; its output is in {job.note('log')}"


def last_record(run: Path) -> dict[str, float]:
    """Last record of the run's metrics: step, loss, seconds …; step 0 if there is none."""
    path = run / "metrics.jsonl"
    if path.exists():
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().splitlines()
        # A line may be incomplete at the end, or at the offset where reading began.
        for line in reversed(lines):
            try:
                record = parse_text(line)
                return {**record, "step": int(record["step"])}
            except (ValueError, KeyError, TypeError):
                continue
    return {"step": 0}
