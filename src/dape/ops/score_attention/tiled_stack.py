"""The tiled backend for any stack of kq×k convolutions: tiles of query rows, O(T) memory, gradients by autograd.

A tile reads as many rows before its own as the stack reaches, and is computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dape.ops.score_attention.reference import softmax_visible
from dape.ops.score_attention.types import ConvWeights, DistanceBias, Problem, TileBias

# Rows × columns (over all batch entries) of a tile.
PIXELS = 32 * 1024
# Rows of one batch entry in a tile, those it reads beside its own apart: more compute too much of a triangle.
FEWEST_ROWS, MOST_ROWS = 8, 64
# Columns that tiles differ by, at least, and how many different numbers of columns there are about.
FEWEST_COLUMNS, MOST_WIDTHS = 64, 16


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    stack = Stack(problem)
    tensors = problem.q, problem.k, problem.v
    rows_of_tiles = []
    for rows, entries_of_rows in stack.tiles():
        parts = []
        for entries in entries_of_rows:
            tile = Tile(stack, entries, rows)
            if torch.is_grad_enabled():
                parts.append(checkpoint(tile.attend, *tensors, use_reentrant=False))
            else:
                parts.append(tile.attend(*tensors))
        rows_of_tiles.append(torch.cat(parts))
    return torch.cat(rows_of_tiles, dim=2)


class Stack:
    """One call: its weights in the dtype of computing, and what its rows see."""

    def __init__(self, problem: Problem) -> None:
        assert problem.conv is not None
        self.problem, self.dtype = problem, problem.compute_dtype
        self.conv: ConvWeights = problem.conv
        self.batch, self.num_heads, self.num_queries, self.num_keys, _ = problem.sizes
        sizes, visible, device = (self.num_queries, self.num_keys), problem.visible, problem.q.device
        self.reads_ahead = not problem.causal or self.conv.leak_future
        self.first, self.last = visible.bounds(*sizes, causal=problem.causal, device=device)
        self.last_read = visible.bounds(*sizes, causal=not self.reads_ahead, device=device)[1]
        # Where every query sees the first key, it may read all rows that there are.
        self.earlier = None if visible.first is None else visible.readable_rows(*sizes, device=device)

    def tiles(self) -> Iterator[tuple[slice, list[slice]]]:
        """Tiles of rows from the first, each with the batch entries that it is cut into."""
        start = 0
        while start < self.num_queries:
            columns = self.columns(min(start + MOST_ROWS, self.num_queries))
            rows = min(MOST_ROWS, max(FEWEST_ROWS, PIXELS // columns), self.num_queries - start)
            entries = max(1, PIXELS // ((rows + self.conv.earlier_rows) * columns))
            cuts = [slice(n, min(n + entries, self.batch)) for n in range(0, self.batch, entries)]
            yield slice(start, start + rows), cuts
            start += rows

    def columns(self, stop: int) -> int:
        """How many keys tiles that end before row `stop` take: those they read, and some more, all hidden.

        Convolutions of every new shape are prepared by libraries that keep what they prepared, so there are few.
        """
        needed = self.num_keys if self.reads_ahead else stop + self.num_keys - self.num_queries
        step = max(FEWEST_COLUMNS, self.num_keys // MOST_WIDTHS)
        return min(self.num_keys, -(-needed // step) * step)


@dataclass(frozen=True)
class Tile:
    """The rows `rows` of the batch entries `entries`."""

    stack: Stack
    entries: slice
    rows: slice

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Output [entries, H, rows, D]."""
        # The op computes in its own dtype, whatever autocast is on.
        with torch.autocast(q.device.type, enabled=False):
            stack, dtype = self.stack, self.stack.dtype
            columns = stack.columns(self.rows.stop)
            reading = slice(max(0, self.rows.start - stack.conv.earlier_rows), self.rows.stop)
            q, k, v = q[self.entries, :, reading], k[self.entries, :, :columns], v[self.entries, :, :columns]
            scores = (q.to(dtype) * stack.problem.scale).reshape(*k.shape[:2], -1, q.shape[3])
            scores = (scores @ k.to(dtype).transpose(-1, -2)).view(*q.shape[:3], columns)
            logits = self._logits(scores, self._bias(reading, columns), reading)
            weights = F.dropout(softmax_visible(logits), stack.problem.dropout)
            out = weights.reshape(*k.shape[:2], -1, columns) @ v.to(dtype)
            return out.view(*logits.shape[:3], -1).to(q.dtype)

    def _bias(self, reading: slice, columns: int) -> Tensor | None:
        """The bias of the rows `reading`, [entries or 1, H, rows, columns], or None."""
        stack, bias = self.stack, self.stack.problem.bias
        if isinstance(bias, DistanceBias):
            # The same distances in a smaller call, whose last row is this tile's.
            num_queries = stack.num_queries - (stack.num_keys - columns)
            return bias.dense(num_queries, columns, reading).to(stack.dtype)
        if isinstance(bias, TileBias):
            bias = bias.checked(reading, columns, stack.num_heads)
        elif bias is not None:
            bias = bias[:, :, reading, :columns]
        return None if bias is None else self._entries(bias).to(stack.dtype)

    def _entries(self, x: Tensor) -> Tensor:
        """This tile's batch entries of x [B or 1, …]."""
        return x if x.shape[0] == 1 else x[self.entries]

    def _logits(self, scores: Tensor, bias: Tensor | None, reading: slice) -> Tensor:
        """Logits of the tile's own rows, [entries, H, rows, columns], from all the rows that it reads."""
        conv, own = self.stack.conv, slice(self.rows.start - reading.start, None)
        bounds = (self.stack.first, self.stack.last, self.stack.last_read)
        first, last, last_read = (self._entries(x)[:, reading] for x in bounds)
        key = torch.arange(scores.shape[3], device=scores.device)
        from_first = key >= first[..., None]
        seen = from_first & (key <= last_read[..., None])
        image = scores if bias is None else torch.cat([scores, bias.expand_as(scores)], dim=1)
        image = image.masked_fill(~seen[:, None], 0.0)
        earlier = None if self.stack.earlier is None else self._entries(self.stack.earlier)[:, reading]
        refined = self._convolved(image, first, last, earlier)[:, :, own]
        residual = scores if bias is None or conv.residual == "scores" else scores + bias
        shown = from_first & (key <= last[..., None])
        return (residual[:, :, own] + refined).masked_fill(~shown[:, None, own], -torch.inf)

    def _convolved(self, image: Tensor, first: Tensor, last: Tensor, earlier: Tensor | None) -> Tensor:
        """The stack's result [entries, H, rows, columns] for image [entries, C, rows, columns]."""
        conv, dtype, columns = self.stack.conv, self.stack.dtype, image.shape[3]
        margin = (conv.depth - 1) * conv.right
        column = torch.arange(columns + margin, device=image.device)
        outside = (column < first[..., None]) | (first > last)[..., None]
        if self.stack.reads_ahead:
            end = torch.full_like(last, columns - 1) if conv.leak_future else last
            outside = outside | (column > end[..., None])
        image = F.pad(image, (0, margin))
        for weight, offset in conv.layers[:-1]:
            image = convolve(image, weight.to(dtype), offset.to(dtype), conv.left, earlier)
            image = F.leaky_relu_(image, conv.negative_slope).masked_fill(outside[:, None], 0.0)
        weight, offset = conv.layers[-1]
        return convolve(image, weight.to(dtype), offset.to(dtype), conv.left, earlier)[..., :columns]


