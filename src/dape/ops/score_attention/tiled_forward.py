"""One tile of query rows of the tiled backend: its position, its inputs, and its logits.

Rows are independent, so a tile of rows is exact. Scores are stored as [entries, H, rows, columns], the maps of the
convolutions channels first, [channels, entries, rows, pitch]: a convolution is then one matrix product
with its k shifted inputs stacked, or one whose k outputs are added with a shift, whichever side is narrower.
Rows are in reverse order: a bias by distance is then a view of its reversed table with positive strides,
and the sums of its gradient along diagonals are a view as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.types import Visible

# Rows × columns (over all batch entries) of a tile: its maps fit into the CPU's last-level cache.
PIXELS = 64 * 1024
# Rows of one batch entry in a tile: fewer make its products too thin, more compute too many invisible pairs.
FEWEST_ROWS, MOST_ROWS = 8, 64


class Scratch:
    """Buffers by name, allocated once and used by every tile; uninitialised."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.like.device)
        return self.buffers[name][:size].view(shape)


class DistanceTable:
    """A table [channels, N] by distance, column m for distance m + lowest, of which tiles are views.

    It is stored in reverse, and continued with zeros for `below` distances under its lowest: those belong to
    pairs that are not visible.
    """

    def __init__(self, table: Tensor, lowest: int, below: int) -> None:
        self.lowest, self.below = lowest, below
        self.reverse = F.pad(table, (below, 0)).flip(1).contiguous()

    def index(self, distance: int) -> int:
        """Column of a distance in the reversed table."""
        return self.reverse.shape[1] - 1 - self.below - (distance - self.lowest)

    def tile(self, top: int, rows: int, columns: int) -> Tensor:
        """View [channels, rows, columns] whose element (0, 0) is at distance `top`, each step one less."""
        return self.reverse.as_strided(
            (self.reverse.shape[0], rows, columns), (self.reverse.stride(0), 1, 1), self.index(top)
        )


