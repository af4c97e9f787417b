"""Layer-wise matching: each retrofitted attention layer learns the output of the base's layer for the base's input.

The target of a layer with other positions is the output of the base's layer for the same hidden states. Layers train
independently, nothing is propagated through the depth of the model, and the output layer over the vocabulary is not
computed: a step costs a fraction of a language modelling step and carries more signal (after the attention transfer of
Zhang et al. 2024, "LoLCATs").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dape.retrofitting.attach import attention_layers, inner_model


class LayerMatching:
    """Loss of a retrofitted model's attention layers against those of its base, on the same tokens."""

    def __init__(self, model: nn.Module, teacher: PreTrainedModel) -> None:
        self.model, self.teacher = inner_model(model), teacher
        names = {id(module): name for name, module in self.model.named_modules()}
        self.layers = attention_layers(self.model)
        self.taught = [teacher.get_submodule(names[id(layer)]) for layer in self.layers]

    def loss(self, ids: Tensor) -> Tensor:
        """Mean over layers of |out − taught|² / |taught|², for ids [B, T]."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.no_grad(), _watched(self.taught, inputs, outputs):
            self.teacher.base_model(input_ids=ids, use_cache=False)
        own: list[Tensor] = []
        with _replaced(self.layers, inputs, outputs, own):
            self.model.base_model(input_ids=ids, use_cache=False)
        errors = [
            (out - taught).square().mean() / taught.square().mean()
            for out, taught in zip(own, outputs, strict=True)
        ]
        return torch.stack(errors).mean()


@contextlib.contextmanager
def _watched(layers: list[nn.Module], inputs: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    """Record inputs and outputs of attention layers."""

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _replaced(
    layers: list[nn.Module], inputs: list[Tensor], outputs: list[Tensor], own_outputs: list[Tensor]
) -> Iterator[None]:
    """Replace inputs and outputs of attention layers by the given ones; append their own outputs to `own_outputs`."""
    layer_index = {id(layer): index for index, layer in enumerate(layers)}

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = inputs[layer_index[id(module)]]
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        own = output[0] if isinstance(output, tuple) else output
        own_outputs.append(cast(Tensor, own))
        given = outputs[layer_index[id(module)]]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    # Prepended, so that other hooks on the layer's input (token states of encodings) see the replaced one.
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
