"""Differential attention (Ye et al. 2024, arXiv 2410.05258, the first version): differences of two heads' weights."""

from __future__ import annotations

import torch
from torch import nn

from dape.ops.score_attention import ScoreProgram, Stage
from dape.scores.base import ScoreProcessor
from dape.scores.conv import check_counts


class Differential(ScoreProcessor):
    """Heads 2m and 2m + 1 both weight their values by A₂ₘ − λ A₂ₘ₊₁: the two halves of one value of twice the width.

    λ = exp(a · b) − exp(c · d) + start, four learnable vectors of `width` numbers per layer, normal with deviation 0.1.

    start: λ at first. The paper's is 0.8 − 0.6 e^(−0.3 (layer − 1)), with layers from 1, and 0.8 in an ablation.

    The paper's normalisation of the output of a pair, times 1 − start, is left out; `head_norm` of DapeConfig
    normalises each half.
    """

    summary = "weights minus λ times those of the next head, in pairs"
    reference = "Ye et al. 2024, arXiv 2410.05258"

    def __init__(self, num_heads: int, width: int = 32, *, start: float = 0.8) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, width=width)
        if num_heads % 2:
            raise ValueError(
                f"differential attention pairs heads and needs an even number, got num_heads={num_heads}"
            )
        self.num_heads, self.start = num_heads, start
        self.vectors = nn.Parameter(0.1 * torch.randn(4, width))

    def program(self) -> ScoreProgram:
        a, b, c, d = self.vectors.unbind()
        factor = torch.exp(a @ b) - torch.exp(c @ d) + self.start
        pair = torch.stack([torch.ones_like(factor), -factor])
        weight = pair.expand(self.num_heads, 2)[:, :, None, None]
        return ScoreProgram(post=(Stage(weight, groups=self.num_heads // 2),))
