"""Deterministic context-free tasks of the Chomsky-hierarchy benchmark: each needs a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from dape.tasks.base import ChomskyTask, TerminatedTask

MODULUS = 5


@dataclass(frozen=True)
class Alphabet:
    """The tokens of operators and brackets; digits are their own tokens. times: None for sums alone."""

    plus: int
    minus: int
    times: int | None
    opening: int
    closing: int


@dataclass(frozen=True)
class StackManipulation(TerminatedTask):
    """A stack of bits from bottom to top, then POP (2), PUSH 0 (3), PUSH 1 (4): the final stack from top to bottom.

    A POP of the empty stack does nothing. The output ends with 2 and is filled with zeros.

    >>> StackManipulation().solve([1, 0, 2, 4, 4])
    [1, 1, 1, 2, 0, 0]
    """

    input_size, level = 5, "context-free"

    POP, PUSH_0, PUSH_1 = 2, 3, 4

    def output_length(self, length: int) -> int:
        return length + 1

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        depth = generator.integers(1, max(length, 2), (batch, 1))
        bits = generator.integers(0, 2, (batch, length))
        actions = generator.integers(self.POP, self.PUSH_1 + 1, (batch, length))
        initial = np.arange(length) < depth
        inputs = np.where(initial, bits, actions)

        # A bit of the initial stack is a push as well.
        pushes, pushed = inputs != self.POP, np.where(inputs >= self.PUSH_0, inputs - self.PUSH_0, inputs)
        rows, height = np.arange(batch), np.zeros(batch, dtype=np.int64)
        stack = np.zeros((batch, length + 1), dtype=np.int64)
        for push, bit in zip(pushes.T, pushed.T, strict=True):
            # Entries above the height may be overwritten.
            stack[rows, height] = bit
            height = np.maximum(height + np.where(push, 1, -1), 0)
        column = np.arange(length + 1)
        from_top = height[:, None] - 1 - column
        outputs = np.where(from_top >= 0, np.take_along_axis(stack, np.maximum(from_top, 0), axis=1), 0)
        outputs[rows, height] = self.terminator
        return inputs, outputs

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

    def output_length(self, length: int) -> int:
        return length

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.integers(0, 2, (batch, length))
        return inputs, inputs[:, ::-1].copy()

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

    ALPHABET = Alphabet(plus=5, minus=6, times=7, opening=8, closing=9)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs, values = bracketed(self.ALPHABET, batch, length, generator)
        return inputs, values[:, None]

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

    ALPHABET = Alphabet(plus=5, minus=6, times=None, opening=7, closing=8)
    UNKNOWN, EQUALS = 9, 10

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        if length < 3:
            return np.zeros((batch, length), dtype=np.int64), np.zeros((batch, 1), dtype=np.int64)
        left, values = bracketed(self.ALPHABET, batch, length - 2, generator)
        # x replaces the first digit at or after a random position, cyclically.
        start = generator.integers(0, length - 2, (batch, 1))
        onward = (start + np.arange(length - 2)) % (length - 2)
        first = (np.take_along_axis(left, onward, axis=1) < 5).argmax(axis=1)
        rows = np.arange(batch)
        position = onward[rows, first]
        answers = left[rows, position]
        left[rows, position] = self.UNKNOWN
        right = np.stack([np.full(batch, self.EQUALS), values], axis=1)
        return np.concatenate([left, right], axis=1), answers[:, None]

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


@dataclass(frozen=True)
class Level:
    """One depth of all expression trees of a batch: N spans, leaves and inner ones."""

    inner: np.ndarray  # indices of the spans that have children; child pairs follow in this order
    operators: np.ndarray  # of those spans: 0 plus, 1 minus, 2 times
    values: np.ndarray  # [N], right at leaves


def bracketed(
    alphabet: Alphabet, batch: int, length: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [batch, length] and their values [batch].

    A span of up to 4 tokens is d, −d, (d) or (−d); a longer one is (left ∘ right), the length of the left
    part uniform, the operator uniform.
    """
    tokens = np.empty((batch, length), dtype=np.int64)
    rows, starts, lengths = np.arange(batch), np.zeros(batch, dtype=np.int64), np.full(batch, length)
    levels = []
    while len(rows):
        level = _leaves(alphabet, tokens, rows, starts, lengths, generator)
        levels.append(level)
        inner = level.inner
        row, start, size = rows[inner], starts[inner], lengths[inner]
        left = generator.integers(1, size - 3)
        tokens[row, start] = alphabet.opening
        tokens[row, start + 1 + left] = _operator_tokens(alphabet)[level.operators]
        tokens[row, start + size - 1] = alphabet.closing
        rows = np.repeat(row, 2)
        starts = np.stack([start + 1, start + 2 + left], axis=1).ravel()
        lengths = np.stack([left, size - 3 - left], axis=1).ravel()
    return tokens, _values(levels)


def _leaves(
    alphabet: Alphabet,
    tokens: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    generator: np.random.Generator,
) -> Level:
    """Write the spans that are leaves; returns the level with their values."""
    digits = generator.integers(0, MODULUS, len(rows))
    leaf = lengths <= 4
    enclosed, negative = leaf & (lengths >= 3), leaf & (lengths % 2 == 0)
    tokens[rows[enclosed], starts[enclosed]] = alphabet.opening
    tokens[rows[enclosed], starts[enclosed] + lengths[enclosed] - 1] = alphabet.closing
    tokens[rows[negative], starts[negative] + enclosed[negative]] = alphabet.minus
    tokens[rows[leaf], starts[leaf] + lengths[leaf] - 1 - enclosed[leaf]] = digits[leaf]
    inner = np.flatnonzero(~leaf)
    operators = generator.integers(0, len(_operator_tokens(alphabet)), len(inner))
    return Level(inner, operators, np.where(negative, -digits, digits) % MODULUS)


def _operator_tokens(alphabet: Alphabet) -> np.ndarray:
    tokens = [alphabet.plus, alphabet.minus, alphabet.times]
    return np.array([token for token in tokens if token is not None])


def _values(levels: list[Level]) -> np.ndarray:
    """The values of the first level's spans, from the deepest level up."""
    below = levels[-1].values
    for level in reversed(levels[:-1]):
        left, right = below[::2], below[1::2]
        results = np.choose(level.operators, [left + right, left - right, left * right])
        below = level.values.copy()
        below[level.inner] = results % MODULUS
    return below


def value_of(alphabet: Alphabet, tokens: Sequence[int]) -> int:
    """The value of an expression, by Python."""
    symbols = dict(zip(astuple(alphabet), "+-*()", strict=True))
    return eval("".join(symbols.get(token, str(token)) for token in tokens)) % MODULUS
