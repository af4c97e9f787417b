"""Attention layers for models of your own: queries, keys and values in, as for `scaled_dot_product_attention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dape.methods import parse_method
from dape.ops.score_attention import Bias, ScoreProgram, Visible, attention, attention_weights
from dape.ops.score_attention.api import check_backend
from dape.ops.score_attention.fold import convolved, without_pre
from dape.ops.score_attention.reference import repeat_heads
from dape.ops.score_attention.types import shown_by
from dape.positions import PositionEncoding, Positions
from dape.positions.masks import KeyValueCache, SizedCache, decoder_positions
from dape.scores import ScoreProcessor


class Cache:
    """Keys and values of earlier calls, for any number of layers: `cache = dape.Cache()`, then pass it to each call."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, G, T, D] of new tokens; all of the layer's so far."""
        if layer_idx in self.layers:
            keys, values = self.layers[layer_idx]
            key_states, value_states = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        self.layers[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx][0].shape[2] if layer_idx in self.layers else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0


class Inputs(NamedTuple):
    """Arguments of the op: q [B, H, Tq, D], k and v [B, G, Tk, D], rotated; the score program, the bias, the visible keys.

    The queries are those requested, preceded by the earlier ones that the score program reads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    program: ScoreProgram
    bias: Bias
    causal: bool
    visible: Visible
    scale: float

    def attend(self, dropout: float = 0.0, backend: str = "auto") -> Tensor:
        """Attention output [B, H, Tq, D]."""
        q, k, v, program, bias, causal, visible, scale = self
        return attention(
            q,
            k,
            v,
            program,
            bias=bias,
            causal=causal,
            visible=visible,
            scale=scale,
            dropout=dropout,
            backend=backend,
        )

    def weights(self) -> Tensor:
        """Attention weights [B, H, Tq, Tk], by the reference: T×T memory."""
        q, k, _, program, bias, causal, visible, scale = self
        return attention_weights(q, k, program, bias=bias, causal=causal, visible=visible, scale=scale)


class ScoreAttention(nn.Module):
    """Attention with processed scores, in place of `scaled_dot_product_attention(q, k, v)`.

    method:    a position encoding and a score processor, as in "dape1x3-kerple"; the module owns both.
    head_dim:  D, the width of a head.
    width:     hidden channels of processors that have them.
    window:    number of keys that a causal query sees, its own included; None for all.
    hidden_size: width of the layer's input, for encodings that read it; num_heads · head_dim by default.
    scale:     of the dot products, 1/√D by default.
    dropout:   on the attention weights, in training.
    backend:   of the op; "auto" takes the fastest that can run.
    layer:     index of this layer in a cache of transformers. A `dape.Cache` needs none.
    """

    def __init__(
        self,
        method: str = "dape1x3-kerple",
        *,
        num_heads: int,
        head_dim: int,
        width: int = 32,
        window: int | None = None,
        hidden_size: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
        layer: int | None = None,
    ) -> None:
        super().__init__()
        check_backend(backend)
        if window is not None and window < 1:
            raise ValueError(f"window={window}: a query sees at least its own key")
        parsed = parse_method(method)
        self.encoding: PositionEncoding = parsed.build_position(
            num_heads=num_heads, head_dim=head_dim, hidden_size=hidden_size or num_heads * head_dim
        )
        if type(self.encoding).embed is not PositionEncoding.embed:
            raise ValueError(
                f'"{parsed.position}" is added to token embeddings, before all layers: add '
                f'dape.POSITIONS["{parsed.position}"] there, and build this layer with '
                f'"{replace(parsed, position="nope").name}"'
            )
        if parsed.canon:
            raise ValueError(
                f"canon={parsed.canon} acts on hidden states, outside the attention: leave it out"
            )
        self.scores = parsed.build_scores(num_heads, width=width, layer=layer or 0)
        self.method, self.num_heads, self.head_dim = parsed.name, num_heads, head_dim
        self.window, self.direction = parsed.window if window is None else window, parsed.direction
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.dropout, self.backend, self.layer = dropout, backend, layer
        self.reads_hidden = type(self.encoding).token_state is not PositionEncoding.token_state

    def extra_repr(self) -> str:
        return f'"{self.method}", num_heads={self.num_heads}, head_dim={self.head_dim}'

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | Visible | None = None,
        is_causal: bool = True,
        positions: Tensor | Positions | None = None,
        cache: SizedCache | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Attention output [B, H, Tq, D] for q [B, H, Tq, D] and k, v [B, G, Tk, D], G dividing H; none rotated yet.

        mask:      True or 1 where a key is visible: [B, Tk] for padding, [B or 1, 1, Tq, Tk] for each query, whose
                   keys must be one run; or a `dape.Visible`. Cached tokens are included.
        is_causal: mask the future, the last query being at the last key.
        positions: of the queries, [T] or [B, T] integers. They count tokens by default, padding on the left left out.
                   Where they start again, another document begins, which sees none of those before it (packing). Or
                   `dape.Positions`, which say everything, the mask included.
        cache:     `dape.Cache()`, or a cache of transformers; k and v are then those of the new tokens.
        hidden:    [B, Tk, hidden], the layer's input, for encodings that read it (fox, data-alibi, selective-rope).
        """
        inputs = self.inputs(q, k, v, mask, is_causal, positions, cache, hidden)
        return inputs.attend(self.dropout if self.training else 0.0, self.backend)[:, :, -q.shape[2] :]

    def weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """Attention weights [B, H, Tq, Tk] that `forward` uses, by the reference: T×T memory."""
        return self.inputs(q, k, k, **options).weights()[:, :, -q.shape[2] :]

    def inputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Visible | None = None,
        is_causal: bool = True,
        positions: Tensor | Positions | None = None,
        cache: SizedCache | None = None,
        hidden: Tensor | None = None,
    ) -> Inputs:
        """Arguments of the op for those of `forward`."""
        self._check(q, k, hidden, cache)
        program = self.scores.program()
        if program.earlier_rows and is_causal and cache is None and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{self.method} reads {program.earlier_rows} earlier queries, but q has {q.shape[2]} tokens beside "
                f"{k.shape[2]} keys: pass cache=dape.Cache(), which keeps them"
            )
        index = id(self) if self.layer is None else self.layer
        arrange = None
        if isinstance(positions, Positions):
            at = positions
        elif is_causal:
            past = _Past(k.shape[2] - q.shape[2]) if cache is None else cache
            by_token = _by_token(mask, q.shape[0]) if isinstance(mask, Tensor) else None
            at, holes = decoder_positions(
                q.shape[2],
                device=q.device,
                cache=past,
                layer=index,
                attention_mask=by_token,
                position_ids=None if positions is None else positions.view(-1, positions.shape[-1]),
            )
            arrange = None if holes is None else holes.arrange
            if arrange is not None and cache is None and q.shape[2] != k.shape[2]:
                raise ValueError(
                    "the mask has padding between tokens: pass cache=dape.Cache(), or queries for all keys"
                )
            if isinstance(mask, Visible):
                at = replace(at, visible=mask)
        else:
            at = self._bidirectional(q, k, mask, positions, cache)
        check_rotations(self.encoding, at, cache, index, self.method)
        alone, state = cache is None and arrange is None, None
        q = rotated_queries(q, self.encoding, at)
        if not (late := rotates_late(self.scores, self.encoding)):
            k = rotated_keys(k, self.encoding, at, at.keys if alone else at.queries)
        if self.reads_hidden and hidden is not None:
            state = self.encoding.token_state(hidden)
        if not alone:
            q, k, v, state, at = with_cached(
                q,
                k,
                v,
                state,
                at,
                cache=cache,
                layer=index,
                arrange=arrange,
                earlier_rows=program.earlier_rows,
            )
        if late:
            k, program = rotated_late(k, program, self.encoding, at)
            v = repeat_heads(v, self.num_heads)
        return inputs_of(q, k, v, state, at, program, self.encoding, self.scale, self.window)

    def _check(self, q: Tensor, k: Tensor, hidden: Tensor | None, cache: SizedCache | None) -> None:
        if q.dim() != 4 or q.shape[1] != self.num_heads or q.shape[3] != self.head_dim:
            raise ValueError(
                f"q has shape {tuple(q.shape)}, expected [batch, {self.num_heads} heads, tokens, {self.head_dim}]"
            )
        if self.reads_hidden and (hidden is None or hidden.shape[1] != k.shape[2]):
            given = "was not given" if hidden is None else f"has {hidden.shape[1]} tokens, k has {k.shape[2]}"
            raise ValueError(
                f"{self.method} reads the layer's input, which {given}: pass hidden=x, [batch, tokens, hidden]"
            )
        if cache is not None and self.layer is None and not isinstance(cache, Cache):
            raise ValueError(
                f"a {type(cache).__name__} keeps layers by their index: build ScoreAttention(…, layer=n), or pass a "
                f"dape.Cache()"
            )

    def _bidirectional(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | Visible | None,
        positions: Tensor | None,
        cache: SizedCache | None,
    ) -> Positions:
        """Positions and visibility where the future is visible."""
        if cache is not None or self.window is not None:
            name = "a cache" if cache is not None else f"window={self.window}"
            raise ValueError(f"{name} is for causal attention, got is_causal=False")
        if self.direction == "causal":
            raise ValueError(f"{self.method} has no meaning where the future is visible: use is_causal=True")
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q has {q.shape[2]} tokens and k {k.shape[2]}: where queries stand among the keys of another sequence "
                f"is for you to say, as positions=dape.Positions(queries, keys, causal=False)"
            )
        at = Positions.of(q.shape[2], causal=False, device=q.device)
        if isinstance(mask, Visible):
            at = replace(at, visible=mask)
        elif mask is not None:
            mask = _by_token(mask, q.shape[0])
            at = replace(
                at, visible=Visible.from_mask(mask) if mask.dim() == 4 else Visible.from_padding(mask)
            )
            if mask.dim() == 2 and at.visible.first is not None:
                tokens = (at.queries - at.visible.first).clamp(min=0)
                at = replace(at, queries=tokens, keys=tokens)
        if positions is not None:
            given = positions.view(-1, positions.shape[-1])
            at = replace(at, queries=given, keys=given, consecutive=False)
        return at


