"""RoPE-ID (Wertheimer et al. 2026): rotations that short training has seen whole, on half of the features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dape.positions.base import PositionEncoding, angle_dtype
from dape.positions.rope import rotated
from dape.settings import check_counts


class RoPEID(PositionEncoding):
    """RoPE on half of the features; pairs turn once in 32 … `original_length` / 2 tokens, in a geometric series.

    original_length: of the training windows, in which the slowest pair turns twice.

    The paper also raises the temperature of inputs beyond the training length as YaRN does; here the logits are as they
    are.
    """

    summary = "half of the features rotated, each a whole turn in training"
    reference = "Wertheimer et al. 2026, arXiv 2603.18017"

    def __init__(self, head_dim: int, *, original_length: int = 2048) -> None:
        super().__init__()
        check_counts(head_dim=head_dim, original_length=original_length)
        if head_dim % 4:
            raise ValueError(f"half of the features rotate, in pairs: 4 does not divide head_dim={head_dim}")
        self.head_dim, self.original_length = head_dim, original_length

    @classmethod
    def trained_at(cls, length: int, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"original_length": length}

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        slowest = max(32.0, self.original_length / 2)
        share = torch.linspace(0, 1, self.head_dim // 4, device=x.device, dtype=angle_dtype(x.device))
        frequencies = 2 * math.pi / (32 * (slowest / 32) ** share)
        return rotated(x, positions[:, None, :, None] * frequencies)
