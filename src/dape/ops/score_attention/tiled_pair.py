"""The paper's two convolutions by tiles of query rows, with a backward pass by hand: causal calls that hide nothing else.

Rows are independent, so a tile of rows is exact. Scores are stored as [entries, H, rows, columns], the maps of the
convolutions channels first, [channels, entries, rows, pitch]: a convolution is then one matrix product
with its k shifted inputs stacked, or one whose k outputs are added with a shift, whichever side is narrower.
Rows are in reverse order: a bias by distance is then a view of its reversed table with positive strides,
and the sums of its gradient along diagonals are a view as well. The backward pass recomputes the maps of every tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """A table [channels, N] by distance, column m for distance m + lowest, of which tiles are views; and its gradient.

    It is stored in reverse, and continued with zeros for `below` distances under its lowest: those belong to
    pairs that are not visible.
    """

    def __init__(self, table: Tensor, lowest: int, below: int) -> None:
        self.lowest, self.below = lowest, below
        self.reverse = F.pad(table, (below, 0)).flip(1).contiguous()
        self.gradient = torch.zeros_like(self.reverse)

    def index(self, distance: int) -> int:
        """Column of a distance in the reversed table."""
        return self.reverse.shape[1] - 1 - self.below - (distance - self.lowest)

    def tile(self, top: int, rows: int, columns: int) -> Tensor:
        """View [channels, rows, columns] whose element (0, 0) is at distance `top`, each step one less."""
        return self.reverse.as_strided(
            (self.reverse.shape[0], rows, columns), (self.reverse.stride(0), 1, 1), self.index(top)
        )

    def add_diagonals(self, top: int, image: Tensor) -> None:
        """Add image [channels, entries, rows, pitch], whose element (0, 0) is at distance `top`, to the gradient.

        Its rows must end in as many zeros as the view along diagonals overruns.
        """
        channels, entries, rows, pitch = image.shape
        skewed = image.as_strided(
            (channels, entries, rows, pitch), (image.stride(0), image.stride(1), pitch - 1, 1)
        )
        start = self.index(top)
        self.gradient[:, start : start + pitch] += skewed.sum((1, 2))

    def summed(self) -> Tensor:
        """The gradient of the table."""
        return self.gradient.flip(1)[:, self.below :].contiguous()


@dataclass
class Call:
    """Arguments of one call, and sizes for all tiles.

    w1, b1, w2, b2: the two convolutions; values: the bias by distance; hidden, edges: tables of its first convolution
    (tables.py), which hold b1, or None without a bias.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor
    values: Tensor | None
    hidden: Tensor | None
    edges: Tensor | None
    lowest: int
    scale: float
    left: int
    slope: float
    residual_bias: bool

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.num_queries, self.head_dim = self.q.shape
        self.num_groups, self.num_keys = self.k.shape[1], self.k.shape[2]
        self.offset = self.num_keys - self.num_queries
        self.dtype = torch.promote_types(self.q.dtype, torch.float32)
        self.keys, self.vals = self.k.to(self.dtype).contiguous(), self.v.to(self.dtype).contiguous()
        self.scratch = Scratch(self.q, self.dtype)
        self.width, _, self.kernel_size = self.w1.shape
        self.right = self.kernel_size - 1 - self.left
        # Tap t of an output reads the input `shifts[t]` columns further.
        self.shifts = [t - self.left for t in range(self.kernel_size)]
        self.expand = self.w1.transpose(1, 2).reshape(self.width, -1)
        self.project = self.w2.permute(2, 0, 1).reshape(-1, self.width)
        below = self.num_queries + self.right + 1
        self.bias_table = self.hidden_table = self.edge_table = None
        if self.values is not None and self.hidden is not None and self.edges is not None:
            self.bias_table = DistanceTable(self.values, self.lowest, below)
            self.hidden_table = DistanceTable(self.hidden, -self.right, below)
            self.edge_table = DistanceTable(self.edges.flatten(0, 1), -self.right, below)

    def tiles(self) -> Iterator[Tile]:
        """Tiles over batch and rows, the longest rows first."""
        stop = self.num_queries
        while stop > 0:
            rows = min(stop, MOST_ROWS, max(FEWEST_ROWS, PIXELS // (stop + self.offset)))
            entries = max(1, PIXELS // (rows * (stop + self.offset)))
            for entry in range(0, self.batch, entries):
                yield Tile(self, slice(entry, min(entry + entries, self.batch)), slice(stop - rows, stop))
            stop -= rows


class Tile:
    """One tile of rows: its position, its logits, and the maps that the backward pass reads again."""

    def __init__(self, call: Call, entries: slice, rows: slice) -> None:
        self.call, self.entries, self.rows = call, entries, rows
        self.num_entries, self.num_rows = entries.stop - entries.start, rows.stop - rows.start
        self.columns = rows.stop + call.offset
        self.keys = slice(0, self.columns)
        # Sums along diagonals need a column of zeros at the end of a row.
        self.pitch = self.columns + call.right + 1
        self.top = self.columns - 1

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

    def hide(self, image: Tensor, value: float, reach: int = 0) -> None:
        """Fill the columns of image [..., rows, width] more than `reach` after a row's last visible key."""
        begin = self.columns - self.num_rows + reach + 1
        column = torch.arange(begin, image.shape[-1], device=image.device)
        last = self.top + reach - torch.arange(self.num_rows, device=image.device)
        image[..., begin:].masked_fill_(column > last[:, None], value)

    def stack(self, name: str, image: Tensor, shifts: Sequence[int]) -> Tensor:
        """Scratch [taps · channels, pixels]: the image's channels for every tap, column j from column j + shift."""
        stacked = self.map_like(name, len(shifts), image.shape[0])
        for shift, taps in zip(shifts, stacked, strict=True):
            low = min(max(0, -shift), self.pitch)
            high = max(low, min(self.pitch, self.columns - shift))
            taps[..., :low] = 0.0
            taps[..., high:] = 0.0
            taps[..., low:high] = image[..., low + shift : high + shift]
        return stacked.view(len(shifts) * image.shape[0], -1)

    def add_taps(self, target: Tensor, taps: Tensor, shifts: Sequence[int]) -> None:
        """Add to target [channels, entries, rows, columns], at column c, column c + shift of every tap."""
        for shift, tap in zip(shifts, taps, strict=True):
            low = min(max(0, -shift), self.columns)
            high = max(low, min(self.columns, self.pitch - shift))
            target[..., low:high] += tap[..., low + shift : high + shift]

    def forward(self) -> Tensor:
        """Logits [entries, H, rows, columns], −∞ where not visible; keeps the maps on self."""
        call = self.call
        self.q = self.take(call.q).mul_(call.scale)
        self.k = call.keys[self.entries, :, self.keys].flatten(0, 1)
        self.v = call.vals[self.entries, :, self.keys].flatten(0, 1)
        scores = self.scores_like("scores")
        torch.bmm(self.grouped(self.q), self.k.transpose(1, 2), out=self.grouped(scores))
        self.hide(scores, 0.0)
        self.stacked = self.stack("inputs", scores.transpose(0, 1), call.shifts)
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
        self.hide(hidden, 0.0, call.right)
        taps = self.map_like("taps", call.kernel_size, call.num_heads)
        torch.mm(call.project, self.flat, out=taps.view(-1, self.flat.shape[1]))
        scores += call.b2[:, None, None]
        if call.bias_table is not None and call.residual_bias:
            scores += call.bias_table.tile(self.top, self.num_rows, self.columns)
        self.add_taps(scores.transpose(0, 1), taps, call.shifts)
        self.hide(scores, -torch.inf)
        return scores


class Gradients:
    """The gradients of all inputs of a call, summed over its tiles."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.q = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
        self.k, self.v, self.b2 = (torch.zeros_like(x) for x in (call.keys, call.vals, call.b2))
        self.b1 = None if call.b1 is None else torch.zeros_like(call.b1)
        self.expand, self.project = torch.zeros_like(call.expand), torch.zeros_like(call.project)

    def results(self) -> dict[str, Tensor]:
        """The gradients by the names of a call's tensors."""
        call = self.call
        w1 = self.expand.unflatten(1, (call.kernel_size, -1)).transpose(1, 2).contiguous()
        w2 = self.project.unflatten(0, (call.kernel_size, -1)).permute(1, 2, 0).contiguous()
        grads = {"q": self.q, "k": self.k, "v": self.v, "w1": w1, "w2": w2, "b2": self.b2}
        if self.b1 is not None:
            grads["b1"] = self.b1
        if call.bias_table is not None and call.hidden_table is not None and call.edge_table is not None:
            edges = call.edge_table.summed().unflatten(0, (call.left, call.width))
            grads |= {
                "values": call.bias_table.summed(),
                "hidden": call.hidden_table.summed(),
                "edges": edges,
            }
        return grads

    def add_tile(self, tile: Tile, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        call = self.call
        weights = tile.forward().sub_(tile.take(lse[..., None])).exp_()
        grad_out = tile.take(grad_out)
        delta = (grad_out * tile.take(out)).sum(-1, keepdim=True)
        grad = tile.scores_like("gradient")
        torch.bmm(tile.grouped(grad_out), tile.v.transpose(1, 2), out=tile.grouped(grad))
        self._add_rows(self.v, tile, weights, grad_out)
        grad.sub_(delta).mul_(weights)
        if call.bias_table is not None and call.residual_bias:
            # Reversed rows end one column earlier each: one zero then separates their diagonals.
            shape = (call.num_heads, tile.num_entries, tile.num_rows, tile.columns + 1)
            image = call.scratch.take("diagonals", *shape)
            image[..., :-1] = grad.transpose(0, 1)
            image[..., -1] = 0.0
            call.bias_table.add_diagonals(tile.top, image)
        self._through_convolutions(tile, grad)
        tile.put(self.q, torch.bmm(tile.grouped(grad), tile.k).mul_(call.scale).view(tile.q.shape))
        self._add_rows(self.k, tile, grad, tile.q)

    def _add_rows(self, target: Tensor, tile: Tile, weights: Tensor, rows: Tensor) -> None:
        """Add weightsᵀ · rows to the tile's keys of target [B, G, Tk, D]."""
        part = target[tile.entries, :, tile.keys].flatten(0, 1)
        torch.baddbmm(part, tile.grouped(weights).transpose(1, 2), tile.grouped(rows), out=part)

    def _through_convolutions(self, tile: Tile, grad_logits: Tensor) -> None:
        """Backward pass of the convolutions: adds to grad_logits the scores' gradients, and to those of the weights."""
        call = self.call
        backwards = [-shift for shift in call.shifts]
        grad_image = grad_logits.transpose(0, 1)
        self.b2 += grad_image.sum((1, 2, 3))
        outputs = tile.stack("taps", grad_image, backwards)
        grad_hidden = tile.map_like("hidden gradient", call.width)
        flat = grad_hidden.view(call.width, -1)
        torch.mm(call.project.T, outputs, out=flat)
        self.project.addmm_(outputs, tile.flat.T)
        torch.ops.aten.leaky_relu_backward.grad_input(flat, tile.flat, call.slope, True, grad_input=flat)
        tile.hide(grad_hidden, 0.0, call.right)
        if self.b1 is not None:
            self.b1 += flat.sum(1)
        self.expand.addmm_(flat, tile.stacked.T)
        taps = tile.map_like("taps", call.kernel_size, call.num_heads)
        torch.mm(call.expand.T, flat, out=taps.view(-1, flat.shape[1]))
        tile.add_taps(grad_image, taps, backwards)
        tile.hide(grad_image, 0.0)
        if call.hidden_table is not None and call.edge_table is not None:
            edges = call.edge_table.gradient.unflatten(0, (call.left, call.width))
            for c in range(min(call.left, tile.columns)):
                start = call.edge_table.index(tile.top) + c
                edges[c, :, start : start + tile.num_rows] += grad_hidden[..., c].sum(1)
                grad_hidden[..., c] = 0.0
            call.hidden_table.add_diagonals(tile.top, grad_hidden)
