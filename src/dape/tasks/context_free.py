"""Deterministic context-free tasks of the Chomsky-hierarchy benchmark: each needs a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dape.tasks.base import ChomskyTask, TerminatedTask

MODULUS = 5


# The tokens of operators and brackets, by their sign; digits are their own tokens.
Alphabet = dict[str, int]


@dataclass(frozen=True)
class StackManipulation(TerminatedTask):
    """A stack of bits from bottom to top, then POP (2), PUSH 0 (3), PUSH 1 (4): the final stack from top to bottom.

    A POP of the empty stack does nothing. The output ends with 2 and is filled with zeros.

    >>> StackManipulation().solve([1, 0, 2, 4, 4])
    [1, 1, 1, 2, 0, 0]
    """

    input_size, level = 5, "context-free"

    POP, PUSH_0, PUSH_1 = 2, 3, 4

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        depth = generator.integers(1, max(length, 2), (batch, 1))
        bits = generator.integers(0, 2, (batch, length))
        actions = generator.integers(self.POP, self.PUSH_1 + 1, (batch, length))
        return np.where(np.arange(length) < depth, bits, actions)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        stack: list[int] = []
        for token in inputs:
            if token in (0, 1):
                stack.append(token)
            elif token == self.POP:
                stack = stack[:-1]
            else:
                stack.append(1 if token == self.PUSH_1 else 0)
        output = [*reversed(stack), self.terminator]
        return output + [0] * (len(inputs) + 1 - len(output))


@dataclass(frozen=True)
class ReverseString(ChomskyTask):
    """The bits backwards.

    >>> ReverseString().solve([0, 0, 1, 0, 1])
    [1, 0, 1, 0, 0]
    """

    input_size, output_size, level = 2, 2, "context-free"

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return list(reversed(inputs))


@dataclass(frozen=True)
class ModularArithmeticBrackets(ChomskyTask):
    """The value modulo 5 of a bracketed expression with +, −, × (tokens 5, 6, 7) and brackets (8, 9).

    Lengths 1 to 4 are d, −d, (d), (−d); a longer one is (left ∘ right) with the length split at random.
    Token 10 is in the vocabulary but never drawn. Products are often 0: always answering 0 has an accuracy of about 31 %.

    >>> ModularArithmeticBrackets().solve([8, 3, 7, 8, 6, 4, 9, 9])
    [3]
    """

    input_size, output_size, level = 11, 5, "context-free"
    constant_accuracy = 0.31

    ALPHABET: ClassVar[Alphabet] = {"+": 5, "-": 6, "*": 7, "(": 8, ")": 9}

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        return bracketed(self.ALPHABET, batch, length, generator)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        return [value_of(self.ALPHABET, inputs)]


@dataclass(frozen=True)
class SolveEquation(ChomskyTask):
    """Which digit is x (token 9), if a bracketed expression with + and − (5, 6; brackets 7, 8) = (10) a digit?

    Modulo 5, so exactly one digit fits. Inputs of length 1 and 2 are zeros with the answer 0.

    >>> SolveEquation().solve([7, 2, 6, 9, 8, 10, 4])
    [3]
    """

    input_size, output_size, level = 11, 5, "context-free"

    ALPHABET: ClassVar[Alphabet] = {"+": 5, "-": 6, "(": 7, ")": 8}
    UNKNOWN, EQUALS = 9, 10

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        if length < 3:
            return np.zeros((batch, length), dtype=np.int64)
        left = bracketed(self.ALPHABET, batch, length - 2, generator)
        values = [value_of(self.ALPHABET, row) for row in left.tolist()]
        # x replaces the first digit at or after a random position, cyclically.
        start = generator.integers(0, length - 2, (batch, 1))
        onward = (start + np.arange(length - 2)) % (length - 2)
        first = (np.take_along_axis(left, onward, axis=1) < 5).argmax(axis=1)
        rows = np.arange(batch)
        left[rows, onward[rows, first]] = self.UNKNOWN
        return np.column_stack([left, np.full(batch, self.EQUALS), values])

    def solve(self, inputs: Sequence[int]) -> list[int]:
        if len(inputs) < 3:
            return [0]
        *left, _, value = inputs
        fits = [
            digit
            for digit in range(5)
            if value_of(self.ALPHABET, [digit if token == self.UNKNOWN else token for token in left]) == value
        ]
        assert len(fits) == 1
        return fits


def bracketed(alphabet: Alphabet, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Expressions [batch, length], level by level of their trees, all of a batch at once.

    A span of up to 4 tokens is d, −d, (d) or (−d); a longer one is (left ∘ right), the length of the left
    part uniform, the operator uniform.
    """
    tokens = np.empty((batch, length), dtype=np.int64)
    operators = np.array([token for sign, token in alphabet.items() if sign in "+-*"])
    rows, starts, lengths = np.arange(batch), np.zeros(batch, dtype=np.int64), np.full(batch, length)
    while len(rows):
        digits = generator.integers(0, MODULUS, len(rows))
        leaf = lengths <= 4
        enclosed, negative = leaf & (lengths >= 3), leaf & (lengths % 2 == 0)
        tokens[rows[enclosed], starts[enclosed]] = alphabet["("]
        tokens[rows[enclosed], starts[enclosed] + lengths[enclosed] - 1] = alphabet[")"]
        tokens[rows[negative], starts[negative] + enclosed[negative]] = alphabet["-"]
        tokens[rows[leaf], starts[leaf] + lengths[leaf] - 1 - enclosed[leaf]] = digits[leaf]
        row, start, size = rows[~leaf], starts[~leaf], lengths[~leaf]
        chosen = generator.integers(0, len(operators), len(row))
        left = generator.integers(1, size - 3)
        tokens[row, start] = alphabet["("]
        tokens[row, start + 1 + left] = operators[chosen]
        tokens[row, start + size - 1] = alphabet[")"]
        rows = np.repeat(row, 2)
        starts = np.stack([start + 1, start + 2 + left], axis=1).ravel()
        lengths = np.stack([left, size - 3 - left], axis=1).ravel()
    return tokens


def value_of(alphabet: Alphabet, tokens: Sequence[int]) -> int:
    """The value of an expression, by Python."""
    symbols = {token: sign for sign, token in alphabet.items()}
    return eval("".join(symbols.get(token, str(token)) for token in tokens)) % MODULUS
