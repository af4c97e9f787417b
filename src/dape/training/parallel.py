"""Processes: one, or many under torchrun, each with its part of every batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dape.devices import find_device
from dape.training.settings import LoopSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """This process among all of them. With one process every method is the identity."""

    kind: str
    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in its place: gradients then are the mean over processes."""
        if self.kind == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model)
        if self.kind == "fsdp":
            return shard(model)
        return model

    @contextlib.contextmanager
    def exchange(self, wrapped: nn.Module, wanted: bool) -> Iterator[None]:
        """Backward passes inside exchange gradients only if wanted: once a step is enough."""
        module: Any = wrapped
        if self.kind == "fsdp":
            module.set_requires_gradient_sync(wanted)
        with module.no_sync() if self.kind == "ddp" and not wanted else contextlib.nullcontext():
            yield

    def total(self, values: Tensor) -> Tensor:
        """The sum over processes."""
        if self.world > 1:
            values = values.to(self.device)
            dist.all_reduce(values)
        return values

    def agree(self, value: T) -> T:
        """The main process's value, in every process."""
        if self.world == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


def shard(model: nn.Module) -> nn.Module:
    """The model, its parameters shared out between processes (FSDP2), a block at a time."""
    from torch.distributed.fsdp import fully_shard

    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module)
    fully_shard(model)
    return model


@contextlib.contextmanager
def processes(settings: LoopSettings) -> Iterator[Parallel]:
    """Join the other processes that torchrun started, for the duration; alone, simply this one."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if settings.distributed == "none":
        if world > 1:
            raise ValueError(
                f"{world} processes were started: pass --distributed ddp, or fsdp for a model too large for one"
            )
        yield Parallel("none", 0, 1, find_device(settings.device))
        return
    if not launched:
        raise ValueError(
            f"--distributed {settings.distributed} needs processes to share the work: start with "
            f"torchrun --nproc-per-node N -m dape train …"
        )
    device = find_device(settings.device, int(os.environ.get("LOCAL_RANK", 0)))
    ours = not dist.is_initialized()
    if ours:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Parallel(settings.distributed, rank, world, device)
    finally:
        if ours:
            dist.destroy_process_group()
