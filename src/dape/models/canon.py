"""Canon layers (Allen-Zhu 2025, arXiv 2512.17351): hidden states mixed with those of the three tokens before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TAPS = 4


class Canon(nn.Module):
    """xₜ + Σ over l = 0 … 3 of wₗ ⊙ xₜ₋ₗ, w [4, hidden] learnable, tokens before the first of a document zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(TAPS, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As a depthwise nn.Conv1d."""
        nn.init.uniform_(self.weight, -(TAPS**-0.5), TAPS**-0.5)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        """x [B, T, hidden]; starts: [1 or B, T], True at the first token of each row or document."""
        total, earlier = x, x
        for factor in self.weight.to(x.dtype):
            total = total + factor * earlier
            earlier = F.pad(earlier[:, :-1], (0, 0, 1, 0)).masked_fill(starts[..., None], 0.0)
        return total
