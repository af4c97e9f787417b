"""Training: a loop for any task that resumes automatically and exactly. Needs `dape[lab]`.

config      settings, recipes, configuration files
loop        `fit`: optimizer, schedule, divergence, signals
checkpoint  saving and loading, in files with checksums
parallel    processes, devices, precision
display     metrics.jsonl, progress
trackers    TensorBoard, Weights & Biases, Trackio, MLflow
run         language models: `train`, `load_run`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dape.training.config import (
    DiskFull,
    Diverged,
    FitResult,
    LoopSettings,
    TrainConfig,
    TrainingStopped,
    recipe,
)
from dape.training.loop import TrainingTask, derive_seed, fit, initialise

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import, and the loop does not need it.
    if name in ("Run", "load_run", "train"):
        import dape.training.run

        return getattr(dape.training.run, name)
    raise AttributeError(f"module 'dape.training' has no attribute '{name}'")
