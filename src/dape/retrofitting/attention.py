"""Attention of a retrofitted model, behind transformers' interfaces for masks and attention.

transformers builds one mask per forward pass and hands it to every layer. Ours is not T×T: it holds the interval of keys
that each query sees and the position of each key, [B, 1, Tq + Tk, 2], computed tile by tile from the mask function that
transformers composes of causality, padding, sliding windows, packed documents and cache offsets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    sdpa_mask,
)

from dape.ops.score_attention import Bias, ScoreProgram, Visible, attention, attention_weights
from dape.ops.score_attention.api import HasProgram
from dape.ops.score_attention.types import EVERYTHING, shown_by
from dape.positions import PositionEncoding, Positions
from dape.positions.base import count_tokens, positions_in

# Name of the implementation in `model.config._attn_implementation`, and names of the modules added to a layer.
NAME = "dape"
SCORES, ENCODING = "score_processor", "position_encoding"
# Keyword argument that carries a layer's token states to `attend`.
STATE = "dape_state"

# Number of mask entries computed at a time.
TILE_NUMBERS = 16 * 1024 * 1024


def interval_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """A row for each query and then for each key, [B, 1, Tq + Tk, 2]; None if causality alone limits queries.

    Of a query, the first and last visible key, first > last if it sees none; of a key, its position, twice.
    """
    if attention_mask is None and q_length == kv_length and mask_function is causal_mask_function:
        return None
    rows = max(1, TILE_NUMBERS // max(1, batch_size * kv_length))
    tiles = []
    for start in range(0, q_length, rows):
        shown = sdpa_mask(
            batch_size=batch_size,
            q_length=min(rows, q_length - start),
            kv_length=kv_length,
            q_offset=cast(int, q_offset + start),
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            device=device,
            use_vmap=use_vmap,
            allow_is_causal_skip=False,
            mask_function=mask_function,
        )
        tiles.append(intervals(cast(Tensor, shown)))
    follows = _follows(mask_function, attention_mask, kv_offset + kv_length)
    chain = sdpa_mask(
        batch_size=batch_size,
        q_length=kv_offset + kv_length,
        kv_length=1,
        device=device,
        use_vmap=use_vmap,
        allow_is_causal_skip=False,
        mask_function=follows,
    )
    keys = count_tokens(cast(Tensor, chain)[:, 0, :, 0])[:, None, kv_offset:, None]
    return torch.cat([*tiles, keys.expand(-1, -1, -1, 2)], dim=2)


def _follows(mask_function: Callable, attention_mask: Tensor | None, num_tokens: int) -> Callable:
    """Mask function that tells of a query whether it sees the token before it, whatever the key."""
    if attention_mask is not None:
        padded = F.pad(attention_mask, (0, max(0, num_tokens - attention_mask.shape[1])))
        mask_function = and_masks(mask_function, padding_mask_function(padded))
    return lambda batch, head, query, key: mask_function(batch, head, query, query - 1)


def intervals(shown: Tensor) -> Tensor:
    """First and last True column in each row of `shown` [B, 1, Tq, Tk], as [B, 1, Tq, 2]; raises if there are gaps."""
    visible = Visible.from_mask(shown)
    return torch.stack(cast(tuple[Tensor, Tensor], (visible.first, visible.last)), dim=-1)[:, None]


@dataclass(frozen=True)
class Call:
    """A layer's call of the attention interface, recorded by `recording`: the module, its sizes, its soft cap."""

    module: nn.Module
    num_heads: int
    head_width: int
    softcap: float | None = None


