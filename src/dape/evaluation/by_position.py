"""Loss by position in the evaluation window: where context helps a model, and where it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from dape.data import Tokens
from dape.evaluation.by_length import Progress, num_targets
from dape.evaluation.evaluator import BATCH_TOKENS, evaluating
from dape.evaluation.statistics import clustered_mean
from dape.evaluation.windows import Context, same_targets


@dataclass(frozen=True)
class PositionLoss:
    """Losses by position: losses [windows, length] of the token after 1, 2, … length tokens of input; documents [windows]."""

    length: int
    losses: np.ndarray
    documents: np.ndarray

    def between(self, start: int, stop: int) -> tuple[float, float]:
        """Mean loss with `start` … `stop` − 1 tokens of input, and its standard error over documents."""
        means = self.losses[:, start - 1 : stop - 1].mean(1, dtype=np.float64)
        return clustered_mean(means, np.ones(len(means)), self.documents)

    def doublings(self) -> list[tuple[int, int, float, float]]:
        """(start, stop, loss, error) for 1, 2–3, 4–7, … tokens of input."""
        starts = [1 << n for n in range(self.length.bit_length())]
        stops = [min(2 * start, self.length + 1) for start in starts]
        return [(start, stop, *self.between(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def loss_by_position(
    model: nn.Module,
    tokens: Tokens,
    length: int,
    *,
    windows: int = 64,
    context: Context = "document",
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> PositionLoss:
    """Loss of every token in windows of `length` inputs."""
    num_targets([length], length, windows, "same-targets", context)
    chosen = same_targets(tokens, length, length, windows, context=context)
    parts = []
    with evaluating(model, batch_tokens=batch_tokens) as evaluator:
        size = evaluator.batch_size(length, length)
        for start in range(0, len(chosen), size):
            ids = chosen.ids(tokens, length, slice(start, start + size))
            parts.append(evaluator.losses(ids, length))
            if progress is not None:
                progress(length, len(ids))
    return PositionLoss(length, np.concatenate(parts), chosen.documents)


def position_records(loss: PositionLoss) -> Sequence[dict[str, float]]:
    names = ("start", "stop", "nll", "nll_se")
    return [dict(zip(names, row, strict=True)) for row in loss.doublings()]
