"""Regular tasks of the Chomsky-hierarchy benchmark: a finite automaton that reads the input once solves each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dape.tasks.base import ChomskyTask


@dataclass(frozen=True)
class EvenPairs(ChomskyTask):
    """Is the number of neighbours that differ even (0) or odd (1)?

    >>> EvenPairs().solve([0, 1, 1, 0, 1])
    [1]
    """

    input_size, output_size, level = 2, 2, "regular"

    def solve(self, inputs: Sequence[int]) -> list[int]:
        unequal = [i for i in range(1, len(inputs)) if inputs[i] != inputs[i - 1]]
        return [len(unequal) % 2]


@dataclass(frozen=True)
class ModularArithmetic(ChomskyTask):
    """The value modulo 5 of digits joined by +, − and × (tokens 5, 6, 7), × first; the length is odd.

    An even length gives inputs that are one shorter. Token 8, a blank, is in the vocabulary but never drawn.

    >>> ModularArithmetic().solve([1, 6, 2, 7, 3])
    [0]
    """

    input_size, output_size, level = 9, 5, "regular"

    PLUS, MINUS, TIMES = 5, 6, 7

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        digits = generator.integers(0, 5, (batch, (length + 1) // 2))
        operators = generator.integers(self.PLUS, self.TIMES + 1, (batch, digits.shape[1] - 1))
        inputs = np.empty((batch, 2 * digits.shape[1] - 1), dtype=np.int64)
        inputs[:, ::2], inputs[:, 1::2] = digits, operators
        return inputs

    def solve(self, inputs: Sequence[int]) -> list[int]:
        text = "".join("01234+-*"[token] for token in inputs)
        return [eval(text) % 5]


@dataclass(frozen=True)
class ParityCheck(ChomskyTask):
    """Is the number of ones even (0) or odd (1)?

    >>> ParityCheck().solve([1, 0, 1, 1])
    [1]
    """

    input_size, output_size, level = 2, 2, "regular"

    def solve(self, inputs: Sequence[int]) -> list[int]:
        odd = False
        for bit in inputs:
            odd = odd != bool(bit)
        return [int(odd)]


@dataclass(frozen=True)
class CycleNavigation(ChomskyTask):
    """Final state on a cycle of five states, from state 0, after steps back (0), rests (1) and steps forward (2).

    >>> CycleNavigation().solve([2, 2, 1, 0, 0, 0])
    [4]
    """

    input_size, output_size, level = 3, 5, "regular"

    def solve(self, inputs: Sequence[int]) -> list[int]:
        state = 0
        for step in inputs:
            state = {0: (4, 0, 1, 2, 3), 1: (0, 1, 2, 3, 4), 2: (1, 2, 3, 4, 0)}[step][state]
        return [state]
