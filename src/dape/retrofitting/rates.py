"""Learning rates of a retrofitted model, higher for added parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from dape.retrofitting.attach import adapter_parameters
from dape.retrofitting.settings import ADDED_RATE


def parameter_groups(
    model: nn.Module, learning_rate: float, *, added_rate: float = ADDED_RATE, weight_decay: float = 0.01
) -> list[dict[str, Any]]:
    """Parameter groups of a retrofitted model for any optimizer, such as Trainer's `optimizers`.

    added_rate: factor of the learning rate for added parameters, which have no weight decay; vectors have none either,
                at the usual rate.
    """
    added = {id(value) for value in adapter_parameters(model).values()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    new = [parameter for parameter in trainable if id(parameter) in added]
    own = [parameter for parameter in trainable if id(parameter) not in added]
    groups = [
        {"params": [p for p in own if p.dim() > 1], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() < 2], "lr": learning_rate, "weight_decay": 0.0},
        {"params": new, "lr": added_rate * learning_rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
