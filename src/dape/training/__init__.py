"""Training: a loop for any task that resumes by itself and loses nothing. Needs `dape[lab]`."""

from dape.training.loop import fit
from dape.training.seeds import derive_seed, initialise
from dape.training.settings import DiskFull, Diverged, FitResult, LoopSettings, TrainingStopped
from dape.training.task import TrainingTask

__all__ = [
    "DiskFull",
    "Diverged",
    "FitResult",
    "LoopSettings",
    "TrainingStopped",
    "TrainingTask",
    "derive_seed",
    "fit",
    "initialise",
]
