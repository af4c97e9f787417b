"""RoPE (Su et al. 2021): queries and keys rotated by their position, with the usual ways to stretch it.

A pair of features (m, m + D/2) turns by position · θₘ, θₘ = base^(−2m/D), so q·k depends on the distance.
Scaling to contexts `factor` times as long as `original_length`:
    linear  position / factor (position interpolation, Chen et al. 2023)
    ntk     base · factor^(D/(D−2)): high frequencies kept, the lowest interpolated
    yarn    linear below `slow` turns over the original length, untouched above `fast`, a ramp between,
            and logits sharpened by (0.1 · ln factor + 1)² (Peng et al. 2023)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dape.positions.base import PositionEncoding, angle_dtype, check_sizes


def _linear(rope: RoPE, frequencies: Tensor) -> Tensor:
    return frequencies / rope.factor


def _ntk(rope: RoPE, frequencies: Tensor) -> Tensor:
    width = rope.head_width
    stretch = rope.factor ** (width / (width - 2))
    exponent = torch.arange(0, width, 2, device=frequencies.device, dtype=frequencies.dtype) / width
    return frequencies * stretch**-exponent


def _yarn(rope: RoPE, frequencies: Tensor) -> Tensor:
    def feature_turning(times: float) -> float:
        """The (fractional) feature that turns so many times over the original length."""
        turns = rope.original_length / (times * 2 * math.pi)
        return rope.head_width * math.log(turns) / (2 * math.log(rope.base))

    low = max(math.floor(feature_turning(rope.fast)), 0)
    high = min(math.ceil(feature_turning(rope.slow)), rope.head_width - 1)
    feature = torch.arange(frequencies.shape[0], device=frequencies.device, dtype=frequencies.dtype)
    interpolated = ((feature - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - interpolated) + frequencies / rope.factor * interpolated


SCALINGS: dict[str, Callable[[RoPE, Tensor], Tensor]] = {
    "none": lambda rope, frequencies: frequencies,
    "linear": _linear,
    "ntk": _ntk,
    "yarn": _yarn,
}


class RoPE(PositionEncoding):
    """Rotates queries and keys; adds no bias."""

    summary = "queries and keys rotated by their position (scaling: linear, ntk, yarn)"

    def __init__(
        self,
        head_width: int,
        *,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float = 1.0,
        original_length: int | None = None,
        fast: float = 32.0,
        slow: float = 1.0,
    ) -> None:
        super().__init__()
        check_sizes(head_width=head_width)
        if head_width % 2:
            raise ValueError(f"rotations come in pairs of features: head_width={head_width} is odd")
        if scaling not in SCALINGS:
            raise ValueError(f'unknown scaling "{scaling}": choose one of {", ".join(SCALINGS)}')
        if factor < 1:
            raise ValueError(f"factor={factor} would shrink the context; it must be at least 1")
        if scaling == "none" and factor != 1:
            raise ValueError(f'factor={factor} has no effect with scaling="none"')
        if (scaling == "yarn") != (original_length is not None):
            raise ValueError(
                f'original_length goes with scaling="yarn": got {original_length} and "{scaling}"'
            )
        if scaling == "ntk" and head_width == 2:
            raise ValueError("ntk scaling needs head_width of at least 4")
        self.head_width, self.base, self.scaling, self.factor = head_width, base, scaling, factor
        self.original_length, self.fast, self.slow = original_length or 0, fast, slow

    def frequencies(self, device: torch.device) -> Tensor:
        """θ [D/2], after scaling."""
        exponent = (
            torch.arange(0, self.head_width, 2, device=device, dtype=angle_dtype(device)) / self.head_width
        )
        return SCALINGS[self.scaling](self, self.base**-exponent)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        theta = self.frequencies(x.device)
        angles = positions[:, None, :, None].to(theta.dtype) * theta
        # YaRN's sharper softmax: q and k each carry the square root of the logits' factor.
        gain = 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)
        a, b = x.to(dtype).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
