"""Layer by layer: each retrofitted attention learns what the base's attention gives for the base's own input.

A layer with other positions is asked for one thing, the output that the base's layer has for the same hidden states. The
layers do not wait for each other, nothing is propagated through the depth of the model, and the output layer over the
vocabulary is not computed at all: a step costs a fraction of one of language modelling and says more (after the attention
transfer of Zhang et al. 2024, "LoLCATs").
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
    """Inputs of any length as windows that the base can read: of its own length, each begun half a window later.

    So a token is known by what the base says of it with half a window or more before it, and a retrofitted model learns
    at lengths that the base cannot read that what lies further back changes nothing.
    """

    def __init__(self, length: int) -> None:
        self.length, self.step = length, max(1, length // 2)

    def windows(self, ids: Tensor) -> Tensor:
        """[B · n, length] of ids [B, T]; those that are not longer are one window."""
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
        """[B, T, …] of values [B · n, length, …]: each token by its latest half window, the first window whole."""
        if len(values) == batch_size:
            return values
        values = values.unflatten(0, (batch_size, -1))
        return torch.cat([values[:, 0], values[:, 1:, -self.step :].flatten(1, 2)], 1)

    def positions(self, share: float, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Random places in the later half of a window [n], and the places in the input that they are, window by window."""
        half = num_tokens if num_tokens <= self.length else self.step
        first = 0 if num_tokens <= self.length else self.length - half
        places = first + torch.randperm(half)[: max(1, round(share * half))]
        starts = torch.arange(0, max(1, num_tokens - self.length + 1), self.step)
        return places, (starts[:, None] + places).flatten()


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a retrofitted model, or of one of ours, first layer first."""
    return retrofitted_layers(model) or [
        module for module in model.modules() if isinstance(module, Attention)
    ]


class LayerMatching:
    """Loss of a retrofitted model's attention layers against those of its base, on the same tokens.

    length: of the windows that the base reads; longer inputs are read in overlapping ones.
    """

    def __init__(self, model: nn.Module, teacher: PreTrainedModel, *, length: int | None = None) -> None:
        self.model, self.teacher = inner_model(model), teacher
        self.reading = None if length is None else Overlapping(length)
        names = {id(module): name for name, module in self.model.named_modules()}
        self.layers = attention_layers(self.model)
        self.taught = [teacher.get_submodule(names[id(layer)]) for layer in self.layers]

    def loss(self, ids: Tensor) -> Tensor:
        """Mean over layers of |out − taught|² / |taught|², of ids [B, T]."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        with torch.no_grad(), _watched(self.taught, inputs, outputs):
            windows = ids if self.reading is None else self.reading.windows(ids)
            self.teacher.base_model(input_ids=windows, use_cache=False)
        if self.reading is not None:
            inputs, outputs = (
                [self.reading.rows(value, len(ids)) for value in values] for values in (inputs, outputs)
            )
        found: list[Tensor] = []
        with _led(self.layers, inputs, outputs, found):
            self.model.base_model(input_ids=ids, use_cache=False)
        errors = [
            (out - taught).square().mean() / taught.square().mean()
            for out, taught in zip(found, outputs, strict=True)
        ]
        return torch.stack(errors).mean()


@contextlib.contextmanager
def _watched(layers: list[nn.Module], inputs: list[Tensor], outputs: list[Tensor]) -> Iterator[None]:
    """Keep the hidden states that attention layers read, and what they give."""

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
def _led(
    layers: list[nn.Module], inputs: list[Tensor], outputs: list[Tensor], found: list[Tensor]
) -> Iterator[None]:
    """Give attention layers those inputs, keep their outputs, and let the model go on with the outputs given."""
    place = {id(layer): index for index, layer in enumerate(layers)}

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        led = inputs[place[id(module)]]
        return ((led, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": led})

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        own = output[0] if isinstance(output, tuple) else output
        found.append(cast(Tensor, own))
        led = outputs[place[id(module)]]
        return (led, *output[1:]) if isinstance(output, tuple) else led

    # First, so that what reads the hidden states before the layer (token states of encodings) reads these.
    handles = [layer.register_forward_pre_hook(before, with_kwargs=True, prepend=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