@dataclass
class Call:
    """Arguments of one call, and sizes for all tiles.

    w1, b1, w2, b2: the two convolutions; dense, values: the bias, by pairs or by distance; hidden, edges: tables of
    its first convolution (tables.py); first, last: the keys that each query sees.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None
    b2: Tensor | None
    dense: Tensor | None
    values: Tensor | None
    hidden: Tensor | None
    edges: Tensor | None
    first: Tensor | None
    last: Tensor | None
    seed: Tensor | None
    lowest: int
    causal: bool
    scale: float
    left: int
    slope: float
    residual_bias: bool
    dropout: float

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.num_queries, self.head_dim = self.q.shape
        self.num_groups, self.num_keys = self.k.shape[1], self.k.shape[2]
        self.offset = self.num_keys - self.num_queries
        self.dtype = torch.promote_types(self.q.dtype, torch.float32)
        self.keys, self.vals = self.k.to(self.dtype).contiguous(), self.v.to(self.dtype).contiguous()
        self.scratch = Scratch(self.q, self.dtype)
        visible, sizes = Visible(self.first, self.last), (self.num_queries, self.num_keys)
        self.first_key, self.last_key = visible.bounds(*sizes, causal=self.causal, device=self.q.device)
        self.right = 0
        if self.w1 is not None and self.w2 is not None:
            self.width, self.channels, self.kernel_size = self.w1.shape
            self.right = self.kernel_size - 1 - self.left
            # Tap t of an output reads the input `shifts[t]` columns further.
            self.shifts = [t - self.left for t in range(self.kernel_size)]
            self.expand = self.w1.transpose(1, 2).reshape(self.width, -1)
            self.project = self.w2.permute(2, 0, 1).reshape(-1, self.width)
        # The bias is a channel of the first convolution, unless tables replace it.
        self.bias_channels = self.w1 is not None and self.channels == 2 * self.num_heads
        below = self.num_queries + self.right + 1
        self.bias_table = self.hidden_table = self.edge_table = None
        if self.values is not None:
            self.bias_table = DistanceTable(self.values, self.lowest, below)
        if self.hidden is not None and self.edges is not None:
            self.hidden_table = DistanceTable(self.hidden, -self.right, below)
            self.edge_table = DistanceTable(self.edges.flatten(0, 1), -self.right, below)

    def tiles(self) -> Iterator[Tile]:
        """Tiles over batch and rows, the longest rows first."""
        stop = self.num_queries
        while stop > 0:
            columns = stop + self.offset if self.causal else self.num_keys
            rows = min(stop, MOST_ROWS, max(FEWEST_ROWS, PIXELS // columns))
            entries = max(1, PIXELS // (rows * columns))
            for entry in range(0, self.batch, entries):
                yield Tile(self, slice(entry, min(entry + entries, self.batch)), slice(stop - rows, stop))
            stop -= rows


class Interval:
    """The columns first … last of every row of a map of `width` columns, with a method to fill all others."""

    def __init__(self, first: Tensor, last: Tensor, width: int) -> None:
        begin, end = int(first.max()), min(int(last.min()) + 1, width)
        ragged = ((0, begin), (end, width)) if begin < end else ((0, width),)
        self.outside = []
        for low, high in ragged:
            if low < high:
                column = torch.arange(low, high, device=first.device)
                outside = (column < first[..., None]) | (column > last[..., None])
                self.outside.append((slice(low, high), outside))

    def fill(self, image: Tensor, value: float) -> None:
        """Fill the columns of image [channels, entries, rows, width] outside the interval."""
        for columns, outside in self.outside:
            image[..., columns].masked_fill_(outside, value)


class Tile:
    """One tile of rows: its position, its logits, and the maps that the backward pass reads again."""

    def __init__(self, call: Call, entries: slice, rows: slice) -> None:
        self.call, self.entries, self.rows = call, entries, rows
        self.num_entries, self.num_rows = entries.stop - entries.start, rows.stop - rows.start
        # [entries or 1, rows], rows in reverse order.
        first, last = (
            (x if x.shape[0] == 1 else x[entries])[:, rows].flip(1) for x in (call.first_key, call.last_key)
        )
        # Columns begin at key `start`; tables need every row to begin at key 0.
        self.start = 0 if call.hidden is not None else max(0, min(int(first.min()), call.num_keys - 1))
        stop = max(int(last.max()), self.start)
        self.columns = stop + 1 - self.start
        self.keys = slice(self.start, stop + 1)
        # Sums along diagonals need a column of zeros at the end of a row.
        self.pitch = self.columns + call.right + (call.hidden is not None)
        self.top = rows.stop - 1 + call.offset - self.start

        first, last = first - self.start, last - self.start
        self.shown = Interval(first, last, self.columns)
        if call.w1 is not None:
            self.hidden = Interval(first, last + call.right * call.causal, self.pitch)

    def take(self, x: Tensor) -> Tensor:
        """This tile's rows of x [B, H, Tq, n], reversed, in the compute dtype."""
        return x[self.entries, :, self.rows].flip(2).to(self.call.dtype)

    def put(self, target: Tensor, x: Tensor) -> None:
        target[self.entries, :, self.rows] = x.flip(2).to(target.dtype)

    def grouped(self, x: Tensor) -> Tensor:
        """[entries, H, rows, n] as [entries · G, H/G · rows, n]: the rows that share keys and values."""
        return x.reshape(self.num_entries * self.call.num_groups, -1, x.shape[-1])

    def scores_like(self, name: str) -> Tensor:
        """Scratch [entries, H, rows, columns]."""
        return self.call.scratch.take(
            name, self.num_entries, self.call.num_heads, self.num_rows, self.columns
        )

    def map_like(self, name: str, *channels: int) -> Tensor:
        """Scratch [channels, entries, rows, pitch]."""
        return self.call.scratch.take(name, *channels, self.num_entries, self.num_rows, self.pitch)

    def stack(self, name: str, images: Sequence[Tensor], shifts: Sequence[int]) -> Tensor:
        """Scratch [taps · channels, pixels]: the images' channels for every tap, column j from column j + shift."""
        channels = sum(image.shape[0] for image in images)
        stacked = self.map_like(name, len(shifts), channels)
        for shift, taps in zip(shifts, stacked, strict=True):
            low = min(max(0, -shift), self.pitch)
            high = max(low, min(self.pitch, self.columns - shift))
            taps[..., :low] = 0.0
            taps[..., high:] = 0.0
            for part, image in zip(taps.split([image.shape[0] for image in images]), images, strict=True):
                part[..., low:high] = image[..., low + shift : high + shift]
        return stacked.view(len(shifts) * channels, -1)

    def add_taps(self, target: Tensor, taps: Tensor, shifts: Sequence[int]) -> None:
        """Add to target [channels, entries, rows, columns], at column c, column c + shift of every tap."""
        for shift, tap in zip(shifts, taps, strict=True):
            low = min(max(0, -shift), self.columns)
            high = max(low, min(self.columns, self.pitch - shift))
            target[..., low:high] += tap[..., low + shift : high + shift]

    def bias_tile(self) -> Tensor | None:
        """The bias as [entries or 1, H, rows, columns], or None."""
        call = self.call
        if call.dense is not None:
            entries = self.entries if call.dense.shape[0] > 1 else slice(0, 1)
            return call.dense[entries, :, self.rows, self.keys].flip(2)
        if call.bias_table is None:
            return None
        return call.bias_table.tile(self.top, self.num_rows, self.columns)[None]

    def forward(self) -> Tensor:
        """Logits [entries, H, rows, columns], −∞ where not visible; keeps the maps on self."""
        call = self.call
        self.q = self.take(call.q).mul_(call.scale)
        self.k = call.keys[self.entries, :, self.keys].flatten(0, 1)
        self.v = call.vals[self.entries, :, self.keys].flatten(0, 1)
        scores = self.scores_like("scores")
        torch.bmm(self.grouped(self.q), self.k.transpose(1, 2), out=self.grouped(scores))
        bias = self.bias_tile()
        taps = None if call.w1 is None else self._refine(scores, bias)
        if bias is not None and call.residual_bias:
            scores += bias
        if taps is not None:
            self.add_taps(scores.transpose(0, 1), taps, call.shifts)
        self.shown.fill(scores.transpose(0, 1), -torch.inf)
        return scores

    def _refine(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Product of the second convolution for every tap, [k, H, entries, rows, pitch]; adds its offset to scores."""
        call = self.call
        assert call.b2 is not None
        images = [scores.transpose(0, 1)]
        if call.bias_channels:
            assert bias is not None
            images.append(self.scores_like("bias").copy_(bias).transpose(0, 1))
        for image in images:
            self.shown.fill(image, 0.0)
        self.stacked = self.stack("inputs", images, call.shifts)

        hidden = self.map_like("hidden", call.width)
        if call.hidden_table is not None and call.edge_table is not None:
            hidden.copy_(call.hidden_table.tile(self.top, self.num_rows, self.pitch)[:, None])
            num_edges = min(call.left, self.columns)
            edges = call.edge_table.tile(self.top, self.num_rows, num_edges)
            edges = edges.unflatten(0, (call.left, call.width))
            for c in range(num_edges):
                hidden[..., c] = edges[c, :, None, :, c]
        else:
            assert call.b1 is not None
            hidden.copy_(call.b1[:, None, None, None].expand_as(hidden))
        self.flat = hidden.view(call.width, -1)
        torch.addmm(self.flat, call.expand, self.stacked, out=self.flat)
        F.leaky_relu_(self.flat, call.slope)
        self.hidden.fill(hidden, 0.0)

        taps = self.map_like("taps", call.kernel_size, call.num_heads)
        torch.mm(call.project, self.flat, out=taps.view(-1, self.flat.shape[1]))
        scores += call.b2[:, None, None]
        return taps

    def keep(self, like: Tensor) -> Tensor:
        """The dropout mask, divided by the probability of keeping: the same in both passes."""
        index = self.entries.start * self.call.num_queries + self.rows.start
        generator = torch.Generator(like.device).manual_seed(int(cast(Tensor, self.call.seed)) + index)
        keep = 1 - self.call.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=generator).div_(keep)
