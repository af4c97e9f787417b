"""The first convolution of a bias by distance as tables, computed once for all rows and batches.

The convolution is linear before its activation, so expand([S ; B]) = expand_S(S) + (expand_B(B) + b₁), and
for B by distance d = i − j the second term depends on d alone, except in the first columns of a row,
where taps reach past the first key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.program import Stage
from dape.ops.score_attention.types import DistanceBias


class HiddenTables(NamedTuple):
    """The bias half of the first convolution for a causal row, by distance; column m is distance m − ahead.

    hidden: [W, N + ahead], for a column with all its left neighbours visible.
    edges:  [left, W, N + ahead], for the column c keys after the first visible one, c < left.
    """

    hidden: Tensor
    edges: Tensor


def stage_tables(
    bias: DistanceBias, stage: Stage, ahead: int, num_keys: int, dtype: torch.dtype
) -> HiddenTables:
    """Tables of a first stage that reads [S ; B], for distances −ahead … num_keys − 1.

    Differentiable in the bias and the weights. A kernel over several queries needs as many queries as keys: the rows
    it reads then exist, or see no key.
    """
    num_heads, groups, num_rows = bias.values.shape[0], stage.groups, stage.query_kernel_size
    values = bias.values[:, -bias.lowest : num_keys - bias.lowest].to(dtype)
    # Tap t of the row d above reads key j + t − left, at distance i − j − d − (t − left); below 0 it is hidden.
    padded = F.pad(values, (ahead + num_rows - 1 + stage.right, stage.left)).unflatten(0, (groups, -1))
    weight = stage.weight.to(dtype).unflatten(0, (groups, -1))[:, :, num_heads // groups :]
    length = num_keys + ahead
    offset = values.new_zeros(stage.outputs) if stage.offset is None else stage.offset.to(dtype)
    sums = [offset.view(groups, -1, 1).expand(-1, -1, length)]
    for tap in range(stage.kernel_size - 1, -1, -1):
        total = sums[-1]
        for row in range(num_rows):
            start = row + stage.kernel_size - 1 - tap
            total = torch.baddbmm(total, weight[:, :, :, row, tap], padded[..., start : start + length])
        sums.append(total)
    # At the first visible key's c-th successor the first left − c taps would read hidden keys.
    right_most = stage.kernel_size - stage.left
    hidden, *edges = (
        total.flatten(0, 1) for total in (sums[-1], *sums[right_most : right_most + stage.left])
    )
    return HiddenTables(hidden, torch.stack(edges) if edges else hidden.new_zeros(0, *hidden.shape))
