"""Registration with transformers' Auto classes, on import of `dape.models`."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from dape.models.config import DapeConfig
from dape.models.decoder import (
    DapeForCausalLM,
    DapeForSequenceClassification,
    DapeForTokenClassification,
    DapeModel,
)


def register() -> None:
    """Register model type "dape" with the Auto classes."""
    AutoConfig.register("dape", DapeConfig, exist_ok=True)
    AutoModel.register(DapeConfig, DapeModel, exist_ok=True)
    AutoModelForCausalLM.register(DapeConfig, DapeForCausalLM, exist_ok=True)
    AutoModelForSequenceClassification.register(DapeConfig, DapeForSequenceClassification, exist_ok=True)
    AutoModelForTokenClassification.register(DapeConfig, DapeForTokenClassification, exist_ok=True)
