"""Bracketed expressions modulo 5: a sampler that grows a whole batch level by level, and a plain evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    """The value of an expression, by recursive descent."""
    value, rest = _read(alphabet, list(tokens))
    assert not rest, f"tokens {rest} after the end of the expression"
    return value % MODULUS


def _read(alphabet: Alphabet, tokens: list[int]) -> tuple[int, list[int]]:
    """The value of the operand at the front, and the tokens after it."""
    first, rest = tokens[0], tokens[1:]
    if first < MODULUS:
        return first, rest
    if first == alphabet.minus:
        value, rest = _read(alphabet, rest)
        return -value, rest
    assert first == alphabet.opening
    value, rest = _read(alphabet, rest)
    if rest[0] != alphabet.closing:
        operator = rest[0]
        right, rest = _read(alphabet, rest[1:])
        if operator == alphabet.plus:
            value += right
        elif operator == alphabet.minus:
            value -= right
        else:
            assert operator == alphabet.times
            value *= right
    assert rest[0] == alphabet.closing
    return value, rest[1:]
