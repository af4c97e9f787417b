"""Corpora by source: installed packages, the library of this Python, files, folders, globs, data sets of the hub."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dape.checksums import file_digest
from dape.data import python_corpus
from dape.data.chunks import CHUNK, BadText, Chunk, Report, stop
from dape.data.hub import HubSource
from dape.data.readers import (
    PARQUET,
    SUFFIXES,
    TEXT,
    read_parquet,
    read_text,
    suffix_of,
    texts_of_lines,
    unpacked,
)

# Not prose by any standard: tests of the interpreter, tables of code points, topics generated from the manual.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
GLOB = set("*?[")


# Corpora that are part of the installation, by name.
BUILT_IN = ("python", "stdlib")


def default_validation(spec: str) -> str:
    """What is held out of a corpus unless requested otherwise: of `python` whole packages, else a tenth."""
    return ",".join(f"{package}/" for package in python_corpus.HELD_OUT) if spec == "python" else "0.1"


def default_tokenizer(spec: str) -> str:
    """The tokenizer of a corpus unless requested otherwise."""
    return "bpe:2048" if spec == "python" else "bytes"


@dataclass(frozen=True)
class Corpus:
    """Sources in a machine-independent order.

    note: how the text differs from what its name promises, as a sentence, or "".
    """

    spec: str
    sources: Sequence[Source]
    note: str = ""

    @property
    def fingerprint(self) -> str:
        """Hash of the files by name, size and time, without reading them."""
        names = json.dumps([[s.name, s.size, s.stamp] for s in self.sources])
        return hashlib.sha256(names.encode()).hexdigest()


@dataclass(frozen=True)
class FileSource:
    """A file; `name` is its path inside the corpus, `stamp` its modification time."""

    name: str
    path: Path
    suffix: str
    field: str
    size: int
    stamp: int

    @property
    def text_file(self) -> bool:
        return self.suffix in TEXT

    def read(self, report: Report = stop) -> FileReader:
        return FileReader(self, report)


@dataclass
class FileReader:
    """Chunks of a file, and its record."""

    source: FileSource
    report: Report

    def __iter__(self) -> Iterator[Chunk]:
        try:
            if self.source.text_file and self.report is not stop:
                # An error late in the file would leave half of it packed: check the file first.
                with open(self.source.path, "rb") as file:
                    try:
                        for _ in read_text(file, str(self.source.path)):
                            pass
                    except BadText as problem:
                        self.report(problem)
                        return
            with open(self.source.path, "rb", CHUNK) as stream:
                yield from self._chunks(stream)
        except OSError as error:
            raise ValueError(f"{self.source.path} cannot be read: {error.strerror or error}") from error

    def _chunks(self, stream: IO[bytes]) -> Iterator[Chunk]:
        """Chunks named after the source; problems name the file by its full path."""
        source, path = self.source, str(self.source.path)
        if source.suffix in TEXT:
            chunks = read_text(stream, path, self.report)
        elif source.suffix in PARQUET:
            chunks = read_parquet(source.path, path, source.field, self.report)
        else:
            chunks = texts_of_lines(unpacked(stream, path), path, source.field, self.report)
        for chunk in chunks:
            yield chunk._replace(document=source.name + chunk.document[len(path) :])

    def record(self) -> dict[str, Any]:
        source = self.source
        digest = file_digest(source.path)
        return {"name": source.name, "bytes": source.size, "stamp": source.stamp, "sha256": digest}


Source = FileSource | HubSource


def find_corpus(spec: str, *, field: str = "text", report: Report = stop) -> Corpus:
    """Find the corpus given by `spec`.

    spec:   "python", "stdlib"; a file, folder or glob; or "hf:NAME[:SPLIT][:FIELD]".
    field:  field of a JSON line, or column of a parquet file, that holds the text.
    report: called with each unreadable path (a dangling link, a pipe, a denied folder); raises by default.
    """
    if spec == "stdlib":
        return Corpus(spec, _library())
    if spec == "python":
        found, note = python_corpus.find_files()
        return Corpus(spec, [_file(path, path.parents[name.count("/")], field) for name, path in found], note)
    if spec.startswith("hf:"):
        source = HubSource.parse(spec, field)
        return Corpus(source.name, [source])
    path = Path(spec).expanduser()
    if path.is_dir():
        paths, root = [p for p in _walk(path, report=report) if _readable(p, report)], path
        if not paths:
            raise ValueError(f"{spec} has no file that ends in {', '.join(SUFFIXES)}")
    elif os.path.lexists(path):
        _readable(path, stop)
        paths, root = [path], path.parent
    elif GLOB & set(spec):
        paths = sorted(map(Path, glob.glob(str(path), recursive=True)))
        paths = [p for p in paths if not p.is_dir() and suffix_of(p) and _readable(p, report)]
        if not paths:
            raise ValueError(f"no file that ends in {', '.join(SUFFIXES)} matches {spec}")
        root = Path(os.path.commonpath([p.parent for p in paths]))
    else:
        raise FileNotFoundError(
            f'there is no corpus "{spec}": give "python", "stdlib", a file, a folder, a glob, or hf:NAME[:SPLIT][:FIELD]'
        )
    return Corpus(str(path.absolute()), [_file(p, root, field) for p in paths])


def _file(path: Path, root: Path, field: str) -> FileSource:
    suffix = suffix_of(path)
    if suffix is None:
        raise ValueError(f"{path} ends in none of {', '.join(SUFFIXES)}: rename it to say what it is")
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    name = path.relative_to(root).as_posix()
    return FileSource(name, path, suffix, field, status.st_size, status.st_mtime_ns)


def _readable(path: Path, report: Report) -> bool:
    """Whether the path is a regular file that can be opened; opening a pipe would block, so its kind is checked first."""
    try:
        os.fsencode(path).decode("utf-8")
        kind = path.stat().st_mode
        problem = None if stat.S_ISREG(kind) else "it is not a regular file"
        if problem is None and not os.access(path, os.R_OK):
            problem = "permission denied"
    except UnicodeDecodeError:
        problem = "its name is not UTF-8"
    except OSError as error:
        problem = "it is a dangling link" if path.is_symlink() else (error.strerror or str(error)).lower()
    if problem is not None:
        name = str(path).encode("utf-8", "backslashreplace").decode()
        report(BadText(f"{name} cannot be read: {problem}"))
    return problem is None


def _walk(root: Path, leave_out: frozenset[str] = frozenset(), report: Report = stop) -> list[Path]:
    """All files of a known kind under a folder except hidden ones, ordered by name."""

    def denied(error: OSError) -> None:
        report(BadText(f"folder {error.filename} cannot be read: {(error.strerror or str(error)).lower()}"))

    paths = []
    for folder, folders, names in os.walk(root, onerror=denied):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in leave_out]
        paths += [os.path.join(folder, n) for n in names if not n.startswith(".") and suffix_of(n)]
    # Compared as names inside the corpus, with / on any system.
    return [Path(path) for path in sorted(paths, key=lambda path: path.replace(os.sep, "/"))]


def _library() -> list[FileSource]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in _walk(root, frozenset(NOT_LIBRARY)) if p.suffix == ".py" and _usable(p)]
    if not paths:
        raise ValueError(f"this Python has no library sources in {root}: give --corpus a folder of text")
    return [_file(path, root, "text") for path in paths]


def _usable(path: Path) -> bool:
    """Whether a library file is non-empty UTF-8 text."""
    try:
        return bool(path.read_text("utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False
