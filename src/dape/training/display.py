"""Reporting of a run: metrics.jsonl, and a progress bar or log lines."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from dape.files import parse_text, write_atomically

Record = dict[str, float]
# Field of a line that tells whether the others are those that were written.
CHECKSUM = "crc32"


def read_metrics(path: Path) -> list[Record]:
    """Read the records in order; lines that were truncated by a kill, damaged or edited are skipped."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = parse_text(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                checksum = record.pop(CHECKSUM, None)
                if checksum in (None, _checksum(record)):
                    records.append(record)
    return records


class MetricsLog:
    """Appends records to a file; on opening, records after `step` are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_atomically(path, "".join(map(_line, kept)))
        self._file: IO[str] = open(path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)

    def append(self, records: Iterable[Record]) -> None:
        self._file.write("".join(map(_line, records)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> str:
    return json.dumps({**record, CHECKSUM: _checksum(record)}) + "\n"


def _checksum(record: Record) -> int:
    return zlib.crc32(json.dumps(record).encode())


SECONDS_BETWEEN_LINES = 30.0


def open_display(steps: int, start: Record, *, wanted: bool) -> Lines | Bar:
    """A progress bar on a terminal, else log lines; `start` has the step, tokens and seconds to continue from."""
    if wanted and sys.stderr.isatty():
        return Bar(steps, start)
    return Lines(steps, start, wanted=wanted)


class Lines:
    """Log lines every half minute and at the end; messages alone if no progress is wanted."""

    def __init__(self, steps: int, start: Record, *, wanted: bool) -> None:
        self.steps, self.wanted, self.speed = steps, wanted, Speed(steps, start)
        self._last = time.monotonic()

    def show(self, record: Record) -> None:
        self.speed.update(record)
        due = time.monotonic() - self._last >= SECONDS_BETWEEN_LINES or record["step"] == self.steps
        if self.wanted and due:
            self._last = time.monotonic()
            self.say(f"step {int(record['step'])}/{self.steps}  {self.speed.summary(record)}")

    def say(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """Progress bar with loss, tokens per second and the time left."""

    def __init__(self, steps: int, start: Record) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.speed = Speed(steps, start)
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
        self._task = self._progress.add_task("", total=steps, completed=int(start["step"]), summary="")
        self._progress.start()

    def show(self, record: Record) -> None:
        self.speed.update(record)
        summary = self.speed.summary(record)
        self._progress.update(self._task, completed=record["step"], summary=summary)

    def say(self, message: str) -> None:
        self._progress.console.print(message, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class Speed:
    """Smoothed tokens per second and time left."""

    def __init__(self, steps: int, start: Record) -> None:
        self.steps, self._before = steps, start
        self.tokens_per_second = self.seconds_per_step = 0.0
        self.validation = ""

    def update(self, record: Record) -> None:
        before, self._before = self._before, record
        if "validation_loss" in record:
            self.validation = f" (validation {record['validation_loss']:.3f})"
        if record["seconds"] <= before["seconds"]:
            return
        seconds, steps = record["seconds"] - before["seconds"], record["step"] - before["step"]
        weight = 0.3 if self.seconds_per_step else 1.0
        tokens_per_second = (record["tokens"] - before["tokens"]) / seconds
        self.tokens_per_second += weight * (tokens_per_second - self.tokens_per_second)
        self.seconds_per_step += weight * (seconds / steps - self.seconds_per_step)

    def summary(self, record: Record) -> str:
        left = self.seconds_per_step * (self.steps - record["step"])
        return f"loss {record['loss']:.3f}{self.validation}  {short(self.tokens_per_second)} tokens/s  {clock(left)} left"


def short(number: float) -> str:
    """850, 8.5k, 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def clock(seconds: float) -> str:
    """0:42, 12:05, 3:10:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
