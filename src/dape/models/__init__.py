"""Models: a decoder that is a Hugging Face citizen, a bidirectional encoder, presets. Needs `dape[models]`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dape.models.attention import Attention
    from dape.models.config import DapeConfig
    from dape.models.decoder import DapeForCausalLM, DapeModel
    from dape.models.encoder import Encoder
    from dape.models.export import export
    from dape.models.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Attention",
    "DapeConfig",
    "DapeForCausalLM",
    "DapeModel",
    "Encoder",
    "export",
    "preset",
]

# Imported when first named: the configuration must be importable while transformers itself still loads.
_HOMES = {
    "PRESETS": "presets",
    "Attention": "attention",
    "DapeConfig": "config",
    "DapeForCausalLM": "decoder",
    "DapeModel": "decoder",
    "Encoder": "encoder",
    "export": "export",
    "preset": "presets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dape.models' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"dape.models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
