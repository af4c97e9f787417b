"""Attention with its scores convolved across heads and neighbouring keys: one function, several backends."""

from dape.ops.score_conv_attention.api import score_conv_attention
from dape.ops.score_conv_attention.types import Bias, ConvWeights, DistanceBias, TileBias, Visible

__all__ = ["Bias", "ConvWeights", "DistanceBias", "TileBias", "Visible", "score_conv_attention"]
