"""`attn_implementation="dape"`: our op behind transformers' interfaces for masks and attention.

Any model whose attention goes through the interface runs as it is: padding, windows, packed documents, soft caps,
sinks, cross-attention, and the position bias of T5 and its relatives with gradients. `dape.retrofit` adds score
processors and position encodings to a model's layers, which are then found here.

transformers builds one mask per forward pass and hands it to every layer. Ours is not T×T: it holds the interval of keys
that each query sees and the position of each key, [B, 1, Tq + Tk, 2], computed tile by tile from the mask function that
transformers composes of causality, padding, sliding windows, packed documents and cache offsets.
"""

from __future__ import annotations

import contextlib
import inspect
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
    bidirectional_mask_function,
    causal_mask_function,
    padding_mask_function,
    sdpa_mask,
)

from dape.layers import Inputs, rotated_keys, rotated_queries
from dape.ops.score_attention import Bias, DistanceBias, ScoreProgram, Visible
from dape.ops.score_attention.api import HasProgram
from dape.ops.score_attention.program import PLAIN
from dape.ops.score_attention.reference import repeat_heads
from dape.ops.score_attention.types import EVERYTHING, shown_by
from dape.positions import Positions
from dape.positions.base import count_tokens, positions_in

# Name of the implementation in `model.config._attn_implementation`; code loaded from a model's folder has its own, as
# transformers keeps one implementation for each name.
NAME = __name__.removesuffix(".models.interface").removesuffix(".dape_models_interface")
# Names of the modules added to a layer.
SCORES, ENCODING, CANON = "score_processor", "position_encoding", "canon_layer"
# Keyword argument that carries a layer's token states to `attend`.
STATE = "dape_state"
# Key of a layer's dictionary that holds the handle of its hook `by_distance`.
BY_DISTANCE = "_dape_by_distance"

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
    """A row for each query and then for each key, [B, 1, Tq + Tk, 2]; None if causality alone limits queries, or nothing.

    Of a query, the first and last visible key, first > last if it sees none; of a key, its position, twice.
    """
    unlimited = mask_function is bidirectional_mask_function
    if attention_mask is None and (
        unlimited or (q_length == kv_length and mask_function is causal_mask_function)
    ):
        return None
    masks: dict[str, Any] = {"batch_size": batch_size, "device": device, "use_vmap": use_vmap}
    masks["allow_is_causal_skip"] = False
    rows = max(1, TILE_NUMBERS // max(1, batch_size * kv_length))
    tiles = []
    for start in range(0, q_length, rows):
        shown = sdpa_mask(
            q_length=min(rows, q_length - start),
            kv_length=kv_length,
            q_offset=cast(int, q_offset + start),
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            mask_function=mask_function,
            **masks,
        )
        tiles.append(intervals(cast(Tensor, shown)))
    follows = _follows(mask_function, attention_mask, kv_offset + kv_length)
    chain = sdpa_mask(q_length=kv_offset + kv_length, kv_length=1, mask_function=follows, **masks)
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
    """A layer's call of the attention interface, recorded by `recording`.

    causal: whether the layer hides the future. crosses: whether keys are of another sequence. num_keys: of the sequence.
    """

    module: nn.Module
    num_heads: int
    head_dim: int
    softcap: float | None = None
    causal: bool = True
    crosses: bool = False
    num_keys: int = 0


# Calls of the attention interface; their outputs are zeros, so meta tensors will do.
CALLS: ContextVar[list[Call] | None] = ContextVar("calls", default=None)
# Inputs of the attention of retrofitted layers, in order of layers.
INPUTS: ContextVar[list[Inputs] | None] = ContextVar("inputs", default=None)


@contextlib.contextmanager
def recording(variable: ContextVar[list[Any] | None]) -> Iterator[list[Any]]:
    """Record CALLS or INPUTS in the block."""
    found: list[Any] = []
    token = variable.set(found)
    try:
        yield found
    finally:
        variable.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B, Tq, H, D] of a layer, and its weights if requested, by the reference.

    position_bias: [1 or B, H, Tq, Tk] of the model, or [1, H, Tq + Tk − 1] by distance, as `by_distance` passes it.
    """
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    num_queries, num_keys = query.shape[2], key.shape[2]
    if (calls := CALLS.get()) is not None:
        crosses = not causal and num_queries != num_keys
        sizes = (query.shape[1], query.shape[-1])
        calls.append(Call(module, *sizes, kwargs.get("softcap"), causal, crosses, num_keys))
        return query.new_zeros(query.shape[0], num_queries, query.shape[1], value.shape[-1]), None
    processed = SCORES in module._modules
    program = _program(module, kwargs)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    mask, counted = unpacked(attention_mask, num_queries, num_keys)
    if mask is not None and not processed:
        # The mask says it all: what a causal layer sees may include a prefix after it.
        causal = False
    visible, num_keys, at_end, causal = _visible(mask, num_queries, num_keys, causal=causal)
    if program.earlier_rows and num_queries < num_keys:
        raise ValueError(
            "the score program that dape.retrofit added reads earlier queries, which caches of transformers do not "
            "keep: pass use_cache=False"
        )
    key, value = key[:, :, :num_keys], value[:, :, :num_keys]
    bias = None if position_bias is None else _own_bias(module, position_bias, query, key)
    encoding = getattr(module, ENCODING, None)
    if encoding is not None:
        if unknown := counted is None:
            if encoding.absolute and mask is not None:
                raise ValueError(
                    f"{type(encoding).__name__} reads the number of tokens before each query, which an attention_mask of "
                    f"new queries alone does not say: pass [batch, tokens], or no cache (use_cache=False)"
                )
            counted = torch.arange(num_keys, device=query.device)[None]
        positions = _positions(num_queries, counted[:, :num_keys], visible, at_end=at_end, causal=causal)
        query = rotated_queries(query, encoding, positions)
        key = rotated_keys(key, encoding, positions, positions.keys)
        state = kwargs.get(STATE)
        if state is not None:
            state = state.extra[:, :, :num_keys]
            # The model's own windows are no starts of documents, which positions tell.
            turned = positions if unknown else replace(positions, visible=Visible(None, visible.last))
            query, key = encoding.turn(query, key, turned, state)
            value = repeat_heads(value, key.shape[1])
        bias = encoding.bias(query, key, positions, scale=scale, state=state)
    inputs = Inputs(query, key, value, program, bias, causal, visible, scale)
    if (recorded := INPUTS.get()) is not None:
        recorded.append(inputs)
    weights = inputs.weights() if kwargs.get("output_attentions") else None
    return inputs.attend(dropout).transpose(1, 2).contiguous(), weights


def _program(module: nn.Module, kwargs: dict[str, Any]) -> ScoreProgram:
    """The layer's program, with the model's own soft cap and sinks."""
    if kwargs.get("head_mask") is not None:
        raise ValueError(f"{type(module).__name__} passes head_mask, which score programs do not support")
    scores = getattr(module, SCORES, None)
    program = scores.program() if isinstance(scores, HasProgram) else PLAIN
    if (softcap := kwargs.get("softcap")) is not None:
        program = replace(program, softcap=float(softcap))
    if (sink := kwargs.get("s_aux")) is not None:
        if program.sink is not None:
            raise ValueError(f"{type(module).__name__} has sinks: choose a method without normaliser=sink")
        program = replace(program, sink=sink)
    return program


def _own_bias(module: nn.Module, bias: Tensor, query: Tensor, key: Tensor) -> Bias:
    """The model's own position bias in a form of the op."""
    if bias.dim() == 3:
        return DistanceBias(bias[0], 1 - query.shape[2]) if bias.shape[2] else None
    batch, heads, num_queries = query.shape[:3]
    if bias.dim() != 4 or bias.shape[0] not in (1, batch) or bias.shape[1:3] != (heads, num_queries):
        raise ValueError(
            f"{type(module).__name__} passes a position_bias of shape {tuple(bias.shape)}, expected "
            f"[1 or {batch}, {heads}, {num_queries}, {key.shape[2]}]"
        )
    use_distances(module)
    return bias[..., : key.shape[2]]


