"""Runs in processes of their own, several at a time: what one does, a crash included, does not touch the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dape.compare.environment import threads_of
from dape.files import write_atomically

SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True, eq=False)
class Job:
    """One training and its evaluation.

    folder: of the comparison; the run is in runs/NAME, what it is evaluated to in scores/NAME.json, the
    process's order, output and, if it failed, the reason in jobs/NAME.*
    train:  the fields of TrainConfig that runs share; evaluation: what evaluate_by_length is asked for.
    """

    method: str
    seed: int
    steps: int
    folder: Path
    train: dict[str, Any]
    evaluation: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.method}-seed{self.seed}-{self.steps}steps"

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def scores(self) -> Path:
        return self.folder / "scores" / f"{self.name}.json"

    @property
    def config(self) -> dict[str, Any]:
        """The fields of this run's TrainConfig."""
        own = {"method": self.method, "seed": self.seed, "steps": self.steps, "out": str(self.run)}
        return {**self.train, **own}

    @property
    def launcher(self) -> list[str]:
        """The command that carries out an order, which is its last argument."""
        return [sys.executable, "-m", "dape.compare.worker"]

    def order(self, at_once: int = 1) -> dict[str, Any]:
        """What the process is told, and beside how many it is one."""
        return {
            "train": self.config,
            "evaluation": self.evaluation,
            "jobs": at_once,
            "threads": threads_of(at_once),
            "scores": str(self.scores),
            "failure": str(self.note("failure")),
        }

    def note(self, suffix: str) -> Path:
        return self.folder / "jobs" / f"{self.name}.{suffix}"


# Hears of a job that runs (None), has ended well (""), or has failed (why).
Watcher = Callable[[Job, str | None], None]


def run_jobs(jobs: Iterable[Job], *, at_once: int, watch: Watcher) -> dict[Job, str]:
    """Run every job; returns those that failed, and why.

    On Ctrl-C and SIGTERM the jobs save where they are and end, and KeyboardInterrupt is raised.
    """
    waiting, failed = list(jobs), {}
    running: list[tuple[Job, subprocess.Popen[bytes]]] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running.append((job, start(job, at_once)))
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for job, process in list(running):
                if process.poll() is None:
                    watch(job, None)
                    continue
                running.remove((job, process))
                end(process)
                if process.returncode:
                    failed[job] = why(job, process.returncode)
                watch(job, failed.get(job, ""))
    finally:
        for _, process in running:
            end(process)
        signal.signal(signal.SIGTERM, before)
    return failed


def start(job: Job, at_once: int) -> subprocess.Popen[bytes]:
    """The job's process. It ends when its standard input does: with this process, however that ends."""
    for path in (job.note("json"), job.scores):
        path.parent.mkdir(parents=True, exist_ok=True)
    job.note("failure").unlink(missing_ok=True)
    write_atomically(job.note("json"), json.dumps(job.order(at_once), indent=1))
    # MKL and OpenMP read this when they are loaded, before the worker can ask for anything.
    environment = os.environ | {"OMP_NUM_THREADS": str(threads_of(at_once))}
    with open(job.note("log"), "ab") as log:
        command = [*job.launcher, str(job.note("json"))]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Close the process's input, upon which it saves and ends, and wait for it."""
    pipe: IO[bytes] | None = process.stdin
    if pipe is not None:
        pipe.close()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def why(job: Job, code: int) -> str:
    """A sentence on why the job's process ended with this code."""
    note = job.note("failure")
    if note.exists():
        return note.read_text("utf-8").strip()
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}; its output is in {job.note('log')}"
    return f"the process ended with code {code}; its output is in {job.note('log')}"


def steps_done(run: Path) -> int:
    """The last step that the run's metrics tell of."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    # A line may be half written, or half of one before the place where reading began.
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
