"""Our names in the registries of transformers: the configuration at once, the models when one is configured."""

from __future__ import annotations

from transformers import AutoConfig

from dape.models.config import DapeConfig


def register_config() -> None:
    """AutoConfig knows "dape"; the models follow with the first configuration, when transformers is fully loaded."""
    AutoConfig.register("dape", DapeConfig, exist_ok=True)
    DapeConfig.before_use = staticmethod(register_models)


def register_models() -> None:
    """AutoModel and AutoModelForCausalLM know our classes."""
    from transformers import AutoModel, AutoModelForCausalLM

    from dape.models.decoder import DapeForCausalLM, DapeModel

    AutoModel.register(DapeConfig, DapeModel, exist_ok=True)
    AutoModelForCausalLM.register(DapeConfig, DapeForCausalLM, exist_ok=True)
    DapeConfig.before_use = staticmethod(lambda: None)
