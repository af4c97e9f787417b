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

from dape.models.attention import Attention
from dape.retrofitting.attach import inner_model, retrofitted_layers


class Overlapping:
    """Overlapping windows of the base's own length, with a stride of half a window, over inputs of any length.

    The target of a token is then the base's output with at least half a window of context, and at lengths beyond the
    base's a retrofitted model learns to ignore tokens further back.
    """

    def __init__(self, length: int) -> None:
        self.length, self.step = length, max(1, length // 2)

    def windows(self, ids: Tensor) -> Tensor:
        """Windows [B · n, length] of ids [B, T]; inputs up to `length` are one window."""
        num_tokens = ids.shape[1]
        if num_tokens <= self.length:
            return ids
        if (num_tokens - self.length) % self.step:
            raise ValueError(
                f"{num_tokens} tokens are not windows of {self.length}, each begun {self.step} later: train at "
                f"{self.length + (num_tokens - self.length) // self.step * self.step}"
            )
        return ids.unfold(1, self.length, self.step).flatten(0, 1)

    def rows(self, values: Tensor, batch_size: int) -> Tensor:
        """Values [B, T, …] from those of windows [B · n, length, …]: the first window, then later halves of the others."""
        if len(values) == batch_size:
            return values
        values = values.unflatten(0, (batch_size, -1))
        return torch.cat([values[:, 0], values[:, 1:, -self.step :].flatten(1, 2)], 1)

    def positions(self, share: float, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Random indices in the later half of a window [n], and the corresponding indices in the input, window by window."""
        half = num_tokens if num_tokens <= self.length else self.step
        first = 0 if num_tokens <= self.length else self.length - half
        index = first + torch.randperm(half)[: max(1, round(share * half))]
        starts = torch.arange(0, max(1, num_tokens - self.length + 1), self.step)
        return index, (starts[:, None] + index).flatten()


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """Attention modules of a retrofitted model or of one of ours, in order of layers."""
    return retrofitted_layers(model) or [
        module for module in model.modules() if isinstance(module, Attention)
    ]


class LayerMatching:
    """Loss of a retrofitted model's attention layers against those of its base, on the same tokens.

    length: window length of the base; longer inputs are split into overlapping windows.
    """

    def __init__(self, model: nn.Module, teacher: PreTrainedModel, *, length: int | None = None) -> None:
        self.model, self.teacher = inner_model(model), teacher
        self.overlapping = None if length is None else Overlapping(length)
        names = {id(module): name for name, module in self.model.named_modules()}
        self.layers = attention_layers(self.model)
        self.taught = [teacher.get_submodule(names[id(layer)]) for layer in self.layers]

    def loss(self, ids: Tensor) -> Tensor:
        """Mean over layers of |out − taught|² / |taught|², for ids [B, T]."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.no_grad(), _watched(self.taught, inputs, outputs):
            windows = ids if self.overlapping is None else self.overlapping.windows(ids)
            self.teacher.base_model(input_ids=windows, use_cache=False)
        if self.overlapping is not None:
            inputs, outputs = (
                [self.overlapping.rows(value, len(ids)) for value in values] for values in (inputs, outputs)
            )
        student_outputs: list[Tensor] = []
        with _replaced(self.layers, inputs, outputs, student_outputs):
            self.model.base_model(input_ids=ids, use_cache=False)
        errors = [
            (out - taught).square().mean() / taught.square().mean()
            for out, taught in zip(student_outputs, outputs, strict=True)
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
