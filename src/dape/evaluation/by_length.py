"""Losses by length: the same target tokens at every length, with growing left context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from dape.data import Tokens
from dape.evaluation.evaluator import BATCH_TOKENS, Evaluator, Measure, evaluating, token_losses
from dape.evaluation.statistics import Estimate, mean_over_documents
from dape.evaluation.windows import Context, Windows, same_targets

# Called with the length and number of finished windows.
Progress = Callable[[int, int], None]

DEFAULT_LAST = 256
# Key tokens: targets whose loss falls by more than so many nats from half of a model's window to all of it.
KEY_GAIN = 0.5


@dataclass(frozen=True)
class WindowLosses:
    """Losses of the same target tokens at several lengths: by length, −log p of each window's targets [windows, last]."""

    windows: Windows
    last: int
    losses: dict[int, np.ndarray]

    def at(self, length: int) -> Estimate:
        """Mean loss at one length, with its error and interval over documents."""
        return self._mean(self.losses[length])

    def change(self, start: int, stop: int) -> Estimate:
        """Mean loss at one length minus the mean at another, on the same tokens."""
        return self._mean(self.losses[stop] - self.losses[start])

    def _mean(self, values: np.ndarray) -> Estimate:
        counts = np.full(len(values), self.last)
        return mean_over_documents(values.sum(1, dtype=np.float64), counts, self.windows.documents)


def losses_by_length(
    model: nn.Module,
    tokens: Tokens,
    lengths: Sequence[int],
    *,
    last: int | None = None,
    windows: int = 128,
    context: Context = "document",
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> WindowLosses:
    """Loss of every target token at each length.

    lengths:  tokens of input that the model sees.
    last:     number of predicted tokens at the end of a window; default: `default_last(lengths)`.
    windows:  maximum number of windows; their targets do not overlap.
    context:  "document" keeps the input within a document, "stream" lets it continue into earlier ones.
    """
    last = num_targets(lengths, last)
    chosen = same_targets(tokens, max(lengths), last, windows, context=context)
    with evaluating(model, batch_tokens=batch_tokens) as evaluator:
        losses = {n: losses_of_windows(evaluator, tokens, chosen, n, last, progress) for n in lengths}
    return WindowLosses(chosen, last, losses)


def losses_of_windows(
    evaluator: Evaluator,
    tokens: Tokens,
    windows: Windows,
    length: int,
    last: int,
    progress: Progress | None = None,
) -> np.ndarray:
    """Loss of every target of the windows at one length [windows, last]."""
    return values_of_windows(evaluator, tokens, windows, length, last, [token_losses], progress)[..., 0]


def values_of_windows(
    evaluator: Evaluator,
    tokens: Tokens,
    windows: Windows,
    length: int,
    last: int,
    measures: Sequence[Measure],
    progress: Progress | None = None,
) -> np.ndarray:
    """Values of every target of the windows at one length [windows, last, measures]."""
    parts, size = [], evaluator.batch_size(length, last)
    for start in range(0, len(windows), size):
        ids = windows.ids(tokens, length, slice(start, start + size))
        parts.append(evaluator.values(ids, last, measures))
        if progress is not None:
            progress(length, len(ids))
    return np.concatenate(parts)


def context_lengths(window: int) -> tuple[int, int, int]:
    """A quarter, half and all of a model's window, which show what it makes of its context."""
    return window // 4, window // 2, window


def default_last(lengths: Sequence[int]) -> int:
    """Targets per window by default: a quarter of the shortest length, so that most of it is context; at most 256."""
    return max(1, min(DEFAULT_LAST, min(lengths) // 4))


def num_targets(lengths: Sequence[int], last: int | None) -> int:
    """Number of targets per window; raises for lengths that cannot be evaluated."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: give at least one, each 1 or more")
    if last is None:
        return default_last(lengths)
    if not 1 <= last <= min(lengths):
        raise ValueError(
            f"last={last} must be between 1 and the shortest length, {min(lengths)}: the same tokens are predicted at every "
            f"length"
        )
    return last
