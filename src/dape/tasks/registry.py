"""Registry of the tasks by name."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from dape.settings import check_choice, shown, type_hints, type_problem
from dape.tasks import context_free, context_sensitive, recall, regular, retrieval, search, sequences, states
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


def build_task(name: str, **options: Any) -> Task:
    """Build a task by name; a wrong name or option raises and lists the valid ones."""
    check_choice("task", name, TASKS)
    known, hints = [option.name for option in fields(TASKS[name])], type_hints(TASKS[name])
    for option, value in options.items():
        if option not in known:
            raise ValueError(f'"{name}" has no option "{option}"; it has {", ".join(known) or "none"}')
        if problem := type_problem(value, hints[option]):
            raise ValueError(f'option {option}={shown(value)} of "{name}"{problem}')
    return TASKS[name](**options)
