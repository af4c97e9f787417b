"""Evaluation by length, by position, by recall and by sliding windows, with standard errors over documents."""

from dape.evaluation.by_length import (
    LengthLoss,
    WindowLosses,
    evaluate_by_length,
    losses_by_length,
    paired_difference,
)
from dape.evaluation.by_position import PositionLoss, loss_by_position
from dape.evaluation.recall import RecallBins, RecallSlices, recall_lengths, recall_slices
from dape.evaluation.sliding import SlidingLoss, sliding_window
from dape.evaluation.statistics import clustered_mean

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
