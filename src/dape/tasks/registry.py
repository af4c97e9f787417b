"""Registry of the tasks by name."""

from __future__ import annotations

import difflib
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from dape.tasks.base import Task
from dape.tasks.binary import BinaryAddition, BinaryMultiplication, ComputeSqrt
from dape.tasks.context_free import (
    ModularArithmeticBrackets,
    ReverseString,
    SolveEquation,
    StackManipulation,
)
from dape.tasks.context_sensitive import BucketSort, DuplicateString, MissingDuplicateString, OddsFirst
from dape.tasks.recall import AssociativeRecall, Induction, Mqar, Passkey, RecallManyKeys, RecallPowerLaw
from dape.tasks.regular import CycleNavigation, EvenPairs, ModularArithmetic, ParityCheck
from dape.tasks.retrieval import CommonSymbol, Facts, FrequentSymbol, Needles, Phonebook, Variables
from dape.tasks.search import BlockSearch, Counting
from dape.tasks.sequences import Addition, Copy, Reverse, Sort
from dape.tasks.states import A5Words, FlipFlop, S5Words

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
    "recall_many_keys": RecallManyKeys,
    "recall_power_law": RecallPowerLaw,
    "mqar": Mqar,
    "copy": Copy,
    "induction": Induction,
    "passkey": Passkey,
    "block_search": BlockSearch,
    "counting": Counting,
    "needles": Needles,
    "phonebook": Phonebook,
    "variables": Variables,
    "facts": Facts,
    "common_symbol": CommonSymbol,
    "frequent_symbol": FrequentSymbol,
    "flip_flop": FlipFlop,
    "s5_words": S5Words,
    "a5_words": A5Words,
    "reverse": Reverse,
    "sort": Sort,
    "addition": Addition,
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
