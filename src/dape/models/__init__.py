"""Models: a decoder as a Hugging Face PreTrainedModel, a bidirectional encoder, presets. Needs `dape[models]`.

Importing this package registers the models with transformers' Auto classes.
"""

from __future__ import annotations

from dape.models.attention import Attention, Context
from dape.models.auto import register
from dape.models.config import DapeConfig
from dape.models.decoder import (
    DapeForCausalLM,
    DapeForSequenceClassification,
    DapeForTokenClassification,
    DapeModel,
)
from dape.models.encoder import Encoder
from dape.models.export import export
from dape.models.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Attention",
    "Context",
    "DapeConfig",
    "DapeForCausalLM",
    "DapeForSequenceClassification",
    "DapeForTokenClassification",
    "DapeModel",
    "Encoder",
    "export",
    "preset",
]

register()
