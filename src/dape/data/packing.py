"""Packing: chunks to token files, with a journal from which an interrupted packing resumes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dape.data.chunks import BadText, Chunk, Report, cut_documents, stop
from dape.data.corpora import Source
from dape.data.tokenizers import Tokenizer
from dape.data.tokens import SPLITS
from dape.files import read_json, write_atomically

# Characters tokenized at a time: enough to keep all cores busy, few enough to hold in memory.
BATCH = 4 << 20
# The journal is written after this many characters or seconds: the most that a kill can lose.
JOURNAL_CHARACTERS = 64 << 20
JOURNAL_SECONDS = 5.0
# Characters at the start of a document that decide its split.
BEGINNING = 1 << 16
# Reasons kept for each source; all are counted.
REASONS = 10


class Side(Protocol):
    """Assigns a document to a split by its first chunk; `found` collects the requested names that occurred."""

    found: set[str]

    def __call__(self, chunk: Chunk) -> str: ...


class SplitFiles:
    """Files of one split, opened for appending: ids and document offsets."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, state: dict[str, int]) -> None:
        self.tokens, self.documents = state.get("tokens", 0), state.get("documents", 0)
        self.dtype = dtype
        self._ids = _reopen(folder / f"{name}.ids", self.tokens * dtype.itemsize)
        self._offsets = _reopen(
            folder / f"{name}.documents", (self.documents + 1) * 8 if self.documents else 0
        )
        if not self.documents:
            self._offsets.write(np.int64(0).tobytes())

    def append(self, ids: np.ndarray, *, last: bool) -> None:
        self._ids.write(ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)
        if last:
            self._offsets.write(np.int64(self.tokens).tobytes())
            self.documents += 1

    def sync(self) -> None:
        for file in (self._ids, self._offsets):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._ids.close()
        self._offsets.close()

    def state(self) -> dict[str, int]:
        return {"tokens": self.tokens, "documents": self.documents}


def _reopen(path: Path, size: int) -> Any:
    """Open a file for appending, truncated to the size in the journal."""
    path.touch()
    if path.stat().st_size < size:
        raise ValueError(f"{path} is shorter than its journal says: run it again, from the beginning")
    file = open(path, "rb+")  # noqa: SIM115 (closed by SplitFiles.close and Packer.close)
    file.truncate(size)
    file.seek(size)
    return file


class Packer:
    """Writes the sources' tokens into a folder, one source after the other; resumes from the journal."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, dtype: np.dtype, side: Side) -> None:
        self.folder, self.tokenizer, self.side = folder, tokenizer, side
        journal = folder / "journal.json"
        state = read_json(journal) if journal.exists() else {}
        self.sources: int = state.get("sources", 0)
        self.chunks: int = state.get("pieces", 0)
        self.open: str | None = state.get("open")
        self.splits = {name: SplitFiles(folder, name, dtype, state.get(name, {})) for name in SPLITS}
        self._records = _reopen(folder / "sources.jsonl", state.get("records", 0))
        side.found.update(state.get("found", []))
        self._done = [self.sources, self.chunks]
        self._held: list[Chunk | dict[str, Any]] = []
        self._characters = self._unsaved = 0
        self._saved_at = time.monotonic()

    def pack(self, source: Source, *, cut: int | None, skip_bad: bool) -> None:
        """Append one source and its record."""
        problems: list[BadText] = []
        report: Report = problems.append if skip_bad else stop
        reader = source.read(report)
        stream: Iterator[Chunk] = iter(reader if cut is None else cut_documents(reader, cut))
        documents = 0
        for chunk in islice(stream, self.chunks):
            documents += chunk.last
        for chunk in stream:
            documents += chunk.last
            self._held.append(chunk)
            self._characters += len(chunk.text)
            if self._characters >= BATCH:
                self.flush()
        record = reader.record() | {"documents": documents}
        if problems:
            record |= {"skipped": len(problems), "reasons": [str(problem) for problem in problems[:REASONS]]}
        self._held.append(record)
        # The next source is read from its beginning.
        self.chunks = 0

    def flush(self) -> None:
        """Tokenize and write the buffered chunks, documents of several sources at once."""
        texts = [item.text for item in self._held if isinstance(item, Chunk)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        for item in self._held:
            if isinstance(item, Chunk):
                self.open = self.side(item) if self.open is None else self.open
                self.splits[self.open].append(next(encoded), last=item.last)
                self.open = None if item.last else self.open
                self._done[1] += 1
            else:
                self._records.write((json.dumps(item, ensure_ascii=False) + "\n").encode("utf-8"))
                self._done = [self._done[0] + 1, 0]
        self._unsaved += self._characters
        self._held, self._characters = [], 0
        if self._unsaved >= JOURNAL_CHARACTERS or time.monotonic() - self._saved_at >= JOURNAL_SECONDS:
            self.save()

    def save(self) -> None:
        """Sync all files, then write the journal: in this order a kill is harmless."""
        for split in self.splits.values():
            split.sync()
        self._records.flush()
        os.fsync(self._records.fileno())
        state = {name: split.state() for name, split in self.splits.items()} | {
            "sources": self._done[0],
            "pieces": self._done[1],
            "open": self.open,
            "records": self._records.tell(),
            "found": sorted(self.side.found),
        }
        write_atomically(self.folder / "journal.json", json.dumps(state))
        self._unsaved, self._saved_at = 0, time.monotonic()

    def close(self) -> None:
        for split in self.splits.values():
            split.close()
        self._records.close()


class ByHash:
    """Assigns about a fraction of the documents to validation, by a hash of their beginning.

    Equal documents are always in the same split, in any file and order.
    """

    def __init__(self, fraction: float, seed: int) -> None:
        self._threshold = fraction * 2.0**64
        self._key = f"dape split {seed}".encode()
        self.found: set[str] = set()

    def __call__(self, chunk: Chunk) -> str:
        beginning = chunk.text[:BEGINNING].encode("utf-8")
        digest = hashlib.blake2b(beginning, digest_size=8, key=self._key).digest()
        return "validation" if int.from_bytes(digest, "big") < self._threshold else "train"


class ByName:
    """Assigns the named documents to validation; a name is a document's own, its file's, or that without suffix."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = set(names)
        self.found: set[str] = set()

    def __call__(self, chunk: Chunk) -> str:
        matching = self.names & name_forms(chunk.document)
        self.found |= matching
        return "validation" if matching else "train"


def name_forms(document: str) -> set[str]:
    """Accepted names of a document: a/b.tex, b.tex, a/b, b, its folder a/; of a row or a cut also its file's."""
    file = document.split("#")[0]
    head, _, tail = file.rpartition(":")
    file = head if head and tail.isdecimal() else file
    path = Path(file)
    folders = {f"{folder.as_posix()}/" for folder in path.parents[:-1]}
    return {document, file, path.name, path.stem, path.with_suffix("").as_posix(), *folders}