def check_rotations(
    encoding: PositionEncoding, positions: Positions, cache: SizedCache | None, layer: int, name: str
) -> None:
    """Raise if the encoding rotates cached keys differently in the longer input."""
    if cache is None or not encoding.by_length or torch.compiler.is_compiling():
        return
    if not int(cache.get_seq_length(layer)):
        return
    after = positions.lengths()[:, -1]
    if (counts := encoding.outgrown(positions.queries[:, 0].expand_as(after), after)) is not None:
        raise ValueError(
            f"{name} rotates keys by the input's length, so those cached at {counts[0]} tokens do not serve "
            f"{counts[1]}: pass the whole input, without a cache (use_cache=False)"
        )


def rotates_late(scores: ScoreProcessor, encoding: PositionEncoding) -> bool:
    """Whether keys are cached as projected, and rotated after the stage before the softmax."""
    return scores.before_rotation and encoding.rotates


def rotated_late(
    k: Tensor, program: ScoreProgram, encoding: PositionEncoding, positions: Positions
) -> tuple[Tensor, ScoreProgram]:
    """Keys [B, H, Tk, D] after the program's stage, then rotated; and the program without the stage."""
    k = convolved(k, program.pre[0], positions.starts())
    return rotated_keys(k, encoding, positions, positions.keys), without_pre(program)


