"""FIRE (Li et al. 2023): a small network on the distance relative to the query's own position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.ops.score_conv_attention.types import Bias, TileBias
from dape.positions.base import Places, PositionEncoding, at_least_float32, check_sizes

EPSILON = 1e-6


class FIRE(PositionEncoding):
    """MLP(ψ(|i − j|) / ψ(max(L, i))), ψ(x) = log(1 + c · x); c, the threshold L and the MLP are learned."""

    summary = "a small network on log-distance relative to the query's position"
    additive = True

    def __init__(
        self, num_heads: int, *, width: int = 32, rate: float = 0.1, threshold: float = 512.0
    ) -> None:
        super().__init__()
        check_sizes(num_heads=num_heads)
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, num_heads))
        self.initial_rate, self.threshold = rate, threshold
        self.rate = nn.Parameter(torch.empty(()))
        self.threshold_factor = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.rate, self.initial_rate)
        nn.init.constant_(self.threshold_factor, 1.0)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def bias(self, q: Tensor, k: Tensor, places: Places, *, scale: float) -> Bias:
        def tile(rows: slice, num_keys: int) -> Tensor:
            rate, factor = at_least_float32(self.rate).abs(), at_least_float32(self.threshold_factor)
            distance = places.distances(rows, num_keys).abs()
            reach = torch.maximum(places.queries[:, rows, None], (factor * self.threshold).abs())
            relative = torch.log1p(rate * distance) / (torch.log1p(rate * reach) + EPSILON)
            w1, b1, w2, b2 = (at_least_float32(parameter) for parameter in self.mlp.parameters())
            hidden = F.relu(relative[..., None] * w1[:, 0] + b1)
            return F.linear(hidden, w2, b2).movedim(-1, 1)

        return TileBias(tile, places.batch)
