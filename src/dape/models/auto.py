"""Our names in the registries of transformers; `dape.models` calls it when it is imported."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dape.models.config import DapeConfig
from dape.models.decoder import DapeForCausalLM, DapeModel


def register() -> None:
    """AutoConfig, AutoModel and AutoModelForCausalLM know "dape"."""
    AutoConfig.register("dape", DapeConfig, exist_ok=True)
    AutoModel.register(DapeConfig, DapeModel, exist_ok=True)
    AutoModelForCausalLM.register(DapeConfig, DapeForCausalLM, exist_ok=True)
