"""Attention whose scores are processed by a program: one function, several backends."""

from dape.ops.score_attention.api import attention, attention_weights
from dape.ops.score_attention.program import PLAIN, ScoreProgram, Stage, conv_program
from dape.ops.score_attention.types import Bias, DistanceBias, SeparableBias, TileBias, Visible

__all__ = [
    "PLAIN", "Bias", "DistanceBias", "ScoreProgram", "SeparableBias", "Stage", "TileBias", "Visible",
    "attention", "attention_weights", "conv_program",
]  # fmt: skip
