"""Kerple (Chi et al. 2022): distances through a learned kernel, logarithmic or power."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dape.positions.base import DistanceEncoding
from dape.settings import check_counts

FLOOR = 0.01


def positive(raw: Tensor, distance: Tensor) -> Tensor:
    """|raw| + 0.01, [H, 1, …]: at least 0.01 after any optimizer step, with slope ±1 in raw."""
    return (raw.abs() + FLOOR).view(-1, *[1] * distance.ndim)


class Kerple(DistanceEncoding):
    """−r₁ · log(1 + r₂ · |i − j|), both learned per head and at least 0.01 by construction."""

    summary = "−r₁ log(1 + r₂ · distance), both learned per head"
    reference = "Chi et al. 2022, arXiv 2205.09921"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_counts(num_heads=num_heads)
        self.raw_height = nn.Parameter(torch.empty(num_heads).uniform_(0, 2))
        self.raw_rate = nn.Parameter(torch.empty(num_heads).uniform_(0, 1))

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        raw_height, raw_rate = self(distance.device)
        height, rate = positive(raw_height, distance), positive(raw_rate, distance)
        # Converted once, not by the product for every head.
        distance = (distance if causal else distance.abs()).to(rate.dtype)
        return -height * torch.log1p(rate * distance)


class KerplePower(DistanceEncoding):
    """−r₁ · |i − j|^r₂, with r₁ > 0 and 0 < r₂ < 2 learned per head."""

    summary = "−r₁ · distance^r₂, both learned per head"
    reference = "Chi et al. 2022, arXiv 2205.09921"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        check_counts(num_heads=num_heads)
        self.raw_height = nn.Parameter(torch.empty(num_heads).uniform_(0, 2))
        self.raw_power = nn.Parameter(torch.empty(num_heads).normal_(std=0.5))

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        raw_height, raw_power = self(distance.device)
        height = positive(raw_height, distance)
        power = 2 * torch.sigmoid(raw_power).view(-1, *[1] * distance.dim())
        # 0^r has no finite derivative in r by autograd's rule; distance 0 has bias 0 for any r.
        apart = distance != 0
        return torch.where(apart, -height * distance.abs().clamp(min=1).to(power.dtype) ** power, 0.0)
