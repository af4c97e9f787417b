"""Canon layers (Allen-Zhu 2025, arXiv 2512.17351): hidden states mixed with those of the three tokens before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dape.positions import Positions
from dape.positions.base import before

TAPS = 4


class Canon(nn.Module):
    """xₜ + Σ over l = 0 … 3 of wₗ ⊙ xₜ₋ₗ, w [4, hidden] learnable, tokens before the first of a document zero.

    Residual, without bias and activation, after the norm, starting as an nn.Conv1d, all as in the authors' released models.
    A cache keeps the last three tokens.

    layer, state: where they are in the cache.
    """

    def __init__(self, hidden_size: int, layer: int = 0, state: int = 0) -> None:
        super().__init__()
        self.layer, self.state = layer, state
        self.weight = nn.Parameter(torch.empty(TAPS, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As a depthwise nn.Conv1d."""
        nn.init.uniform_(self.weight, -(TAPS**-0.5), TAPS**-0.5)

    def forward(self, x: Tensor, positions: Positions, cache: Any = None) -> Tensor:
        """Output [B, T, hidden] for x [B, T, hidden], the last T queries of `positions`; cache: of transformers, with states."""
        count, own = x.shape[1], positions.query_index()[:, -x.shape[1] :]
        if cache is not None:
            x = cache.update_conv_state(x.mT, self.layer, self.state, conv_kernel_size=TAPS - 1).mT
        index = own[:, :1] + torch.arange(count - x.shape[1], count, device=x.device)
        starts, index = positions.starts(), index.clamp(min=0)
        batch = max(len(starts), len(index))
        starts = starts.expand(batch, -1).gather(1, index.expand(batch, -1)) | (index == 0)
        return self.mixed(x, starts)[:, -count:]

    def mixed(self, x: Tensor, starts: Tensor) -> Tensor:
        """Output for x [B, T, hidden] alone; starts [1 or B, T]: the first tokens of rows or documents."""
        total, earlier = x, x
        for factor in self.weight.to(x.dtype):
            total = total + factor * earlier
            earlier = before(earlier, starts)
        return total
