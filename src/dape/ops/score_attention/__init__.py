"""Attention with its scores convolved across heads and neighbouring keys: one function, several backends."""

from dape.ops.score_attention.api import attention
from dape.ops.score_attention.types import Bias, ConvWeights, DistanceBias, TileBias, Visible

__all__ = ["Bias", "ConvWeights", "DistanceBias", "TileBias", "Visible", "attention"]
