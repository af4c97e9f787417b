"""Documents in chunks, so that no text is held in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# Approximate characters per chunk. Longer documents are cut at line ends, and chunks are tokenized separately:
# for a tokenizer that joins characters across lines, this changes about one token in a million characters.
CHUNK = 1 << 20


class Chunk(NamedTuple):
    """Part of a document; `last` marks the final one."""

    document: str
    text: str
    last: bool


class BadText(ValueError):
    """A document that cannot be used; the message names file and position."""


class Interrupted(ValueError):
    """A source that was interrupted, such as by a lost connection; a retry may continue from there."""


# Raises the problem, or records it and returns: the reader then continues with the next document.
Report = Callable[[BadText], None]


def stop(problem: BadText) -> None:
    raise problem


def whole(document: str, text: str, report: Report) -> Iterator[Chunk]:
    """Chunks of a document given as one string."""
    if not text.strip():
        report(BadText(f"{document} is empty"))
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        report(BadText(f"{document}: character {error.start} is an unpaired surrogate"))
        return
    if "\0" in text:
        report(BadText(f"{document}: a NUL at character {text.index(chr(0))}: this looks like binary data"))
        return
    start = 0
    while len(text) - start > CHUNK:
        end = text.rfind("\n", start, start + CHUNK) + 1 or start + CHUNK
        yield Chunk(document, text[start:end], last=False)
        start = end
    yield Chunk(document, text[start:], last=True)


def cut_documents(chunks: Iterable[Chunk], size: int) -> Iterator[Chunk]:
    """The same text as documents NAME#1, NAME#2, … of at least `size` characters, cut at line ends.

    The remainder of a document is part of the last of them.
    """
    name, number, buffer = "", 1, ""
    for chunk in chunks:
        if chunk.document != name:
            name, number, buffer = chunk.document, 1, ""
        buffer += chunk.text
        start = 0
        # Keep at least `size` characters, so that a short remainder never becomes a document of its own.
        while len(buffer) - start >= 2 * size:
            end = buffer.find("\n", start + size - 1, len(buffer) - size) + 1 or start + size
            yield Chunk(f"{name}#{number}", buffer[start:end], last=True)
            number, start = number + 1, end
        buffer = buffer[start:]
        if chunk.last:
            yield Chunk(f"{name}#{number}", buffer, last=True)
            name = ""
