"""T5's bias (Raffel et al. 2020): a learned number for each bucket of distances, one table for all layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dape.positions.base import DistanceEncoding
from dape.settings import check_counts


def buckets(distance: Tensor, *, num_buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Bucket of each distance (query − key): small ones their own, larger ones logarithmic up to max_distance."""
    offset = torch.zeros_like(distance)
    if not causal:
        num_buckets //= 2
        offset = num_buckets * (distance < 0)
        distance = distance.abs()
    exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    logarithmic = exact + (ratio * (num_buckets - exact)).long()
    return offset + torch.where(
        distance < exact, distance.clamp(min=0), logarithmic.clamp(max=num_buckets - 1)
    )


class T5Bias(DistanceEncoding):
    """table[bucket(i − j)] · √D, so that the table learns at the pace of unscaled scores."""

    summary = "a learned number per logarithmic bucket of distances"
    reference = "Raffel et al. 2020, arXiv 1910.10683"
    shared = True

    def __init__(
        self, num_heads: int, head_dim: int, *, num_buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, head_dim=head_dim)
        if num_buckets < 4 or num_buckets % 4:
            raise ValueError(f"num_buckets={num_buckets} must be a positive multiple of 4")
        if max_distance <= num_buckets // 2:
            raise ValueError(f"max_distance={max_distance} must exceed num_buckets / 2 = {num_buckets // 2}")
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.gain = math.sqrt(head_dim)
        self.table = nn.Parameter(torch.empty(num_buckets, num_heads).normal_(std=0.02))

    def at(self, distance: Tensor, *, causal: bool) -> Tensor:
        index = buckets(
            distance.long(), num_buckets=self.num_buckets, max_distance=self.max_distance, causal=causal
        )
        (table,) = self(distance.device)
        return (table[index] * self.gain).movedim(-1, 0)
