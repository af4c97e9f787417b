"""How a trained model reads at the evaluation, where it reads otherwise than it was trained.

A block of an experiment's grid says so under `at_evaluation`:
    rope_scaling = "linear" | "ntk" | "yarn"   RoPE, stretched by the input's length over that of training
    randomized_positions = N                   positions drawn anew for every batch, from N places
Scores of a cell are kept by length, and by length and reading, such as "256" and "256 rope_scaling=ntk".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dape.methods import parse_method
from dape.positions import POSITIONS, randomized_positions
from dape.positions.rope import SCALINGS, RoPE

OPTIONS = ("rope_scaling", "randomized_positions")


@dataclass(frozen=True)
class Reading:
    """What differs from reading as in training; nothing, by default."""

    rope_scaling: str = "none"
    randomized_positions: int | None = None

    @property
    def name(self) -> str:
        """The options in words; nothing where nothing differs."""
        usual = Reading()
        chosen = {name: getattr(self, name) for name in OPTIONS}
        return ",".join(f"{name}={value}" for name, value in chosen.items() if value != getattr(usual, name))

    def key(self, length: int) -> str:
        """Under which a cell's scores at a length are kept."""
        return f"{length} {self.name}".strip()

    def position_options(self, length: int, train_length: int) -> dict[str, Any]:
        """Options of the position encoding for inputs of that length."""
        if self.rope_scaling == "none":
            return {}
        original = {"original_length": train_length} if self.rope_scaling == "yarn" else {}
        return {"scaling": self.rope_scaling, "factor": max(1.0, length / train_length), **original}

    def positions(self, length: int) -> Callable[[int], Tensor] | None:
        """What draws the positions of an input, the same ones in every run; None for 0, 1, 2, …"""
        if self.randomized_positions is None:
            return None
        places, generator = self.randomized_positions, torch.Generator().manual_seed(length)
        return lambda num_tokens: randomized_positions(num_tokens, places, generator=generator)


def parse_key(key: str) -> tuple[int, Reading]:
    """The length and the reading that scores are kept under."""
    length, _, name = key.partition(" ")
    options: dict[str, Any] = dict(entry.split("=") for entry in name.split(",") if entry)
    if "randomized_positions" in options:
        options["randomized_positions"] = int(options["randomized_positions"])
    return int(length), Reading(**options)


def checked_reading(options: dict[str, Any], method: str, lengths: tuple[int, ...]) -> Reading:
    """The reading of a block of the grid; a sentence for one that cannot be."""
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f'at_evaluation has no key "{name}": it takes {", ".join(OPTIONS)}')
    reading = Reading(**options)
    if reading.rope_scaling not in SCALINGS:
        raise ValueError(f'rope_scaling="{reading.rope_scaling}": choose one of {", ".join(SCALINGS)}')
    if "rope_scaling" in options and not issubclass(POSITIONS[parse_method(method).position], RoPE):
        raise ValueError(f"{method} has no RoPE that could be scaled at the evaluation")
    places = reading.randomized_positions
    if places is not None and places < max(lengths, default=1):
        raise ValueError(
            f"randomized_positions={places} at the evaluation, but inputs have {max(lengths)} tokens"
        )
    return reading
