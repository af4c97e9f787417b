"""Loss by recall: tokens that repeat an earlier n-gram of the input, against all others.

A target is a *recall hit* if the n-gram that ends with it also occurs earlier in the input, so that it could be copied
(after the associative-recall hits of Arora et al., 2023, "Zoology": bigrams there, without those that are frequent in
training, as `max_training_count` leaves them out). Whether it is one depends on how long the input is; the shortest
input that makes it one is a property of the target alone. Targets are therefore binned once by that length; the bins
are the same at every evaluated length and for every model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dape.data import Tokens
from dape.evaluation.by_length import WindowLosses
from dape.evaluation.statistics import clustered_mean
from dape.evaluation.windows import Windows

# Recall length of a target that no input up to the longest makes a hit.
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
    """[n, length + 1] of windows [n, length + 1], for every token position; those before the first n-gram are NEVER."""
    grams = _gram_codes(ids, ngram)
    # Stable: occurrences of an n-gram are sorted in the order of the text, each after its predecessor.
    order = np.argsort(grams, axis=1, kind="stable")
    ordered = np.take_along_axis(grams, order, axis=1)
    again = ordered[:, 1:] == ordered[:, :-1]
    # Gram g begins at ids[g], and an input of `length` tokens at ids[-length - 1].
    needed = np.where(again, ids.shape[1] - 1 - order[:, :-1], NEVER)
    lengths = np.full(ids.shape, NEVER)
    np.put_along_axis(lengths, order[:, 1:] + ngram - 1, needed, axis=1)
    return lengths


def _gram_codes(ids: np.ndarray, ngram: int) -> np.ndarray:
    """Code of every n-gram [n, length + 2 − ngram], by its first token: n-grams are equal if and only if codes are."""
    count = ids.shape[1] + 1 - ngram
    _, symbols = np.unique(ids, return_inverse=True)
    symbols = symbols.reshape(ids.shape)
    codes = symbols[:, :count]
    for shift in range(1, ngram):
        pairs = codes * (symbols.max() + 1) + symbols[:, shift : shift + count]
        # Renumbered, so that products stay below the square of the number of tokens.
        _, codes = np.unique(pairs, return_inverse=True)
        codes = codes.reshape(pairs.shape)
    return codes


def training_counts(train: Tokens, grams: np.ndarray, *, batch_tokens: int = BATCH_TOKENS) -> np.ndarray:
    """Counts [...] of the n-grams `grams` [..., n] in the training tokens."""
    ngram = grams.shape[-1]
    size = int(max(train.ids.max(initial=0), grams.max(initial=0))) + 1
    # One level per token: an n-gram's code follows from its last token and the code of the tokens before it.
    levels: list[np.ndarray] = []
    codes = np.zeros(grams.shape[:-1], np.int64)
    for column in range(ngram):
        level, codes = np.unique(codes * size + grams[..., column].astype(np.int64), return_inverse=True)
        codes = codes.reshape(grams.shape[:-1])
        levels.append(level)
    counts = np.zeros(len(levels[-1]), np.int64)
    for start in range(0, len(train) - ngram + 1, batch_tokens):
        ids = train.ids[start : start + batch_tokens + ngram - 1].astype(np.int64)
        starts = np.arange(len(ids) - ngram + 1)
        index = np.zeros(len(starts), np.int64)
        for column, level in enumerate(levels):
            wanted = index * size + ids[starts + column]
            index = np.searchsorted(level, wanted)
            known = level[np.minimum(index, len(level) - 1)] == wanted
            starts, index = starts[known], index[known]
        counts += np.bincount(index, minlength=len(counts))
    return counts[codes]


@dataclass(frozen=True)
class RecallBins:
    """Targets binned by document and recall length; the same for every model and every evaluated length.

    bounds: [bins − 1] lengths, ascending: bin b holds targets whose recall needs more than bounds[b − 1] and at most
            bounds[b] tokens of input, the last bin those that no length makes a hit.
    cell_index: document · bins + bin of each target [windows, last]; counts: targets [documents, bins].
    digest: hash of the target tokens and their bins.
    """

    bounds: tuple[int, ...]
    ngram: int
    cell_index: np.ndarray
    counts: np.ndarray
    digest: str

    @staticmethod
    def of(
        tokens: Tokens,
        windows: Windows,
        lengths: Sequence[int],
        last: int,
        *,
        ngram: int = DEFAULT_NGRAM,
        train: Tokens | None = None,
        max_training_count: int | None = None,
    ) -> RecallBins:
        """Bins for windows evaluated at these lengths.

        max_training_count: n-grams that occur more often in `train` do not count as recall: a model may have memorised them.
        """
        bounds = tuple(sorted(lengths))
        if not 1 <= ngram <= bounds[-1]:
            raise ValueError(f"ngram={ngram}: the longest input has n-grams of 1 to {bounds[-1]} tokens")
        needed = recall_lengths(tokens, windows, bounds[-1], last, ngram=ngram)
        if max_training_count is not None:
            if train is None:
                raise ValueError("max_training_count needs the training tokens")
            hits = np.nonzero(needed != NEVER)
            ends = (windows.ends[:, None] + np.arange(-last, 0))[hits]
            grams = tokens.ids[ends[:, None] + np.arange(1 - ngram, 1)]
            needed[hits] = np.where(training_counts(train, grams) > max_training_count, NEVER, needed[hits])
        _, document = np.unique(windows.documents, return_inverse=True)
        shape = (int(document.max()) + 1, len(bounds) + 1)
        cell_index = document[:, None] * shape[1] + np.searchsorted(bounds, needed)
        counts = np.bincount(cell_index.ravel(), minlength=shape[0] * shape[1]).reshape(shape)
        targets = windows.ids(tokens, last)[:, 1:]
        identity = [windows.ends.tolist(), targets.tolist(), ngram, bounds, counts.tolist()]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return RecallBins(bounds, ngram, cell_index, counts, digest)

    def sums(self, losses: np.ndarray) -> np.ndarray:
        """Losses of the targets [windows, last] summed by document and bin [documents, bins]."""
        weights = losses.ravel().astype(np.float64)
        return np.bincount(self.cell_index.ravel(), weights, minlength=self.counts.size).reshape(
            self.counts.shape
        )


@dataclass(frozen=True)
class RecallSlices:
    """Losses of one model, summed by document and recall length; every slice follows from the sums.

    bounds, ngram, counts, digest: of the RecallBins.
    base: reference length of changes; a hit that needs a longer input is new.
    sums: by evaluated length, sums of the losses [documents, bins].
    """

    bounds: tuple[int, ...]
    base: int
    ngram: int
    counts: np.ndarray
    sums: dict[int, np.ndarray]
    digest: str

    @staticmethod
    def of(bins: RecallBins, sums: Mapping[int, np.ndarray], *, base: int | None = None) -> RecallSlices:
        """Slices of the available sums by length; `base` is the shortest length by default."""
        base = bins.bounds[0] if base is None else base
        if base not in bins.bounds:
            raise ValueError(f"base={base} is not one of the lengths {', '.join(map(str, bins.bounds))}")
        return RecallSlices(bins.bounds, base, bins.ngram, bins.counts, dict(sums), bins.digest)

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
        """Loss at a length minus loss of the same tokens at the base length; NaN if that was not evaluated yet."""
        if self.base not in self.sums:
            return math.nan, math.nan
        return self._mean(self.sums[length] - self.sums[self.base], self.bins(name, length))

    def difference(self, other: RecallSlices, length: int, name: str = "all") -> tuple[float, float]:
        """Loss minus that of another model on the same tokens of a slice."""
        return self._mean(self._against(other, length), self.bins(name, length))

    def contribution(self, other: RecallSlices, length: int, name: str = "all") -> tuple[float, float]:
        """Share of a slice in the difference over all tokens: those of "hit" and "other" add up to it."""
        sums = self._against(other, length)[:, self.bins(name, length)].sum(1)
        return clustered_mean(sums, self.counts.sum(1), np.arange(len(sums)))

    def records(self, reference: RecallSlices | None = None) -> list[dict[str, Any]]:
        """A record for each length and slice; "new" only for inputs longer than the base."""
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
            "digest": self.digest,
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
            content["digest"],
        )

    def _against(self, other: RecallSlices, length: int) -> np.ndarray:
        if self.digest != other.digest:
            raise ValueError(
                "the slices have different target tokens, lengths or n-grams, so their differences are not paired"
            )
        return self.sums[length] - other.sums[length]

    def _mean(self, sums: np.ndarray, bins: np.ndarray) -> tuple[float, float]:
        counts = self.counts[:, bins].sum(1)
        if not counts.any():
            return math.nan, math.nan
        # Documents without a token of the slice do not count as clusters.
        kept = counts > 0
        return clustered_mean(sums[:, bins].sum(1)[kept], counts[kept], np.arange(len(sums))[kept])


def recall_slices(
    tokens: Tokens, losses: WindowLosses, *, base: int | None = None, **options: Any
) -> RecallSlices:
    """Losses of windows, sliced by recall.

    base:    reference length of changes, such as the training length; the shortest by default.
    options: those of `RecallBins.of`: ngram, the length of the n-gram that must have occurred before, the target
             included; train and max_training_count.
    """
    bins = RecallBins.of(tokens, losses.windows, list(losses.losses), losses.last, **options)
    return RecallSlices.of(
        bins, {length: bins.sums(values) for length, values in losses.losses.items()}, base=base
    )


def _pair(name: str, value: tuple[float, float]) -> dict[str, float]:
    return {name: value[0], f"{name}_se": value[1]}
