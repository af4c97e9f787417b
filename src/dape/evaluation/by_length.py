"""Perplexity by length: the same target tokens at every length, with growing left context."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from dape.data import Tokens
from dape.evaluation.evaluator import BATCH_TOKENS, Evaluator, evaluating
from dape.evaluation.statistics import clustered_mean, perplexity
from dape.evaluation.windows import Context, Windows, consecutive, same_targets

Protocol = Literal["same-targets", "paper"]
# Called with the number of finished windows and their length.
Progress = Callable[[int, int], None]

DEFAULT_LAST = 256
# Key tokens: targets whose loss falls by more than so many nats from half of a model's window to all of it.
KEY_GAIN = 0.5


@dataclass(frozen=True)
class LengthLoss:
    """Loss of the last tokens of windows, given `eval_length` tokens of input.

    tokens:    total number of target tokens.
    windows:   mean loss of each window [n]; documents: the document each belongs to [n];
    ends:      end of each window's targets, as an index into the split's ids [n]; last: targets per window.
    """

    eval_length: int
    nll: float
    nll_se: float
    ppl: float
    tokens: int
    windows: np.ndarray
    documents: np.ndarray
    ends: np.ndarray
    last: int

    @staticmethod
    def of(
        eval_length: int, windows: np.ndarray, documents: np.ndarray, ends: np.ndarray, last: int
    ) -> LengthLoss:
        nll, error = clustered_mean(windows, np.ones(len(windows)), documents)
        return LengthLoss(
            eval_length, nll, error, perplexity(nll), last * len(windows), windows, documents, ends, last
        )

    def record(self) -> dict[str, Any]:
        return {
            "eval_length": self.eval_length,
            "nll": self.nll,
            "nll_se": self.nll_se,
            "ppl": self.ppl,
            "tokens": self.tokens,
            "windows": len(self.windows),
            "documents": len(np.unique(self.documents)),
            "last": self.last,
        }


def paired_difference(a: LengthLoss, b: LengthLoss) -> tuple[float, float]:
    """Loss of a minus loss of b on the same target tokens, and its standard error over documents.

    a and b: two methods at one length, or one method at two lengths.
    """
    if a.last != b.last or not np.array_equal(a.ends, b.ends):
        raise ValueError(
            f"the losses at lengths {a.eval_length} and {b.eval_length} have different target tokens, "
            f"so their differences are not paired"
        )
    return clustered_mean(a.windows - b.windows, np.ones(len(a.windows)), a.documents)


@dataclass(frozen=True)
class WindowLosses:
    """Losses of the same target tokens at several lengths: by length, −log p of each window's targets [n, last]."""

    windows: Windows
    last: int
    losses: dict[int, np.ndarray]

    def at(self, length: int) -> LengthLoss:
        """Mean loss at one length, with its standard error."""
        return _length_loss(self.windows, length, self.last, self.losses[length])

    def only(self, lengths: Sequence[int]) -> WindowLosses:
        """The same at some of the lengths."""
        return WindowLosses(self.windows, self.last, {n: self.losses[n] for n in lengths})


@dataclass(frozen=True)
class ContextUse:
    """What a model makes of its own window: losses of the same targets with ¼, ½ and all of it.

    A model that loses nothing by half a window has nothing to gain from a longer one.
    """

    window: int
    quarter: LengthLoss
    half: LengthLoss
    whole: LengthLoss
    key: np.ndarray

    @staticmethod
    def of(losses: WindowLosses, window: int) -> ContextUse:
        """From losses at window // 4, window // 2 and window."""
        key = losses.losses[window // 2] - losses.losses[window] > KEY_GAIN
        quarter, half, whole = (losses.at(n) for n in context_lengths(window))
        return ContextUse(window, quarter, half, whole, key)

    def used(self) -> tuple[float, float]:
        """What the later half of the window lowers the loss by, and the standard error."""
        return paired_difference(self.half, self.whole)

    def key_change(self, losses: WindowLosses, length: int) -> tuple[float, float]:
        """Loss of key tokens at `length` minus that with the window, and the standard error; NaN without any."""
        if not self.key.any():
            return math.nan, math.nan
        change = np.where(self.key, losses.losses[length] - losses.losses[self.window], 0.0)
        return clustered_mean(change.sum(1, dtype=np.float64), self.key.sum(1), losses.windows.documents)


def context_lengths(window: int) -> tuple[int, int, int]:
    return window // 4, window // 2, window


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
    also: Sequence[int] = (),
) -> WindowLosses:
    """Loss of every target token at each length, on the windows of `evaluate_by_length`.

    also: further lengths on the same windows, as far as the targets fit into them.
    """
    last = num_targets(lengths, last, windows, "same-targets", context)
    chosen = same_targets(tokens, max(lengths), last, windows, context=context)
    further = {n for n in also if last <= n <= max(lengths)}
    with evaluating(model, batch_tokens=batch_tokens) as evaluator:
        losses = {
            n: losses_of_windows(evaluator, tokens, chosen, n, last, progress)
            for n in sorted({*lengths, *further})
        }
    return WindowLosses(chosen, last, losses)


