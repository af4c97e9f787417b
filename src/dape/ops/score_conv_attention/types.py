"""What the op takes beside q, k, v: who sees whom, the bias in its three forms, the convolution's weights.

Shapes: B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head width, W convolution width,
k kernel size, C input channels of the first convolution (2H with a bias, else H).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Residual = Literal["scores+bias", "scores"]


@dataclass(frozen=True)
class Visible:
    """The keys that each query sees: the interval first … last, both ends included.

    first: [B or 1, Tq or 1] integers, or None for key 0.
    last:  [B or 1, Tq or 1] integers, or None for key i + Tk − Tq (causal) or Tk − 1 (bidirectional).

    Left padding, right padding, sliding windows, packed documents and preallocated caches are all
    intervals. A query with first > last sees nothing; its output is zero.
    """

    first: Tensor | None = None
    last: Tensor | None = None

    @staticmethod
    def from_padding(mask: Tensor) -> Visible:
        """The interval of ones in each row of `mask` [B, Tk] (1 = real token, 0 = padding)."""
        if mask.dim() != 2:
            raise ValueError(f"a padding mask has shape [batch, keys], got {tuple(mask.shape)}")
        real = mask.bool()
        num_keys = mask.shape[1]
        index = torch.arange(num_keys, device=mask.device)
        first = index.masked_fill(~real, num_keys).amin(-1, keepdim=True)
        last = index.masked_fill(~real, -1).amax(-1, keepdim=True)
        if bool((real.sum(-1, keepdim=True) != (last - first + 1).clamp(min=0)).any()):
            raise ValueError("the padding mask has holes: each row must be one run of ones")
        return Visible(first, last)

    def bounds(
        self, num_queries: int, num_keys: int, *, causal: bool, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """First and last visible key, each [B or 1, Tq], as int64; causality always limits `last`."""
        query = torch.arange(num_queries, device=device)
        limit = query + (num_keys - num_queries) if causal else torch.full_like(query, num_keys - 1)
        first = torch.zeros_like(limit)[None] if self.first is None else self.first.long()
        last = limit[None] if self.last is None else torch.minimum(self.last.long(), limit)
        return (
            first.clamp(min=0).expand(first.shape[0], num_queries),
            last.expand(last.shape[0], num_queries),
        )

    def mask(self, num_queries: int, num_keys: int, *, causal: bool, device: torch.device) -> Tensor:
        """visible(i, j) as booleans [B or 1, 1, Tq, Tk]."""
        first, last = self.bounds(num_queries, num_keys, causal=causal, device=device)
        key = torch.arange(num_keys, device=device)
        return ((key >= first[..., None]) & (key <= last[..., None]))[:, None]


EVERYTHING = Visible()


@dataclass(frozen=True)
class DistanceBias:
    """A bias that depends on the distance alone: B[h, i, j] = values[h, i − j + Tk − Tq − lowest].

    values: [H, N], one column a distance, from `lowest` (0 for a causal use, −(Tk − 1) for a
    bidirectional one) upwards. The last query stands at the place of the last key.
    """

    values: Tensor
    lowest: int = 0

    def dense(self, num_queries: int, num_keys: int, rows: slice | None = None) -> Tensor:
        """The same bias as a tensor [1, H, rows, Tk]; pairs outside the table get 0."""
        device = self.values.device
        query = torch.arange(num_queries, device=device)[rows or slice(None)]
        index = (
            query[:, None] - torch.arange(num_keys, device=device) + (num_keys - num_queries - self.lowest)
        )
        inside = (index >= 0) & (index < self.values.shape[1])
        gathered = self.values[:, index.clamp(0, self.values.shape[1] - 1)]
        return gathered.masked_fill(~inside, 0.0)[None]


@dataclass(frozen=True)
class TileBias:
    """A bias evaluated by tiles: `tile(rows, num_keys)` → [batch, H, len(rows), num_keys].

    `batch` is 1 or B. A tile covers the queries `rows` and the first `num_keys` keys. Gradients flow
    through whatever tensors `tile` uses; the op calls it again in the backward pass instead of keeping
    its results.
    """

    tile: Callable[[slice, int], Tensor]
    batch: int = 1


Bias = Tensor | DistanceBias | TileBias | None


@dataclass(frozen=True)
class ConvWeights:
    """The two 1×k convolutions Y = project(LeakyReLU(expand(X))) and how their result is used.

    expand_weight [W, C, 1, k], expand_bias [W], project_weight [H, W, 1, k], project_bias [H].
    left:       how many keys to the left of its own a tap reaches (right reach: k − 1 − left).
    residual:   logits are S + B + Y ("scores+bias") or S + Y ("scores").
    leak_future: the paper's cheating experiment: the convolution reads keys that the query may not see.
    """

    expand_weight: Tensor
    expand_bias: Tensor
    project_weight: Tensor
    project_bias: Tensor
    left: int
    residual: Residual = "scores+bias"
    leak_future: bool = False
    negative_slope: float = 0.01

    @property
    def kernel_size(self) -> int:
        return self.expand_weight.shape[-1]

    @property
    def right(self) -> int:
        return self.kernel_size - 1 - self.left

    @property
    def width(self) -> int:
        return self.expand_weight.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.expand_weight, self.expand_bias, self.project_weight, self.project_bias

    def to(self, dtype: torch.dtype) -> ConvWeights:
        """The same weights in another dtype (differentiable)."""
        w1, b1, w2, b2 = (tensor.to(dtype) for tensor in self.tensors)
        return ConvWeights(w1, b1, w2, b2, self.left, self.residual, self.leak_future, self.negative_slope)


@dataclass(frozen=True)
class Problem:
    """One checked call of the op, as a backend receives it: `bias` is None, dense or by distance."""

    q: Tensor
    k: Tensor
    v: Tensor
    conv: ConvWeights | None
    bias: Tensor | DistanceBias | None
    visible: Visible
    causal: bool
    scale: float
    dropout: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, H, Tq, Tk, D."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2], self.q.shape[3]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32 for half precision inputs, else the inputs' own."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def dense_bias(self) -> Tensor | None:
        """The bias as a tensor [1 or B, H, Tq, Tk], or None."""
        if isinstance(self.bias, DistanceBias):
            return self.bias.dense(self.q.shape[2], self.k.shape[2])
        return self.bias
