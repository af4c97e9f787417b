"""Base classes of generated tasks: a sampler of inputs, a solver in plain Python, sizes, and the model's inputs."""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np

# Label of positions without a target; torch's cross entropy skips it.
IGNORED = -100


@dataclass(frozen=True)
class Protocol:
    """Default training and test settings of a task; each can be overridden."""

    steps: int
    batch_size: int
    learning_rate: float
    train_lengths: tuple[int, ...]
    test_lengths: tuple[int, ...]
    samples: int
    num_layers: int
    hidden_size: int
    num_heads: int
    clip: float = 1.0


@dataclass(frozen=True)
class Examples:
    """A batch of model inputs: ids [B, T], labels [B, T] (IGNORED at positions without a target), counted [B, T]."""

    ids: np.ndarray
    labels: np.ndarray
    counted: np.ndarray

    def right(self, answers: np.ndarray) -> np.ndarray:
        """Mask [B, T] of counted positions at which answers [B, T] are right."""
        return (answers == self.labels) & self.counted

    def accuracy(self, answers: np.ndarray) -> float:
        """Share of counted positions at which answers [B, T] are right."""
        return float(self.right(answers).sum() / self.counted.sum())


@dataclass(frozen=True)
class Task(abc.ABC):
    """Base of all tasks; the dataclass fields of a subclass are its options.

    name:  in the registry: the class name in snake case.
    model: "encoder" answers at empty tokens after the input, "decoder" at tokens of the input.
    level: level of the Chomsky hierarchy, or the kind of decoder task.
    """

    name: ClassVar[str]
    model: ClassVar[Literal["encoder", "decoder"]]
    level: ClassVar[str]
    protocol: ClassVar[Protocol]

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__).lower()

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of different input tokens."""

    @property
    @abc.abstractmethod
    def num_labels(self) -> int:
        """Number of different labels."""

    @property
    def random_accuracy(self) -> float:
        """Accuracy of random answers, drawn uniformly from the possible labels."""
        return 1 / self.num_labels

    @property
    def constant_accuracy(self) -> float:
        """Accuracy, on long inputs, of the best constant answer."""
        return self.random_accuracy

    @property
    def minimum_length(self) -> int:
        """Length of the shortest input."""
        return 1

    def sample(
        self, batch: int, length: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [batch, length], drawn from the generator, and their outputs [batch, n], integers."""
        if length < self.minimum_length:
            raise ValueError(
                f'"{self.name}" has no input of length {length}; the shortest has {self.minimum_length} tokens'
            )
        if batch < 1:
            raise ValueError(f"batch={batch} samples cannot be drawn; batch must be at least 1")
        inputs = self.draw(batch, length, generator)
        return inputs, np.array([self.solve(row) for row in inputs.tolist()])

    @abc.abstractmethod
    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Inputs for checked arguments; the length may be cut to the next that the task has."""

    @abc.abstractmethod
    def solve(self, inputs: Sequence[int]) -> list[int]:
        """Output for one input, computed from the input alone."""

    @abc.abstractmethod
    def examples(self, batch: int, length: int, generator: np.random.Generator) -> Examples:
        """Draw a batch of model inputs and labels."""

    def spell(self, token: int) -> str:
        """Readable form of a token: its number, or a short word."""
        return str(token)

    def options(self) -> dict[str, Any]:
        """The options and their values."""
        return {option.name: getattr(self, option.name) for option in fields(self)}


@dataclass(frozen=True)
class ChomskyTask(Task):
    """A task of the Chomsky-hierarchy benchmark: the output follows the input, at as many empty tokens.

    input_size and output_size: number of different tokens in inputs and in outputs.
    """

    input_size: ClassVar[int]
    output_size: ClassVar[int]
    model = "encoder"
    protocol = Protocol(
        steps=200_000,
        batch_size=128,
        learning_rate=1e-3,
        train_lengths=tuple(range(1, 41)),
        test_lengths=tuple(range(41, 501)),
        samples=512,
        num_layers=5,
        hidden_size=64,
        num_heads=8,
    )

    @property
    def vocab_size(self) -> int:
        return self.input_size + 1

    @property
    def num_labels(self) -> int:
        return self.output_size

    @property
    def empty(self) -> int:
        """The token at output positions."""
        return self.input_size

    def draw(self, batch: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Uniform tokens."""
        return generator.integers(0, self.input_size, (batch, length))

    def counted(self, outputs: np.ndarray) -> np.ndarray:
        """Mask of the outputs that count for the accuracy: all."""
        return np.ones(outputs.shape, dtype=bool)

    def examples(self, batch: int, length: int, generator: np.random.Generator) -> Examples:
        inputs, outputs = self.sample(batch, length, generator)
        return Examples(
            np.concatenate([inputs, np.full_like(outputs, self.empty)], axis=1),
            np.concatenate([np.full_like(inputs, IGNORED), outputs], axis=1),
            np.concatenate([np.zeros(inputs.shape, dtype=bool), self.counted(outputs)], axis=1),
        )


