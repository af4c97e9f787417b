"""Arguments of the op other than q, k, v and a score program: visibility, and the bias in its four forms.

Shapes: B batch, H heads, G key/value heads, Tq/Tk queries/keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.program import ScoreProgram

# Below this, a number added to scores hides a key: −inf, the least number of any dtype, −1e9, or −1e4 however rounded.
HIDING = -9e3


def shown_by(mask: Tensor) -> Tensor:
    """A mask as booleans, True where visible; given booleans, ones and zeros, or numbers to add to scores.

    Numbers to add must be 0, or at most −10,000 for keys that are hidden.
    """
    if not mask.is_floating_point():
        return mask.bool()
    shown = mask > HIDING
    # Values are read only on the CPU, where it is cheap.
    checked = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if checked and bool((mask.masked_fill(mask <= HIDING, 0) != 0).any()):
        raise ValueError(
            "the mask holds more than 0 (visible) and −10,000 or less (hidden): pass offsets of the scores as a bias"
        )
    return shown


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
        first, last, contiguous = _runs(mask.bool()[:, None])
        if not bool(contiguous):
            raise ValueError("the padding mask has holes: each row must be one contiguous run of ones")
        return Visible(first, last)

    @staticmethod
    def from_mask(mask: Tensor) -> Visible:
        """The interval of True in each row of a boolean mask [B, Tq, Tk] or [B, 1, Tq, Tk]."""
        if mask.dtype != torch.bool:
            raise TypeError(f"the mask must be boolean, got {mask.dtype}")
        if mask.dim() == 4 and mask.shape[1] == 1:
            mask = mask[:, 0]
        if mask.dim() != 3:
            raise ValueError(
                f"the mask has shape {tuple(mask.shape)}, expected [batch, queries, keys]: one for all heads"
            )
        first, last, contiguous = _runs(mask)
        checked = not (torch.compiler.is_compiling() or mask.is_meta)
        if checked and not bool(contiguous):
            raise ValueError("the mask has gaps: the keys that a query sees must be contiguous")
        return Visible(first, last)

    @staticmethod
    def window(
        size: int, num_queries: int, num_keys: int | None = None, *, device: torch.device | str | None = None
    ) -> Visible:
        """Sliding window: each query sees `size` keys, its own and those right before it; keys as many as queries."""
        if size < 1:
            raise ValueError(f"size={size}: a window has at least the query's own key")
        num_keys = num_queries if num_keys is None else num_keys
        own = torch.arange(num_queries, device=device)[None] + (num_keys - num_queries)
        return Visible((own - size + 1).clamp(min=0), own)

    @staticmethod
    def packed(cu_seqlens: Tensor) -> Visible:
        """Packed documents in one row, none seeing another; cu_seqlens: [0, n₁, n₁ + n₂, …, T], as in FlashAttention."""
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
            given = f"shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}"
            raise ValueError(f"cu_seqlens has {given}, expected whole numbers [documents + 1]")
        ends = cu_seqlens.long()
        lengths = ends.diff()
        if int(ends[0]) != 0 or bool((lengths < 0).any()):
            raise ValueError(f"cu_seqlens={cu_seqlens.tolist()} must begin with 0 and never fall")
        first, last = (x.repeat_interleave(lengths)[None] for x in (ends[:-1], ends[1:] - 1))
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

    def readable_rows(self, num_queries: int, num_keys: int, *, device: torch.device) -> Tensor:
        """Number of queries right before each query whose own key it sees, [B or 1, Tq].

        The key of query i is i + Tk − Tq, the last query's the last. A kernel over several queries may read these:
        neither padding nor another document.
        """
        first, _ = self.bounds(num_queries, num_keys, causal=False, device=device)
        query = torch.arange(num_queries, device=device)
        return torch.minimum(query, query + (num_keys - num_queries) - first).clamp(min=0)


def _runs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First and last True in each row of a boolean mask [B, Tq, Tk], and whether all between them are True everywhere."""
    key = torch.arange(mask.shape[-1], device=mask.device)
    first, last = key.masked_fill(~mask, mask.shape[-1]).amin(-1), key.masked_fill(~mask, -1).amax(-1)
    return first, last, (mask.sum(-1) == (last - first + 1).clamp(min=0)).all()


EVERYTHING = Visible()


@dataclass(frozen=True)
class DistanceBias:
    """A bias that depends on the distance alone: B[h, i, j] = values[h, i − j + Tk − Tq − lowest].

    values: [H, N], one column per distance, from `lowest` (0 for a causal use, −(Tk − 1) for a
    bidirectional one) upwards. The last query is at the last key.
    """

    values: Tensor
    lowest: int = 0

    def dense(self, num_queries: int, num_keys: int, rows: slice | None = None) -> Tensor:
        """The same bias as a tensor [1, H, rows, Tk]; pairs outside the table get 0."""
        start, stop = (0, num_queries) if rows is None else (rows.start, rows.stop)
        if torch.compiler.is_exporting():
            # The length is open: nothing may depend on where the table ends.
            queries, keys = (torch.arange(n, device=self.values.device) for n in (num_queries, num_keys))
            column = queries[start:stop, None] + (num_keys - num_queries) - keys - self.lowest
            inside = (column >= 0) & (column < self.values.shape[1])
            return (self.values[:, column.clamp(0, self.values.shape[1] - 1)] * inside)[None]
        # The tile reads the columns low … high − 1 of the table, each row shifted by one from the row before.
        low = start + (num_keys - num_queries) - (num_keys - 1) - self.lowest
        high = low + (stop - start) + (num_keys - 1)
        below, above = min(max(0, -low), high - low), min(max(0, high - self.values.shape[1]), high - low)
        part = F.pad(self.values[:, low + below : max(low + below, high - above)], (below, above))
        return part.flip(1).unfold(1, num_keys, 1).flip(1)[None]


