"""Evaluation windows: which tokens are predicted, and from which inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dape.data import Tokens
from dape.settings import COUNT, TOKENS, setting

Context = Literal["document", "stream"]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Options of an evaluation by length, of `dape compare` and `dape eval`."""

    lengths: str | None = setting(
        None,
        help="Tokens of input at which to evaluate, separated by commas; by default 1, 2, 4, 8 and 16 times the training "
        "length.",
        listed=int,
        **TOKENS,
    )
    last: int | None = setting(
        None,
        help="Tokens predicted at the end of each window; by default a quarter of the shortest length, at most 256.",
        **TOKENS,
    )
    windows: int = setting(128, help="Maximum number of evaluation windows.", **COUNT)
    context: Context = setting(
        "document",
        help='"stream" lets the context continue into earlier documents (for corpora of short ones).',
    )


@dataclass(frozen=True)
class Windows:
    """Evaluation windows: ends of their targets [n] (indices into ids, exclusive), and their documents [n]."""

    ends: np.ndarray
    documents: np.ndarray

    def ids(self, tokens: Tokens, length: int, chosen: slice = slice(None)) -> np.ndarray:
        """Token ids [n, length + 1]: `length` inputs, and the token after each."""
        index = self.ends[chosen, None] + np.arange(-length - 1, 0)
        return tokens.ids[index].astype(np.int64)

    def __len__(self) -> int:
        return len(self.ends)


def same_targets(
    tokens: Tokens, longest: int, last: int, count: int, *, context: Context = "document"
) -> Windows:
    """Up to `count` windows of `last` targets, each with room for `longest` tokens of input before its end.

    Targets never overlap. The windows are spread evenly over all possible ones of the split, so long documents
    weigh more, in proportion to their tokens.
    context: "document" never reaches past the document's beginning; "stream" continues into earlier ones.
    """
    if count < 1:
        raise ValueError(f"windows={count}: there is nothing to evaluate")
    if context not in ("document", "stream"):
        raise ValueError(f'context="{context}": choose "document" or "stream"')
    starts = tokens.documents[:-1] if context == "document" else tokens.documents[:1]
    stops = tokens.documents[1:] if context == "document" else tokens.documents[-1:]
    ends = [np.arange(start + longest + 1, stop + 1, last) for start, stop in zip(starts, stops, strict=True)]
    possible = np.concatenate(ends) if ends else np.empty(0, np.int64)
    if not len(possible):
        raise ValueError(_too_short(tokens, longest, context))
    chosen = possible[np.linspace(0, len(possible) - 1, min(count, len(possible))).round().astype(np.int64)]
    return Windows(chosen, tokens.document_of(chosen - 1))


def _too_short(tokens: Tokens, length: int, context: Context) -> str:
    if context == "stream":
        return f"length {length} needs {length + 1} tokens, but the split has {len(tokens)}"
    longest = int((tokens.documents[1:] - tokens.documents[:-1]).max(initial=0))
    return (
        f"length {length} needs a document of {length + 1} tokens, but the longest has {longest}: evaluate "
        f'shorter lengths, or let the context run across documents (--context stream, in Python context="stream")'
    )
