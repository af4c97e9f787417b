"""Layer-wise matching: each retrofitted attention layer learns the output of the base's layer for the base's input.

The target of a layer with other positions is the output of the base's layer for the same hidden states. Layers train
independently, nothing is propagated through the depth of the model, and the output layer over the vocabulary is not
computed: a step costs a fraction of a language modelling step and carries more signal (after the attention transfer of
Zhang et al. 2024, "LoLCATs").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
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
        inputs: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}
        errors: list[Tensor] = []

        def watch(number: int) -> Callable:
            def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
                inputs[number] = args[0] if args else kwargs["hidden_states"]
                outputs[number] = _states(output)

            return after

        def give(number: int) -> Callable:
            def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
                given = inputs[number]
                return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

            return before

        def compare(number: int) -> Callable:
            def after(module: nn.Module, args: Any, output: Any) -> Any:
                taught = outputs[number]
                errors.append((_states(output) - taught).square().mean() / taught.square().mean())
                return (taught, *output[1:]) if isinstance(output, tuple) else taught

            return after

        with torch.no_grad(), ExitStack() as stack:
            for number, layer in enumerate(self.taught):
                stack.enter_context(layer.register_forward_hook(watch(number), with_kwargs=True))
            self.teacher.base_model(input_ids=ids, use_cache=False)
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                # Before other hooks on the layer's input: token states of encodings are of what the base's layer reads.
                hook = layer.register_forward_pre_hook(give(number), with_kwargs=True, prepend=True)
                stack.enter_context(hook)
                stack.enter_context(layer.register_forward_hook(compare(number)))
            self.model.base_model(input_ids=ids, use_cache=False)
        return torch.stack(errors).mean()


def _states(output: Any) -> Tensor:
    """The hidden states that an attention layer gives, which may come with its weights."""
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)