_recorded: ContextVar[list[Call] | None] = ContextVar("recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Record calls of the attention interface in the block; their outputs are zeros, so meta tensors will do."""
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a retrofitted layer's attention, recorded by `watching`."""

    q: Tensor
    k: Tensor
    bias: Bias
    program: ScoreProgram
    scale: float
    visible: Visible


_watched: ContextVar[list[Inputs] | None] = ContextVar("watched", default=None)


@contextlib.contextmanager
def watching() -> Iterator[list[Inputs]]:
    """Record the attention inputs of retrofitted layers in the block, in order of layers."""
    recorded: list[Inputs] = []
    token = _watched.set(recorded)
    try:
        yield recorded
    finally:
        _watched.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B, Tq, H, D] of a retrofitted layer, and its weights if requested, by the reference."""
    if (calls := _recorded.get()) is not None:
        calls.append(Call(module, query.shape[1], query.shape[-1], kwargs.get("softcap")))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    program = _program(module, kwargs)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    mask, counted = _unpacked(attention_mask, query.shape[2], key.shape[2])
    visible, num_keys, at_end = _visible(mask, query.shape[2], key.shape[2])
    if program.earlier_rows and query.shape[2] < num_keys:
        raise ValueError(
            "the score program that dape.retrofit added reads earlier queries, which caches of transformers do not "
            "keep: pass use_cache=False"
        )
    key, value = key[:, :, :num_keys], value[:, :, :num_keys]
    bias: Bias = None
    encoding = getattr(module, ENCODING, None)
    if encoding is not None:
        if counted is None:
            if encoding.absolute and mask is not None:
                raise ValueError(
                    f"{type(encoding).__name__} reads the number of tokens before each query, which an attention_mask of "
                    f"new queries alone does not say: pass [batch, tokens], or no cache (use_cache=False)"
                )
            counted = torch.arange(num_keys, device=query.device)[None]
        positions = _positions(query.shape[2], counted[:, :num_keys], visible, at_end=at_end)
        query, key = _rotated(encoding, query, key, positions)
        state = kwargs.get(STATE)
        if state is not None:
            state = state.extra[:, :, :num_keys]
        bias = encoding.bias(query, key, positions, scale=scale, state=state)
    if (recorded := _watched.get()) is not None:
        recorded.append(Inputs(query, key, bias, program, scale, visible))
    width = value.shape[-1]
    query, key, value = _same_width(query, key, value)
    options: dict[str, Any] = {"bias": bias, "causal": True, "visible": visible, "scale": scale}
    out = attention(query, key, value, program, dropout=dropout, **options)[..., :width]
    weights = None
    if kwargs.get("output_attentions"):
        weights = attention_weights(query, key, program, **options)
    return out.transpose(1, 2).contiguous(), weights


def _program(module: nn.Module, kwargs: dict[str, Any]) -> ScoreProgram:
    """The layer's program, with the model's own soft cap and sinks."""
    for name in ("head_mask", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which changes the scores where a score program cannot see "
                f"it: retrofit a model without it"
            )
    scores = getattr(module, SCORES, None)
    if not isinstance(scores, HasProgram):
        raise ValueError(
            f'{type(module).__name__} has no score processor, but its model runs attn_implementation="{NAME}": add it '
            f"with dape.retrofit(model)"
        )
    program = scores.program()
    if (softcap := kwargs.get("softcap")) is not None:
        program = replace(program, softcap=float(softcap))
    if (sink := kwargs.get("s_aux")) is not None:
        if program.sink is not None:
            raise ValueError(
                f"{type(module).__name__} has sinks of its own: choose a method without normaliser=sink"
            )
        program = replace(program, sink=sink)
    return program


def _same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three zero-padded to one head width; zeros change neither dot products nor the values before them."""
    width = max(key.shape[-1], value.shape[-1])
    padded = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return cast(tuple[Tensor, Tensor, Tensor], tuple(padded))


def _rotated(
    encoding: PositionEncoding, query: Tensor, key: Tensor, positions: Positions
) -> tuple[Tensor, Tensor]:
    if not encoding.by_length:
        return encoding.rotate(query, positions.queries), encoding.rotate(key, positions.keys)
    lengths = positions.lengths()
    # With a cache a row is one document, though padding may follow it.
    of_keys = lengths if positions.num_keys == positions.num_queries else lengths.amax(-1, keepdim=True)
    return encoding.rotate(query, positions.queries, lengths), encoding.rotate(key, positions.keys, of_keys)


def _positions(num_queries: int, keys: Tensor, visible: Visible, *, at_end: bool) -> Positions:
    """Positions of queries and keys [1 or B, Tk]. A query's own key is the last one that it sees."""
    if at_end and keys.shape[0] > 1 and bool((keys == keys[:1]).all()):
        keys = keys[:1]
    queries = keys[:, keys.shape[1] - num_queries :]
    if not at_end and visible.last is not None:
        last = visible.last.clamp(min=0)
        queries = keys.expand(last.shape[0], -1).gather(1, last)
    return Positions(queries, keys, visible=visible, consecutive=at_end)


def _unpacked(mask: Tensor | None, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Intervals of visible keys [B, 1, Tq, 2] and positions of keys [B, Tk], None for those without limits or unknown.

    mask: of `interval_mask`, or a caller's [B, 1, Tq, Tk].
    """
    if mask is None:
        return None, None
    if mask.shape[1] != 1:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: a score program takes one mask for all heads"
        )
    if mask.dtype == torch.long and mask.shape[2] > num_queries:
        return mask[:, :, :num_queries], mask[:, 0, num_queries:, 0]
    shown = shown_by(mask)
    return intervals(shown), positions_in(shown[:, 0]) if shown.shape[2] == num_keys else None


def _visible(mask: Tensor | None, num_queries: int, num_keys: int) -> tuple[Visible, int, bool]:
    """The visible keys, the number of keys in use, and whether the last query is at the last of them.

    mask: the interval of keys that each query sees, [B, 1, Tq, 2].
    """
    if mask is None:
        return EVERYTHING, num_keys, True
    first, last = mask[:, 0].unbind(-1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        # Reading values is cheap here. A preallocated cache returns more slots than there are keys; and a mask that
        # hides only the future needs no limits at all.
        query = torch.arange(num_queries)
        num_keys = min(num_keys, num_queries + max(0, int((last - query).max())))
        if not first.any() and torch.equal(last, (query + num_keys - num_queries).expand_as(last)):
            return EVERYTHING, num_keys, True
        return Visible(first, last), num_keys, True
    return Visible(first, last), num_keys, False


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, interval_mask)
