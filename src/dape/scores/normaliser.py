"""Normalisers other than the softmax, around any score processor: a learnable sink, and SSMax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import nn

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor

Normaliser = Literal["softmax", "sink", "ssmax"]

# Initial root of a sink with `zero_init`: its square is below the resolution of float32 at 1.
SMALL_ROOT = 1e-4
# Keeps the logarithm finite for a root of 0.
TINY = 1e-12


class Normalised(ScoreProcessor):
    """A score processor with another normaliser than the softmax.

    sink:  exp(lᵢ) / (Σ exp(lⱼ) + a²), one learnable a per head: a head may attend to nothing (gpt-oss, which learns
           log a²). It starts at 1.
    ssmax: softmax(s · log n · l), n the number of visible keys, one learnable s per head (Nakanishi 2025); it starts at
           1 / log `length`, so that with `length` keys it is the softmax.
    zero_init: start as the softmax: a sink with a² = 10⁻⁸, whose gradient is not as small (that of its logit would be);
           SSMax as (s · log n + b) · l with s = 0 and a learnable b = 1.
    """

    def __init__(
        self,
        processor: ScoreProcessor,
        num_heads: int,
        normaliser: Normaliser,
        *,
        length: int = 512,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        if normaliser not in get_args(Normaliser):
            raise ValueError(f'normaliser="{normaliser}", expected one of {", ".join(get_args(Normaliser))}')
        self.processor, self.length, self.zero_init = processor, length, zero_init
        self.before_rotation = processor.before_rotation

        def vector(wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num_heads)) if wanted else None

        self.sink_root = vector(normaliser == "sink")
        self.length_scale = vector(normaliser == "ssmax")
        self.length_offset = vector(normaliser == "ssmax" and zero_init)
        self._reset_own()

    def _reset_own(self) -> None:
        if self.sink_root is not None:
            nn.init.constant_(self.sink_root, SMALL_ROOT if self.zero_init else 1.0)
        if self.length_scale is not None:
            nn.init.constant_(self.length_scale, 0.0 if self.zero_init else 1 / math.log(self.length))
        if self.length_offset is not None:
            nn.init.ones_(self.length_offset)

    def reset_parameters(self) -> None:
        self.processor.reset_parameters()
        self._reset_own()

    def program(self) -> ScoreProgram:
        # In float32 or finer: half precision would round the square to 0.
        root = None if self.sink_root is None else self.sink_root.to(_fine(self.sink_root.dtype))
        sink = None if root is None else torch.log(root.square() + TINY)
        return replace(
            self.processor.program(),
            sink=sink,
            length_scale=self.length_scale,
            length_offset=self.length_offset,
        )


def _fine(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
