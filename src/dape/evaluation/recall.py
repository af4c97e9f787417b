"""Loss by recall: tokens that repeat an earlier n-gram of the input, against all others.

A target is a *recall hit* if the n-gram that ends with it also occurs earlier in the input, so that it could be copied
(after the associative-recall hits of Arora et al., 2023, "Zoology": bigrams there, without those that are frequent in
training). Whether it is one depends on how long the input is; the shortest
input that makes it one is a property of the target alone. Targets are therefore binned once by that length; the bins
are the same at every evaluated length and for every model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dape.data import Tokens
from dape.evaluation.windows import Windows

# Recall length of a target that no input up to the longest makes a hit.
NEVER = np.iinfo(np.int64).max
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


def targets_by_recall(
    tokens: Tokens,
    windows: Windows,
    bounds: Sequence[int],
    last: int,
    *,
    ngram: int = DEFAULT_NGRAM,
) -> dict[str, np.ndarray]:
    """Targets [windows, last] by the input that makes them a hit: recall<=N, more than the next smaller bound; recall>N.

    bounds: lengths, such as those of `recall_bounds`.
    """
    bounds = sorted(bounds)
    if not 1 <= ngram <= bounds[-1]:
        raise ValueError(f"ngram={ngram}: the longest input has n-grams of 1 to {bounds[-1]} tokens")
    needed = recall_lengths(tokens, windows, bounds[-1], last, ngram=ngram)
    kind = "recall" if ngram == DEFAULT_NGRAM else f"recall of {ngram}-grams"
    bins = np.searchsorted(bounds, needed)
    names = [*(f"{kind}<={bound}" for bound in bounds), f"{kind}>{bounds[-1]}"]
    return {name: bins == index for index, name in enumerate(names)}


def recall_bounds(lengths: Sequence[int], longest: int) -> list[int]:
    """The evaluated lengths, and the powers of two between them, so that evaluations at other lengths pair."""
    powers = {1 << power for power in range(longest.bit_length()) if 1 << power >= min(lengths)}
    return sorted({*powers, *lengths, longest})
