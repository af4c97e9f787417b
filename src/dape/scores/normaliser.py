"""Normalisers other than the softmax, around any score processor: a learnable sink, and SSMax."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import nn

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor

Normaliser = Literal["softmax", "sink", "ssmax"]


class Normalised(ScoreProcessor):
    """A score processor whose logits become weights by another normaliser than the softmax.

    sink:  exp(lᵢ) / (Σ exp(lⱼ) + exp(b)), one learnable b a head: a head may attend to nothing (gpt-oss).
    ssmax: softmax(s · log n · l), n the number of visible keys, one learnable s a head (Nakanishi 2025); it starts at
           1 / log `length`, so that at that many keys it is the softmax.
    """

    def __init__(
        self, processor: ScoreProcessor, num_heads: int, normaliser: Normaliser, *, length: int = 512
    ) -> None:
        super().__init__()
        if normaliser not in get_args(Normaliser):
            raise ValueError(f'normaliser="{normaliser}", expected one of {", ".join(get_args(Normaliser))}')
        self.processor, self.length = processor, length
        self.sink = nn.Parameter(torch.empty(num_heads)) if normaliser == "sink" else None
        self.length_scale = nn.Parameter(torch.empty(num_heads)) if normaliser == "ssmax" else None
        self._reset_own()

    def _reset_own(self) -> None:
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        if self.length_scale is not None:
            nn.init.constant_(self.length_scale, 1 / float(torch.tensor(float(self.length)).log()))

    def reset_parameters(self) -> None:
        self.processor.reset_parameters()
        self._reset_own()

    def program(self) -> ScoreProgram:
        return replace(self.processor.program(), sink=self.sink, length_scale=self.length_scale)
