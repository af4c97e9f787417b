"""PoPE (Gopalakrishnan et al. 2025, arXiv 2509.10534): content decides magnitudes, position alone the angles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.positions.base import PositionEncoding, angle_dtype, at_least_float32
from dape.settings import check_counts


class PoPE(PositionEncoding):
    """Scores Σ_c softplus(q_c) softplus(k_c) cos((j − i) θ_c + δ_c), θ_c = base^(−c/D), one learnable δ per feature.

    Queries and keys have twice the width then, cosine and sine parts; the values keep theirs. δ starts at 0, with which
    the paper extrapolates best, and is one per feature of a layer, for all heads.
    """

    summary = "softplus of content times the cosine of position, by feature"
    reference = "Gopalakrishnan et al. 2025, arXiv 2509.10534"

    def __init__(self, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        check_counts(head_dim=head_dim)
        self.head_dim, self.base = head_dim, base
        self.shift = nn.Parameter(torch.zeros(head_dim))

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self._polar(x, positions, None)

    def rotate_keys(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        (shift,) = self(x.device)
        return self._polar(x, positions, shift)

    def _polar(self, x: Tensor, positions: Tensor, shift: Tensor | None) -> Tensor:
        """Cosine and sine parts [B, H, T, 2D] of features with magnitudes softplus(x), x [B, H, T, D]."""
        dtype = angle_dtype(x.device)
        feature = torch.arange(self.head_dim, device=x.device, dtype=dtype)
        angles = positions[:, None, :, None].to(dtype) * self.base ** (-feature / self.head_dim)
        if shift is not None:
            angles = angles + shift
        size = F.softplus(at_least_float32(x))
        parts = (size * angles.cos().to(size.dtype), size * angles.sin().to(size.dtype))
        return torch.cat(parts, -1).to(x.dtype)


if __name__ == "__main__":
    from dape.positions.picture import show

    show("dape.positions.pope")
