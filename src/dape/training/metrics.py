"""metrics.jsonl: a line for every step, appended, never a step twice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from dape.files import write_atomically

Record = dict[str, float]


def read_metrics(path: Path) -> list[Record]:
    """The records, in order; lines that cannot be read, such as one that a kill cut short, are left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


class MetricsLog:
    """Appends records to a file; opened at a step, it forgets whatever was logged after that step."""

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
    return json.dumps(record) + "\n"
