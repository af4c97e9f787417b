"""Readers of files: plain text, JSON lines (also compressed) and parquet, as streams of chunks."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from dape.data.chunks import CHUNK, BadText, Chunk, Report, stop, whole
from dape.errors import install
from dape.files import json_kind, parse_text

TEXT = (".txt", ".md", ".tex", ".py")
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
PARQUET = (".parquet",)
SUFFIXES = (*TEXT, *JSON_LINES, *PARQUET)


def suffix_of(path: str | os.PathLike[str]) -> str | None:
    """The known suffix of the file, or None."""
    name = os.fspath(path).lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def read_text(stream: IO[bytes], name: str, report: Report = stop) -> Iterator[Chunk]:
    """Read a text file as one document."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held: str | None = None
    fed = lines = 0
    while True:
        block = stream.read(CHUNK)
        if block and not block.endswith(b"\n"):
            block += stream.readline(CHUNK)
        fed += len(block)
        if (nul := block.find(0)) >= 0:
            offset = fed - len(block) + nul
            report(BadText(f"{name}: a NUL at byte {offset}: this looks like a binary file"))
            return
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = lines + error.object[: error.start].count(b"\n") + 1
            offset, byte = fed - len(error.object) + error.start, error.object[error.start]
            where = f"{name}, line {line}: byte {offset} (0x{byte:02x})"
            report(BadText(f"{where} is not UTF-8 ({error.reason})"))
            return
        if not block:
            break
        lines += block.count(b"\n")
        if held is not None:
            yield Chunk(name, held, last=False)
        elif not text.strip() and len(block) < CHUNK:
            continue
        held = text
    if held is None:
        report(BadText(f"{name} is empty"))
    else:
        yield Chunk(name, held, last=True)


def texts_of_lines(stream: IO[bytes], name: str, field: str, report: Report = stop) -> Iterator[Chunk]:
    """Read one document per line: the string in `field` of the line's object."""
    number = 0
    try:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                text = _record_text(line, f"{name}, line {number}", field)
            except BadText as problem:
                report(problem)
                continue
            yield from whole(f"{name}:{number}", text, report)
    except _unpacking_errors() as error:
        report(BadText(f"{name}, after line {number}: cannot be unpacked ({error})"))
        return
    if number == 0:
        report(BadText(f"{name} is empty"))


def _record_text(line: bytes, location: str, field: str) -> str:
    try:
        record = parse_text(line)
    except UnicodeDecodeError as error:
        raise BadText(
            f"{location}: byte {error.start} of the line is not UTF-8 (0x{line[error.start]:02x})"
        ) from None
    except json.JSONDecodeError as error:
        raise BadText(f"{location}: not JSON ({error.msg} at column {error.colno})") from None
    except ValueError as error:
        raise BadText(f"{location}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise BadText(f"{location}: an object with a field was expected, not {json_kind(type(record))}")
    if field not in record:
        raise BadText(f'{location}: no field "{field}"; it has {_list(record)}')
    if not isinstance(record[field], str):
        raise BadText(f'{location}: field "{field}" is {json_kind(type(record[field]))}, not text')
    return record[field]


def _list(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


def _unpacking_errors() -> tuple[type[Exception], ...]:
    try:
        import zstandard
    except ImportError:
        return (EOFError, gzip.BadGzipFile, zlib.error)
    return (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)


def unpacked(stream: IO[bytes], name: str) -> IO[bytes]:
    """The decompressed stream, by the suffix of the file's name."""
    if name.lower().endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if name.lower().endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{name} needs zstandard: {install('data')}") from None
        reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=False)
        return io.BufferedReader(cast(Any, reader), CHUNK)
    return stream


def read_parquet(path: Path, name: str, field: str, report: Report = stop) -> Iterator[Chunk]:
    """Read one document per row: the string in column `field`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{name} needs pyarrow: {install('data')}") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                report(BadText(f'{name}: no column "{field}"; it has {_list(columns)}'))
                return
            kind = file.schema_arrow.field(field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                report(BadText(f'{name}: column "{field}" holds {kind}, not text'))
                return
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield from _row(value, f"{name}:{number}", report)
            if number == 0:
                report(BadText(f"{name} is empty"))
    except pyarrow.ArrowException as error:
        report(BadText(f"{name}: cannot be read as parquet ({str(error).splitlines()[0]})"))


def _row(value: Any, document: str, report: Report) -> Iterator[Chunk]:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        report(BadText(f"{document}: byte {error.start} of the row is not UTF-8"))
        return
    if text is None:
        report(BadText(f"{document} is null"))
    else:
        yield from whole(document, text, report)
