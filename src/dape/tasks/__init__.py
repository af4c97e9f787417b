"""Generated tasks: the Chomsky-hierarchy benchmark (CHE) for encoders, recall and retrieval for decoders.

A task draws batches by vectorised code (`sample`), and solves one input in plain Python (`solve`); tests compare the two.
"""

from dape.tasks.base import IGNORED, ChomskyTask, DecoderTask, Examples, Protocol, Task, generator_for
from dape.tasks.registry import TASKS, build_task

__all__ = [
    "IGNORED",
    "TASKS",
    "ChomskyTask",
    "DecoderTask",
    "Examples",
    "Protocol",
    "Task",
    "build_task",
    "generator_for",
]