def rotated_queries(q: Tensor, encoding: PositionEncoding, positions: Positions) -> Tensor:
    """The last queries of `positions` [B, H, T, D], rotated."""
    at, count = positions.queries, q.shape[2]
    lengths = [positions.lengths()[:, -count:]] if encoding.by_length else []
    return encoding.rotate(q, at if at.shape[1] == count else at[:, -count:], *lengths)


def rotated_keys(k: Tensor, encoding: PositionEncoding, positions: Positions, at: Tensor) -> Tensor:
    """Keys rotated to the positions `at` [1 or B, tokens]."""
    if not encoding.by_length:
        return encoding.rotate_keys(k, at)
    lengths = positions.lengths()
    # With a cache a row is one document, though padding may follow it.
    return encoding.rotate_keys(
        k, at, lengths if at.shape[1] == positions.num_queries else lengths.amax(-1, keepdim=True)
    )


def inputs_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    positions: Positions,
    program: ScoreProgram,
    encoding: PositionEncoding,
    scale: float,
    window: int | None,
) -> Inputs:
    """Arguments of the op for rotated queries, rotated keys and values of all tokens."""
    further = {}
    if state is not None:
        q, k = encoding.turn(q, k, positions, state)
        v, further = repeat_heads(v, k.shape[1]), {"state": state}
    if window is not None:
        positions = positions.windowed(window)
    bias = encoding.bias(q, k, positions, scale=scale, **further)
    return Inputs(q, k, v, program, bias, positions.causal, positions.visible, scale)


