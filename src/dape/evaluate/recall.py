"""Loss by recall: tokens that repeat what the input has said before, against all others.

A target is a *recall hit* if the n-gram that ends with it also occurs earlier in the input, so that it could be copied
(after the associative-recall hits of Arora et al., 2023, "Zoology", there for bigrams). Whether it is one depends on
how long the input is; the shortest input that makes it one is a property of the target alone. So the targets are
sorted once by that length, into bins that are the same at every length read and for every model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dape.data import Tokens
from dape.evaluate.by_length import WindowLosses
from dape.evaluate.statistics import clustered_mean
from dape.evaluate.windows import Windows

# The length at which a target becomes a hit, if no input up to the longest makes it one.
NEVER = np.iinfo(np.int64).max
SLICES = ("all", "hit", "new", "other")
DEFAULT_NGRAM = 3
BATCH_TOKENS = 1 << 20


def recall_lengths(
    tokens: Tokens,
    windows: Windows,
    longest: int,
    last: int,
    *,
    ngram: int = DEFAULT_NGRAM,
    batch_tokens: int = BATCH_TOKENS,
) -> np.ndarray:
    """The shortest input that makes each target a recall hit [windows, last]; NEVER if none up to `longest` does."""
    size = max(1, batch_tokens // (longest + 1))
    parts = [
        _recall_lengths(windows.ids(tokens, longest, slice(start, start + size)), ngram)[:, -last:]
        for start in range(0, len(windows), size)
    ]
    return np.concatenate(parts)


def _recall_lengths(ids: np.ndarray, ngram: int) -> np.ndarray:
    """[n, length + 1] of windows [n, length + 1], for every place; those before the first n-gram are NEVER."""
    grams = _gram_codes(ids, ngram)
    # Stable: occurrences of an n-gram stand in the order of the text, each after the one before it.
    order = np.argsort(grams, axis=1, kind="stable")
    ordered = np.take_along_axis(grams, order, axis=1)
    again = ordered[:, 1:] == ordered[:, :-1]
    # Gram g begins at ids[g], and an input of `length` tokens at ids[-length - 1].
    needed = np.where(again, ids.shape[1] - 1 - order[:, :-1], NEVER)
    found = np.full(ids.shape, NEVER)
    np.put_along_axis(found, order[:, 1:] + ngram - 1, needed, axis=1)
    return found


def _gram_codes(ids: np.ndarray, ngram: int) -> np.ndarray:
    """A number for every n-gram [n, length + 2 − ngram], by its first token: the same for equal ones alone."""
    count = ids.shape[1] + 1 - ngram
    _, symbols = np.unique(ids, return_inverse=True)
    symbols = symbols.reshape(ids.shape)
    codes = symbols[:, :count]
    for shift in range(1, ngram):
        pairs = codes * (symbols.max() + 1) + symbols[:, shift : shift + count]
        # Numbered anew, so that products stay below the square of the number of tokens.
        _, codes = np.unique(pairs, return_inverse=True)
        codes = codes.reshape(pairs.shape)
    return codes


@dataclass(frozen=True)
class RecallSlices:
    """Losses of one model, summed by document and by the length that recall needs; enough for every slice.

    bounds:  [bins − 1] the lengths read, ascending: bin b holds targets whose recall needs more than bounds[b − 1] and
             at most bounds[b] tokens of input, the last bin those that no length makes a hit.
    base:    the length that changes are counted from, and past which a hit is new.
    counts:  targets [documents, bins]; sums: by length read, of their losses [documents, bins].
    targets: a digest of which tokens were scored.
    """

    bounds: tuple[int, ...]
    base: int
    ngram: int
    counts: np.ndarray
    sums: dict[int, np.ndarray]
    targets: str

    def bins(self, name: str, length: int) -> np.ndarray:
        """The bins [bins] that make up a slice at a length: "all", "hit", "new" or "other"."""
        needed = np.array([*self.bounds, math.inf])
        return {
            "all": needed > 0,
            "hit": needed <= length,
            "new": (needed <= length) & (needed > self.base),
            "other": needed > length,
        }[name]

    def tokens(self, length: int, name: str) -> int:
        return int(self.counts[:, self.bins(name, length)].sum())

    def loss(self, length: int, name: str = "all") -> tuple[float, float]:
        """Mean loss of a slice, and its standard error over documents."""
        return self._mean(self.sums[length], self.bins(name, length))

    def change(self, length: int, name: str = "all") -> tuple[float, float]:
        """Loss at a length minus loss of the same tokens at the base length."""
        return self._mean(self.sums[length] - self.sums[self.base], self.bins(name, length))

    def difference(self, other: RecallSlices, length: int, name: str = "all") -> tuple[float, float]:
        """Loss minus that of another model on the same tokens of a slice."""
        return self._mean(self._against(other, length), self.bins(name, length))

    def contribution(self, other: RecallSlices, length: int, name: str = "all") -> tuple[float, float]:
        """The part of the difference over all tokens that lies on a slice: parts of "hit" and "other" add up to it."""
        sums = self._against(other, length)[:, self.bins(name, length)].sum(1)
        return clustered_mean(sums, self.counts.sum(1), np.arange(len(sums)))

    def records(self, reference: RecallSlices | None = None) -> list[dict[str, Any]]:
        """A record for each length and slice; "new" only where the input is longer than the base."""
        total = int(self.counts.sum())
        nothing = (math.nan, math.nan)
        return [
            {"eval_length": length, "slice": name, "tokens": tokens, "share": tokens / total}
            | _pair("nll", self.loss(length, name))
            | _pair("change", self.change(length, name))
            | _pair("difference", self.difference(reference, length, name) if reference else nothing)
            | _pair("contribution", self.contribution(reference, length, name) if reference else nothing)
            for length in self.sums
            for name in SLICES
            if name != "new" or length > self.base
            for tokens in [self.tokens(length, name)]
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "bounds": list(self.bounds),
            "base": self.base,
            "ngram": self.ngram,
            "targets": self.targets,
            "counts": self.counts.tolist(),
            "sums": {str(length): sums.tolist() for length, sums in self.sums.items()},
        }

    @staticmethod
    def of_json(content: dict[str, Any]) -> RecallSlices:
        return RecallSlices(
            tuple(content["bounds"]),
            content["base"],
            content["ngram"],
            np.array(content["counts"]),
            {int(length): np.array(sums) for length, sums in content["sums"].items()},
            content["targets"],
        )

    def _against(self, other: RecallSlices, length: int) -> np.ndarray:
        if (self.targets, self.ngram, self.bounds) != (other.targets, other.ngram, other.bounds):
            raise ValueError(
                "the slices have different target tokens, lengths or n-grams, so their differences are not paired"
            )
        return self.sums[length] - other.sums[length]

    def _mean(self, sums: np.ndarray, bins: np.ndarray) -> tuple[float, float]:
        counts = self.counts[:, bins].sum(1)
        if not counts.any():
            return math.nan, math.nan
        # Documents without a token of the slice say nothing about it.
        kept = counts > 0
        return clustered_mean(sums[:, bins].sum(1)[kept], counts[kept], np.arange(len(sums))[kept])


def recall_slices(
    tokens: Tokens, losses: WindowLosses, *, ngram: int = DEFAULT_NGRAM, base: int | None = None
) -> RecallSlices:
    """Losses of windows, sliced by recall.

    ngram: how many tokens must have occurred before, the target included.
    base:  the length that changes are counted from, such as that of training; the shortest by default.
    """
    bounds = tuple(sorted(losses.losses))
    base = bounds[0] if base is None else base
    _check(bounds, base, ngram)
    needed = recall_lengths(tokens, losses.windows, bounds[-1], losses.last, ngram=ngram)
    bins = np.searchsorted(bounds, needed)
    _, document = np.unique(losses.windows.documents, return_inverse=True)
    shape = (int(document.max()) + 1, len(bounds) + 1)
    cell = (document[:, None] * shape[1] + bins).ravel()

    def sums(values: np.ndarray | None) -> np.ndarray:
        weights = None if values is None else values.ravel().astype(np.float64)
        return np.bincount(cell, weights, minlength=shape[0] * shape[1]).reshape(shape)

    by_length = {length: sums(losses.losses[length]) for length in bounds}
    return RecallSlices(bounds, base, ngram, sums(None), by_length, _digest(losses))


def _check(bounds: Sequence[int], base: int, ngram: int) -> None:
    if not 1 <= ngram <= bounds[-1]:
        raise ValueError(f"ngram={ngram}: the longest input has n-grams of 1 to {bounds[-1]} tokens")
    if base not in bounds:
        raise ValueError(f"base={base} is not one of the lengths {', '.join(map(str, bounds))}")


def _digest(losses: WindowLosses) -> str:
    ends = losses.windows.ends.astype("<i8").tobytes()
    return hashlib.sha256(ends + losses.last.to_bytes(8, "little")).hexdigest()[:16]


def _pair(name: str, value: tuple[float, float]) -> dict[str, float]:
    return {name: value[0], f"{name}_se": value[1]}
