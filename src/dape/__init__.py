"""Attention scores as feature maps: position encodings × score processors, for PyTorch.

Shapes everywhere: B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head width, W convolution
width, k kernel size. Words: *scores* before the softmax, *weights* after, *bias* additive from positions,
*positions* integer places passed as data, *visible* who sees whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dape.methods import Method, all_methods, parse_method
from dape.ops.score_conv_attention import ConvWeights, DistanceBias, TileBias, Visible, score_conv_attention
from dape.positions import POSITIONS, Places, PositionEncoding, randomized_positions
from dape.scores import SCORES, PlainScores, ScoreConv, ScoreProcessor

if TYPE_CHECKING:
    from dape import models as models
    from dape.inspection import inspect as inspect

__version__ = "0.1.0"

__all__ = [
    "POSITIONS",
    "SCORES",
    "ConvWeights",
    "DistanceBias",
    "Method",
    "Places",
    "PlainScores",
    "PositionEncoding",
    "ScoreConv",
    "ScoreProcessor",
    "TileBias",
    "Visible",
    "all_methods",
    "parse_method",
    "randomized_positions",
    "score_conv_attention",
]


# What needs more than torch is imported when it is first named.
LAZY = {"models": ("dape.models", None), "inspect": ("dape.inspection", "inspect")}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'dape' has no attribute '{name}'")
    import importlib

    module, attribute = LAZY[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)
