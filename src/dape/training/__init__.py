"""Training: a loop for any task that resumes by itself and loses nothing. Needs `dape[lab]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dape.training.loop import fit
from dape.training.seeds import derive_seed, initialise
from dape.training.settings import DiskFull, Diverged, FitResult, LoopSettings, TrainingStopped
from dape.training.task import TrainingTask

if TYPE_CHECKING:
    from dape.training.config import TrainConfig, recipe
    from dape.training.run import Run, load_run, train

__all__ = [
    "DiskFull",
    "Diverged",
    "FitResult",
    "LoopSettings",
    "Run",
    "TrainConfig",
    "TrainingStopped",
    "TrainingTask",
    "derive_seed",
    "fit",
    "initialise",
    "load_run",
    "recipe",
    "train",
]

# These need models and data; the loop alone starts without them.
LATER = {
    "TrainConfig": "config",
    "recipe": "config",
    "Run": "run",
    "load_run": "run",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in LATER:
        return getattr(importlib.import_module(f"dape.training.{LATER[name]}"), name)
    raise AttributeError(f"module 'dape.training' has no attribute '{name}'")
