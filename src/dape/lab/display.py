"""Progress display of runs: a bar for each, the time left for all, and a line when one ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dape.evaluation.statistics import perplexity
from dape.evaluation.table import means
from dape.files import parse_text
from dape.lab.experiment import Announce, Watcher
from dape.lab.runs import Job

# Seconds over which the speed is measured.
SPEED_OVER = 300.0


@contextlib.contextmanager
def display(console: Console, *, lines: bool = True) -> Iterator[Announce]:
    """Bars on a terminal; with `lines`, also one for each run that ends, everywhere."""
    columns = (
        TextColumn("{task.description:<32.32}"),
        BarColumn(bar_width=10),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True, speed_estimate_period=SPEED_OVER
    ) as progress:  # fmt: skip

        def announce(title: str, runs: Sequence[Job], left: Sequence[Job], folder: Path) -> Watcher:
            if runs and lines:
                kept = f", {len(runs) - len(left)} already done" if len(left) < len(runs) else ""
                console.print(
                    f"{f'{title}: ' if title else ''}{len(runs)} run{'s' if len(runs) > 1 else ''}{kept}"
                )
            return Bars(progress, console if lines else None, left, folder)

        yield announce


class Bars:
    """Watches the runs that are left."""

    def __init__(
        self, progress: Progress, console: Console | None, jobs: Sequence[Job], folder: Path
    ) -> None:
        self.progress, self.console, self.folder = progress, console, folder
        self.jobs, self.done = list(jobs), 0
        self.steps = {job.id: 0 for job in jobs}
        self.bars: dict[str, TaskID] = {}
        total = max(1, sum(job.steps for job in jobs))
        self.whole = progress.add_task("all runs", total=total, note="") if len(self.jobs) > 1 else None

    def __call__(self, job: Job, outcome: str | None) -> None:
        if job.id not in self.bars:
            self.bars[job.id] = self.progress.add_task(job.title, total=job.steps, note="")
        if outcome is None:
            self._update(job)
            return
        self.progress.remove_task(self.bars[job.id])
        self.done += 1
        self._advance(job, job.steps)
        if self.console is None:
            return
        said = f"failed: {outcome}" if outcome else summary(job.done(self.folder))
        self.console.print(
            f"  [{self.done}/{len(self.jobs)}] {job.title}: {said}",
            style="red" if outcome else "dim",
            markup=False,
            soft_wrap=not self.console.is_terminal,
        )

    def _update(self, job: Job) -> None:
        record = last_record(self.folder / "runs" / job.training)
        done = int(record["step"])
        note = "evaluating" if done and done == job.steps else f"loss {record['loss']:.2f}" if done else ""
        self.progress.update(self.bars[job.id], completed=done, note=note)
        self._advance(job, done)

    def _advance(self, job: Job, done: int) -> None:
        self.steps[job.id] = done
        if self.whole is not None:
            self.progress.update(self.whole, completed=sum(self.steps.values()))


def summary(rows: pd.DataFrame) -> str:
    """Short summary of the rows of a run: its training loss, and the perplexity or accuracy at the ends."""
    said = [f"training loss {value:.3f}" for value in rows.loc[rows["metric"] == "train_loss", "sum"]]
    for metric, shown in (("loss", perplexity), ("accuracy", float)):
        found = means(rows, metric)
        if len(found):
            (row,) = found.to_numpy()
            ends = dict.fromkeys((0, len(row) - 1))
            name = "perplexity" if metric == "loss" else metric
            said.append(f"{name} " + ", ".join(f"{shown(row[i]):.2f} at {found.columns[i]}" for i in ends))
            break
    return "; ".join(said) or "done"


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
