"""Sequence transformations for decoders: the answer is as long as the question, with a label at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dape.tasks.base import SUITE, DecoderTask, labelled_at_end


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
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def random_accuracy(self) -> float:
        return 1 / self.symbols

    def output_length(self, length: int) -> int:
        return length // 2 * 2

    def rewritten(self, text: np.ndarray) -> np.ndarray:
        """The answers [B, T] to texts [B, T]."""
        return text

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        text = generator.integers(0, self.symbols, (batch, length // 2))
        separator, answer = np.full((batch, 1), self.symbols), self.rewritten(text)
        return labelled_at_end(np.concatenate([text, separator, answer[:, :-1]], axis=1), answer)

    def spell(self, token: int) -> str:
        return str(token) if token < self.symbols else "="

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        return self.answer(list(inputs[: list(inputs).index(self.symbols)]))

    def answer(self, text: list[int]) -> list[int]:
        """The answer to one text, in plain Python."""
        return text


@dataclass(frozen=True)
class Reverse(Copy):
    """Symbols, a separator, and the symbols from the last to the first. An odd length is cut by one.

    >>> Reverse(symbols=4).solve([3, 0, 2, 4, 2, 0])
    [-100, -100, -100, 2, 0, 3]
    """

    def rewritten(self, text: np.ndarray) -> np.ndarray:
        return text[:, ::-1]

    def answer(self, text: list[int]) -> list[int]:
        return [text[-1 - position] for position in range(len(text))]


@dataclass(frozen=True)
class Sort(Copy):
    """Symbols, a separator, and the symbols in their order. An odd length is cut by one.

    >>> Sort(symbols=4).solve([3, 0, 2, 4, 0, 2])
    [-100, -100, -100, 0, 2, 3]
    """

    def rewritten(self, text: np.ndarray) -> np.ndarray:
        return np.sort(text, axis=1)

    def answer(self, text: list[int]) -> list[int]:
        return [symbol for symbol in range(self.symbols) for _ in range(text.count(symbol))]


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

    vocab_size, random_accuracy, minimum_length = 12, 0.1, 5

    def output_length(self, length: int) -> int:
        return (length - 2) // 3 * 3 + 2

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        digits = (length - 2) // 3
        first, second = generator.integers(0, 10, (2, batch, digits))
        answer, carry = np.empty((batch, digits + 1), dtype=np.int64), np.zeros(batch, dtype=np.int64)
        for digit in range(digits):
            carry, answer[:, digit] = np.divmod(first[:, digit] + second[:, digit] + carry, 10)
        answer[:, digits] = carry
        plus, equals = (np.full((batch, 1), token) for token in (self.PLUS, self.EQUALS))
        inputs = np.concatenate([first, plus, second, equals, answer[:, :-1]], axis=1)
        return labelled_at_end(inputs, answer)

    def spell(self, token: int) -> str:
        return "0123456789+="[token]

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        plus, equals = list(inputs).index(self.PLUS), list(inputs).index(self.EQUALS)
        first, second = (
            int("".join(map(str, reversed(part)))) for part in (inputs[:plus], inputs[plus + 1 : equals])
        )
        answer = str(first + second).zfill(plus + 1)
        return [int(digit) for digit in reversed(answer)]
