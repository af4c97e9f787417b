"""From attention masks, position ids and caches to places: where queries and keys stand, who sees whom."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache

from dape.ops.score_conv_attention import Visible
from dape.ops.score_conv_attention.types import EVERYTHING
from dape.positions import Places


def decoder_places(
    num_queries: int,
    *,
    device: torch.device,
    cache: Cache | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Places:
    """Places of the next `num_queries` tokens after those in the cache.

    attention_mask: [B, keys], ones for tokens and zeros for padding, one run of ones a row.
    position_ids:   [1 or B, queries]; without a cache any ascending integers, with one they must continue
                    the cached tokens' positions by ones.
    """
    compiling = torch.compiler.is_compiling()
    seen = 0 if cache is None else cache.get_seq_length()
    if isinstance(seen, Tensor) and not compiling:
        seen = int(seen)
    preallocated = isinstance(seen, Tensor)
    num_keys = (
        cache.get_mask_sizes(num_queries, 0)[0] if preallocated and cache is not None else seen + num_queries
    )
    index = torch.arange(num_queries, device=device) + seen

    if attention_mask is None:
        keys = torch.arange(num_keys, device=device)[None]
        visible = Visible(last=index[None]) if preallocated else EVERYTHING
    else:
        mask = _fit(attention_mask, num_keys, preallocated=preallocated)
        visible = _visible(mask, index, compiling=compiling)
        keys = (mask.long().cumsum(-1) - 1).clamp(min=0)
    queries = keys[:, index]
    consecutive = not preallocated
    if position_ids is not None:
        if position_ids.dim() != 2 or position_ids.shape[1] != num_queries:
            raise ValueError(
                f"position_ids have shape {tuple(position_ids.shape)}, expected [batch, {num_queries} tokens]"
            )
        shift = position_ids[:, -1:] - queries[:, -1:]
        if compiling:
            follows = preallocated or seen > 0
        else:
            real = True if attention_mask is None else mask[:, index].bool()
            follows = bool(((position_ids == queries + shift) | ~torch.as_tensor(real, device=device)).all())
        if not follows and not isinstance(seen, Tensor) and seen > 0:
            raise ValueError(
                "position_ids do not continue those of the cached tokens by ones; pass the whole input without a "
                "cache (use_cache=False) to use other positions"
            )
        queries, keys = position_ids, keys + shift if follows else position_ids
        consecutive = consecutive and follows
    return Places(queries, keys, causal=True, visible=visible, consecutive=consecutive)


def _fit(attention_mask: Tensor, num_keys: int, *, preallocated: bool) -> Tensor:
    """The mask with a column for every key."""
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected [batch, tokens]: ones for tokens, "
            f"zeros for padding"
        )
    missing = num_keys - attention_mask.shape[1]
    if missing and not preallocated:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but there are {num_keys}, those in the cache "
            f"included"
        )
    return torch.nn.functional.pad(attention_mask, (0, missing))


def _visible(mask: Tensor, index: Tensor, *, compiling: bool) -> Visible:
    if compiling:
        first = mask.long().argmax(-1, keepdim=True)
        return Visible(first, index[None].expand(mask.shape[0], -1))
    if bool(mask.all()):
        return EVERYTHING
    try:
        padding = Visible.from_padding(mask)
    except ValueError as error:
        raise ValueError(f"attention_mask: {error} (pad batches on the left before generating)") from error
    # Padding on the left alone needs no right limit beside causality.
    return Visible(padding.first) if bool(mask[:, -1].all()) else padding
