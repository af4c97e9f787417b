"""The attention that a retrofitted model runs, behind transformers' two interfaces: masks and attention.

transformers builds one mask a forward pass and hands it to every layer. Ours is not T×T: it is the interval
of keys that each query sees, [B, 1, Tq, 2], found tile by tile from whatever transformers composed of causality,
padding, sliding windows, packed documents and cache offsets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from dape.ops.score_attention import Visible, attention, attention_weights
from dape.ops.score_attention.types import EVERYTHING
from dape.scores import ScoreProcessor

# The implementation's name in `model.config._attn_implementation`, and that of the convolution in a layer.
NAME = "dape"
SCORES = "score_conv"

# Booleans of a mask that exist at a time.
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
) -> Tensor:
    """First and last visible key of every query, [B, 1, Tq, 2]; a query that sees nothing has first > last."""
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
    return torch.cat(tiles, dim=2)


def intervals(shown: Tensor) -> Tensor:
    """The run of True in each row of `shown` [B, 1, Tq, Tk], as [B, 1, Tq, 2]: its first and last column."""
    column = torch.arange(shown.shape[-1], device=shown.device)
    first = column.masked_fill(~shown, shown.shape[-1]).amin(-1)
    last = column.masked_fill(~shown, -1).amax(-1)
    if not torch.compiler.is_compiling() and bool((shown.sum(-1) != (last - first + 1).clamp(min=0)).any()):
        raise ValueError(
            "the attention mask shows a query keys with a gap between them, but score convolution needs each "
            "query's keys to be one run: use padding, sliding windows or packed documents, not masks with holes"
        )
    return torch.stack([first, last], dim=-1)


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
    """Attention output [B, Tq, H, D] of a retrofitted layer; and its weights if asked for, by the reference."""
    scores = getattr(module, SCORES, None)
    if not isinstance(scores, ScoreProcessor):
        raise ValueError(
            f'{type(module).__name__} has no score convolution, but its model runs attn_implementation="{NAME}": '
            f"add it with dape.retrofit(model)"
        )
    for name in ("softcap", "s_aux", "head_mask", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name}, which changes the scores where a convolution cannot see it: "
                f"retrofit a model without it"
            )
    visible, num_keys = _visible(attention_mask, query.shape[2], key.shape[2])
    key, value = key[:, :, :num_keys], value[:, :, :num_keys]
    out = attention(query, key, value, scores, causal=True, visible=visible, scale=scaling, dropout=dropout)
    weights = None
    if kwargs.get("output_attentions"):
        weights = attention_weights(query, key, scores, causal=True, visible=visible, scale=scaling)
    return out.transpose(1, 2).contiguous(), weights


def _visible(mask: Tensor | None, num_queries: int, num_keys: int) -> tuple[Visible, int]:
    """What the queries see, and how many of the keys matter, from our own mask or a caller's [B, 1, Tq, Tk]."""
    if mask is None:
        return EVERYTHING, num_keys
    if mask.shape[1] != 1:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: score convolution takes one mask for all heads"
        )
    if mask.is_floating_point() or mask.dtype == torch.bool:
        mask = intervals(mask if mask.dtype == torch.bool else mask == 0)
    first, last = mask[:, 0].unbind(-1)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        # Reading numbers is free here. A preallocated cache returns room for more keys than there are; and what
        # hides nothing beyond the future needs no limits at all.
        query = torch.arange(num_queries)
        num_keys = min(num_keys, num_queries + max(0, int((last - query).max())))
        if not first.any() and torch.equal(last, (query + num_keys - num_queries).expand_as(last)):
            return EVERYTHING, num_keys
    return Visible(first, last), num_keys


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, interval_mask)
