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


class Display:
    """A progress bar on a terminal, else log lines every half minute and at the end; messages alone if not `wanted`.

    start: the step, tokens and seconds to continue from.
    """

    def __init__(self, steps: int, start: Record, *, wanted: bool) -> None:
        self.steps, self.start, self.wanted = steps, start, wanted
        self.validation, self.bar = "", None
        self._last = time.monotonic()
        if wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (TextColumn("training"), BarColumn(bar_width=None), MofNCompleteColumn())
            summary = TextColumn("{task.fields[summary]}")
            self.bar = Progress(*columns, summary, console=Console(stderr=True), refresh_per_second=2)
            self._task = self.bar.add_task("", total=steps, completed=int(start["step"]), summary="")
            self.bar.start()

    def show(self, record: Record) -> None:
        if "validation_loss" in record:
            self.validation = f" (validation {record['validation_loss']:.3f})"
        if self.bar is not None:
            self.bar.update(self._task, completed=record["step"], summary=self.summary(record))
        elif self.wanted and (
            time.monotonic() - self._last >= SECONDS_BETWEEN_LINES or record["step"] == self.steps
        ):
            self._last = time.monotonic()
            self.say(f"step {int(record['step'])}/{self.steps}  {self.summary(record)}")

    def say(self, message: str) -> None:
        if self.bar is None:
            print(message, file=sys.stderr, flush=True)
        else:
            self.bar.console.print(message, markup=False, highlight=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def summary(self, record: Record) -> str:
        """Loss, and the mean speed since the start."""
        seconds, tokens, steps = (record[name] - self.start[name] for name in ("seconds", "tokens", "step"))
        text = f"loss {record['loss']:.3f}{self.validation}"
        if seconds > 0:
            left = seconds / steps * (self.steps - record["step"])
            text += f"  {short(tokens / seconds)} tokens/s  {clock(left)} left"
        return text


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
