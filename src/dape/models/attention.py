"""The attention of every model here: any position encoding with any score processor, no branch on names."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from dape.ops.score_attention import DistanceBias, TileBias
from dape.ops.score_attention.reference import repeat_heads, softmax_visible
from dape.ops.score_attention.types import Bias
from dape.positions import Places, PositionEncoding
from dape.scores import ScoreProcessor


class KeyValueCache(Protocol):
    """What attention needs of a cache; those of transformers fit."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class ResidualLinear(nn.Linear):
    """A layer whose output is added to the residual stream: it starts smaller, the more layers add."""


class Attention(nn.Module):
    """Multi-head attention on x [B, T, hidden]; the position encoding and the places come with each call.

    num_key_value_heads: fewer than num_heads shares keys and values between heads (GQA).
    layer: this layer's number in a cache.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        scores: ScoreProcessor,
        num_key_value_heads: int | None = None,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        backend: str = "auto",
        layer: int = 0,
    ) -> None:
        super().__init__()
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        if hidden_size % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide hidden_size={hidden_size}")
        if num_key_value_heads < 1 or num_heads % num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={num_key_value_heads} does not divide num_heads={num_heads}"
            )
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.head_width = hidden_size // num_heads
        self.scale = 1 / math.sqrt(self.head_width)
        self.dropout, self.backend, self.layer = dropout, backend, layer
        groups = num_key_value_heads * self.head_width
        self.query = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.key = nn.Linear(hidden_size, groups, bias=qkv_bias)
        self.value = nn.Linear(hidden_size, groups, bias=qkv_bias)
        self.out = ResidualLinear(hidden_size, hidden_size)
        self.scores = scores

    def forward(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        places: Places,
        cache: KeyValueCache | None = None,
        last_rows: int | None = None,
        shown: list[Tensor] | None = None,
    ) -> Tensor:
        """Output [B, T, hidden] for the queries x; with a cache, keys and values of earlier calls come first.

        last_rows: only so many queries, those at the end.
        shown: takes the softmax weights [B, H, Tq, Tk], computed beside the output by the reference path.
        """
        # Rows of a kernel over several queries need those before them.
        reading = None if last_rows is None else min(last_rows + self.scores.earlier_rows, x.shape[1])
        q, k, v, bias = self.inputs(x, encoding, places, cache, reading)
        places = places if reading is None else places.last(reading)
        own = slice(None if last_rows is None else -last_rows, None)
        if shown is not None:
            shown.append(self._weights(q, k, bias, places)[:, :, own])
        attended = self.scores.attend(
            q,
            k,
            v,
            bias=bias,
            causal=places.causal,
            visible=places.visible,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return self.out(attended[:, :, own].transpose(1, 2).flatten(2))

    def inputs(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        places: Places,
        cache: KeyValueCache | None = None,
        last_rows: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Bias]:
        """What the scores are made of: q [B, H, Tq, D], k and v [B, G, Tk, D], and the bias."""
        asking, shown = (x, places) if last_rows is None else (x[:, -last_rows:], places.last(last_rows))
        q = encoding.rotate(self._heads(self.query(asking)), shown.queries)
        k = encoding.rotate(self._heads(self.key(x)), places.queries)
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
            # A preallocated cache returns room for more keys than there are.
            k, v = k[:, :, : places.num_keys], v[:, :, : places.num_keys]
        return q, k, v, encoding.bias(q, k, shown, scale=self.scale)

    def weights(self, x: Tensor, encoding: PositionEncoding, places: Places) -> Tensor:
        """The softmax weights [B, H, Tq, Tk], by the reference: T×T memory, for looking at."""
        q, k, _, bias = self.inputs(x, encoding, places)
        return self._weights(q, k, bias, places)

    def _weights(self, q: Tensor, k: Tensor, bias: Bias, places: Places) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(dtype) @ repeat_heads(k, self.num_heads).to(dtype).transpose(-1, -2) * self.scale
        dense = dense_bias(bias, places)
        return softmax_visible(self.scores(scores, dense, causal=places.causal, visible=places.visible)).to(
            q.dtype
        )

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, n·D] → [B, n, T, D]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def dense_bias(bias: Bias, places: Places) -> Tensor | None:
    """A bias of any form as a tensor [1 or B, H, Tq, Tk], or None."""
    if isinstance(bias, DistanceBias):
        return bias.dense(places.num_queries, places.num_keys)
    if isinstance(bias, TileBias):
        return bias.tile(slice(0, places.num_queries), places.num_keys)
    return bias
