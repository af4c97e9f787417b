"""A model with the data to evaluate it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dape.data import TokenData, Tokens


@dataclass(frozen=True)
class EvaluatedModel:
    """A model and the data to evaluate it on; method, seed and train_length if known.

    trained_on: data with the model's training split, if known; opened when it is needed.
    """

    label: str
    model: nn.Module
    data: TokenData
    method: str | None = None
    seed: int | None = None
    train_length: int | None = None
    trained_on: Callable[[], TokenData] | None = None

    def training_tokens(self) -> Tokens:
        """Tokens that the model was trained on; raises if they are not known."""
        train = self.trained_on().train if self.trained_on is not None else None
        if train is None or not len(train):
            raise ValueError(
                f"the training data of {self.label} is unknown, and so are its n-gram counts: leave out "
                f"--max-training-count, or pass the packed training data of an hf: model by --data"
            )
        return train

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "model": self.label,
            "method": self.method,
            "seed": self.seed,
            "train_length": self.train_length,
        }

    def same_tokens(self, other: EvaluatedModel, split: str) -> bool:
        """Whether both are evaluated on the same token ids."""
        mine, theirs = self.data.manifest, other.data.manifest
        return (
            mine["tokenizer"]["sha256"] == theirs["tokenizer"]["sha256"]
            and mine["splits"][split] == theirs["splits"][split]
        )