def with_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    positions: Positions,
    *,
    cache: KeyValueCache | None,
    layer: int,
    arrange: Callable[[Tensor], Tensor] | None = None,
    earlier_rows: int = 0,
    asked: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Positions]:
    """Queries, keys, values and state of the cached tokens, followed by the given ones, arranged; and the positions.

    Of the queries, the last `asked` and the `earlier_rows` before them, as far as they exist.

    A cache keeps keys and values. The other tensors that later queries need, the encoding's token state and earlier
    queries, are kept as further features of the keys, so that any kind of cache can be used.
    """
    num_tokens, dtype, width = q.shape[2], k.dtype, k.shape[-1]
    asked = num_tokens if asked is None else asked
    kept = [x for x in (state, q if earlier_rows else None) if x is not None]
    # [B, H, T, n] as [B, G, T, H/G · n]: a key has the features of all heads that read it.
    packed = [x.unflatten(1, (k.shape[1], -1)).transpose(2, 3).flatten(3) for x in kept]
    # A cache has one dtype, the finest of all: under autocast, states are finer than keys.
    k = torch.cat([k, *packed], -1) if packed else k
    if cache is not None:
        k, v = cache.update(k, v, layer)
    if arrange is not None:
        k, v = arrange(k), arrange(v)
    # A preallocated cache returns room for more keys than there are.
    k, v = k[:, :, : positions.num_keys], v[:, :, : positions.num_keys]
    if k.shape[2] != positions.num_keys:
        raise ValueError(
            f"attention has {k.shape[2]} keys, but {positions.num_keys} are expected: a cache must keep every token, "
            f"without a sliding window"
        )
    if packed:
        k, *packed = k.split([width, *(x.shape[-1] for x in packed)], -1)
    unpacked = [
        x.unflatten(3, (-1, y.shape[-1])).transpose(2, 3).flatten(1, 2).to(y.dtype)
        for x, y in zip(packed, kept, strict=True)
    ]
    if state is not None:
        state = unpacked[0]
    if earlier_rows:
        q = unpacked[-1]
    if earlier_rows and positions.preallocated:
        positions, index = positions.before_in_room(earlier_rows)
        index = index.clamp(min=0)[:, None, :, None].expand(q.shape[0], q.shape[1], -1, q.shape[3])
        q, rows = q.gather(2, index), asked + earlier_rows
    else:
        earlier = min(earlier_rows, positions.num_keys - num_tokens)
        rows = min(asked + earlier_rows, num_tokens + earlier)
        positions = positions.before(earlier)
    q = q if q.shape[2] == rows else q[:, :, -rows:]
    return q, k.to(dtype), v.to(dtype), state, positions.last(rows)


class _Past(Cache):
    """A number of tokens before the queries, whose keys come with the call."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.count


def _by_token(mask: Tensor, batch: int) -> Tensor:
    """A mask as [B, Tk] where it is the same for all queries, else [B or 1, 1, Tq, Tk]."""
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    return shown_by(mask.expand(batch, -1) if mask.dim() == 2 else mask)
