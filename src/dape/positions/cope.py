"""CoPE (Golovneva et al. 2024): positions counted by content; each query counts the keys it gates in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dape.ops.score_attention.types import Bias, TileBias
from dape.positions.base import PositionEncoding, Positions, State, at_least_float32
from dape.settings import check_counts


class CoPE(PositionEncoding):
    """q · e[p], p(i, j) = Σ σ(score(i, m)) over the keys m = j … i, at most num_positions − 1, e interpolated.

    scaled: divide q · e[p] by √D, as the scores are; the paper adds it as it is.
    """

    summary = "positions counted by content: keys that a query gates in"
    reference = "Golovneva et al. 2024, arXiv 2405.18719"
    direction = "causal"

    def __init__(self, head_dim: int, *, num_positions: int = 64, scaled: bool = False) -> None:
        super().__init__()
        check_counts(head_dim=head_dim)
        if num_positions < 2:
            raise ValueError(f"num_positions={num_positions}: counting needs at least 2")
        self.num_positions, self.scaled = num_positions, scaled
        self.embeddings = nn.Parameter(torch.zeros(head_dim, num_positions))

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        positions.check(q, k)
        (embeddings,) = self(q.device)
        embeddings = embeddings * scale if self.scaled else embeddings

        def tile(rows: slice, num_keys: int) -> Tensor:
            query = at_least_float32(q[:, :, rows])
            keys = at_least_float32(k[:, :, :num_keys]).repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = query @ keys.transpose(-1, -2) * scale
            gates = torch.sigmoid(scores).masked_fill(~positions.shown(rows, num_keys), 0.0)
            count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.num_positions - 1)
            floor = count.floor()
            at = query @ embeddings
            # The last position has no right neighbour; its share there is 0.
            low, high = floor.long(), (floor.long() + 1).clamp(max=self.num_positions - 1)
            share = count - floor
            return at.gather(-1, low) * (1 - share) + at.gather(-1, high) * share

        return TileBias(tile, q.shape[0])