def convolve(image: Tensor, weight: Tensor, offset: Tensor, left: int, earlier: Tensor | None) -> Tensor:
    """A kq×k convolution [B, C, R, n] → [B, O, R, n].

    earlier: [B or 1, R], how many rows before its own each row reads at most; None for all that there are.

    It is one of 1×k with the rows before as further channels: of its input or its output, whichever is narrower.
    """
    outputs, inputs, query_kernel_size, kernel_size = weight.shape
    image = F.pad(image, (left, kernel_size - 1 - left))
    # weight[…, a, :] belongs to the row a rows before.
    weight = weight.flip(2)

    def row_before(x: Tensor, distance: int) -> Tensor:
        moved = F.pad(x, (0, 0, distance, 0))[:, :, : x.shape[2]]
        if earlier is None:
            return moved
        return moved.masked_fill((earlier < distance)[:, None, :, None], 0.0)

    if query_kernel_size == 1:
        return F.conv2d(image, weight, offset)
    before = range(1, query_kernel_size)
    if inputs <= outputs:
        images = torch.cat([image, *(row_before(image, distance) for distance in before)], dim=1)
        return F.conv2d(images, weight.transpose(1, 2).flatten(1, 2)[:, :, None], offset)
    maps = F.conv2d(image, weight.movedim(2, 0).flatten(0, 1)[:, :, None]).split(outputs, dim=1)
    total = maps[0] + offset[:, None, None]
    for distance in before:
        total = total + row_before(maps[distance], distance)
    return total
