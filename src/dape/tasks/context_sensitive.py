"""Context-sensitive tasks of the Chomsky-hierarchy benchmark: symbols moved or compared, binary numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dape.tasks.base import ChomskyTask, TerminatedTask


@dataclass(frozen=True)
class DuplicateString(ChomskyTask):
    """The bits twice over.

    >>> DuplicateString().solve([0, 1, 1])
    [0, 1, 1, 0, 1, 1]
    """

    input_size, output_size, level = 2, 2, "context-sensitive"

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return [*inputs, *inputs]


@dataclass(frozen=True)
class MissingDuplicateString(ChomskyTask):
    """Some bits twice over with one of them hidden (2): which bit? An odd length ends with a blank (3).

    The one input of length 1 is 1, its answer 1.

    >>> MissingDuplicateString().solve([0, 1, 1, 0, 2, 1, 3])
    [1]
    """

    input_size, output_size, level = 4, 2, "context-sensitive"

    HIDDEN, BLANK = 2, 3

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        if length == 1:
            return np.ones((batch, 1), dtype=np.int64)
        inputs = np.full((batch, length), self.BLANK)
        half = length // 2
        inputs[:, : 2 * half] = np.tile(generator.integers(0, 2, (batch, half)), 2)
        hidden = generator.integers(0, 2 * half, (batch, 1))
        np.put_along_axis(inputs, hidden, self.HIDDEN, axis=1)
        return inputs

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

    input_size, output_size, level = 2, 2, "context-sensitive"

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

    input_size, output_size, level = 5, 5, "context-sensitive"

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return [digit for digit in range(5) for token in inputs if token == digit]


@dataclass(frozen=True)
class BinaryAddition(TerminatedTask):
    """first + second (token 2 between them), bits from the lowest to the highest: the sum, ended by 2, then zeros.

    Both numbers are at least 1 and may have zeros at their high end; the sum has none. An input of length 1
    or 2 is a single number below 2ᴸ − 1, its own sum.

    >>> BinaryAddition().solve([1, 1, 2, 1, 0, 1])  # 3 + 5 = 8
    [0, 0, 0, 1, 2, 0, 0]
    """

    input_size, level = 3, "context-sensitive"

    OPERATOR = 2

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        return two_numbers(batch, length, generator)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return digits_of(sum(read_numbers(inputs)), len(inputs) + 1)


@dataclass(frozen=True)
class BinaryMultiplication(TerminatedTask):
    """first × second (token 2 between them), as in binary_addition: the product, ended by 2, then zeros.

    An input of length 1 has the output 2, one of length 2 the output 0 2, for any bits.

    >>> BinaryMultiplication().solve([1, 1, 2, 1, 0, 1])  # 3 × 5 = 15
    [1, 1, 1, 1, 2, 0]
    """

    input_size, level = 3, "context-sensitive"

    OPERATOR = 2

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        return two_numbers(batch, length, generator)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        if len(inputs) <= 2:
            return [0] * (len(inputs) - 1) + [2]
        return digits_of(math.prod(read_numbers(inputs)), len(inputs))


@dataclass(frozen=True)
class ComputeSqrt(ChomskyTask):
    """The integer part of the square root of a number of at least 1, both from the highest bit to the lowest.

    >>> ComputeSqrt().solve([1, 0, 0, 1, 1, 0])  # √38 = 6.16…
    [1, 1, 0]
    """

    input_size, output_size, level = 2, 2, "context-sensitive"

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        return nonzero_bits(np.full(batch, length), length, generator)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        root = math.isqrt(int("".join(map(str, inputs)), 2))
        return [int(bit) for bit in f"{root:0{(len(inputs) + 1) // 2}b}"]


def nonzero_bits(widths: np.ndarray, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Bits [B, columns] of numbers from 1 to 2^width − 1, uniform; columns from `width` on are 0."""
    inside = np.arange(columns) < widths[:, None]
    bits = generator.integers(0, 2, inside.shape) * inside
    while len(zero := np.flatnonzero(~bits.any(axis=1))):
        bits[zero] = generator.integers(0, 2, (len(zero), columns)) * inside[zero]
    return bits


def two_numbers(batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Inputs [B, length] of the form first, 2, second, the lowest bit first; of length 1 and 2 one number."""
    if length <= 2:
        return generator.integers(0, 2**length - 1, (batch, 1)) >> np.arange(length) & 1
    first_width = generator.integers(1, length - 1, batch)
    first = nonzero_bits(first_width, length, generator)
    second = nonzero_bits(length - 1 - first_width, length, generator)
    after = np.arange(length) - first_width[:, None] - 1
    inputs = first + np.where(after >= 0, np.take_along_axis(second, np.maximum(after, 0), axis=1), 0)
    inputs[np.arange(batch), first_width] = BinaryAddition.OPERATOR
    return inputs


def read_numbers(inputs: Sequence[int]) -> list[int]:
    """Parse the numbers of an input."""
    text = "".join(map(str, inputs))
    return [int(part[::-1], 2) for part in text.split(str(BinaryAddition.OPERATOR))]


def digits_of(number: int, width: int) -> list[int]:
    """Output for a number: its bits, the lowest first, then 2, then zeros."""
    bits = [int(bit) for bit in reversed(f"{number:b}")]
    return [*bits, TerminatedTask.terminator, *[0] * (width - len(bits) - 1)]
