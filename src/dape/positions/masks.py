"""Positions and visibility of queries and keys, from attention masks, position ids and caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dape.ops.score_attention import Visible
from dape.ops.score_attention.types import EVERYTHING, shown_by
from dape.positions.base import Positions, positions_in


class KeyValueCache(Protocol):
    """Interface of a key-value cache, as transformers' caches and `dape.Cache` have it."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class SizedCache(KeyValueCache, Protocol):
    """A cache that knows the number of its tokens."""

    @property
    def is_compileable(self) -> bool: ...

    def get_seq_length(self, layer_idx: int = 0) -> int: ...

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]: ...


@dataclass(frozen=True)
class WithoutHoles:
    """Reordering of keys that moves the padding of each row to the front, so that its tokens are contiguous.

    order: [B, Tk], the keys' new order. room: number of invisible keys to add at the end, so that a query whose keys
    moved to the right still has them to its left. The order of the visible keys does not change.
    """

    order: Tensor
    room: int

    def arrange(self, states: Tensor) -> Tensor:
        """Keys or values [B, G, Tk, …] in the new order."""
        index = self.order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
        return torch.nn.functional.pad(states.gather(2, index), (0, 0, 0, self.room))

    def in_original_order(self, weights: Tensor) -> Tensor:
        """Weights [B, H, Tq, reordered keys] with columns in the caller's order."""
        index = self.order.argsort(-1)[:, None, None, :].expand(-1, *weights.shape[1:3], -1)
        return weights.gather(-1, index)


def has_holes(mask: Tensor) -> bool:
    """Whether any row of a mask [B, Tk] has zeros between its ones."""
    # Most masks have no zeros at all, and this is asked for every generated token.
    return not bool(mask.all()) and bool((_runs(mask) > 1).any())


def _runs(mask: Tensor) -> Tensor:
    """Number of runs of ones in each row of a mask [B, Tk]."""
    return torch.nn.functional.pad(mask.bool().long(), (1, 0)).diff(dim=-1).clamp(min=0).sum(-1)


def _positions_without_holes(
    mask: Tensor, index: Tensor, position_ids: Tensor | None
) -> tuple[Positions, WithoutHoles]:
    """Positions of queries `index` among reordered keys, padding first, then tokens, then room; and the reordering."""
    real = mask.bool().long()
    rank = real.cumsum(-1) - 1
    num_padding = (1 - real).sum(-1, keepdim=True)
    order = real.argsort(dim=-1, stable=True)
    count = _count(mask)
    keys, queries = count.gather(1, order), count[:, index]
    if position_ids is not None:
        shift = position_ids[:, -1:] - queries[:, -1:]
        if mask.shape[1] == position_ids.shape[1]:
            queries, keys = position_ids, position_ids.expand(mask.shape[0], -1).gather(1, order)
        elif bool(((position_ids != queries + shift) & mask[:, index].bool()).any()):
            raise ValueError(
                "position_ids do not count the tokens of attention_mask by ones, and the cached tokens' are not known: "
                "pass the whole input without a cache (use_cache=False) to use other positions"
            )
        else:
            queries, keys = queries + shift, keys + shift
    first, last = num_padding, num_padding + rank[:, index]
    if starts_again(position_ids, mask):
        # Without a cache, so that `keys` are the positions of all tokens in the new order.
        starts = document_starts(keys, real.gather(1, order))
        first = torch.maximum(starts.gather(1, last.clamp(min=0)), num_padding)
    room = int((1 - real)[:, index].sum(-1).max())
    keys = torch.cat([keys, keys[:, -1:].expand(-1, room)], 1)
    return Positions(queries, keys, visible=Visible(first, last)), WithoutHoles(order, room)


