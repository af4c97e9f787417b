"""Evaluation by length, by position, by recall and by sliding windows, with standard errors over documents."""

import sys
from types import ModuleType
from typing import Any

from dape.evaluate.by_length import (
    LengthLoss,
    WindowLosses,
    evaluate_by_length,
    losses_by_length,
    paired_difference,
)
from dape.evaluate.by_position import PositionLoss, loss_by_position
from dape.evaluate.recall import RecallBins, RecallSlices, recall_lengths, recall_slices
from dape.evaluate.sliding import SlidingLoss, sliding_window
from dape.evaluate.statistics import clustered_mean

__all__ = [
    "LengthLoss",
    "PositionLoss",
    "RecallBins",
    "RecallSlices",
    "SlidingLoss",
    "WindowLosses",
    "clustered_mean",
    "evaluate_by_length",
    "loss_by_position",
    "losses_by_length",
    "paired_difference",
    "recall_lengths",
    "recall_slices",
    "sliding_window",
]


class _Callable(ModuleType):
    """Package that can be called: `dape.evaluate(run)`."""

    def __call__(self, *models: Any, **options: Any) -> Any:
        from dape.lab.api import evaluate

        return evaluate(*models, **options)


sys.modules[__name__].__class__ = _Callable
