"""Recall and retrieval tasks for decoders: queries about earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from dape.tasks.base import IGNORED, SUITE, DecoderTask, Protocol, require


@dataclass(frozen=True)
class AssociativeRecall(DecoderTask):
    """Key–value pairs, then keys: the value of each (multi-query associative recall, Arora et al. 2023).

    keys, values: number of different keys and values; keys are tokens 0 …, then values, then the filler token.
    pairs:   number of pairs in an input; None for as many as fit, a third of its length without gaps.
    queries: None for as many as pairs. A query asks for a key that was shown; none twice while there are others.
    gap:     minimum number of filler tokens after every pair.
    In an input longer than its pairs and queries, filler is placed between them at random.
    power:   if given, pairs come first, and the probability of a query at a later position falls as its distance to
             the power of `power` − 1 (zoology has 0.01, so most queries follow soon); None for uniform.

    >>> AssociativeRecall(keys=4, values=3).solve([2, 5, 0, 4, 0, 2])
    [-100, -100, -100, -100, 4, 5]
    """

    keys: int = 32
    values: int = 64
    pairs: int | None = None
    queries: int | None = None
    gap: int = 0
    power: float | None = None
    least: ClassVar = {"gap": 0}
    answers: ClassVar = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.power is None or self.power > 0, f"power={self.power} must be above 0")

    @property
    def span(self) -> int:
        """Number of tokens of a pair with its gap."""
        return 2 + self.gap

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("k", self.keys), ("", self.values), (".", 1))

    @property
    def minimum_length(self) -> int:
        pairs = self.pairs or 1
        return self.span * pairs + (self.queries or pairs)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        pairs = self.pairs or (length - (self.queries or 0)) // (self.span + (not self.queries))
        queries = self.queries or pairs
        require(
            pairs <= self.keys,
            f'"{self.name}" of length {length} shows {pairs} pairs, but there are only keys={self.keys}; set pairs or '
            f"keys, or use lengths up to {self.span * self.keys + (self.queries or self.keys)}",
        )
        keys = generator.random((batch, self.keys)).argsort(axis=1)[:, :pairs]
        values = self.keys + generator.integers(0, self.values, (batch, pairs))
        asked = generator.random((batch, pairs)).argsort(axis=1)[:, np.arange(queries) % pairs]

        # Pairs and queries in order, filler in random slots between them.
        units, rows = pairs + queries, np.arange(batch)[:, None]
        slots = units + length - self.span * pairs - queries
        taken = np.sort(self._slots(generator.random((batch, slots)), pairs)[:, :units], axis=1)
        start = taken + (self.span - 1) * np.minimum(np.arange(units), pairs)
        inputs = np.full((batch, length), self.keys + self.values)
        inputs[rows, start[:, :pairs]] = keys
        inputs[rows, start[:, :pairs] + 1] = values
        inputs[rows, start[:, pairs:]] = np.take_along_axis(keys, asked, axis=1)
        return inputs

    def _slots(self, drawn: np.ndarray, pairs: int) -> np.ndarray:
        """Slots in the order in which units take them, from uniform draws [B, slots]."""
        if self.power is None:
            return drawn.argsort(axis=1)
        # Without replacement, by weights: the smallest of −log(uniform) / weight (Efraimidis and Spirakis 2006).
        weights = np.arange(1, drawn.shape[1] - pairs + 1) ** (self.power - 1.0)
        order = np.argsort(-np.log1p(-drawn[:, pairs:]) / weights, axis=1)
        first = np.tile(np.arange(pairs), (len(drawn), 1))
        return np.concatenate([first, pairs + order], axis=1)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        value_of: dict[int, int] = {}
        outputs = []
        for position, token in enumerate(inputs):
            following = inputs[position + 1] if position + 1 < len(inputs) else -1
            if token < self.keys and self.keys <= following < self.keys + self.values:
                value_of[token] = following
                outputs.append(IGNORED)
            else:
                outputs.append(value_of[token] if token < self.keys else IGNORED)
        return outputs


@dataclass(frozen=True)
class RecallManyKeys(AssociativeRecall):
    """Associative recall with many more keys than values, so that a value says little about its key (zoology).

    >>> RecallManyKeys(keys=4, values=3).solve([2, 5, 0, 4, 0, 2])
    [-100, -100, -100, -100, 4, 5]
    """

    keys: int = 128
    values: int = 8
    pairs: int | None = 8
    queries: int | None = 8
    protocol = SUITE


@dataclass(frozen=True)
class RecallPowerLaw(AssociativeRecall):
    """Associative recall whose queries mostly come soon after the pairs, as words in text do (zoology).

    >>> RecallPowerLaw(keys=4, values=3).solve([2, 5, 0, 4, 0, 2])
    [-100, -100, -100, -100, 4, 5]
    """

    pairs: int | None = 8
    queries: int | None = 8
    power: float | None = 0.1
    protocol = SUITE


@dataclass(frozen=True)
class Mqar(AssociativeRecall):
    """Multi-query associative recall as zoology has it: pairs first, each queried once by a power law, 8,192 tokens known.

    pairs: 4, 8, 16 and 64 in inputs of 64, 128, 256 and 512 tokens; others in 16 tokens a pair.

    >>> Mqar(keys=4, values=3).solve([2, 5, 0, 4, 0, 2])
    [-100, -100, -100, -100, 4, 5]
    """

    keys: int = 4095
    values: int = 4096
    pairs: int | None = 4
    power: float | None = 0.01

    @property
    def protocol(self) -> Protocol:  # type: ignore[override]  # a class variable elsewhere; here it follows the size
        pairs = self.pairs or 4
        length = 512 if pairs == 64 else 16 * pairs
        return replace(SUITE, train_lengths=(length,), test_lengths=tuple(length * n for n in (1, 2, 4, 8)))


@dataclass(frozen=True)
class Induction(DecoderTask):
    """A text whose last symbol occurred once before: the symbol that followed it there (the induction head's task).

    >>> Induction(symbols=6).solve([4, 1, 5, 0, 1])
    [-100, -100, -100, -100, 5]
    """

    symbols: int = 16
    protocol = replace(
        DecoderTask.protocol, train_lengths=tuple(range(3, 49)), test_lengths=(24, 48, 96, 192)
    )

    minimum_length = 3
    # The one in question and another.
    least: ClassVar = {"symbols": 2}

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", self.symbols),)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        rows = np.arange(batch)
        asked = generator.integers(0, self.symbols, batch)
        # Any symbol but the queried one: a draw from one fewer, shifted past it.
        inputs = generator.integers(0, self.symbols - 1, (batch, length))
        inputs += inputs >= asked[:, None]
        position = generator.integers(0, length - 2, batch)
        inputs[rows, position] = inputs[:, -1] = asked
        return inputs

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        (earlier,) = [position for position in range(len(inputs) - 1) if inputs[position] == inputs[-1]]
        return [inputs[earlier + 1]]


@dataclass(frozen=True)
class Passkey(DecoderTask):
    """Filler with a passkey in it at a random depth: mark (10), digits; at the end ask (11), the digits again.

    digits: in the passkey. filler: tokens of the sentence (12 …) that is repeated around it.

    >>> Passkey(digits=2, filler=3).solve([12, 10, 7, 4, 13, 14, 12, 11, 7])
    [-100, -100, -100, -100, -100, -100, -100, 7, 4]
    """

    digits: int = 5
    filler: int = 8
    protocol = replace(
        DecoderTask.protocol, train_lengths=tuple(range(16, 65)), test_lengths=(32, 64, 128, 256, 512)
    )

    MARK, ASK, FILLER = 10, 11, 12

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", 10), ("!", 1), ("?", 1), (".", self.filler))

    @property
    def minimum_length(self) -> int:
        return 2 * self.digits + 1

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        rows, count = np.arange(batch)[:, None], length - self.minimum_length
        digits = generator.integers(0, 10, (batch, self.digits))
        depth = generator.integers(0, count + 1, (batch, 1))
        column = np.arange(length - self.digits)
        # After the passkey the sentence continues at the token where it was interrupted.
        said = np.where(column < depth, column, column - 1 - self.digits)
        inputs = np.empty((batch, length), dtype=np.int64)
        inputs[:, : length - self.digits] = self.FILLER + said % self.filler
        inputs[rows, depth] = self.MARK
        inputs[rows, depth + 1 + np.arange(self.digits)] = digits
        inputs[:, length - self.digits] = self.ASK
        inputs[:, length - self.digits + 1 :] = digits[:, :-1]
        return inputs

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        mark = list(inputs).index(self.MARK)
        return list(inputs[mark + 1 : mark + 1 + self.digits])
