"""FIRE (Li et al. 2023): a small network on the distance relative to the query's own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dape.ops.score_attention.types import Bias, Curve, TileBias
from dape.positions.base import LinearMap, PositionEncoding, Positions, State
from dape.settings import check_counts

EPSILON = 1e-6
# More than any distance relative to its reach.
FARTHEST = 1e4


class FIRE(PositionEncoding):
    """MLP(ψ(|i − j|) / ψ(max(L, i))), ψ(x) = log(1 + c · x); c, the threshold L and the MLP are learned."""

    absolute = True
    summary = "a small network on log-distance relative to the position"
    reference = "Li et al. 2024, arXiv 2310.04418"

    def __init__(
        self, num_heads: int, *, width: int = 32, rate: float = 0.1, threshold: float = 512.0
    ) -> None:
        super().__init__()
        check_counts(num_heads=num_heads)
        # With a ReLU between them; see `network`.
        self.mlp = nn.ModuleDict({"0": LinearMap(1, width), "2": LinearMap(width, num_heads)})
        self.threshold = threshold
        # One number each, but no scalars, which FSDP cannot shard.
        self.rate = nn.Parameter(torch.full((1,), rate))
        self.threshold_factor = nn.Parameter(torch.ones(1))

    @classmethod
    def trained_at(cls, length: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Half the training length, as the DAPE authors configure it (256 for 512)."""
        return {"threshold": length / 2}

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        positions.check(q, k)
        rate, factor = self(q.device)
        rate, threshold = rate.abs(), (factor * self.threshold).abs()
        pieces = self.pieces(q.device)

        def tile(rows: slice, num_keys: int) -> Tensor:
            distance = positions.distances(rows, num_keys).abs()
            reach = torch.maximum(positions.queries[:, rows, None], threshold)
            relative = torch.log1p(rate * distance) / (torch.log1p(rate * reach) + EPSILON)
            return self.evaluate(relative, *pieces).transpose(0, 1)

        def curve() -> Curve:
            lowest = 0 if positions.causal else 1 - positions.num_queries
            distance = torch.arange(lowest, positions.num_keys, device=q.device).abs()
            reach = torch.maximum(positions.queries, threshold)
            rows = 1 / (torch.log1p(rate * reach) + EPSILON)
            return Curve(torch.log1p(rate * distance), rows, *pieces, lowest)

        return TileBias(tile, positions.batch, curve if positions.consecutive else None)

    def pieces(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The MLP as a piecewise linear function of a scalar: knots [width], slopes and offsets [H, width + 1].

        A table of pieces takes a fraction of the time and memory of `width` hidden channels for each query and key.
        """
        (w1, b1), (w2, b2) = self.mlp["0"](device), self.mlp["2"](device)
        w1 = w1[:, 0]
        with torch.no_grad():
            # Pieces far from any x need no knots of their own.
            knots = (-b1 / w1).nan_to_num().clamp(-1.0, FARTHEST).sort().values
            inside = torch.cat([knots[:1] - 1, (knots[1:] + knots[:-1]) / 2, knots[-1:] + 1])
            active = (inside[:, None] * w1 + b1 > 0).to(w1.dtype)
        return knots, w2 @ (active * w1).T, w2 @ (active * b1).T + b2[:, None]

    @staticmethod
    def evaluate(x: Tensor, knots: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
        """A piecewise linear function from x […] to [H, …]."""
        piece = torch.bucketize(x.detach().flatten(), knots, out_int32=True)
        values = torch.addcmul(offsets.index_select(1, piece), slopes.index_select(1, piece), x.flatten())
        return values.view(-1, *x.shape)
