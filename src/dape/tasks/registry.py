"""Registry of the tasks by name."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from dape.tasks import (
    context_free,
    context_sensitive,
    recall,
    regular,
    retrieval,
    search,
    sequences,
    states,
)
from dape.tasks.base import Task

MODULES = (regular, context_free, context_sensitive, recall, sequences, search, retrieval, states)
# The classes of these modules that can draw, by name.
TASKS: dict[str, type[Task]] = {
    kind.name: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Task)
    and kind.__module__ == module.__name__
    and not inspect.isabstract(kind)
}

# Accepted values of an option by type, and their description; other types are checked by the task.
KINDS: dict[Any, tuple[type, str]] = {
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    NoneType: (NoneType, "None"),
}


def build_task(name: str, **options: Any) -> Task:
    """Build a task by name; a wrong name or option raises and lists the valid ones."""
    if name not in TASKS:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), TASKS, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ValueError(f'unknown task "{name}"; {hint}the tasks are {", ".join(TASKS)}')
    known = [option.name for option in fields(TASKS[name])]
    for option in options:
        if option not in known:
            raise ValueError(
                f'"{name}" has no option "{option}"; it has {", ".join(known) if known else "none"}'
            )
    hints = get_type_hints(TASKS[name])
    for option, value in options.items():
        kinds = [kind for kind in get_args(hints[option]) or (hints[option],) if kind in KINDS]
        if kinds and not any(isinstance(value, KINDS[kind][0]) for kind in kinds):
            wanted = " or ".join(KINDS[kind][1] for kind in kinds)
            raise ValueError(f'option {option} of "{name}" is {wanted}, got {value!r}')
    return TASKS[name](**options)
