"""Model and optimizer as named tensors, whole whatever they are shared out over, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def model_tensors(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Parameters and buffers by name. Every process must call it; only those with `keep` get the result."""
    return _gather(iter(model.state_dict().items()), keep)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Tensor]:
    """The optimizer's tensors, named parameter:key. Every process must call it."""
    return _gather(optimizer_entries(model, optimizer), keep)


def optimizer_entries(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}:{key}", value


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put the tensors into the model in place; other names or shapes are an error that names one."""
    own = model.state_dict()
    if differing := sorted(own.keys() ^ tensors.keys()):
        raise ValueError(
            f"the checkpoint is of another model: {differing[0]} is in only one of them "
            f"({len(differing)} such in all); train in another folder"
        )
    for name, target in own.items():
        if target.shape != tensors[name].shape:
            raise ValueError(
                f"the checkpoint is of another model: {name} has shape {tuple(tensors[name].shape)} there "
                f"and {tuple(target.shape)} here; train in another folder"
            )
        with torch.no_grad():
            target.copy_(_like(tensors[name], target))


def load_optimizer_tensors(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for entry, value in tensors.items():
        name, key = entry.rsplit(":", 1)
        parameter = parameters[name]
        moment = value.shape == parameter.shape and value.dim() > 0
        placed = _like(value, parameter) if moment else value.to(parameter.device)
        optimizer.state[parameter][key] = placed


def _gather(entries: Iterator[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in entries:
        whole = tensor.detach()
        # A shared-out tensor is put together by all processes, wanted here or not.
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        if keep:
            tensors[name] = whole.cpu()
    return tensors


def _like(whole: Tensor, target: Tensor) -> Tensor:
    """The tensor on the target's device, shared out as the target is."""
    if hasattr(target, "placements"):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements)  # type: ignore[attr-defined]  # a DTensor
    return whole.to(target.device)