class Curve(NamedTuple):
    """A bias f_h(values[distance] · rows[query]), f piecewise linear: O(T) numbers with gradients, but for the knots.

    values: [N], one a distance from `lowest` upwards, as in a DistanceBias; rows: [1 or B, Tq].
    knots:  [P], ascending, where the pieces of f meet; slopes, offsets: [H, P + 1], of each piece.
    """

    values: Tensor
    rows: Tensor
    knots: Tensor
    slopes: Tensor
    offsets: Tensor
    lowest: int


@dataclass(frozen=True)
class TileBias:
    """A bias evaluated by tiles: `tile(rows, num_keys)` → [batch, H, len(rows), num_keys].

    `batch` is 1 or B. A tile covers the queries `rows` and the first `num_keys` keys. Gradients flow
    through all tensors that `tile` uses; the op calls it again in the backward pass instead of keeping
    its results.

    curve: makes the same bias as a curve, where it is one; optimisation hint, never affects results.
    """

    tile: Callable[[slice, int], Tensor]
    batch: int = 1
    curve: Callable[[], Curve] | None = None

    def checked(self, rows: slice, num_keys: int, num_heads: int) -> Tensor:
        """The tile; raises if its shape is not the expected one."""
        tile, shape = self.tile(rows, num_keys), (self.batch, num_heads, rows.stop - rows.start, num_keys)
        if tile.shape != shape:
            raise ValueError(
                f"the tile bias gave shape {tuple(tile.shape)} for rows {rows}, expected {shape}"
            )
        return tile


@dataclass(frozen=True)
class SeparableBias:
    """A bias that is a sum over its two tokens: B[b, h, i, j] = row[b, h, i] + column[b, h, j].

    row: [1 or B, H, Tq]; column: [1 or B, H, Tk]. O(T) numbers, with gradients: cumulative gates, for instance. Sums
    that grow with the length should be float64: then their differences are as exact as the scores.
    """

    row: Tensor
    column: Tensor

    @property
    def batch(self) -> int:
        return max(self.row.shape[0], self.column.shape[0])

    def tiles(self, dtype: torch.dtype | None = None) -> TileBias:
        """The same bias, evaluated by tiles, in the dtype of its parts or another."""

        def tile(rows: slice, num_keys: int) -> Tensor:
            total = self.row[:, :, rows, None] + self.column[:, :, None, :num_keys]
            return total.to(dtype or total.dtype)

        return TileBias(tile, self.batch)


Bias = Tensor | DistanceBias | SeparableBias | TileBias | None


def bias_tile(bias: Bias, rows: slice, num_keys: int, *, num_queries: int, total_keys: int) -> Tensor | None:
    """A bias of any form as a tensor [1 or B, H, rows, num_keys], or None.

    rows: of the num_queries queries; num_keys: number of keys, the first of total_keys.
    """
    if isinstance(bias, DistanceBias):
        # The same distances in a smaller call, whose last row may be past its last key.
        return bias.dense(num_queries - (total_keys - num_keys), num_keys, rows)
    if isinstance(bias, SeparableBias):
        bias = bias.tiles()
    if isinstance(bias, TileBias):
        return bias.tile(rows, num_keys)
    return None if bias is None else bias[:, :, rows, :num_keys]


@dataclass(frozen=True)
class Problem:
    """A checked call of the op, the argument of backends."""

    q: Tensor
    k: Tensor
    v: Tensor
    program: ScoreProgram
    bias: Bias
    visible: Visible
    causal: bool
    scale: float
    dropout: float

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """B, H, Tq, Tk, D."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2], self.q.shape[3]

    @property
    def is_pair(self) -> bool:
        """Whether the program is the paper's two convolutions, and reads the bias if there is one."""
        return self.program.is_pair and (self.bias is None or self.program.reads_bias(self.q.shape[1]))

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32 for half precision inputs, else the inputs' own."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def dense_bias(self) -> Tensor | None:
        """The bias as a tensor [1 or B, H, Tq, Tk], or None."""
        _, num_heads, num_queries, num_keys, _ = self.sizes
        if isinstance(self.bias, TileBias):
            return self.bias.checked(slice(0, num_queries), num_keys, num_heads)
        rows = slice(0, num_queries)
        bias = self.bias.tiles(self.compute_dtype) if isinstance(self.bias, SeparableBias) else self.bias
        return bias_tile(bias, rows, num_keys, num_queries=num_queries, total_keys=num_keys)
