"""Two ways to store a run's tensors: gathered into one file, or each process its own part.

Both are safetensors, never pickles, and both continue on any number of processes.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dape.checksums import file_digest
from dape.training.checkpoint import Checkpoints, read_tensors
from dape.training.parallel import Parallel
from dape.training.state import (
    load_model_tensors,
    load_optimizer_tensors,
    model_tensors,
    optimizer_entries,
    optimizer_tensors,
)


class Storage(Protocol):
    """Every process calls both methods."""

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        parallel: Parallel,
    ) -> None: ...

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None: ...


class Whole:
    """The main process gathers everything and writes it."""

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        parallel: Parallel,
    ) -> None:
        tensors = {
            "model": model_tensors(model, keep=parallel.main),
            "optimizer": optimizer_tensors(model, optimizer, keep=parallel.main),
        }
        if parallel.main:
            checkpoints.write(step, tensors, state)

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        load_model_tensors(model, read_tensors(path, "model"))
        load_optimizer_tensors(model, optimizer, read_tensors(path, "optimizer"))


class Sharded:
    """Each process writes its part through torch.distributed.checkpoint; nobody holds the whole."""

    def save(
        self,
        checkpoints: Checkpoints,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        parallel: Parallel,
    ) -> None:
        from torch.distributed import checkpoint as dcp

        if parallel.main:
            checkpoints.begin(step)
        parallel.wait()
        temporary = checkpoints.temporary(step)
        try:
            writer = dcp.HuggingFaceStorageWriter(str(temporary), save_distributed=True)
            with quiet_alone():
                dcp.save(_entries(model, optimizer), storage_writer=writer, no_dist=parallel.world == 1)
            if parallel.main:
                digests = {file.name: file_digest(file) for file in sorted(temporary.glob("*.safetensors"))}
                checkpoints.commit(step, state, digests)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            # The library wraps what went wrong in any process; a full disk should be known as one.
            for cause, _ in getattr(error, "failures", {}).values():
                if isinstance(cause, OSError):
                    raise cause from error
            raise

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed import checkpoint as dcp

        prepare_optimizer(optimizer)
        entries = _entries(model, optimizer)
        try:
            with quiet_alone():
                dcp.load(
                    entries,
                    storage_reader=dcp.HuggingFaceStorageReader(str(path)),
                    no_dist=not dist.is_initialized(),
                )
        except (RuntimeError, dcp.CheckpointException) as error:
            raise ValueError(f"{path} does not fit this model ({error}): train in another folder") from error


def prepare_optimizer(optimizer: Optimizer) -> None:
    """Have the optimizer make its state, for loading into: a step at learning rate 0 moves and decays nothing."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _entries(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Model and optimizer as they are shared out; a scalar as a vector of one, which a file can slice."""
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer_entries(model, optimizer)}
    return {name: tensor.view(1) if tensor.dim() == 0 else tensor for name, tensor in tensors.items()}


class quiet_alone(warnings.catch_warnings):
    """torch warns that a lone process saves as one, which is what is wanted."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", module="torch.distributed")
        return entered


STORAGES: dict[str, Storage] = {"whole": Whole(), "sharded": Sharded()}
