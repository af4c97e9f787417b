"""Tasks for decoders that one token alone cannot answer: search by several letters, and counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from dape.tasks.base import DecoderTask, require


@dataclass(frozen=True)
class BlockSearch(DecoderTask):
    """Blocks of letters, then some letters: the one block that has them all (Golovneva et al. 2025, MTA).

    letters: the alphabet, tokens 0 …; then the dot that ends a block, then the mark before the question.
    block, question: letters in each, all different, in any order.
    answer:  the block's "first" letter, its "last", or "all" of them, each from the one before.
    As many blocks as fit into the length; the rest of the length is cut.

    >>> BlockSearch(letters=5, block=2, question=1).solve([3, 0, 5, 1, 4, 5, 6, 4])
    [-100, -100, -100, -100, -100, -100, -100, 1]
    """

    letters: int = 26
    block: int = 5
    question: int = 2
    answer: Literal["first", "last", "all"] = "first"
    protocol = replace(
        DecoderTask.protocol,
        train_lengths=tuple(range(15, 64, 6)),
        test_lengths=(33, 63, 123, 243),
        num_layers=2,
    )

    def __post_init__(self) -> None:
        require(
            1 <= self.question <= self.block < self.letters,
            f"question={self.question} letters of a block={self.block} out of letters={self.letters} cannot be drawn: "
            f"1 ≤ question ≤ block < letters",
        )

    @property
    def dot(self) -> int:
        return self.first(1)

    @property
    def ask(self) -> int:
        return self.first(2)

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        return (("", self.letters), (".", 1), ("?", 1))

    @property
    def minimum_length(self) -> int:
        return self._after + self.block + 1

    @property
    def _after(self) -> int:
        """Number of tokens after the blocks."""
        return 1 + self.question + (self.block - 1 if self.answer == "all" else 0)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        rows, count = np.arange(batch), (length - self._after) // (self.block + 1)
        blocks = self._blocks((batch, count), generator)
        right = generator.integers(0, count, batch)
        asked = np.take_along_axis(
            blocks[rows, right], generator.random((batch, self.block)).argsort(axis=1)[:, : self.question], 1
        )
        others = np.arange(count) != right[:, None]
        while True:
            has_all = (blocks[:, :, :, None] == asked[:, None, None]).any(axis=2).all(axis=2) & others
            if not has_all.any():
                break
            blocks[has_all] = self._blocks((int(has_all.sum()),), generator)

        target = blocks[rows, right]
        dots = np.full((batch, count, 1), self.dot)
        context = np.concatenate([blocks, dots], axis=2).reshape(batch, -1)
        said = target[:, :-1] if self.answer == "all" else target[:, :0]
        return np.column_stack([context, np.full(batch, self.ask), asked, said])

    def _blocks(self, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
        """Blocks [*shape, block] of different letters."""
        return generator.random((*shape, self.letters)).argsort(axis=-1)[..., : self.block]

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        tokens = list(inputs)
        mark = tokens.index(self.ask)
        asked = tokens[mark + 1 : mark + 1 + self.question]
        blocks = [tokens[start : start + self.block] for start in range(0, mark, self.block + 1)]
        (target,) = [block for block in blocks if all(letter in block for letter in asked)]
        return {"first": [target[0]], "last": [target[-1]], "all": target}[self.answer]


@dataclass(frozen=True)
class Counting(DecoderTask):
    """Operations on variables (pass, set to 0, increment), then a variable: its value (Golovneva et al. 2024, CoPE).

    Tokens: pass 0, then "set" of each variable, "increment" of each, "print" of each, then the values 0 … limit.
    variables: number of variables; they start at 0. limit: increments beyond it are replaced by pass.
    passes:    share of operations that do nothing; one in five of the others is a set.

    >>> Counting(variables=2, limit=3).solve([3, 4, 1, 0, 3, 3, 5])  # a+1, b+1, a=0, pass, a+1, a+1, print a
    [-100, -100, -100, -100, -100, -100, 9]
    """

    variables: int = 1
    limit: int = 10
    passes: float = 0.5
    protocol = replace(
        DecoderTask.protocol, train_lengths=tuple(range(2, 65)), test_lengths=(32, 64, 128, 256), num_layers=2
    )
    minimum_length = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.passes < 1, f"passes={self.passes} must be at least 0 and below 1")

    answers: ClassVar = 4

    @property
    def kinds(self) -> tuple[tuple[str, int], ...]:
        operations = ((name, self.variables) for name in ("set", "increment", "print"))
        return ((".", 1), *operations, ("", self.limit + 1))

    @property
    def constant_accuracy(self) -> float:
        # A fifth of the values are 0, because the last operation was a set; those not set recently are at the limit.
        return max(0.2, 0.8**self.limit)

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        rows, count = np.arange(batch), np.zeros((batch, self.variables), dtype=np.int64)
        kind = generator.random((batch, length - 1))
        variable = generator.integers(0, self.variables, (batch, length - 1))
        sets = kind < (1 - self.passes) / 5
        increments = ~sets & (kind < 1 - self.passes)
        for position in range(length - 1):
            operand = variable[:, position]
            value = count[rows, operand]
            increments[:, position] &= value < self.limit
            count[rows, operand] = np.where(sets[:, position], 0, value + increments[:, position])
        asked = generator.integers(0, self.variables, batch)
        inputs = np.zeros((batch, length), dtype=np.int64)
        inputs[:, :-1] = np.where(sets, 1 + variable, np.where(increments, 1 + self.variables + variable, 0))
        inputs[:, -1] = 1 + 2 * self.variables + asked
        return inputs

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        *operations, last = inputs
        asked = last - 1 - 2 * self.variables
        value = 0
        for token in operations:
            if token == 1 + asked:
                value = 0
            elif token == 1 + self.variables + asked:
                value += 1
        return [1 + 3 * self.variables + value]
