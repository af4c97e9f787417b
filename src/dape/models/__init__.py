"""Models: a decoder that is a Hugging Face citizen, a bidirectional encoder, presets. Needs `dape[models]`."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dape.models.attention import Attention
from dape.models.config import DapeConfig
from dape.models.decoder import DapeForCausalLM, DapeModel
from dape.models.encoder import Encoder
from dape.models.presets import PRESETS, preset

__all__ = ["PRESETS", "Attention", "DapeConfig", "DapeForCausalLM", "DapeModel", "Encoder", "preset"]

AutoConfig.register("dape", DapeConfig)
AutoModel.register(DapeConfig, DapeModel)
AutoModelForCausalLM.register(DapeConfig, DapeForCausalLM)
