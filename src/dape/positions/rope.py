"""RoPE (Su et al. 2021): queries and keys rotated by their position, with the usual ways to stretch it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dape.positions.base import PositionEncoding, angle_dtype
from dape.settings import check_counts


def _ntk(rope: RoPE, frequencies: Tensor, stretch: float | Tensor) -> Tensor:
    """The frequencies of base · stretch^(D/(D−2))."""
    width = rope.head_dim
    exponent = torch.arange(0, width, 2, device=frequencies.device, dtype=frequencies.dtype) / width
    return frequencies * stretch ** (-exponent * width / (width - 2))


def _dynamic(rope: RoPE, frequencies: Tensor, length: Tensor) -> Tensor:
    ratio = length[..., None].clamp(min=rope.original_length).to(frequencies.dtype) / rope.original_length
    return _ntk(rope, frequencies, rope.factor * ratio - (rope.factor - 1))


def _yarn(rope: RoPE, frequencies: Tensor, length: Tensor) -> Tensor:
    def feature_turning(times: float) -> float:
        """The (fractional) feature that makes `times` turns over the original length."""
        turns = rope.original_length / (times * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.base))

    low = max(math.floor(feature_turning(rope.fast)), 0)
    high = min(math.ceil(feature_turning(rope.slow)), rope.head_dim - 1)
    feature = torch.arange(frequencies.shape[0], device=frequencies.device, dtype=frequencies.dtype)
    interpolated = ((feature - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - interpolated) + frequencies / rope.factor * interpolated


def _llama3(rope: RoPE, frequencies: Tensor, length: Tensor) -> Tensor:
    turns = rope.original_length * frequencies / (2 * math.pi)
    kept = ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)
    return frequencies * kept + frequencies / rope.factor * (1 - kept)


def _longrope(rope: RoPE, frequencies: Tensor, length: Tensor) -> Tensor:
    short, long = (frequencies.new_tensor(divisors) for divisors in (rope.short, rope.long))
    return frequencies / torch.where(length[..., None] > rope.original_length, long, short)


@dataclass(frozen=True)
class Scaling:
    """A RoPE scaling: `stretch` maps θ [D/2] given lengths of inputs […] to […, D/2] or [D/2]; `needs` and `takes` name its options."""

    stretch: Callable[[RoPE, Tensor, Tensor], Tensor]
    needs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    gain: Callable[[RoPE], float] = lambda rope: 1.0
    by_length: bool = False


ORIGINAL = frozenset({"original_length"})
TURNS = frozenset({"fast", "slow"})
SCALINGS: dict[str, Scaling] = {
    "none": Scaling(lambda rope, frequencies, length: frequencies),
    "linear": Scaling(lambda rope, frequencies, length: frequencies / rope.factor),
    "ntk": Scaling(lambda rope, frequencies, length: _ntk(rope, frequencies, rope.factor)),
    "dynamic": Scaling(_dynamic, ORIGINAL, by_length=True),
    "yarn": Scaling(_yarn, ORIGINAL, TURNS, lambda rope: 0.1 * math.log(rope.factor) + 1),
    "llama3": Scaling(_llama3, ORIGINAL, TURNS),
    "longrope": Scaling(
        _longrope,
        ORIGINAL | {"short", "long"},
        gain=lambda rope: math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length)),
        by_length=True,
    ),
}
FAST = {"llama3": 4.0}


class RoPE(PositionEncoding):
    """Queries and keys rotated by their position; adds no bias.

    A pair of features (m, m + D/2) turns by position · θₘ, θₘ = base^(−2m/D), so q·k depends on the distance. A scaling
    is for inputs `factor` times as long as `original_length`:

    - linear: position / factor (position interpolation, Chen et al. 2023).
    - ntk: base · factor^(D/(D−2)), high frequencies kept, the lowest interpolated.
    - dynamic: ntk by the length n of the input, factor · n / original_length − (factor − 1); none up to original_length.
    - yarn: linear below `slow` turns over the original length, untouched above `fast`, a ramp over features between, and
      logits times (0.1 · ln factor + 1)² (Peng et al. 2023).
    - llama3: linear below `slow` turns, untouched above `fast`, a ramp over turns between (Llama 3.1).
    - longrope: θ divided by `short` [D/2], or by `long` in inputs longer than original_length; logits times
      1 + ln factor / ln original_length (Ding et al. 2024).

    With `dynamic` and `longrope` keys depend on the length of the input, of each row's or packed document, without
    padding: cached keys are not valid in a longer one.

    fraction: share of each head's features that rotate, the first ones; the others carry no position (GPT-NeoX).
    """

    summary = "queries and keys rotated by position; scaling=yarn, ntk …"
    reference = "Su et al. 2021, arXiv 2104.09864"

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float = 1.0,
        original_length: int | None = None,
        fast: float | None = None,
        slow: float | None = None,
        short: Sequence[float] | None = None,
        long: Sequence[float] | None = None,
        fraction: float = 1.0,
    ) -> None:
        super().__init__()
        check_counts(head_dim=head_dim)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction} of the features rotate; it must be in (0, 1]")
        if head_dim % 2:
            raise ValueError(f"rotations come in pairs of features: head_dim={head_dim} is odd")
        rotated = round(head_dim * fraction)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"rotations come in pairs of features: fraction={fraction} of head_dim={head_dim} is {rotated}"
            )
        head_dim = rotated
        if scaling not in SCALINGS:
            raise ValueError(f'unknown scaling "{scaling}": choose one of {", ".join(SCALINGS)}')
        if factor < 1:
            raise ValueError(f"factor={factor} would shrink the context; it must be at least 1")
        if scaling == "none" and factor != 1:
            raise ValueError(f'factor={factor} has no effect with scaling="none"')
        chosen = SCALINGS[scaling]
        given = {"original_length": original_length, "fast": fast, "slow": slow, "short": short, "long": long}
        for name, value in given.items():
            if name in chosen.needs and value is None:
                raise ValueError(f'scaling="{scaling}" needs {name}')
            if value is not None and name not in chosen.needs | chosen.takes:
                takers = [f'"{way}"' for way, about in SCALINGS.items() if name in about.needs | about.takes]
                raise ValueError(
                    f'{name} goes with scaling={" or ".join(takers)}: got {value} and "{scaling}"'
                )
        for name, divisors in (("short", short), ("long", long)):
            if divisors is not None and len(divisors) != head_dim // 2:
                raise ValueError(
                    f"{name} has {len(divisors)} numbers, expected head_dim / 2 = {head_dim // 2}"
                )
        if scaling in ("ntk", "dynamic") and head_dim == 2:
            raise ValueError(f"{scaling} scaling needs head_dim of at least 4")
        self.head_dim, self.base, self.scaling = head_dim, base, scaling
        self.factor: float = factor
        self.original_length: int = original_length or 0
        self.fast, self.slow = (
            FAST.get(scaling, 32.0) if fast is None else fast,
            1.0 if slow is None else slow,
        )
        self.by_length = chosen.by_length
        self.short, self.long = list(short or ()), list(long or ())

    @classmethod
    def trained_at(cls, length: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """The training length as `original_length`, for a scaling that needs it."""
        chosen = SCALINGS.get(given.get("scaling", "none"))
        return {"original_length": length} if chosen and "original_length" in chosen.needs else {}

    def frequencies(self, length: Tensor) -> Tensor:
        """θ after scaling, for inputs of `length` […] tokens: […, D/2], or [D/2] if the scaling does not read it."""
        exponent = (
            torch.arange(0, self.head_dim, 2, device=length.device, dtype=angle_dtype(length.device))
            / self.head_dim
        )
        return SCALINGS[self.scaling].stretch(self, self.base**-exponent, length)

    def keys_serve(self, before: int, after: int) -> bool:
        if not self.by_length or after <= self.original_length:
            return True
        return self.scaling == "longrope" and before > self.original_length

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        lengths = positions.amax(-1, keepdim=True) + 1 if lengths is None else lengths
        theta = self.frequencies(lengths[:, None])
        angles = positions[:, None, :, None].to(theta.dtype) * theta
        # A sharper softmax: q and k each carry the square root of the logits' factor.
        return rotated(x, angles, SCALINGS[self.scaling].gain(self))


def rotated(x: Tensor, angles: Tensor, gain: float = 1.0) -> Tensor:
    """x […, T, D] with its features m and m + n rotated by angles […, T, n], times gain; features from 2n on as they are."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (angles.cos() * gain).to(dtype), (angles.sin() * gain).to(dtype)
    pairs = angles.shape[-1]
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    a, b = a.to(dtype), b.to(dtype)
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], -1)
