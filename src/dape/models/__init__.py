"""Models: a decoder as a Hugging Face PreTrainedModel, a bidirectional encoder, presets. Needs `dape[models]`.

Importing this package registers the models with transformers' Auto classes.
"""

from __future__ import annotations

import transformers

from dape.models import decoder
from dape.models.attention import Attention, Context
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
from dape.models.remote_code import ENTRIES

__all__ = [
    "PRESETS", "Attention", "Context", "DapeConfig", "DapeForCausalLM", "DapeForSequenceClassification",
    "DapeForTokenClassification", "DapeModel", "Encoder", "export", "preset",
]  # fmt: skip

for _auto, _name in ENTRIES.items():
    _key = "dape" if _auto == "AutoConfig" else DapeConfig
    getattr(transformers, _auto).register(_key, getattr(decoder, _name), exist_ok=True)
