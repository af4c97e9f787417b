"""Two ways to store a run's tensors: gathered into one file, or each process its own part.

Both are safetensors, never pickles, and both continue on any number of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from dape.training.checkpoint import Checkpoints, read_tensors
from dape.training.parallel import Parallel
from dape.training.state import (
    load_model_tensors,
    load_optimizer_tensors,
    model_tensors,
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

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer, parallel: Parallel) -> None: ...


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

    def load(self, path: Path, model: nn.Module, optimizer: Optimizer, parallel: Parallel) -> None:
        load_model_tensors(model, read_tensors(path, "model"))
        load_optimizer_tensors(model, optimizer, read_tensors(path, "optimizer"))


STORAGES: dict[str, Storage] = {"whole": Whole()}
