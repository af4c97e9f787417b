"""What the first convolution makes of a bias by distance, as tables: computed once, for all rows and batches.

The convolution is linear before its activation, so expand([S ; B]) = expand_S(S) + (expand_B(B) + b₁), and
for B by distance d = i − j the second term depends on d alone, except in the first columns of a row,
where taps reach past the first key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.program import Pair
from dape.ops.score_attention.types import DistanceBias


class HiddenTables(NamedTuple):
    """The bias half of the first convolution for a causal row, by distance; column m is distance m − right.

    hidden: [W, N + right], for a column with all its left neighbours visible.
    edges:  [left, W, N + right], for the column c keys after the first visible one, c < left.
    """

    hidden: Tensor
    edges: Tensor


def hidden_tables(bias: DistanceBias, conv: Pair, num_keys: int, dtype: torch.dtype) -> HiddenTables:
    """Tables for distances −right … num_keys − 1. Differentiable in the bias and the weights."""
    num_heads = bias.values.shape[0]
    left, right = conv.left, conv.right
    values = bias.values[:, -bias.lowest : num_keys - bias.lowest].to(dtype)
    # Tap t of column j reads key j + t − left, at distance d − (t − left); distances below 0 are hidden.
    padded = F.pad(values, (2 * right, left))
    taps = conv.expand_weight[:, num_heads:, 0].to(dtype).flip(-1)
    size, length = taps.shape[-1], padded.shape[-1] - taps.shape[-1] + 1
    sums = [conv.expand_bias.to(dtype)[:, None].expand(-1, length)]
    # The op computes in `dtype`, whatever autocast is on.
    with torch.autocast(values.device.type, enabled=False):
        for tap in range(size):
            sums.append(torch.addmm(sums[-1], taps[..., tap], padded[:, tap : tap + length]))
    # At the first visible key's c-th successor the last left − c of these taps would read hidden keys.
    edges = sums[size - left : size]
    return HiddenTables(sums[-1], torch.stack(edges) if edges else sums[-1].new_zeros(0, *sums[-1].shape))
