"""RoPE with the distances of far keys grouped or capped, for models trained without: SelfExtend and ReRoPE."""

from __future__ import annotations

from torch import Tensor

from dape.ops.score_attention.types import Bias, TileBias
from dape.positions.base import PositionEncoding, Positions, State, at_least_float32
from dape.positions.rope import RoPE
from dape.settings import check_counts


class SelfExtend(PositionEncoding):
    """RoPE at distance i − j below `near`; from there on at ⌊i/group⌋ − ⌊j/group⌋ + near − ⌊near/group⌋ (Jin et al. 2024).

    group: None caps the distance at `near` instead (ReRoPE, Su 2023, whose code also multiplies queries beyond the
           training length n by log i / log n; here they stay as they are).
    base, fraction: as in RoPE. A retrofit takes both from the model, and half of its length as `near`.

    The bias is the difference of the two scores, so that processors read the scores at true distances and the change.
    """

    summary = "RoPE with far distances grouped (SelfExtend) or capped (ReRoPE)"
    reference = "Jin et al. 2024, arXiv 2401.01325"
    direction = "causal"

    def __init__(
        self,
        head_dim: int,
        *,
        near: int = 512,
        group: int | None = None,
        base: float = 10000.0,
        fraction: float = 1.0,
    ) -> None:
        super().__init__()
        check_counts(near=near, group=1 if group is None else group)
        self.rope = RoPE(head_dim, base=base, fraction=fraction)
        self.near, self.group = near, group

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.rope.rotate(x, positions)

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        positions.check(q, k)
        wide_q = at_least_float32(q)
        wide_k = at_least_float32(k).repeat_interleave(q.shape[1] // k.shape[1], 1)
        # From true positions to those of far pairs.
        far_q = self.rope.rotate(wide_q, self._far(positions.queries, of_query=True) - positions.queries)
        far_k = self.rope.rotate(wide_k, self._far(positions.keys) - positions.keys)

        def tile(rows: slice, num_keys: int) -> Tensor:
            true = wide_q[:, :, rows] @ wide_k[:, :, :num_keys].mT
            far = far_q[:, :, rows] @ far_k[:, :, :num_keys].mT
            is_near = positions.distances(rows, num_keys)[:, None] < self.near
            return ((far - true) * scale).masked_fill(is_near, 0.0)

        return TileBias(tile, q.shape[0])

    def _far(self, positions: Tensor, *, of_query: bool = False) -> Tensor:
        """Positions at which far pairs are rotated."""
        if self.group is None:
            return positions * 0 + (self.near if of_query else 0)
        return positions // self.group + (self.near - self.near // self.group if of_query else 0)
