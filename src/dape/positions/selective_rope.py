"""Selective RoPE (Movahedi et al. 2025): queries and keys rotated by angles that the tokens decide and that add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.positions.base import LinearMap, PositionEncoding, Positions, angle_dtype, before
from dape.positions.rope import rotated
from dape.settings import check_counts

TAPS = 4


class SelectiveRoPE(PositionEncoding):
    """Pair m of a query or key at token t rotated by base^(−2m/D) · Σ φₛ over the tokens s up to t.

    φ = g · (a(conv(W₂ W₁ x)) + e^b), x the hidden state in `num_heads` parts of length 1, conv over a token and the three
    before it for each head and pair, as in the authors' code, whose defaults are these; their language models have `gate`
    and `silu`.

    rank: of W₂ W₁.
    gate: g = σ(w · x + c) per head, else 1.
    bias: add e^b with a learnable b per head and pair, at first 0: then it starts near RoPE; else 0.
    silu: a is the SiLU, else the identity.
    """

    summary = "rotated by angles computed from the hidden states and added up"
    reference = "Movahedi et al. 2025, arXiv 2511.17388"
    direction = "causal"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        hidden_size: int,
        *,
        rank: int = 16,
        base: float = 500000.0,
        gate: bool = False,
        bias: bool = False,
        silu: bool = False,
    ) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, head_dim=head_dim, hidden_size=hidden_size, rank=rank)
        if head_dim % 2:
            raise ValueError(f"rotations come in pairs of features: head_dim={head_dim} is odd")
        if hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}")
        self.num_heads, self.base, self.silu = num_heads, base, silu
        self.pairs = pairs = head_dim // 2
        self.down = LinearMap(hidden_size, rank, bias=False)
        self.up = LinearMap(rank, num_heads * pairs, bias=False)
        self.gate = LinearMap(hidden_size, num_heads) if gate else None
        # As a depthwise nn.Conv1d.
        self.taps = nn.Parameter(torch.empty(TAPS, num_heads, 1, pairs).uniform_(-(TAPS**-0.5), TAPS**-0.5))
        self.offset = nn.Parameter(torch.zeros(num_heads, 1, pairs)) if bias else None

    def token_state(self, x: Tensor) -> Tensor:
        (down,), (up,) = self.down(x.device), self.up(x.device)
        unit = F.normalize(x.to(down.dtype).unflatten(-1, (self.num_heads, -1)), dim=-1).flatten(-2)
        state = (unit @ down.T @ up.T).unflatten(-1, (self.num_heads, self.pairs)).transpose(1, 2)
        if self.gate is not None:
            gate = torch.sigmoid(F.linear(unit, *self.gate(x.device))).transpose(1, 2)[..., None]
            state = torch.cat([state, gate], -1)
        return state.to(x.dtype)

    def turn(self, q: Tensor, k: Tensor, positions: Positions, state: Tensor) -> tuple[Tensor, Tensor]:
        taps, *offset = self(k.device)
        earlier, starts = state[..., : self.pairs].to(taps.dtype), positions.starts()
        step = torch.zeros_like(earlier)
        for tap in taps:
            step = step + tap * earlier
            earlier = before(earlier, starts)
        step = F.silu(step) if self.silu else step
        step = step + offset[0].exp() if offset else step
        step = step if self.gate is None else step * state[..., self.pairs :]
        dtype = angle_dtype(k.device)
        pair = torch.arange(self.pairs, device=k.device, dtype=dtype)
        angles = step.to(dtype).cumsum(2) * self.base ** (-pair / self.pairs)
        rows = positions.query_index()[:, None, :, None].expand(*angles.shape[:2], -1, self.pairs)
        keys = k.repeat_interleave(self.num_heads // k.shape[1], 1)
        return rotated(q, angles.gather(2, rows)), rotated(keys, angles)
