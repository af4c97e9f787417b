"""Distances in two dimensions: patches of an image, rows one after another."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.types import Bias, TileBias
from dape.positions.base import DistanceEncoding, PositionEncoding, Positions, State


class Grid(PositionEncoding):
    """An encoding by distance, of the straight-line distance between patches of an image.

    encoding: any DistanceEncoding, such as Kerple.
    prefix:   number of tokens before the patches (class, distillation, registers), at distance 0 from all.
    columns:  patches in a row; None for a square image.
    """

    summary = "an encoding by distance between patches of an image"

    def __init__(self, encoding: PositionEncoding, *, prefix: int = 0, columns: int | None = None) -> None:
        super().__init__()
        if not isinstance(encoding, DistanceEncoding):
            raise ValueError(f"{type(encoding).__name__} is not an encoding by distance, which patches need")
        self.encoding, self.prefix, self.columns = encoding, prefix, columns

    def distances(self, num_tokens: int, device: torch.device) -> Tensor:
        """Distances [T, T] between all tokens."""
        patches = num_tokens - self.prefix
        columns = math.isqrt(max(0, patches)) if self.columns is None else self.columns
        if columns < 1 or patches % columns or (self.columns is None and columns**2 != patches):
            raise ValueError(
                f"{num_tokens} tokens, {self.prefix} of them before the patches, are not "
                f"{'a square' if self.columns is None else f'rows of {columns}'}: set prefix and columns"
            )
        index = torch.arange(patches, device=device)
        row, column = (x.float() for x in (index // columns, index % columns))
        apart = torch.hypot(row[:, None] - row, column[:, None] - column)
        return F.pad(apart, (self.prefix, 0, self.prefix, 0))

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"q has {q.shape[2]} patches and k {k.shape[2]}, expected one image")
        distance = self.distances(k.shape[2], k.device)
        dtype = torch.promote_types(q.dtype, torch.float32)

        def tile(rows: slice, num_keys: int) -> Tensor:
            return self.encoding.at(distance[rows, :num_keys], causal=False)[None].to(dtype)

        return TileBias(tile)
