"""State tracking for decoders: the state after all steps so far, at every step or at queries."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np

from dape.tasks.base import IGNORED, SUITE, DecoderTask, require


@dataclass(frozen=True)
class FlipFlop(DecoderTask):
    """Instructions with a bit each: write (2), ignore (3), read (4); at a read, the bit written last (Liu et al. 2023).

    ignores: share of instructions to ignore; the others write or read equally often.
    The first instruction writes, the last reads. An even length is cut by one.

    >>> FlipFlop().solve([2, 1, 3, 0, 4, 1, 2, 0, 3, 1, 4])
    [-100, -100, -100, -100, 1, -100, -100, -100, -100, -100, 0]
    """

    ignores: float = 0.8
    level = "state tracking"
    protocol = replace(SUITE, train_lengths=tuple(range(5, 34, 4)), test_lengths=(33, 65, 129, 257))

    WRITE, IGNORE, READ = 2, 3, 4

    def __post_init__(self) -> None:
        require(0 <= self.ignores < 1, f"ignores={self.ignores} must be at least 0 and below 1")

    kinds = (("", 2), ("w", 1), ("i", 1), ("r", 1))
    minimum_length = 3

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        steps = (length + 1) // 2
        kinds = np.array([self.WRITE, self.IGNORE, self.READ])
        other = (1 - self.ignores) / 2
        said = generator.choice(kinds, (batch, steps), p=(other, self.ignores, other))
        said[:, 0], said[:, -1] = self.WRITE, self.READ
        bits = generator.integers(0, 2, (batch, steps))
        # Index of the last write at or before each instruction.
        written = np.maximum.accumulate(np.where(said == self.WRITE, np.arange(steps), 0), axis=1)
        state = np.take_along_axis(bits, written, axis=1)
        return np.stack([said, np.where(said == self.READ, state, bits)], axis=2).reshape(batch, -1)[:, :-1]

    def solve(self, inputs: Sequence[int]) -> list[int]:
        bit, outputs = 0, []
        for position, token in enumerate(inputs):
            if token == self.WRITE:
                bit = inputs[position + 1]
            outputs.append(bit if token == self.READ else IGNORED)
        return outputs


@cache
def permutations(even: bool) -> tuple[tuple[int, ...], ...]:
    """The permutations of five things in the order of their digits; the even ones alone for A5."""
    return tuple(
        p
        for p in itertools.permutations(range(5))
        if not even or sum(a > b for a, b in itertools.combinations(p, 2)) % 2 == 0
    )


@cache
def _numbers(even: bool) -> dict[tuple[int, ...], int]:
    return {permutation: number for number, permutation in enumerate(permutations(even))}


@dataclass(frozen=True)
class S5Words(DecoderTask):
    """Permutations of five things, one after the other: at each, the product of all so far (Merrill et al. 2024).

    Tokens and labels are the 120 permutations by number. Complete for NC¹, so believed out of reach of constant depth
    at every length.

    >>> S5Words().solve([1, 1, 2])
    [1, 0, 2]
    """

    even: ClassVar[bool] = False
    level = "state tracking"
    protocol = replace(SUITE, train_lengths=tuple(range(1, 17)), test_lengths=(16, 32, 64, 128))

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", len(permutations(self.even))),)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(0, self.vocab_size, (batch, length))

    def spell(self, token: int) -> str:
        return "".join(str(image + 1) for image in permutations(self.even)[token])

    def solve(self, inputs: Sequence[int]) -> list[int]:
        group, numbers = permutations(self.even), _numbers(self.even)
        product, outputs = tuple(range(5)), []
        for token in inputs:
            product = tuple(group[token][image] for image in product)
            outputs.append(numbers[product])
        return outputs


@dataclass(frozen=True)
class A5Words(S5Words):
    """Even permutations of five things, one after the other: at each, the product of all so far.

    Tokens and labels are the 60 even permutations by number: the smallest group whose words are as hard as S5's.

    >>> A5Words().solve([1, 1, 1])
    [1, 2, 0]
    """

    even = True
