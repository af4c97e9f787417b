"""Progress display of jobs: a bar for each, the time left for all, and a line when one ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dape.lab.records import VIEWS
from dape.lab.runner import Job, Watcher, last_record
from dape.training.display import clock

# Called with a view, its number of jobs and those that are left; returns a watcher of these.
Announce = Callable[[str, int, Sequence[Job]], Watcher]
# Short summary of a successful job.
Summary = Callable[[Job], str]


def silent(view: str, count: int, left: Sequence[Job]) -> Watcher:
    """No display."""
    return lambda job, outcome: None


@contextlib.contextmanager
def display(console: Console, *, at_once: int = 1, summary: Summary = lambda job: "") -> Iterator[Announce]:
    """Bars on a terminal, and lines everywhere."""
    columns = (
        TextColumn("{task.description:<36.36}"),
        BarColumn(bar_width=16),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def announce(view: str, count: int, left: Sequence[Job]) -> Watcher:
            if count:
                kept = f", {count - len(left)} already done" if len(left) < count else ""
                title = f"{VIEWS[view]}: " if view in VIEWS else ""
                console.print(f"{title}{count} run{'s' if count > 1 else ''}{kept}")
            return Bars(progress, console, left, at_once, summary)

        yield announce


class Bars:
    """Watches the jobs of a view."""

    def __init__(
        self, progress: Progress, console: Console, jobs: Sequence[Job], at_once: int, summary: Summary
    ) -> None:
        self.progress, self.console, self.summary, self.at_once = progress, console, summary, at_once
        self.jobs, self.done = list(jobs), 0
        self.steps = dict.fromkeys(jobs, 0)
        self.pace: dict[Job, float] = {}
        self.bars: dict[Job, TaskID] = {}
        total = max(1, sum(job.steps for job in jobs))
        self.whole = progress.add_task("all runs", total=total, note="") if len(self.jobs) > 1 else None

    def __call__(self, job: Job, outcome: str | None) -> None:
        if job not in self.bars:
            self.bars[job] = self.progress.add_task(job.label, total=job.steps, note="")
        if outcome is None:
            self._update(job)
            return
        self.progress.remove_task(self.bars[job])
        self.done += 1
        self._advance(job, job.steps)
        summary = self.summary(job) if not outcome else ""
        self.console.print(
            f"  [{self.done}/{len(self.jobs)}] {job.label}: "
            + (f"failed: {outcome}" if outcome else summary or "done"),
            style="red" if outcome else "dim",
            markup=False,
            soft_wrap=not self.console.is_terminal,
        )

    def _update(self, job: Job) -> None:
        record = last_record(job.run)
        done = int(record["step"])
        if done and record.get("seconds"):
            self.pace[job] = record["seconds"] / done
        note = "evaluating" if done and done == job.steps else f"loss {record['loss']:.2f}" if done else ""
        self.progress.update(self.bars[job], completed=done, note=note)
        self._advance(job, done)

    def _advance(self, job: Job, done: int) -> None:
        self.steps[job] = done
        if self.whole is not None:
            self.progress.update(self.whole, completed=sum(self.steps.values()), note=self.time_left())

    def time_left(self) -> str:
        """Time left for all jobs, by the mean pace of those that have begun; unknown before."""
        if not self.pace:
            return ""
        mean = sum(self.pace.values()) / len(self.pace)
        left = sum((job.steps - self.steps[job]) * self.pace.get(job, mean) for job in self.jobs)
        return f"{clock(left / min(self.at_once, len(self.jobs)))} left"
