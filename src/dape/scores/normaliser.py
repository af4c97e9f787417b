"""Normalisers other than the softmax, around any score processor: a sink, SSMax, stick-breaking, entmax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.ops.score_attention import ScoreProgram, program
from dape.scores.base import ScoreProcessor

Normaliser = Literal["softmax", "sink", "ssmax", "stickbreaking", "entmax", "asentmax"]

CAN_START_AS_SOFTMAX = ("softmax", "sink", "ssmax")
# The program's normaliser, where it is not the softmax.
PROGRAMS: dict[str, program.Normaliser] = {
    "stickbreaking": "stickbreaking",
    "entmax": "entmax",
    "asentmax": "entmax",
}
REFERENCES = {
    "sink": "OpenAI 2025, arXiv 2508.10925",
    "ssmax": "Nakanishi 2025, arXiv 2501.19399",
    "stickbreaking": "Tan et al. 2024, arXiv 2410.17980",
    "entmax": "Peters et al. 2019, arXiv 1905.05702",
    "asentmax": "Vasylenko et al. 2025, arXiv 2506.16640",
}
# Its softplus is 0.1.
SOFTPLUS_OF_TENTH = math.log(math.expm1(0.1))
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
    stickbreaking: βⱼ Π (1 − βₗ) over j < l ≤ i, β = σ(logits) (Tan et al. 2024, arXiv 2410.17980): near keys first, no
           positions needed. A query's own key takes part, as with the authors' attend_current; what is left of the
           stick is dropped. Causal attention only.
    entmax: α-entmax with α = 1.5: exact zeros (Peters et al. 2019).
    asentmax: entmax of (δ + β log n) · l (Vasylenko et al. 2025, arXiv 2506.16640), a learnable β ≥ 0 and δ per head,
           where the paper's β and the power of log n are functions of the token; β starts at 0.1, δ at 1.
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
        if zero_init and normaliser not in CAN_START_AS_SOFTMAX:
            raise ValueError(f'normaliser="{normaliser}" cannot start as the softmax: zero_init=True')
        self.processor, self.length, self.zero_init = processor, length, zero_init
        self.normaliser = normaliser
        self.before_rotation = processor.before_rotation

        def vector(wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num_heads)) if wanted else None

        self.sink_root = vector(normaliser == "sink")
        self.length_scale = vector(normaliser in ("ssmax", "asentmax"))
        self.length_offset = vector(normaliser == "asentmax" or (normaliser == "ssmax" and zero_init))
        self._reset_own()

    def _reset_own(self) -> None:
        if self.sink_root is not None:
            nn.init.constant_(self.sink_root, SMALL_ROOT if self.zero_init else 1.0)
        if self.length_scale is not None:
            start = 0.0 if self.zero_init else 1 / math.log(self.length)
            nn.init.constant_(
                self.length_scale, SOFTPLUS_OF_TENTH if self.normaliser == "asentmax" else start
            )
        if self.length_offset is not None:
            nn.init.ones_(self.length_offset)

    def reset_parameters(self) -> None:
        self.processor.reset_parameters()
        self._reset_own()

    def program(self) -> ScoreProgram:
        # In float32 or finer: half precision would round the square to 0.
        root = None if self.sink_root is None else self.sink_root.to(_fine(self.sink_root.dtype))
        sink = None if root is None else torch.log(root.square() + TINY)
        scale: Tensor | None = self.length_scale
        if self.normaliser == "asentmax":
            scale = F.softplus(cast(Tensor, scale))
        return replace(
            self.processor.program(),
            sink=sink,
            length_scale=scale,
            length_offset=self.length_offset,
            normaliser=PROGRAMS.get(self.normaliser, "softmax"),
        )


def _fine(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
