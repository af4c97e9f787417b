"""Attention scores as feature maps: position encodings × score processors, for PyTorch.

Shapes everywhere: B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head_dim, W convolution
width, k kernel size. Words: *scores* before the softmax, *weights* after, *bias* additive from positions,
*positions* integer positions passed as data, *visible* the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dape import models as models
    from dape.inspection import inspect as inspect
    from dape.lab.api import evaluate as evaluate
    from dape.lab.api import train as train
    from dape.lab.compare import compare as compare
    from dape.lab.comparison import load_comparison as load_comparison
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
    from dape.retrofitting import load_adapter, load_retrofitted, remove_retrofit, retrofit, save_adapter
    from dape.retrofitting.adapt import adapt as adapt
    from dape.scores import SCORES, PlainScores, ScoreConv, ScoreProcessor

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


# Imported on first access: the command line starts without torch, and most of these need more than torch.
NAMES = {
    "dape.inspection": ("inspect",),
    "dape.lab.api": ("evaluate", "train"),
    "dape.lab.compare": ("compare",),
    "dape.lab.comparison": ("load_comparison",),
    "dape.layers": ("Cache", "ScoreAttention"),
    "dape.methods": ("Method", "all_methods", "parse_method", "register_position", "register_scores"),
    "dape.ops.score_attention": (
        *("DistanceBias", "ScoreProgram", "SeparableBias", "Stage", "TileBias", "Visible"),
        *("attention", "attention_weights"),
    ),
    "dape.positions": ("POSITIONS", "PositionEncoding", "Positions", "randomized_positions"),
    "dape.retrofitting": (
        *("load_adapter", "load_retrofitted", "remove_retrofit", "retrofit", "save_adapter"),
    ),
    "dape.retrofitting.adapt": ("adapt",),
    "dape.scores": ("SCORES", "PlainScores", "ScoreConv", "ScoreProcessor"),
}
_MODULES = {name: module for module, names in NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return globals()[name]
    if name in ("layers", "methods", "models", "ops", "positions", "scores"):
        return importlib.import_module(f"dape.{name}")
    raise AttributeError(f"module 'dape' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "models"})