def starts_again(position_ids: Tensor | None, attention_mask: Tensor | None = None) -> bool:
    """Whether any row holds several documents: positions that do not ascend from token to token.

    Across padding a document must start at position 0: other positions, such as those that generate() assigns to tokens
    after a right-padded prompt, are not packing, and raise.
    """
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return False
    if attention_mask is None or attention_mask.shape[-1] < position_ids.shape[1]:
        return bool(_begins(position_ids, None).any())
    if attention_mask.dim() != 2:
        return False
    # A mask may cover the free slots of a preallocated cache.
    attention_mask = attention_mask[:, : position_ids.shape[1]]
    # Across padding, a token's predecessor is the last token before the padding.
    order = attention_mask.bool().long().argsort(dim=-1, stable=True)
    position_ids = position_ids.expand(attention_mask.shape[0], -1)
    arranged = position_ids.gather(1, order)
    begins = _begins(arranged, attention_mask.gather(1, order))
    after_padding = torch.nn.functional.pad(order.diff(dim=-1) > 1, (1, 0))
    if bool((begins & after_padding & (arranged != 0)).any()):
        raise ValueError(
            "position_ids decrease after padding, but not to 0, where another document would begin: number the tokens "
            "of attention_mask by ones, and pad prompts on the left"
        )
    return bool(begins.any())


def check_packing_arguments(position_ids: Tensor | None, arguments: Mapping[str, object]) -> None:
    """Raise if packed documents are given by lengths alone, as flash-attention collators do: we need position_ids."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if position_ids is None and arguments.get(name) is not None:
            raise ValueError(
                f"{name} without position_ids would be dropped and the packed documents mixed: pass position_ids "
                f"that start again with each document (return_position_ids=True of the collator)"
            )


def check_not_sharded() -> None:
    """Raise inside torch's context_parallel, which shards tokens and exchanges keys inside SDPA alone."""
    if torch.compiler.is_compiling():
        return
    patched = getattr(torch.nn.functional.scaled_dot_product_attention, "__module__", None) or ""
    if patched.startswith("torch.distributed."):
        raise ValueError(
            "context_parallel gives each process a part of the tokens and exchanges keys inside PyTorch's own "
            "attention, which dape does not use: the parts would not see each other. Shard parameters (FSDP2), or pass "
            "shares=dape.models.parallel.Shares(…) instead"
        )


def document_starts(position_ids: Tensor, real: Tensor | None = None) -> Tensor:
    """Index of the first token of each token's document, [B, T], from positions and the mask of tokens."""
    index = torch.arange(position_ids.shape[1], device=position_ids.device)
    return torch.where(_begins(position_ids, real), index, 0).cummax(-1).values


def _begins(position_ids: Tensor, real: Tensor | None) -> Tensor:
    """Mask [B, T] of tokens that begin another document: their position does not exceed that of the token before."""
    begins = position_ids.diff(dim=-1) <= 0
    if real is not None:
        begins = begins & real[:, 1:].bool() & real[:, :-1].bool()
    return torch.nn.functional.pad(begins, (1, 0))


def decoder_positions(
    num_queries: int,
    *,
    device: torch.device,
    cache: SizedCache | None = None,
    layer: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Positions, WithoutHoles | None]:
    """Positions of the next `num_queries` tokens after those that the cache has for `layer`.

    Also the reordering of keys that makes those of each row contiguous; None for a mask without holes.

    attention_mask: [B, keys], ones for tokens and zeros for padding. Or [B, 1, queries, keys], booleans, ones and zeros, or numbers to
                    add to scores, in which each query sees contiguous keys; without a cache, positions are then
                    counted in each document, from the first token of a row.
    position_ids:   [1 or B, queries]; without a cache any integers: where they do not ascend, another document
                    begins, which sees none of those before it (packing). With a cache they must continue the
                    cached tokens' positions by ones.
    """
    compiling = torch.compiler.is_compiling()
    seen = 0 if cache is None else cache.get_seq_length(layer)
    if isinstance(seen, Tensor) and not compiling:
        seen = int(seen)
    preallocated = isinstance(seen, Tensor)
    whole = not preallocated and seen == 0
    roomy = preallocated or (cache is not None and cache.is_compileable)
    num_keys = (
        cache.get_mask_sizes(num_queries, layer)[0]
        if preallocated and cache is not None
        else seen + num_queries
    )
    index = torch.arange(num_queries, device=device) + seen

    if attention_mask is not None and attention_mask.dim() != 4:
        attention_mask = _fit(attention_mask, num_keys, roomy=roomy)
        if not compiling and bool(attention_mask.all()):
            attention_mask = None
    if attention_mask is None:
        keys = torch.arange(num_keys, device=device)[None]
        visible = Visible(last=index[None]) if preallocated else EVERYTHING
    elif attention_mask.dim() == 4:
        shown = _fit(attention_mask, num_keys, num_queries, roomy=roomy)
        keys = positions_in(shown[:, 0]) if whole else torch.arange(num_keys, device=device)[None]
        visible, attention_mask = Visible.from_mask(shown), None
    else:
        if not compiling and has_holes(attention_mask):
            return _positions_without_holes(attention_mask, index, position_ids)
        visible = _visible(attention_mask, index if preallocated else None, compiling=compiling)
        keys = _count(attention_mask)
    queries = keys[:, index]
    consecutive = not preallocated
    if position_ids is not None:
        if position_ids.dim() != 2 or position_ids.shape[1] != num_queries:
            raise ValueError(
                f"position_ids have shape {tuple(position_ids.shape)}, expected [batch, {num_queries} tokens]"
            )
        if whole and (compiling or starts_again(position_ids, attention_mask)):
            return _packed_positions(position_ids, visible, attention_mask), None
        shift = position_ids[:, -1:] - queries[:, -1:]
        if compiling:
            follows = preallocated or seen > 0
        else:
            differs = position_ids != queries + shift
            if attention_mask is not None:
                differs = differs & attention_mask[:, index].bool()
            follows = num_queries == 1 or not bool(differs.any())
        if not follows and not isinstance(seen, Tensor) and seen > 0:
            raise ValueError(
                "position_ids do not continue those of the cached tokens by ones; pass the whole input without a "
                "cache (use_cache=False) to use other positions"
            )
        queries, keys = position_ids, keys + shift if follows else position_ids
        consecutive = consecutive and follows
    return Positions(queries, keys, True, visible, consecutive, preallocated), None


