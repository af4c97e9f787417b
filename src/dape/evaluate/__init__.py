"""Evaluation by length, by position and by sliding windows, with standard errors over documents."""

from dape.evaluate.by_length import evaluate_by_length
from dape.evaluate.by_position import PositionLoss, loss_by_position
from dape.evaluate.sliding import SlidingScore, sliding_window
from dape.evaluate.statistics import LengthScore, clustered_mean, paired_difference

__all__ = [
    "LengthScore",
    "PositionLoss",
    "SlidingScore",
    "clustered_mean",
    "evaluate_by_length",
    "loss_by_position",
    "paired_difference",
    "sliding_window",
]