def evaluate_by_length(
    model: nn.Module,
    tokens: Tokens,
    lengths: Sequence[int],
    *,
    last: int | None = None,
    windows: int = 128,
    protocol: Protocol = "same-targets",
    context: Context = "document",
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[LengthLoss]:
    """Loss and perplexity at each length, in the order of `lengths`.

    lengths:  tokens of input that the model sees.
    last:     number of predicted tokens at the end of a window; default: `default_last(lengths)`.
    windows:  maximum number of windows; their targets do not overlap.
    protocol: "same-targets": one set of windows, so losses at all lengths are of the same tokens.
              "paper": each length has its own windows, consecutive across documents, with min(last, length)
              targets; losses at different lengths are then of different tokens.
    context:  "document" or "stream", for "same-targets".
    """
    if protocol == "same-targets":
        losses = losses_by_length(
            model,
            tokens,
            lengths,
            last=last,
            windows=windows,
            context=context,
            batch_tokens=batch_tokens,
            progress=progress,
        )
        return [losses.at(n) for n in lengths]
    last = num_targets(lengths, last, windows, protocol, context)
    with evaluating(model, batch_tokens=batch_tokens) as evaluator:
        return [
            length_loss(evaluator, tokens, consecutive(tokens, n, windows), n, min(last, n), progress)
            for n in lengths
        ]


def length_loss(
    evaluator: Evaluator, tokens: Tokens, windows: Windows, length: int, last: int, progress: Progress | None
) -> LengthLoss:
    """Mean loss of the windows at one length, with its standard error."""
    return _length_loss(
        windows, length, last, losses_of_windows(evaluator, tokens, windows, length, last, progress)
    )


def losses_of_windows(
    evaluator: Evaluator, tokens: Tokens, windows: Windows, length: int, last: int, progress: Progress | None
) -> np.ndarray:
    """Loss of every target of the windows at one length [n, last]."""
    parts = []
    size = evaluator.batch_size(length, last)
    for start in range(0, len(windows), size):
        ids = windows.ids(tokens, length, slice(start, start + size))
        parts.append(evaluator.losses(ids, last))
        if progress is not None:
            progress(length, len(ids))
    return np.concatenate(parts)


def _length_loss(windows: Windows, length: int, last: int, losses: np.ndarray) -> LengthLoss:
    means = losses.astype(np.float64).mean(1)
    return LengthLoss.of(length, means, windows.documents, windows.ends, last)


def default_last(lengths: Sequence[int]) -> int:
    """Targets per window by default: a quarter of the shortest length, so that most of it is context; at most 256."""
    return max(1, min(DEFAULT_LAST, min(lengths) // 4))


def num_targets(lengths: Sequence[int], last: int | None, windows: int, protocol: str, context: str) -> int:
    """Number of targets per window; raises for settings that cannot be evaluated."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: give at least one, each 1 or more")
    if windows < 1:
        raise ValueError(f"windows={windows}: there is nothing to evaluate")
    if protocol not in ("same-targets", "paper"):
        raise ValueError(f'protocol="{protocol}", expected "same-targets" or "paper"')
    if context not in ("document", "stream"):
        raise ValueError(f'context="{context}", expected "document" or "stream"')
    if protocol == "paper":
        last = DEFAULT_LAST if last is None else last
    elif last is None:
        last = default_last(lengths)
    elif last > min(lengths):
        raise ValueError(
            f"last={last} is more than the shortest length {min(lengths)}: the same tokens could not be "
            f"predicted at every length"
        )
    if last < 1:
        raise ValueError(f"last={last}: there is nothing to predict")
    return last