def _packed_positions(position_ids: Tensor, visible: Visible, mask: Tensor | None) -> Positions:
    """Positions of rows of packed documents, each seeing only itself, with padding at the ends of rows."""
    starts = document_starts(position_ids, mask)
    first = starts if visible.first is None else torch.maximum(starts, visible.first)
    consecutive = False
    if mask is None and not torch.compiler.is_compiling():
        index = torch.arange(position_ids.shape[1], device=position_ids.device)
        consecutive = bool((position_ids == index - starts + position_ids[:, :1]).all())
    return Positions(position_ids, position_ids, True, Visible(first, visible.last), consecutive)


def _fit(attention_mask: Tensor, num_keys: int, num_queries: int | None = None, *, roomy: bool) -> Tensor:
    """The mask with a column for every key; a mask for a preallocated cache may have fewer or more."""
    shape, rows = tuple(attention_mask.shape), None if num_queries is None else (1, num_queries)
    if attention_mask.dim() != (2 if rows is None else 4) or (rows is not None and shape[1:3] != rows):
        raise ValueError(
            f"attention_mask has shape {shape}, expected [batch, tokens], ones for tokens and zeros for padding, or "
            f"[batch, 1, queries, keys], one mask for all heads"
        )
    missing = num_keys - attention_mask.shape[-1]
    if missing and not roomy:
        covered = attention_mask.shape[-1]
        raise ValueError(
            f"attention_mask covers {covered} tokens, but there are {num_keys}, cached ones included"
        )
    if rows is not None:
        attention_mask = shown_by(attention_mask)
    return torch.nn.functional.pad(attention_mask, (0, missing))


def _count(mask: Tensor) -> Tensor:
    """Positions [B, Tk], counting tokens: 0 in padding before the first, increasing through padding at the end."""
    ended = mask.flip(-1).long().cumsum(-1).flip(-1) == 0
    return ((mask.bool() | ended).long().cumsum(-1) - 1).clamp(min=0)


def _visible(mask: Tensor, index: Tensor | None, *, compiling: bool) -> Visible:
    """The keys that a padding mask shows; index: the queries' own keys, where free slots come after them."""
    if compiling:
        # The graph cannot move keys, so it checks at run time: attention would silently include keys in a hole.
        torch._assert_async(
            (_runs(mask) <= 1).all(),
            "attention_mask has padding between tokens, which a compiled model cannot leave out: pad on the left alone",
        )
        first = mask.long().argmax(-1, keepdim=True)
        return Visible(first, None if index is None else index[None].expand(mask.shape[0], -1))
    padding = Visible.from_padding(mask)
    # Padding on the left alone needs no right limit other than causality.
    return Visible(padding.first) if bool(mask[:, -1].all()) else padding
