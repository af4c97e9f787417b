"""Documents in pieces, so that no text is in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# Characters of a piece, roughly. Longer documents are cut at line ends, and a piece is tokenized by itself:
# for a tokenizer that joins characters across lines, that changes a token or so in a million characters.
PIECE = 1 << 20


class Piece(NamedTuple):
    """A stretch of a document; `last` says that the document ends with it."""

    document: str
    text: str
    last: bool


class BadText(ValueError):
    """A document that cannot be used; the message names file and place."""


class Interrupted(ValueError):
    """A source that broke off, as connections do; trying again may go on from there."""


# Takes a problem and raises it, or notes it and returns: then the reader goes on with the next document.
Report = Callable[[BadText], None]


def stop(problem: BadText) -> None:
    raise problem


def whole(document: str, text: str, report: Report) -> Iterator[Piece]:
    """The pieces of a document whose text is at hand."""
    if not text.strip():
        report(BadText(f"{document} is empty"))
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        report(BadText(f"{document}: character {error.start} is half of a surrogate pair, which is no text"))
        return
    if "\0" in text:
        report(BadText(f"{document}: a NUL at character {text.index(chr(0))}: this looks like binary data"))
        return
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield Piece(document, text[start:end], last=False)
        start = end
    yield Piece(document, text[start:], last=True)


def cut_documents(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """The same text as documents NAME#1, NAME#2, … of at least `size` characters, cut at line ends.

    What is left of a document at its end joins the last of them.
    """
    name, number, buffer = "", 1, ""
    for piece in pieces:
        if piece.document != name:
            name, number, buffer = piece.document, 1, ""
        buffer += piece.text
        start = 0
        # Keep at least `size` characters back, so that a short rest never becomes a document of its own.
        while len(buffer) - start >= 2 * size:
            end = buffer.find("\n", start + size - 1, len(buffer) - size) + 1 or start + size
            yield Piece(f"{name}#{number}", buffer[start:end], last=True)
            number, start = number + 1, end
        buffer = buffer[start:]
        if piece.last:
            yield Piece(f"{name}#{number}", buffer, last=True)
            name = ""
