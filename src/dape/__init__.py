"""Attention scores as feature maps: position encodings × score processors, for PyTorch.

Shapes everywhere: B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head width, W convolution
width, k kernel size. Words: *scores* before the softmax, *weights* after, *bias* additive from positions,
*positions* integer positions passed as data, *visible* the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dape.layers import Cache, ScoreAttention
from dape.methods import Method, all_methods, parse_method, register_position, register_scores
from dape.ops.score_attention import (
    DistanceBias,
    ScoreProgram,
    SeparableBias,
    Stage,
    TileBias,
    Visible,
    attention,
    attention_weights,
)
from dape.positions import POSITIONS, PositionEncoding, Positions, randomized_positions
from dape.scores import SCORES, PlainScores, ScoreConv, ScoreProcessor

if TYPE_CHECKING:
    from dape import models as models
    from dape.inspection import inspect as inspect
    from dape.lab.api import evaluate as evaluate
    from dape.lab.api import train as train
    from dape.lab.compare import compare as compare
    from dape.lab.comparison import load_comparison as load_comparison
    from dape.retrofitting import load_adapter, load_retrofitted, remove_retrofit, retrofit, save_adapter
    from dape.retrofitting.adapt import adapt as adapt

__version__ = "0.2.0"

__all__ = [
    "POSITIONS",
    "SCORES",
    "Cache",
    "DistanceBias",
    "Method",
    "PlainScores",
    "PositionEncoding",
    "Positions",
    "ScoreAttention",
    "ScoreConv",
    "ScoreProcessor",
    "ScoreProgram",
    "SeparableBias",
    "Stage",
    "TileBias",
    "Visible",
    "all_methods",
    "attention",
    "attention_weights",
    "load_adapter",
    "load_retrofitted",
    "parse_method",
    "randomized_positions",
    "register_position",
    "register_scores",
    "remove_retrofit",
    "retrofit",
    "save_adapter",
]


# Imported on first access, because they need more than torch: name → module.
LATER = {
    "adapt": "dape.retrofitting.adapt",
    "compare": "dape.lab.compare",
    "evaluate": "dape.lab.api",
    "load_comparison": "dape.lab.comparison",
    "train": "dape.lab.api",
    "inspect": "dape.inspection",
    "load_adapter": "dape.retrofitting",
    "load_retrofitted": "dape.retrofitting",
    "remove_retrofit": "dape.retrofitting",
    "retrofit": "dape.retrofitting",
    "save_adapter": "dape.retrofitting",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "models":
        return importlib.import_module("dape.models")
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module 'dape' has no attribute '{name}'")
