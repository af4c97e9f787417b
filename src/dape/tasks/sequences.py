"""Sequence transformations for decoders: the answer is as long as the question, with a label at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dape.tasks.base import SUITE, DecoderTask


@dataclass(frozen=True)
class Copy(DecoderTask):
    """Symbols, a separator, and the symbols again: each from the one before. An odd length is cut by one.

    >>> Copy(symbols=4).solve([3, 0, 2, 4, 3, 0])
    [-100, -100, -100, 3, 0, 2]
    """

    symbols: int = 16
    level = "sequences"
    protocol = replace(SUITE, train_lengths=tuple(range(4, 33, 4)), test_lengths=(32, 64, 128, 256))
    minimum_length = 2

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", self.symbols), ("=", 1))

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        text = generator.integers(0, self.symbols, (batch, length // 2))
        answer = np.array([self.answer(row) for row in text.tolist()])
        return np.column_stack([text, np.full(batch, self.symbols), answer[:, :-1]])

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        return self.answer(list(inputs[: list(inputs).index(self.symbols)]))

    def answer(self, text: list[int]) -> list[int]:
        """The answer to one text."""
        return text


@dataclass(frozen=True)
class Reverse(Copy):
    """Symbols, a separator, and the symbols from the last to the first. An odd length is cut by one.

    >>> Reverse(symbols=4).solve([3, 0, 2, 4, 2, 0])
    [-100, -100, -100, 2, 0, 3]
    """

    def answer(self, text: list[int]) -> list[int]:
        return text[::-1]


@dataclass(frozen=True)
class Sort(Copy):
    """Symbols, a separator, and the symbols in their order. An odd length is cut by one.

    >>> Sort(symbols=4).solve([3, 0, 2, 4, 0, 2])
    [-100, -100, -100, 0, 2, 3]
    """

    def answer(self, text: list[int]) -> list[int]:
        return sorted(text)


@dataclass(frozen=True)
class Addition(DecoderTask):
    """Two numbers of n digits and their sum of n + 1, all from the last digit on: a + b = s, 3 n + 2 tokens.

    Tokens: the digits, + (10), = (11). From the last digit on, as carries go (Lee et al. 2023). A length that is not
    3 n + 2 is cut.

    >>> Addition().solve([7, 4, 10, 5, 2, 11, 2, 7])  # 47 + 25
    [-100, -100, -100, -100, -100, 2, 7, 0]
    """

    level = "sequences"
    protocol = replace(SUITE, train_lengths=tuple(range(5, 18, 3)), test_lengths=(17, 32, 65, 128))

    PLUS, EQUALS = 10, 11
    kinds = (("", 10), ("+", 1), ("=", 1))
    minimum_length = 5

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        first, second = generator.integers(0, 10, (2, batch, (length - 2) // 3))
        answer = np.array([self.add(*row) for row in zip(first.tolist(), second.tolist(), strict=True)])
        plus, equals = (np.full(batch, token) for token in (self.PLUS, self.EQUALS))
        return np.column_stack([first, plus, second, equals, answer[:, :-1]])

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        plus, equals = list(inputs).index(self.PLUS), list(inputs).index(self.EQUALS)
        return self.add(inputs[:plus], inputs[plus + 1 : equals])

    def add(self, *numbers: Sequence[int]) -> list[int]:
        """The digits of the sum, one more than those of the numbers."""
        total = sum(int("".join(map(str, reversed(digits)))) for digits in numbers)
        return [int(digit) for digit in reversed(str(total).zfill(len(numbers[0]) + 1))]
