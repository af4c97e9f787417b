"""Differential attention (Ye et al. 2024, arXiv 2410.05258, the first version): differences of two heads' weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from dape.ops.score_attention import ScoreProgram, Stage
from dape.scores.base import ScoreProcessor
from dape.settings import check_counts


class Differential(ScoreProcessor):
    """Heads 2m and 2m + 1 both weight their values by A₂ₘ − λ A₂ₘ₊₁: the two halves of one value of twice the width.

    λ = exp(a · b) − exp(c · d) + start, four learnable vectors of `width` numbers per layer, normal with deviation 0.1
    (the paper's have as many numbers as a head).

    start: λ at first, 0.8 − 0.6 e^(−0.3 layer) by default, layers counted from 0; 0.8 in an ablation of the paper.

    The RMSNorm of the output of a pair, with a learnable weight and times 1 − start, is `head_norm` of DapeConfig, as in
    the authors' code.
    """

    heads_per_value = 2

    summary = "weights minus λ times those of the next head, in pairs"
    reference = "Ye et al. 2024, arXiv 2410.05258"

    def __init__(
        self, num_heads: int, width: int = 32, *, layer: int = 0, start: float | None = None
    ) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, width=width)
        if num_heads % 2:
            raise ValueError(f"differential attention needs an even number, got num_heads={num_heads}")
        self.num_heads = num_heads
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer) if start is None else start
        self.norm_scale = 1 - self.start
        self.vectors = nn.Parameter(0.1 * torch.randn(4, width))

    def program(self) -> ScoreProgram:
        a, b, c, d = self.vectors.unbind()
        factor = torch.exp(a @ b) - torch.exp(c @ d) + self.start
        pair = torch.stack([torch.ones_like(factor), -factor])
        weight = pair.expand(self.num_heads, 2)[:, :, None, None]
        return ScoreProgram(post=(Stage(weight, groups=self.num_heads // 2),))
