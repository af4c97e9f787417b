"""Sinusoidal encoding (Vaswani et al. 2017): sines and cosines of the position, added to the embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from dape.positions.base import PositionEncoding, angle_dtype
from dape.settings import check_counts


def sinusoids(positions: Tensor, width: int, base: float = 10000.0) -> Tensor:
    """[…, width]: sin(p · base^(−2i/width)) for i < width/2, then the cosines."""
    dtype = angle_dtype(positions.device)
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=dtype) / width
    angles = positions[..., None].to(dtype) * base**-exponent
    return torch.cat([angles.sin(), angles.cos()], -1)


class Sinusoidal(PositionEncoding):
    """x + sinusoids(position)."""

    absolute = True
    summary = "sines and cosines of the position, added to the embeddings"
    reference = "Vaswani et al. 2017, arXiv 1706.03762"

    def __init__(self, hidden_size: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_counts(hidden_size=hidden_size)
        if hidden_size % 2:
            raise ValueError(f"sinusoids come in pairs: hidden_size={hidden_size} is odd")
        self.hidden_size, self.base = hidden_size, base

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoids(positions, self.hidden_size, self.base).to(x.dtype)
