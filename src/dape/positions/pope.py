"""PoPE (Gopalakrishnan et al. 2025, arXiv 2509.10534): content decides magnitudes, position alone the angles."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.positions.base import PositionEncoding, angle_dtype, at_least_float32
from dape.settings import check_counts


class PoPE(PositionEncoding):
    """Scores Σ_c softplus(q_c) softplus(k_c) cos((j − i) θ_c + δ_c), θ_c = base^(−c/D), a learnable δ per head and feature.

    As in the paper, δ is bounded to [−2π, 0] and starts at 0, with which it extrapolates best; the paper's other start,
    uniform, fits a little better at the training length. Queries and keys have twice the width then, cosine and sine
    parts; the values keep theirs.
    """

    summary = "softplus of content times the cosine of position, by feature"
    reference = "Gopalakrishnan et al. 2025, arXiv 2509.10534"

    def __init__(self, num_heads: int, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_counts(num_heads=num_heads, head_dim=head_dim)
        self.head_dim, self.base = head_dim, base
        self.shift = nn.Parameter(torch.zeros(num_heads, 1, head_dim))

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        # The queries' angles less δ, not the keys' plus δ: heads that share a key have their own.
        (shift,) = self(x.device)
        return self._polar(x, positions, shift.clamp(-2 * math.pi, 0))

    def rotate_keys(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self._polar(x, positions)

    def _polar(self, x: Tensor, positions: Tensor, shift: Tensor | None = None) -> Tensor:
        """Cosine and sine parts [B, H, T, 2D] of features with magnitudes softplus(x), x [B, H, T, D]."""
        dtype = angle_dtype(x.device)
        feature = torch.arange(self.head_dim, device=x.device, dtype=dtype)
        angles = positions[:, None, :, None].to(dtype) * self.base ** (-feature / self.head_dim)
        size = F.softplus(at_least_float32(x))
        cos, sin = angles.cos().to(size.dtype), angles.sin().to(size.dtype)
        if shift is not None:
            # Of the differences; not cos(angles − shift), which would take H times as many cosines.
            own_cos, own_sin = shift.cos(), shift.sin()
            cos, sin = cos * own_cos + sin * own_sin, sin * own_cos - cos * own_sin
        return torch.cat((size * cos, size * sin), -1).to(x.dtype)
