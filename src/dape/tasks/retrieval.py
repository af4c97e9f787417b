"""Retrieval for decoders: a query at the end of a longer text about part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dape.tasks.base import SUITE, DecoderTask, require


def scattered(
    units: np.ndarray, length: int, filler: np.ndarray | int, generator: np.random.Generator
) -> np.ndarray:
    """Units [B, n, w] in their order at random positions of rows of `length` tokens, filler [B, length] around them."""
    batch, count, width = units.shape
    slots = length - count * (width - 1)
    taken = np.sort(generator.random((batch, slots)).argsort(axis=1)[:, :count], axis=1)
    start = taken + (width - 1) * np.arange(count)
    text = np.empty((batch, length), dtype=np.int64)
    text[:] = filler
    for offset in range(width):
        np.put_along_axis(text, start + offset, units[:, :, offset], axis=1)
    return text


class Retrieval(DecoderTask):
    """Base class: text, a mark, which is the last token, and a question."""

    level = "retrieval"
    protocol = SUITE

    @property
    def mark(self) -> int:
        return self.vocab_size - 1

    def asked_after(self, text: np.ndarray, question: np.ndarray) -> np.ndarray:
        """Inputs of text, mark and question, [B, n] each."""
        return np.column_stack([text, np.full(len(text), self.mark), question])


@dataclass(frozen=True)
class Needles(Retrieval):
    """Keys with values in random filler; then a mark and some of the keys: all values of each, in their order (RULER).

    keys:   number in an input, out of `names`. values: number per key, at separate positions. asked: number of keys queried.
    Tokens: values 0 … 9, keys, filler, the mark.

    >>> Needles(keys=2, values=2, names=2, filler=1).solve([10, 7, 12, 11, 3, 11, 5, 10, 1, 13, 11, 3])
    [-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, 3, 5]
    """

    keys: int = 4
    values: int = 1
    asked: int = 1
    names: int = 16
    filler: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.asked <= self.keys <= self.names,
            f"asked={self.asked} of keys={self.keys} out of names={self.names} cannot be drawn: asked ≤ keys ≤ names",
        )

    @property
    def minimum_length(self) -> int:
        return 2 * self.keys * self.values + self._after

    @property
    def _after(self) -> int:
        """Number of tokens of the question with its answers."""
        return 1 + self.asked * self.values

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        keys = 10 + generator.random((batch, self.names)).argsort(axis=1)[:, : self.keys]
        which = generator.permuted(np.tile(np.repeat(np.arange(self.keys), self.values), (batch, 1)), axis=1)
        values = generator.integers(0, 10, which.shape)
        needles = np.stack([np.take_along_axis(keys, which, axis=1), values], axis=2)
        filler = 10 + self.names + generator.integers(0, self.filler, (batch, length - self._after))
        text = scattered(needles, length - self._after, filler, generator)
        # Values by key, in the order of the text: a stable sort by the key's number.
        by_key = np.take_along_axis(values, np.argsort(which, axis=1, kind="stable"), axis=1)
        answers = by_key.reshape(batch, self.keys, self.values)[:, : self.asked]
        said = np.concatenate([keys[:, : self.asked, None], answers[:, :, :-1]], axis=2).reshape(batch, -1)
        return self.asked_after(text, said)

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", 10), ("k", self.names), (".", self.filler), ("?", 1))

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        end = list(inputs).index(self.mark)
        values: dict[int, list[int]] = {}
        for index in range(end - 1):
            if 10 <= inputs[index] < 10 + self.names:
                values.setdefault(inputs[index], []).append(inputs[index + 1])
        asked = inputs[end + 1 :: self.values]
        return [value for key in asked for value in values[key]]


@dataclass(frozen=True)
class Phonebook(Retrieval):
    """Lines of a name, two tokens, and its number; then a mark and a name: its number (Jelassi et al. 2024).

    names: number of first and last names to draw from; no full name occurs twice. digits: per number.
    Tokens: digits, names, the mark. As many lines as fit; the rest of the length is cut.

    >>> Phonebook(names=3, digits=2).solve([10, 12, 3, 4, 12, 10, 5, 6, 13, 12, 10, 5])
    [-100, -100, -100, -100, -100, -100, -100, -100, -100, -100, 5, 6]
    """

    names: int = 24
    digits: int = 3
    protocol = replace(SUITE, train_lengths=tuple(range(20, 51, 5)), test_lengths=(50, 100, 200, 400))

    @property
    def minimum_length(self) -> int:
        return 2 * (2 + self.digits)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        lines = length // (2 + self.digits) - 1
        require(
            lines <= self.names**2,
            f'"{self.name}" of length {length} has {lines} lines, but names={self.names} make {self.names**2} names',
        )
        whole = generator.random((batch, self.names**2)).argsort(axis=1)[:, :lines]
        people = 10 + np.stack(np.divmod(whole, self.names), axis=2)
        numbers = generator.integers(0, 10, (batch, lines, self.digits))
        book = np.concatenate([people, numbers], axis=2).reshape(batch, -1)
        rows, line = np.arange(batch), generator.integers(0, lines, batch)
        return self.asked_after(book, np.concatenate([people[rows, line], numbers[rows, line, :-1]], axis=1))

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", 10), ("n", self.names), ("?", 1))

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        end, width = list(inputs).index(self.mark), 2 + self.digits
        lines = [list(inputs[start : start + width]) for start in range(0, end, width)]
        (number,) = [line[2:] for line in lines if line[:2] == list(inputs[end + 1 : end + 3])]
        return number


@dataclass(frozen=True)
class Variables(Retrieval):
    """Chains of assignments in random filler: name and value, then name and name; at the end a name: its value (RULER).

    chains: number of chains, interleaved. steps: assignments of each, in their order. names: to draw from, none used twice.
    Tokens: values 0 … 9, names, filler, the mark before the question, which asks for the last name of a chain.

    >>> Variables(chains=1, steps=2, names=3, filler=1).solve([11, 6, 13, 12, 11, 14, 12])
    [-100, -100, -100, -100, -100, -100, 6]
    """

    chains: int = 2
    steps: int = 2
    names: int = 12
    filler: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.chains * self.steps <= self.names,
            f"chains={self.chains} of steps={self.steps} need {self.chains * self.steps} names, not names={self.names}",
        )

    @property
    def minimum_length(self) -> int:
        return 2 * self.chains * self.steps + 2

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        rows, count = np.arange(batch), self.chains * self.steps
        names = 10 + generator.random((batch, self.names)).argsort(axis=1)[:, :count]
        names = names.reshape(batch, self.chains, self.steps)
        values = generator.integers(0, 10, (batch, self.chains, 1))
        sources = np.concatenate([values, names[:, :, :-1]], axis=2)
        chain = generator.permuted(np.tile(np.repeat(np.arange(self.chains), self.steps), (batch, 1)), axis=1)
        # The n-th occurrence of a chain is its n-th assignment.
        step = ((chain[:, :, None] == chain[:, None, :]) & np.tri(count, k=-1, dtype=bool)).sum(axis=2)
        said = np.stack([names[rows[:, None], chain, step], sources[rows[:, None], chain, step]], axis=2)
        filler = 10 + self.names + generator.integers(0, self.filler, (batch, length - 2))
        asked = generator.integers(0, self.chains, batch)
        text = scattered(said, length - 2, filler, generator)
        return self.asked_after(text, names[rows, asked, -1:])

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", 10), ("x", self.names), (".", self.filler), ("?", 1))

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        known: dict[int, int] = {}
        index = 0
        while inputs[index] != self.mark:
            if 10 <= inputs[index] < 10 + self.names:
                known[inputs[index]] = known.get(inputs[index + 1], inputs[index + 1])
                index += 1
            index += 1
        return [known[inputs[-1]]]


@dataclass(frozen=True)
class Facts(Retrieval):
    """People and the rooms they go to, in random filler; then a mark and a person: the last room of that person (BABILong).

    people, rooms: numbers to draw from; a person may go more than once. events: number in an input.
    Tokens: rooms, people, filler, the mark.

    >>> Facts(people=2, rooms=3, filler=1).solve([3, 0, 4, 1, 5, 3, 2, 6, 3])
    [-100, -100, -100, -100, -100, -100, -100, -100, 2]
    """

    people: int = 4
    rooms: int = 6
    events: int = 6
    filler: int = 8

    @property
    def minimum_length(self) -> int:
        return 2 * self.events + 2

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        rows = np.arange(batch)
        people = self.rooms + generator.integers(0, self.people, (batch, self.events))
        rooms = generator.integers(0, self.rooms, (batch, self.events))
        filler = self.rooms + self.people + generator.integers(0, self.filler, (batch, length - 2))
        text = scattered(np.stack([people, rooms], axis=2), length - 2, filler, generator)
        return self.asked_after(text, people[rows, generator.integers(0, self.events, batch), None])

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", self.rooms), ("p", self.people), (".", self.filler), ("?", 1))

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        pairs = pairwise(inputs[:-1])
        return [{person: room for person, room in pairs if person >= self.rooms}[inputs[-1]]]


@dataclass(frozen=True)
class CommonSymbol(Retrieval):
    """Symbols in random order, one at least three times as often as each other; at the end a mark: that one (RULER).

    shown: number of different ones in an input, out of `symbols`. Tokens: symbols, the mark.

    >>> CommonSymbol(symbols=4, shown=2).solve([3, 1, 3, 3, 4])
    [-100, -100, -100, -100, 3]
    """

    symbols: int = 16
    shown: int = 6
    protocol = replace(SUITE, train_lengths=tuple(range(12, 49, 6)))

    def __post_init__(self) -> None:
        require(
            2 <= self.shown <= self.symbols,
            f"shown={self.shown} of symbols={self.symbols} cannot be drawn: 2 ≤ shown ≤ symbols",
        )

    @property
    def minimum_length(self) -> int:
        return self.shown + 3

    def counts(self, total: int) -> list[int]:
        """Number of occurrences of each symbol, the most common first."""
        others = total // (self.shown + 2)
        return [total - (self.shown - 1) * others] + [others] * (self.shown - 1)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        symbols = generator.random((batch, self.symbols)).argsort(axis=1)[:, : self.shown]
        said = np.repeat(symbols, self.counts(length - 1), axis=1)
        return self.asked_after(generator.permuted(said, axis=1), said[:, :0])

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", self.symbols), ("?", 1))

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        (first, count), (_, next_count) = Counter(inputs[:-1]).most_common(2)
        assert count > next_count
        return [first]


@dataclass(frozen=True)
class FrequentSymbol(CommonSymbol):
    """Symbols in random order whose counts fall as 1 / rank; at the end a mark: the most frequent (RULER).

    shown: number of different ones in an input, out of `symbols`. Tokens: symbols, the mark.

    >>> FrequentSymbol(symbols=4, shown=2).solve([3, 1, 3, 4])
    [-100, -100, -100, 3]
    """

    @property
    def minimum_length(self) -> int:
        return self.shown + 2

    def counts(self, total: int) -> list[int]:
        unit = total / sum(1 / rank for rank in range(1, self.shown + 1))
        others = [max(1, int(unit / rank)) for rank in range(2, self.shown + 1)]
        return [total - sum(others), *others]
