"""Transformer-XL's relative encoding (Dai et al. 2019): queries meet the distance as well as the key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dape.ops.score_attention.types import Bias, TileBias
from dape.positions.base import LinearMap, PositionEncoding, Positions, State, at_least_float32
from dape.positions.sinusoidal import sinusoids
from dape.settings import check_counts


class TransformerXL(PositionEncoding):
    """scale · (u·k + (q + v)·W r(i − j)): u, v learned per head, W a bias-free layer on sinusoids of the distance."""

    summary = "queries meet sinusoids of the distance, keys learned vectors"
    reference = "Dai et al. 2019, arXiv 1901.02860"

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, head_dim=head_dim)
        self.key_bias = nn.Parameter(torch.empty(num_heads, head_dim).normal_(std=0.02))
        self.distance_bias = nn.Parameter(torch.empty(num_heads, head_dim).normal_(std=0.02))
        width = num_heads * head_dim
        self.distance_key = LinearMap(width + width % 2, width, bias=False)

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        positions.check(q, k)
        num_heads, head_dim = self.key_bias.shape
        repeats = num_heads // k.shape[1]
        key_bias, distance_bias = self(q.device)
        (weight,) = self.distance_key(q.device)

        def tile(rows: slice, num_keys: int) -> Tensor:
            keys = at_least_float32(k[:, :, :num_keys]).repeat_interleave(repeats, 1)
            to_key = torch.einsum("hd,bhkd->bhk", key_bias, keys)
            distance = positions.distances(rows, num_keys)
            distance = distance.clamp(min=0) if positions.causal else distance
            # Each distance that occurs is embedded once, however many pairs share it.
            lowest, highest = _span(positions, rows, num_keys)
            occurring = torch.arange(lowest, highest + 1, device=q.device)
            table = sinusoids(occurring, weight.shape[1]).to(weight.dtype) @ weight.T
            table = table.unflatten(-1, (num_heads, head_dim)).movedim(1, 0)
            query = at_least_float32(q[:, :, rows]) + distance_bias[:, None]
            to_distance = query @ table.transpose(-1, -2)
            index = (distance - lowest)[:, None].expand(q.shape[0], num_heads, -1, -1)
            return scale * (to_key[:, :, None] + to_distance.gather(-1, index))

        return TileBias(tile, q.shape[0])


def _span(positions: Positions, rows: slice, num_keys: int) -> tuple[int, int]:
    """The least and greatest distance in a tile; 0 and up when causal."""
    if positions.consecutive:
        offset = positions.num_keys - positions.num_queries
        lowest, highest = rows.start + offset - num_keys + 1, rows.stop - 1 + offset
    else:
        distance = positions.distances(rows, num_keys)
        lowest, highest = int(distance.min()), int(distance.max())
    return (0, max(0, highest)) if positions.causal else (lowest, highest)
