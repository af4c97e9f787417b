"""Adding a score convolution to every attention layer of a causal language model of transformers, and removing it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dape.retrofitting.attention import NAME, SCORES
from dape.scores import ScoreConv
from dape.scores.conv import Padding

Model = TypeVar("Model", bound=PreTrainedModel)

# Architectures whose attention passes through transformers' interface with scores that nothing else changes:
# `model_type` → the class of its attention modules. Each is tested; a new one is one line.
ARCHITECTURES = {
    "gpt2": "GPT2Attention",
    "gpt_neox": "GPTNeoXAttention",
    "granite": "GraniteAttention",
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "olmo2": "Olmo2Attention",
    "phi3": "Phi3Attention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
    "starcoder2": "Starcoder2Attention",
}

# Where the model's configuration keeps what was added, so that a saved model says so.
RECORD = "dape_retrofit"


@dataclass(frozen=True)
class Retrofit:
    """What was added: enough to build it again."""

    kernel_size: int
    width: int
    padding: Padding
    num_heads: int
    num_layers: int
    replaced: str = "sdpa"

    @property
    def method(self) -> str:
        return f"dape1x{self.kernel_size}"


def retrofit(
    model: Model,
    method: str = "dape1x3",
    *,
    width: int = 32,
    padding: Padding = "same",
    freeze_base: bool = False,
    zero_init: bool = True,
) -> Model:
    """The same model, every attention layer with a score convolution that begins by changing nothing.

    The model keeps its own positions (rotary or learned), its key/value groups, windows, caches and generation.
    method:  "dape" (kernel 1) or "dape1xK"; the convolution reads the scores of the layer's heads.
    width:   channels between the two convolutions.
    freeze_base: train the convolutions alone; everything else stops requiring gradients.
    zero_init: begin as the unchanged model; False begins from PyTorch's random convolutions.

    Save with `save_adapter`, undo with `remove_retrofit`.
    """
    layers = list(attention_layers(model))
    if is_retrofitted(model):
        raise ValueError(
            "this model is already retrofitted: call dape.remove_retrofit(model) before adding another"
        )
    num_heads = model.config.num_attention_heads
    plan = Retrofit(
        kernel_size(method),
        width,
        padding,
        num_heads,
        len(layers),
        replaced=model.config._attn_implementation or "sdpa",
    )
    if freeze_base:
        model.requires_grad_(False)
    for layer in layers:
        like = next(layer.parameters())
        with torch.device(like.device):
            scores = ScoreConv(
                num_heads,
                width,
                kernel_size=plan.kernel_size,
                bias_channels=False,
                padding=padding,
                zero_init=zero_init,
            )
        # Frozen and quantised weights may have dtypes that convolutions cannot have; then float32 is right.
        layer.add_module(SCORES, scores.to(like.dtype if like.is_floating_point() else torch.float32))
    _switch(model, NAME)
    setattr(model.config, RECORD, asdict(plan))
    # A hook, because setting another implementation later would silently ignore the convolutions.
    model._dape_guard = model.register_forward_pre_hook(_refuse_other_attention)  # type: ignore[assignment]  # a module takes any attribute
    return model


def remove_retrofit(model: Model) -> Model:
    """The model as it was before `retrofit`: convolutions gone, its own attention back, all weights as they are.

    Parameters that `freeze_base=True` froze stay frozen: call `model.requires_grad_(True)` to train them.
    """
    plan = record(model)
    for layer in attention_layers(model):
        delattr(layer, SCORES)
    cast(Any, model._dape_guard).remove()
    del model._dape_guard
    delattr(model.config, RECORD)
    _switch(model, plan.replaced)
    return model


def record(model: PreTrainedModel) -> Retrofit:
    """What `retrofit` added to this model."""
    if not is_retrofitted(model):
        raise ValueError("this model has no score convolution: add it with dape.retrofit(model)")
    return Retrofit(**getattr(model.config, RECORD))


def is_retrofitted(model: PreTrainedModel) -> bool:
    """Whether the convolutions are there; a configuration may tell of some that plain transformers did not load."""
    return any(hasattr(layer, SCORES) for layer in attention_layers(model))


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The convolutions' parameters by their names in the model."""
    return {name: value for name, value in model.named_parameters() if f".{SCORES}." in name}


def attention_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The self-attention modules of a supported model, first layer first; another raises with what is supported."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not isinstance(model, PreTrainedModel) or kind not in ARCHITECTURES:
        raise ValueError(
            f'cannot retrofit "{kind}": pass a causal language model of transformers of one of the types '
            f"{', '.join(ARCHITECTURES)}"
        )
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError(
            f'cannot retrofit a "{kind}" with cross-attention: build it with add_cross_attention=False'
        )
    return (layer for layer in model.modules() if type(layer).__name__ == ARCHITECTURES[kind])


def kernel_size(method: str) -> int:
    """The convolution's size in "dape" or "dape1xK"."""
    match = re.fullmatch(r"dape(?:1x([1-9]\d*))?", method)
    if not match:
        raise ValueError(
            f'method="{method}": a retrofitted model keeps its own positions, so name the convolution alone, '
            f'"dape" (kernel 1) or "dape1x3"'
        )
    return int(match[1] or 1)


def _switch(model: PreTrainedModel, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        raise ValueError(
            f'{type(model).__name__} did not take attn_implementation="{implementation}": its attention does not go '
            f"through transformers' AttentionInterface, which hides the scores; load it with a version that does"
        )


def _refuse_other_attention(model: nn.Module, _: Any) -> None:
    implementation = cast(PreTrainedModel, model).config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f'attn_implementation="{implementation}" hides the scores from the convolutions that dape.retrofit '
            f'added: call model.set_attn_implementation("{NAME}"), or dape.remove_retrofit(model) to drop them'
        )
