"""Data sets of the Hugging Face hub, streamed through `datasets`, which is imported only here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dape.data.chunks import BadText, Chunk, Interrupted, Report, stop, whole
from dape.errors import install
from dape.hub import hub_reachable


@dataclass(frozen=True)
class HubSource:
    """hf:NAME[@CONFIGURATION][:SPLIT][:FIELD], by default split "train" and field "text"."""

    dataset: str
    configuration: str | None
    split: str
    field: str
    # Unknown until the last row has come.
    size: int = 0
    stamp: int = 0
    text_file: bool = False

    @staticmethod
    def parse(spec: str, default_field: str = "text") -> HubSource:
        name, *rest = spec.removeprefix("hf:").split(":")
        if not name or len(rest) > 2:
            raise ValueError(f'"{spec}" is not of the form hf:NAME[@CONFIGURATION][:SPLIT][:FIELD]')
        dataset, _, configuration = name.partition("@")
        split, text = [*rest, "", ""][:2]
        return HubSource(dataset, configuration or None, split or "train", text or default_field)

    @property
    def name(self) -> str:
        configuration = f"@{self.configuration}" if self.configuration else ""
        return f"hf:{self.dataset}{configuration}:{self.split}:{self.field}"

    def read(self, report: Report = stop) -> HubReader:
        return HubReader(self, report)

    def rows(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise ValueError(f"{self.name} needs datasets: {install('data')}") from None
        offline = os.environ.get("HF_DATASETS_OFFLINE") or os.environ.get("HF_HUB_OFFLINE")
        if not (offline or os.path.exists(self.dataset) or hub_reachable()):
            raise Interrupted(
                f"{self.name} cannot be opened: the Hugging Face hub cannot be reached from here"
            )
        try:
            return datasets.load_dataset(self.dataset, self.configuration, split=self.split, streaming=True)
        except Exception as error:
            # The library raises many types, from connection errors to its own; all mean the same to a user.
            raise Interrupted(f"{self.name} cannot be opened: {_first_line(error)}") from error


@dataclass
class HubReader:
    source: HubSource
    report: Report
    _bytes: int = field(default=0, init=False)
    _hash: Any = field(default_factory=hashlib.sha256, init=False)

    def __iter__(self) -> Iterator[Chunk]:
        name, column = self.source.name, self.source.field
        number = 0
        rows = iter(self.source.rows())
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                raise Interrupted(f"{name}, after row {number}: {_first_line(error)}") from error
            if row is None:
                break
            number += 1
            if column not in row:
                # Every row of a data set has the same columns, so the other rows would fail too.
                raise BadText(f'{name}, row {number}: no field "{column}"; it has {", ".join(row)}')
            if not isinstance(row[column], str):
                self.report(BadText(f'{name}, row {number}: field "{column}" is not text'))
                continue
            for chunk in whole(f"{name}:{number}", row[column], self.report):
                encoded = chunk.text.encode("utf-8")
                self._hash.update(encoded)
                self._bytes += len(encoded)
                yield chunk
        if number == 0:
            self.report(BadText(f"{name} is empty"))

    def record(self) -> dict[str, Any]:
        return {"name": self.source.name, "bytes": self._bytes, "stamp": 0, "sha256": self._hash.hexdigest()}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
