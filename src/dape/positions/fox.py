"""Biases accumulated over the tokens between query and key, learned from hidden states: FoX, data-dependent ALiBi.

Both are cumulative sums: Bᵢⱼ = −Σ over tokens l = j + 1 … i of a step that token l decides. So the bias is separable,
cᵢ − cⱼ with c the cumulative sum, and costs O(T) numbers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.ops.score_attention.types import Bias, SeparableBias
from dape.positions.alibi import slopes
from dape.positions.base import PositionEncoding, Positions, State, angle_dtype, at_least_float32
from dape.settings import check_counts


class TokenSteps(PositionEncoding):
    """Bᵢⱼ = cᵢ − cⱼ, c the cumulative sum of `step(w · x + b)` over tokens, one a head. Override `step`."""

    direction = "causal"

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, hidden_size=hidden_size)
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size))
        self.offset = nn.Parameter(torch.zeros(num_heads))

    def step(self, gate: Tensor) -> Tensor:
        """Change of c [B, H, T] at each token, from its linear gate; never positive."""
        raise NotImplementedError

    def token_state(self, x: Tensor) -> Tensor:
        weight, offset = self(x.device)
        gate = torch.einsum("bti,hi->bht", at_least_float32(x).to(weight.dtype), weight)
        return self.step(gate + offset[:, None]).to(x.dtype)[..., None]

    def bias(self, q: Tensor, k: Tensor, positions: Positions, *, scale: float, state: State = None) -> Bias:
        positions.check(q, k)
        if state is None:
            raise ValueError(f"{type(self).__name__} needs the hidden states: pass state=token_state(x)")
        # In float32, sums of 30,000 would be off by 0.002, which is what neighbouring tokens may differ by.
        total = state[..., 0].to(angle_dtype(state.device)).cumsum(-1)
        rows = positions.query_index()
        row = total.gather(2, rows[:, None].expand(total.shape[0], total.shape[1], -1))
        return SeparableBias(row, -total)


class FoX(TokenSteps):
    """Forgetting Transformer (Lin et al. 2025): steps are log σ(w · x + b), the logarithms of forget gates.

    shortest, longest: initial time constants of the heads, in tokens: the number after which all but 1/e is forgotten.
    """

    summary = "cumulative log forget gates, computed from the hidden states"
    reference = "Lin et al. 2025, arXiv 2503.02130"

    def __init__(
        self, num_heads: int, hidden_size: int, *, shortest: float = 4.0, longest: float = 1024.0
    ) -> None:
        super().__init__(num_heads, hidden_size)
        if not 0 < shortest <= longest:
            raise ValueError(f"shortest={shortest} and longest={longest}: expected 0 < shortest ≤ longest")
        nn.init.normal_(self.weight, std=0.02)
        for head in range(num_heads):
            time = shortest * (longest / shortest) ** (head / max(1, num_heads - 1))
            # σ(b) = e^(−1/time).
            nn.init.constant_(self.offset[head], -math.log(math.expm1(1 / time)))

    def step(self, gate: Tensor) -> Tensor:
        return F.logsigmoid(gate)


class DataAlibi(TokenSteps):
    """ALiBi whose distance is measured in learned steps: −slopeₕ · 2σ(w · x + b) a token. Starts as ALiBi."""

    summary = "ALiBi with distances in steps learned from the hidden states"
    reference = "Lin et al. 2025, arXiv 2503.02130"

    def __init__(self, num_heads: int, hidden_size: int) -> None:
        super().__init__(num_heads, hidden_size)
        self.slopes = slopes(num_heads)

    def step(self, gate: Tensor) -> Tensor:
        slope = torch.tensor(self.slopes, device=gate.device, dtype=gate.dtype)
        return -slope[:, None] * 2 * torch.sigmoid(gate)
