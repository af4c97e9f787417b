"""What the loop trains: a model and its batches, whatever they are made of."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class TrainingTask(Protocol):
    """Language modelling and generated tasks are both this.

    A batch is a tensor, or tensors in tuples, lists and dicts; the loop moves them to the device.
    """

    @property
    def model(self) -> nn.Module:
        """The model to train; the loop changes its parameters in place."""

    def batch(self, step: int) -> Any:
        """The whole batch of a step, on the CPU: a function of the task's seed and the step alone."""

    def shard(self, batch: Any, rank: int, world: int) -> Any:
        """Part `rank` of `world` parts of the batch, which together make the whole."""

    def size(self, batch: Any) -> int:
        """How many targets the mean loss of this batch, or part of one, is taken over."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss over the targets of the batch; `model` is `self.model`, perhaps wrapped."""


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: move(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [move(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
