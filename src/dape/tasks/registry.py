"""The tasks by name."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from dape.tasks.base import Task
from dape.tasks.binary import BinaryAddition, BinaryMultiplication, ComputeSqrt
from dape.tasks.context_free import (
    ModularArithmeticBrackets,
    ReverseString,
    SolveEquation,
    StackManipulation,
)
from dape.tasks.context_sensitive import BucketSort, DuplicateString, MissingDuplicateString, OddsFirst
from dape.tasks.recall import AssociativeRecall, Copy, Induction, Passkey
from dape.tasks.regular import CycleNavigation, EvenPairs, ModularArithmetic, ParityCheck
from dape.tasks.search import BlockSearch, Counting

TASKS: dict[str, type[Task]] = {
    "even_pairs": EvenPairs,
    "modular_arithmetic": ModularArithmetic,
    "parity_check": ParityCheck,
    "cycle_navigation": CycleNavigation,
    "stack_manipulation": StackManipulation,
    "reverse_string": ReverseString,
    "modular_arithmetic_brackets": ModularArithmeticBrackets,
    "solve_equation": SolveEquation,
    "duplicate_string": DuplicateString,
    "missing_duplicate_string": MissingDuplicateString,
    "odds_first": OddsFirst,
    "binary_addition": BinaryAddition,
    "binary_multiplication": BinaryMultiplication,
    "compute_sqrt": ComputeSqrt,
    "bucket_sort": BucketSort,
    "associative_recall": AssociativeRecall,
    "copy": Copy,
    "induction": Induction,
    "passkey": Passkey,
    "block_search": BlockSearch,
    "counting": Counting,
}


def build_task(name: str, **options: Any) -> Task:
    """The task of that name with its options; a wrong name or option raises with the right ones."""
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
    return TASKS[name](**options)
