"""Attention layer of all models: any position encoding with any score processor, no branch on names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dape.layers import Inputs, inputs_of, rotated_late, rotates_late, with_cached
from dape.ops.score_attention import ScoreProgram
from dape.ops.score_attention.reference import repeat_heads
from dape.positions import PositionEncoding, Positions
from dape.positions.masks import KeyValueCache
from dape.scores import ScoreProcessor

if TYPE_CHECKING:
    from dape.models.parallel import Shares


@dataclass(frozen=True)
class Context:
    """What all layers of one forward pass share.

    positions: of queries and keys, with the mask between them.
    arrange:   reordering of keys and values [B, G, Tk, …], the cached ones included, to the order of positions.keys.
    shares:    context parallelism: the layers' input holds this process's tokens of the sequence.
    shown:     list to which each layer appends its attention weights [B, H, Tq, Tk], computed by the reference path.
    """

    positions: Positions
    arrange: Callable[[Tensor], Tensor] | None = None
    shares: Shares | None = None
    shown: list[Tensor] | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Context:
        """With positions on `device`; tools that move a layer's inputs between devices call this method."""
        return replace(self, positions=self.positions.to(device, non_blocking))


class Attention(nn.Module):
    """Multi-head attention on x [B, T, hidden]; the position encoding and the positions come with each call.

    num_key_value_heads: fewer than num_heads shares keys and values between heads (GQA).
    head_norm: RMSNorm of each head's output, of pairs of heads in differential attention, times 1 − λ,
               λ = 0.8 − 0.6 · e^(−0.3 · layer), or what `scores` says (Ye et al. 2024, Golovneva et al. 2025).
    head_gate: multiply each head's output by σ(w · x), one gate per head.
    window:    number of keys that a query sees, its own and those right before it; None for all.
    layer:     index of this layer in a cache.
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
        self.head_dim = hidden_size // num_heads
        self.scale = 1 / math.sqrt(self.head_dim)
        self.dropout, self.window, self.backend, self.layer = dropout, window, backend, layer
        groups = num_key_value_heads * self.head_dim
        self.query = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.key = nn.Linear(hidden_size, groups, bias=qkv_bias)
        self.value = nn.Linear(hidden_size, groups, bias=qkv_bias)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.norm = nn.RMSNorm(self.head_dim * scores.heads_per_value, eps=1e-5) if head_norm else None
        self.gate = nn.Linear(hidden_size, num_heads) if head_gate else None
        self.scores = scores

    def forward(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        context: Context,
        past_key_values: KeyValueCache | None = None,
        last_rows: int | None = None,
    ) -> Tensor:
        """Output [B, T, hidden] for the queries x; with a cache, keys and values of earlier calls come first.

        last_rows: compute only the last `last_rows` queries.
        """
        if context.shares is not None:
            return self._project(context.shares.attend(self, x, encoding), x)
        inputs = self.inputs(x, encoding, context, past_key_values, last_rows)
        x = x if last_rows is None else x[:, -last_rows:]
        rows = x.shape[1]
        if context.shown is not None:
            context.shown.append(inputs.weights()[:, :, -rows:])
        attended = inputs.attend(self.dropout if self.training else 0.0, self.backend)
        return self._project(attended if inputs.q.shape[2] == rows else attended[:, :, -rows:], x)

    def program(self) -> ScoreProgram:
        """The score program of this process's heads."""
        return self.scores.program()

    def _project(self, attended: Tensor, x: Tensor) -> Tensor:
        """Output [B, T, hidden] from the heads' outputs [B, H, T, D] for queries x."""
        if self.norm is not None:
            together = attended.unflatten(1, (-1, self.scores.heads_per_value)).transpose(2, 3)
            scale = self.scores.norm_scale
            scale = 0.2 + 0.6 * math.exp(-0.3 * self.layer) if scale is None else scale
            normed = self.norm(together.flatten(3)) * scale
            attended = normed.view_as(together).transpose(2, 3).flatten(1, 2)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]
        return self.out(attended.transpose(1, 2).flatten(2))

    def inputs(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        context: Context,
        past_key_values: KeyValueCache | None = None,
        last_rows: int | None = None,
    ) -> Inputs:
        """Inputs of the attention op for the queries x, or the last rows of them and the earlier ones that they read."""
        positions, arrange = context.positions, context.arrange
        program, alone = self.program(), past_key_values is None and arrange is None
        k, v, state = self.heads(self.key(x)), self.heads(self.value(x)), encoding.token_state(x)
        at, lengths = positions.queries, [positions.lengths()] if encoding.by_length else []
        if not (late := rotates_late(self.scores, encoding)):
            k = encoding.rotate_keys(k, at, *lengths)
        if alone and last_rows is not None:
            x, at, *lengths = (y[:, -last_rows - program.earlier_rows :] for y in (x, at, *lengths))
        q = self.heads(self.query(x))
        if q.shape[1] != self.num_heads:
            raise ValueError(
                f"the projection gives {q.shape[1]} of {self.num_heads} heads, which would be processed apart: for tensor "
                f"parallelism use dape.models.parallel.share_heads, or leave query, key, value and out whole"
            )
        q = encoding.rotate(q, at, *lengths)
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
                earlier_rows=program.earlier_rows,
                asked=last_rows,
            )
        if k.shape[2] != positions.keys.shape[1]:
            given = f"attention has {k.shape[2]} keys, but {positions.num_keys} are expected"
            raise ValueError(f"{given}: with gradient checkpointing, pass no cached tokens")
        if late:
            k, program = rotated_late(k, program, encoding, positions)
            v = repeat_heads(v, q.shape[1])
        return inputs_of(q, k, v, state, queried, program, encoding, self.scale, self.window)

    def weights(self, x: Tensor, encoding: PositionEncoding, positions: Positions) -> Tensor:
        """Attention weights [B, H, Tq, Tk] by the reference, for inspection: T×T memory."""
        shown: list[Tensor] = []
        self.forward(x, encoding, Context(positions, shown=shown))
        return shown[0]

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, n·D] → [B, n, T, D]."""
        return x.view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)
