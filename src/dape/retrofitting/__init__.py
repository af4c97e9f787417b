"""Retrofitting of pretrained models: add score processors and position encodings, train, save and remove them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dape.retrofitting.attach import adapter_parameters, remove_retrofit, retrofit, set_trainable
    from dape.retrofitting.files import load_adapter, load_retrofitted, save_adapter
    from dape.retrofitting.matching import LayerMatching
    from dape.retrofitting.tuning import parameter_groups

__all__ = [
    "LayerMatching", "adapter_parameters", "load_adapter", "load_retrofitted", "parameter_groups",
    "remove_retrofit", "retrofit", "save_adapter", "set_trainable",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and the settings do not need it.
    if name in __all__:
        for module in ("attach", "files", "matching", "tuning"):
            if hasattr(found := import_module(f"dape.retrofitting.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module 'dape.retrofitting' has no attribute '{name}'")
