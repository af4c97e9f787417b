"""Context-sensitive tasks of the Chomsky-hierarchy benchmark that move or compare symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dape.tasks.base import ChomskyTask


@dataclass(frozen=True)
class DuplicateString(ChomskyTask):
    """The bits twice over.

    >>> DuplicateString().solve([0, 1, 1])
    [0, 1, 1, 0, 1, 1]
    """

    input_size = 2
    output_size = 2
    level = "context-sensitive"

    def output_length(self, length: int) -> int:
        return 2 * length

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.integers(0, 2, (batch, length))
        return inputs, np.tile(inputs, 2)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return [*inputs, *inputs]


@dataclass(frozen=True)
class MissingDuplicateString(ChomskyTask):
    """Some bits twice over with one of them hidden (2): which bit? An odd length ends with a blank (3).

    The one input of length 1 is 1, its answer 1.

    >>> MissingDuplicateString().solve([0, 1, 1, 0, 2, 1, 3])
    [1]
    """

    input_size = 4
    output_size = 2
    level = "context-sensitive"

    HIDDEN, BLANK = 2, 3

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if length == 1:
            return np.ones((batch, 1), dtype=np.int64), np.ones((batch, 1), dtype=np.int64)
        inputs = np.full((batch, length), self.BLANK)
        half = length // 2
        inputs[:, : 2 * half] = np.tile(generator.integers(0, 2, (batch, half)), 2)
        hidden = generator.integers(0, 2 * half, (batch, 1))
        answers = np.take_along_axis(inputs, hidden, axis=1)
        np.put_along_axis(inputs, hidden, self.HIDDEN, axis=1)
        return inputs, answers

    def solve(self, inputs: Sequence[int]) -> list[int]:
        if len(inputs) == 1:
            return [1]
        half = len(inputs) // 2
        first, second = inputs[:half], inputs[half : 2 * half]
        other = second[first.index(self.HIDDEN)] if self.HIDDEN in first else first[second.index(self.HIDDEN)]
        return [other]


@dataclass(frozen=True)
class OddsFirst(ChomskyTask):
    """The bits at odd positions, then those at even positions, counted from 0 (so the first bit comes second).

    The original's description counts from 1, but its generator does this.

    >>> OddsFirst().solve([0, 1, 0, 1, 0])
    [1, 1, 0, 0, 0]
    """

    input_size = 2
    output_size = 2
    level = "context-sensitive"

    def output_length(self, length: int) -> int:
        return length

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.integers(0, 2, (batch, length))
        return inputs, np.concatenate([inputs[:, 1::2], inputs[:, ::2]], axis=1)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        odd = [bit for position, bit in enumerate(inputs) if position % 2 == 1]
        even = [bit for position, bit in enumerate(inputs) if position % 2 == 0]
        return odd + even


@dataclass(frozen=True)
class BucketSort(ChomskyTask):
    """The digits 0 to 4 in ascending order.

    >>> BucketSort().solve([3, 0, 4, 0, 1])
    [0, 0, 1, 3, 4]
    """

    input_size = 5
    output_size = 5
    level = "context-sensitive"
    random_accuracy = 0.2

    def output_length(self, length: int) -> int:
        return length

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.integers(0, 5, (batch, length))
        return inputs, np.sort(inputs, axis=1)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return [digit for digit in range(5) for token in inputs if token == digit]
