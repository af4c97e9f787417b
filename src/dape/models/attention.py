"""Attention layer of all models: any position encoding with any score processor, no branch on names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dape.layers import rotated_late, rotates_late, with_cached
from dape.models.context import Shares, context_attention
from dape.models.heads import HeadShare, bias_of_heads, program_of_heads
from dape.ops.score_attention import Bias, ScoreProgram, attention, attention_weights
from dape.ops.score_attention.reference import repeat_heads
from dape.positions import PositionEncoding, Positions
from dape.positions.masks import KeyValueCache
from dape.scores import ScoreProcessor


class Inputs(NamedTuple):
    """Inputs of the attention op: q [B, H, Tq, D], k and v [B, G, Tk, D], the bias, positions of the queries, the program.

    The queries are those requested, preceded by the earlier ones that the score program reads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias
    positions: Positions
    program: ScoreProgram


class Attention(nn.Module):
    """Multi-head attention on x [B, T, hidden]; the position encoding and the positions come with each call.

    num_key_value_heads: fewer than num_heads shares keys and values between heads (GQA).
    head_norm: RMSNorm of each head's output, scaled by 1 − λ(layer), λ = 0.8 − 0.6 · e^(−0.3 · layer) (Golovneva et al.
               2025, after Ye et al. 2024).
    head_gate: multiply each head's output by σ(w · x), one gate per head.
    window:    number of keys that a query sees, its own and those right before it; None for all.
    layer:     index of this layer in a cache.

    heads: this process's share of the heads after `dape.models.tensor_parallel.share_heads`.
    """

    heads: HeadShare | None = None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        scores: ScoreProcessor,
        num_key_value_heads: int | None = None,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        head_norm: bool = False,
        head_gate: bool = False,
        window: int | None = None,
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
        self.dropout, self.window, self.backend, self.layer = dropout, window, backend, layer
        groups = num_key_value_heads * self.head_width
        self.query = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.key = nn.Linear(hidden_size, groups, bias=qkv_bias)
        self.value = nn.Linear(hidden_size, groups, bias=qkv_bias)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.RMSNorm(self.head_width, eps=1e-5) if head_norm else None
        self.gate = nn.Linear(hidden_size, num_heads) if head_gate else None
        self.scores = scores

    def forward(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        positions: Positions,
        past_key_values: KeyValueCache | None = None,
        last_rows: int | None = None,
        shown: list[Tensor] | None = None,
        shares: Shares | None = None,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Output [B, T, hidden] for the queries x; with a cache, keys and values of earlier calls come first.

        last_rows: compute only the last `last_rows` queries.
        shown: list to which the attention weights [B, H, Tq, Tk] are appended, computed by the reference path.
        shares: context parallelism; x holds this process's tokens of the sequence.
        arrange: reordering of keys and values [B, G, Tk, …], the cached ones included, to the order of positions.keys.
        """
        if self.heads is not None:
            x = self.heads.enter(x)
        if shares is not None:
            return self._project(self._across(x, encoding, self.program(), shares), x)
        q, k, v, bias, queried, program = self.inputs(
            x, encoding, positions, past_key_values, last_rows, arrange=arrange
        )
        asked = x.shape[1] if last_rows is None else last_rows
        options = {"causal": queried.causal, "visible": queried.visible, "scale": self.scale}
        if shown is not None:
            shown.append(attention_weights(q, k, program, bias=bias, **options)[:, :, -asked:])  # type: ignore[arg-type]  # options are as named
        dropout = self.dropout if self.training else 0.0
        attended = attention(
            q,
            k,
            v,
            program,
            bias=bias,
            dropout=dropout,
            backend=self.backend,
            **options,  # type: ignore[arg-type]  # as above
        )[:, :, -asked:]
        return self._project(attended, x[:, -asked:])

    def program(self) -> ScoreProgram:
        """The score program of this process's heads."""
        program = self.scores.program()
        return program if self.heads is None else program_of_heads(program, self.heads.part, self.heads.parts)

    def _project(self, attended: Tensor, x: Tensor) -> Tensor:
        """Output [B, T, hidden] from the heads' outputs [B, H, T, D] for queries x."""
        if self.norm is not None:
            attended = self.norm(attended) * (0.2 + 0.6 * math.exp(-0.3 * self.layer))
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]
        return self.out(attended.transpose(1, 2).flatten(2))

    def _across(self, x: Tensor, encoding: PositionEncoding, program: ScoreProgram, shares: Shares) -> Tensor:
        """Heads' outputs for this process's tokens x, attending to the tokens of all processes."""
        if self.dropout and self.training:
            raise ValueError(
                f"attention_dropout={self.dropout} has no meaning across processes, whose draws differ: set it to 0"
            )
        if self.heads is not None:
            raise ValueError("heads and tokens cannot both be sharded: choose one")
        if self.window is not None:
            raise ValueError(f"tokens cannot be sharded with window={self.window}")
        if rotates_late(self.scores, encoding):
            raise ValueError(
                "keys shifted before they are rotated need their neighbours on other processes: choose a method without "
                "rotations, or do not share out tokens"
            )
        q, k, v = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        return context_attention(
            q,
            k,
            v,
            program,
            shares=shares,
            encoding=encoding,
            state=encoding.token_state(x),
            scale=self.scale,
            backend=self.backend,
        )

    def inputs(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        positions: Positions,
        past_key_values: KeyValueCache | None = None,
        last_rows: int | None = None,
        *,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> Inputs:
        """Inputs of the attention op for the queries x, or the last rows of them and the earlier ones that they read."""
        program, late = self.program(), rotates_late(self.scores, encoding)
        earlier_rows = program.earlier_rows
        k, v = self._heads(self.key(x)), self._heads(self.value(x))
        lengths = [positions.lengths()] if encoding.by_length else []
        if not late:
            k = encoding.rotate_keys(k, positions.queries, *lengths)
        state = encoding.token_state(x)
        alone = past_key_values is None and arrange is None
        num_tokens = last_rows + earlier_rows if alone and last_rows is not None else x.shape[1]
        q = self._heads(self.query(x[:, -num_tokens:]))
        expected = self.num_heads // (1 if self.heads is None else self.heads.parts)
        if q.shape[1] != expected:
            raise ValueError(
                f"the projection gives {q.shape[1]} of {expected} heads: split between processes by tensor "
                f"parallelism, heads would be processed apart. Use dape.models.tensor_parallel.share_heads, or leave "
                f"query, key, value and out whole, and split the MLPs"
            )
        q = encoding.rotate(q, *(x[:, -num_tokens:] for x in (positions.queries, *lengths)))
        if alone:
            queried = positions.last(q.shape[2])
        else:
            q, k, v, state, queried = with_cached(
                q,
                k,
                v,
                state,
                positions,
                cache=past_key_values,
                layer=self.layer,
                arrange=arrange,
                earlier_rows=earlier_rows,
                asked=last_rows,
            )
        if k.shape[2] != positions.num_keys:
            raise ValueError(
                f"attention has {k.shape[2]} keys, but {positions.num_keys} are expected: with gradient "
                f"checkpointing, pass no cached tokens"
            )
        if late:
            k, program = rotated_late(k, program, encoding, positions)
            v = repeat_heads(v, q.shape[1])
        if self.window is not None:
            queried = queried.windowed(self.window)
        # An encoding without a state may leave the argument out.
        further = {} if state is None else {"state": state}
        if self.heads is None:
            bias = encoding.bias(q, k, queried, scale=self.scale, **further)
        else:
            # Encodings compute all heads. Repeated, this process's heads have their own indices; the rest is dropped.
            part, parts = self.heads.part, self.heads.parts
            all_q, all_k = q.repeat(1, parts, 1, 1), k.repeat(1, parts, 1, 1)
            whole = encoding.bias(all_q, all_k, queried, scale=self.scale, **further)
            bias = bias_of_heads(whole, part, parts)
        return Inputs(q, k, v, bias, queried, program)

    def weights(self, x: Tensor, encoding: PositionEncoding, positions: Positions) -> Tensor:
        """Attention weights [B, H, Tq, Tk] by the reference, for inspection: T×T memory."""
        shown: list[Tensor] = []
        self.forward(x, encoding, positions, shown=shown)
        return shown[0]

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, n·D] → [B, n, T, D]."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_width).transpose(1, 2)
