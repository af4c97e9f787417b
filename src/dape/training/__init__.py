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
