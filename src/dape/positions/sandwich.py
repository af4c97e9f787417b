"""Sandwich (Chi et al. 2023): the inner product of sinusoidal encodings, as a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from dape.positions.base import DistanceEncoding, angle_dtype
from dape.settings import check_counts


class Sandwich(DistanceEncoding):
    """Σᵢ cos(d / 10000^(2i/width)) over i < width/2, divided by 8(h + 1)/H for head h; nothing to learn."""

    summary = "inner products of sinusoids, flatter from head to head"
    reference = "Chi et al. 2023, arXiv 2212.10356"

    def __init__(self, num_heads: int, *, width: int = 128) -> None:
        super().__init__()
        check_counts(num_heads=num_heads)
        if width < 2 or width % 2:
            raise ValueError(f"width={width} must be even and positive: sinusoids come in pairs")
        self.num_heads, self.width = num_heads, width

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        dtype = angle_dtype(distance.device)
        exponent = torch.arange(0, self.width, 2, device=distance.device, dtype=dtype) / self.width
        product = sum(torch.cos(distance * frequency) for frequency in 10000.0**-exponent)
        head = torch.arange(1, self.num_heads + 1, device=distance.device, dtype=dtype)
        return product / (8 * head / self.num_heads).view(-1, *[1] * distance.dim())
