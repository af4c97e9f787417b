"""Processes, devices and precision: one process, or many under torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dape.devices import BF16_WORKAROUND, cpu_multiplies, find_device
from dape.training.config import LoopSettings

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
        """Wrap the model such that gradients are averaged over processes."""
        if self.kind == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model)
        if self.kind == "fsdp":
            return shard(model)
        return model

    def release(self, wrapped: nn.Module) -> None:
        """Release the result of `wrap` before the process group is destroyed.

        DDP's reducer must not hold the last reference to the process group: it would destroy the group while it holds
        the interpreter's lock, join gloo's threads, and deadlock if one of those needs the lock.
        """
        if self.kind == "ddp":
            module: Any = wrapped
            module.reducer = module.logger = None

    @contextlib.contextmanager
    def exchange(self, wrapped: nn.Module, wanted: bool) -> Iterator[None]:
        """Context of a backward pass that exchanges gradients only if `wanted`: once per step is enough."""
        module: Any = wrapped
        if self.kind == "fsdp":
            module.set_requires_gradient_sync(wanted)
        with module.no_sync() if self.kind == "ddp" and not wanted else contextlib.nullcontext():
            yield

    def total(self, values: Tensor) -> Tensor:
        """Sum over processes."""
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
    """Shard the model's parameters over processes (FSDP2), block by block."""
    from torch.distributed.fsdp import fully_shard

    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module)
    fully_shard(model)
    return model


@contextlib.contextmanager
def processes(settings: LoopSettings) -> Iterator[Parallel]:
    """Context with a process group under torchrun, or with this process alone."""
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


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast context of a forward pass; parameters stay in float32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def check_precision(precision: str, device: torch.device) -> None:
    """Raise, with advice, if the precision cannot run; tried in a subprocess, which may crash."""
    if precision == "fp32":
        return
    if device.type == "cuda":
        if precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise ValueError(f"{torch.cuda.get_device_name(device)} has no bfloat16: use --precision fp16")
        return
    if device.type == "cpu" and not cpu_multiplies(DTYPES[precision]):
        remedy = (
            f", or set {BF16_WORKAROUND} in the environment before starting"
            if precision == "bf16" and "ONEDNN_MAX_CPU_ISA" not in os.environ
            else ""
        )
        raise ValueError(
            f"a {precision} matrix product ends the process on this CPU (tried in a subprocess): "
            f"use --precision fp32{remedy}"
        )