def use_distances(module: nn.Module) -> None:
    """From now on, let T5's attention layers in `module` pass their bias by distance, O(T) numbers, to `attend`.

    `attend` calls this for every layer that it meets. Call it yourself if even the first input is too long for a bias
    of all pairs.
    """
    if torch.compiler.is_compiling():
        return
    for layer in module.modules():
        # UMT5 computes its own in every layer and takes none.
        known = (
            hasattr(layer, "compute_bias") and "position_bias" in inspect.signature(layer.forward).parameters
        )
        if known and BY_DISTANCE not in layer.__dict__:
            layer.__dict__[BY_DISTANCE] = layer.register_forward_pre_hook(by_distance, with_kwargs=True)


def by_distance(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    """Pass T5's bias as [1, H, Tq + Tk − 1], by distance from 1 − Tq on; without one, [1, H, 0]."""
    layer = cast(Any, module)
    if layer.config._attn_implementation != NAME or kwargs.get("position_bias") is not None:
        return None
    x, cache = args[0] if args else kwargs["hidden_states"], kwargs.get("past_key_values")
    if kwargs.get("key_value_states") is not None or not layer.has_relative_attention_bias:
        return args, {**kwargs, "position_bias": x.new_zeros(1, layer.n_heads, 0)}
    seen = 0 if cache is None else cache.get_seq_length(layer.layer_idx)
    if isinstance(seen, Tensor) or getattr(cache, "is_compileable", False):
        # Keys of a preallocated cache are as many as its slots.
        return None
    num_queries, num_keys = x.shape[1], seen + x.shape[1]
    # A query at the last key, and keys on to the right of it: distances num_keys − 1 … 1 − num_queries.
    row = layer.compute_bias(1, num_queries + num_keys - 1, device=x.device, past_seen_tokens=num_keys - 1)
    return args, {**kwargs, "position_bias": row[:, :, 0].flip(-1)}


def _positions(num_queries: int, keys: Tensor, visible: Visible, *, at_end: bool, causal: bool) -> Positions:
    """Positions of queries and keys [1 or B, Tk]. A causal query's own key is the last one that it sees."""
    if not causal:
        consecutive = visible is EVERYTHING and keys.shape[0] == 1
        return Positions(keys, keys, causal=False, visible=visible, consecutive=consecutive)
    if at_end and keys.shape[0] > 1 and bool((keys == keys[:1]).all()):
        keys = keys[:1]
    queries = keys[:, keys.shape[1] - num_queries :]
    if not at_end and visible.last is not None:
        last = visible.last.clamp(min=0)
        queries = keys.expand(last.shape[0], -1).gather(1, last)
    return Positions(queries, keys, visible=visible, consecutive=at_end)


def unpacked(mask: Tensor | None, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Intervals of visible keys [B, 1, Tq, 2] and positions of keys [B, Tk], None for those without limits or unknown.

    mask: of `interval_mask`, or a caller's [B, 1, Tq, Tk].
    """
    if mask is None:
        return None, None
    if mask.shape[1] != 1:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}: pass one mask for all heads")
    if mask.dtype == torch.long and mask.shape[2] > num_queries:
        return mask[:, :, :num_queries], mask[:, 0, num_queries:, 0]
    shown = shown_by(mask)
    return intervals(shown), positions_in(shown[:, 0]) if shown.shape[2] == num_keys else None


def _visible(
    mask: Tensor | None, num_queries: int, num_keys: int, *, causal: bool
) -> tuple[Visible, int, bool, bool]:
    """The visible keys, the number of keys in use, whether the last query is at the last of them, and causality.

    mask: the interval of keys that each query sees, [B, 1, Tq, 2].
    """
    if mask is None:
        return EVERYTHING, num_keys, True, causal
    first, last = mask[:, 0].unbind(-1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        # Reading values is cheap here. A preallocated cache returns more slots than there are keys; and a mask that
        # hides only the future needs no limits at all.
        query = torch.arange(num_queries)
        used = min(num_keys, num_queries + max(0, int((last - query).max())))
        if not first.any() and torch.equal(last, (query + used - num_queries).expand_as(last)):
            return EVERYTHING, used, True, True
        if causal:
            return Visible(first, last), used, True, True
        if not first.any() and bool((last == num_keys - 1).all()):
            return EVERYTHING, num_keys, True, False
        return Visible(first, last), num_keys, True, causal
    return Visible(first, last), num_keys, False, causal


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, interval_mask)
