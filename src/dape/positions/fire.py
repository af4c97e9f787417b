"""FIRE (Li et al. 2023): a small network on the distance relative to the query's own position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dape.ops.score_attention.types import Bias, TileBias
from dape.positions.base import Places, PositionEncoding, at_least_float32, check_sizes

EPSILON = 1e-6
# More than any distance relative to its reach.
FARTHEST = 1e4


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
            return self.network(relative).transpose(0, 1)

        return TileBias(tile, places.batch)

    def network(self, x: Tensor) -> Tensor:
        """The MLP at numbers x […], as [H, …].

        Of one number it is a piecewise linear function: a table has the slope and offset of each piece, which takes
        a fraction of the time and memory of `width` hidden values for each query and key.
        """
        w1, b1, w2, b2 = (at_least_float32(parameter) for parameter in self.mlp.parameters())
        w1 = w1[:, 0]
        with torch.no_grad():
            # Pieces far from any x need no knots of their own.
            knots = (-b1 / w1).nan_to_num().clamp(-1.0, FARTHEST).sort().values
            inside = torch.cat([knots[:1] - 1, (knots[1:] + knots[:-1]) / 2, knots[-1:] + 1])
            active = (inside[:, None] * w1 + b1 > 0).to(w1.dtype)
            piece = torch.bucketize(x.flatten(), knots, out_int32=True)
        slopes, offsets = w2 @ (active * w1).T, w2 @ (active * b1).T + b2[:, None]
        found = torch.addcmul(offsets.index_select(1, piece), slopes.index_select(1, piece), x.flatten())
        return found.view(-1, *x.shape)
