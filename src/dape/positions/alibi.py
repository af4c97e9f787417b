"""ALiBi (Press et al. 2021): −slope · distance, a fixed slope for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from dape.positions.base import DistanceEncoding, angle_dtype
from dape.settings import check_counts


def slopes(num_heads: int) -> list[float]:
    """2^(−8h/n) for the largest power of two n ≤ num_heads, then every other slope of 2n until there are enough."""
    power = 1 << (num_heads.bit_length() - 1)
    full = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return full + between[: num_heads - power]


class ALiBi(DistanceEncoding):
    """−slopeₕ · |i − j|; nothing to learn."""

    summary = "−slope · distance, a fixed slope per head"
    reference = "Press et al. 2022, arXiv 2108.12409"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_counts(num_heads=num_heads)
        self.slopes = slopes(num_heads)

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        slope = torch.tensor(self.slopes, device=distance.device, dtype=angle_dtype(distance.device))
        return -slope.view(-1, *[1] * distance.dim()) * distance.abs()
