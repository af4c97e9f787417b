"""Generated tasks: the Chomsky-hierarchy benchmark (CHE) for encoders, recall and retrieval for decoders.

A task draws inputs by vectorised code (`draw`), and solves each in plain Python (`solve`).
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