@dataclass(frozen=True)
class TerminatedTask(ChomskyTask):
    """A task whose outputs end with a termination token, after which nothing is counted.

    The zeros after the token are still trained on, as in the original.
    """

    output_size = 3
    random_accuracy = 0.5
    terminator: ClassVar[int] = 2

    def counted(self, outputs: np.ndarray) -> np.ndarray:
        end = (outputs == self.terminator).argmax(axis=1, keepdims=True)
        return np.arange(outputs.shape[1]) <= end


@dataclass(frozen=True)
class DecoderTask(Task):
    """A task for decoders: a label at some tokens of the input, IGNORED at the others.

    answers: index of the kind of tokens that labels are of.
    """

    model = "decoder"
    level = "recall"
    protocol = Protocol(
        steps=1000,
        batch_size=64,
        learning_rate=3e-3,
        train_lengths=(24,),
        test_lengths=(12, 24, 48, 96),
        samples=512,
        num_layers=1,
        hidden_size=64,
        num_heads=2,
    )
    answers: ClassVar[int] = 0
    # Least values of whole-numbered options other than 1.
    least: ClassVar[dict[str, int]] = {}

    def __post_init__(self) -> None:
        for name, value in self.options().items():
            least = self.least.get(name, 1)
            require(not isinstance(value, int) or value >= least, f"{name}={value} must be at least {least}")

    @property
    @abc.abstractmethod
    def kinds(self) -> tuple[tuple[str, int], ...]:
        """Kinds of tokens in the order of their numbers: a letter or a sign, and how many there are."""

    def first(self, kind: int) -> int:
        """The first token of a kind."""
        return sum(size for _, size in self.kinds[:kind])

    @property
    def vocab_size(self) -> int:
        return self.first(len(self.kinds))

    @property
    def num_labels(self) -> int:
        return self.vocab_size

    @property
    def random_accuracy(self) -> float:
        return 1 / self.kinds[self.answers][1]

    def examples(self, batch: int, length: int, generator: np.random.Generator) -> Examples:
        inputs, outputs = self.sample(batch, length, generator)
        return Examples(inputs, outputs, outputs != IGNORED)

    def solve(self, inputs: Sequence[int]) -> list[int]:
        labels = self.last_labels(inputs)
        return [IGNORED] * (len(inputs) - len(labels)) + labels

    def last_labels(self, inputs: Sequence[int]) -> list[int]:
        """The labels at the end of one input; those before are IGNORED."""
        raise NotImplementedError

    def spell(self, token: int) -> str:
        """The letter of its kind and the number in it; the only one of a kind, and filler, as the letter alone."""
        for letter, size in self.kinds:
            if token < size:
                return letter if letter == "." or (letter and size == 1) else f"{letter}{token}"
            token -= size
        raise ValueError(f"token {token} is not in the vocabulary")


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


# Protocol of the length suite: two layers; minutes per task with six methods and two seeds. What has to be recalled fits
# into the shortest training length, so that longer inputs have more tokens to search.
SUITE = replace(
    DecoderTask.protocol, steps=400, batch_size=32, samples=128, num_layers=2, num_heads=4,
    train_lengths=tuple(range(24, 49, 6)), test_lengths=(48, 96, 192, 384),
)  # fmt: skip


def generator_for(*key: int) -> np.random.Generator:
    """Random generator seeded by the key alone, the same in every process."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
