"""Pure PyTorch by tiles of query rows: any device, dtype and bias, O(T) memory, hand-written backward.

Rows are independent, so a tile of rows is exact. Inside a tile the maps lie flat, channel by channel:
[channels, tile batch × rows × pitch], each row followed by a gap of zeros, so that a shift along the
keys is an offset into the flat axis and a convolution is k skinny matrix products. Rows stand in
reverse order: then a bias by distance is a view of its table with positive strides, and the sum of
its gradient along diagonals is a view as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dape.ops.score_conv_attention.library import make_differentiable
from dape.ops.score_conv_attention.tables import hidden_tables
from dape.ops.score_conv_attention.types import DistanceBias, Problem, Visible

# Rows (over all batch entries) of a tile; 16 to 48 are equally fast.
ROWS = 32


def unsupported(problem: Problem) -> str | None:
    return None


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    conv, bias, dtype = problem.conv, problem.bias, problem.compute_dtype
    values = bias.values.to(dtype) if isinstance(bias, DistanceBias) else None
    lowest = bias.lowest if isinstance(bias, DistanceBias) else 0
    dense = bias.to(dtype) if isinstance(bias, Tensor) else None
    w1 = b1 = w2 = b2 = hidden = edges = None
    left, slope, residual_bias, leak = 0, 0.0, True, False
    if conv is not None:
        left, slope, leak = conv.left, conv.negative_slope, conv.leak_future
        residual_bias = conv.residual == "scores+bias"
        w1, w2, b2 = (
            conv.expand_weight[:, :, 0].to(dtype),
            conv.project_weight[:, :, 0].to(dtype),
            conv.project_bias.to(dtype),
        )
        if (
            isinstance(bias, DistanceBias)
            and problem.causal
            and problem.visible.first is None
            and problem.visible.last is None
            and not leak
        ):
            hidden, edges = hidden_tables(bias, conv, problem.k.shape[2], dtype)
            w1 = w1[:, : problem.q.shape[1]]
        else:
            b1 = conv.expand_bias.to(dtype)
    seed = torch.randint(2**62, (), device="cpu") if problem.dropout else torch.zeros((), dtype=torch.long)
    out, _ = _forward(
        problem.q, problem.k, problem.v, w1, b1, w2, b2, dense, values, hidden, edges,
        problem.visible.first, problem.visible.last, seed,
        lowest, problem.causal, problem.scale, left, slope, residual_bias, leak, problem.dropout,
    )  # fmt: skip
    return out


@dataclass
class _Call:
    """The arguments of one call and the sizes that every tile needs."""

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
    seed: Tensor
    lowest: int
    causal: bool
    scale: float
    left: int
    slope: float
    residual_bias: bool
    leak: bool
    dropout: float

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.num_queries, self.head_width = self.q.shape
        self.num_groups, self.num_keys = self.k.shape[1], self.k.shape[2]
        self.dtype = torch.promote_types(self.q.dtype, torch.float32)
        self.keys, self.vals = self.k.to(self.dtype), self.v.to(self.dtype)
        self.right = 0 if self.w1 is None else self.w1.shape[2] - 1 - self.left
        self.offset = self.num_keys - self.num_queries
        # The bias is a channel of the first convolution, unless tables stand for it.
        self.bias_channels = self.w1 is not None and self.w1.shape[1] == 2 * self.num_heads
        self.first_key, self.last_key = Visible(self.first, self.last).bounds(
            self.num_queries, self.num_keys, causal=self.causal, device=self.q.device
        )

    def tiles(self) -> Iterator[_Tile]:
        """Tiles over batch and rows, the longest rows first: scratch is then allocated once."""
        rows = min(ROWS, self.num_queries)
        entries = max(1, ROWS // rows)
        for start in reversed(range(0, self.num_queries, rows)):
            for entry in range(0, self.batch, entries):
                yield _Tile(
                    self,
                    slice(entry, min(entry + entries, self.batch)),
                    slice(start, min(start + rows, self.num_queries)),
                )


class _Tile:
    """One tile of rows: its maps, flat, and what the backward pass needs of them."""

    def __init__(self, call: _Call, entries: slice, rows: slice) -> None:
        self.call, self.entries, self.rows = call, entries, rows
        self.num_entries, self.num_rows = entries.stop - entries.start, rows.stop - rows.start
        first, last = self._bounds()
        # Columns begin at key `start`; tables need every row to begin at key 0.
        self.start = 0 if call.hidden is not None else max(0, min(int(first.min()), call.num_keys - 1))
        stop = call.num_keys - 1 if call.leak else max(int(last.max()), self.start)
        self.num_columns = stop + 1 - self.start
        self.keys = slice(self.start, stop + 1)
        self.first, self.last = first - self.start, last - self.start
        gap = call.right + max(call.left, call.right)
        # Summing along diagonals reads up to `rows` places into the gap.
        self.pitch = self.num_columns + max(gap, self.num_rows if call.values is not None else 0)
        self.flat = self.num_entries * self.num_rows * self.pitch

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """First and last visible key, [entries or 1, rows], rows in reverse order."""
        first, last = (
            (x if x.shape[0] == 1 else x[self.entries])[:, self.rows].flip(1)
            for x in (self.call.first_key, self.call.last_key)
        )
        return first, last

    def take(self, x: Tensor) -> Tensor:
        """This tile's rows of x [B, H, Tq, D], reversed, in the compute dtype."""
        return x[self.entries, :, self.rows].flip(2).to(self.call.dtype)

    def put(self, target: Tensor, x: Tensor) -> None:
        target[self.entries, :, self.rows] = x.flip(2).to(target.dtype)

    def grouped(self, x: Tensor) -> Tensor:
        """[entries, H, rows, n] as [entries, G, H/G · rows, n]: the rows that share keys and values."""
        return x.reshape(self.num_entries, self.call.num_groups, -1, x.shape[-1])

    def ungrouped(self, x: Tensor) -> Tensor:
        return x.view(self.num_entries, self.call.num_heads, self.num_rows, x.shape[-1])

    def blank(self, channels: int, before: int = 0, after: int = 0) -> tuple[Tensor, Tensor]:
        """A zero map [channels, before + flat + after], and its middle as [channels, entries, rows, pitch]."""
        store = torch.zeros(
            channels, before + self.flat + after, dtype=self.call.dtype, device=self.call.q.device
        )
        return store, self.image(store[:, before : before + self.flat])

    def image(self, flat: Tensor) -> Tensor:
        return flat.unflatten(1, (self.num_entries, self.num_rows, self.pitch))

    def hide(self, image: Tensor, first: Tensor, last: Tensor, fill: float = 0.0) -> None:
        """Fill the columns of image [channels, entries, rows, pitch] outside first … last, where there are any."""
        begin, end = int(first.max()), int(last.min()) + 1
        if begin >= end:
            begin, end = 0, 0
        for lo, hi in ((0, begin), (end, image.shape[-1])):
            if lo < hi:
                column = torch.arange(lo, hi, device=image.device)
                outside = (column < first[..., None]) | (column > last[..., None])
                image[..., lo:hi].masked_fill_(outside, fill)

    def by_distance(self, table: Tensor, lowest: int, columns: int) -> Tensor:
        """View [channels, rows, columns] of table [channels, N], whose column m is distance m + lowest."""
        # Reversed row r stands at query rows.stop − 1 − r, column c at key start + c.
        top = self.rows.stop - 1 + self.call.offset - self.start - lowest
        bottom = top - (self.num_rows - 1) - (columns - 1)
        # Distances below the table belong to hidden pairs: any number serves, zero is one.
        reverse = torch.nn.functional.pad(table[:, max(0, bottom) : top + 1], (max(0, -bottom), 0)).flip(1)
        return reverse.as_strided((table.shape[0], self.num_rows, columns), (reverse.stride(0), 1, 1))

    def add_diagonals(self, grad: Tensor, lowest: int, image: Tensor, columns: int) -> None:
        """Add to grad [channels, N] the sum of image [channels, rows, pitch] (contiguous) over equal distances."""
        channels, num_rows, pitch = image.shape
        # The gap holds zeros, so reading diagonals past a row's end adds nothing.
        length = columns + num_rows - 1
        flat = torch.nn.functional.pad(image.reshape(channels, -1), (num_rows, length))
        skewed = flat.as_strided((channels, num_rows, length), (flat.stride(0), pitch - 1, 1), num_rows)
        sums = skewed.sum(1)
        # Column m of sums is distance top − m, counted in table places.
        top = self.rows.stop - 1 + self.call.offset - self.start - lowest
        high, low = top, top - length + 1
        cut = max(0, -low)
        grad[:, low + cut : high + 1] += sums[:, : length - cut].flip(1)

    def bias_tile(self) -> Tensor | None:
        """The bias as [entries or 1, H, rows, columns], or None."""
        call = self.call
        if call.dense is not None:
            entries = self.entries if call.dense.shape[0] > 1 else slice(0, 1)
            return call.dense[entries, :, self.rows, self.keys].flip(2)
        if call.values is None:
            return None
        return self.by_distance(call.values, call.lowest, self.num_columns)[None]

    def forward(self) -> Tensor:
        """Logits [entries, H, rows, columns], −∞ where hidden; leaves the maps on self."""
        call = self.call
        self.q = self.take(call.q)
        self.k, self.v = call.keys[self.entries, :, self.keys], call.vals[self.entries, :, self.keys]
        scores = self.ungrouped(self.grouped(self.q * call.scale) @ self.k.transpose(-1, -2))
        bias = self.bias_tile()
        logits = scores if bias is None or not call.residual_bias else scores + bias
        if call.w1 is not None:
            logits = logits + self._refined(scores, bias)
        self.hide(logits.transpose(0, 1), self.first, self.last, -torch.inf)
        return logits

    def _refined(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """What the convolutions make of scores and bias: [entries, H, rows, columns]."""
        call = self.call
        assert call.w1 is not None and call.w2 is not None and call.b2 is not None
        num_heads, columns = call.num_heads, self.num_columns
        width, channels, kernel_size = call.w1.shape
        self.x, image = self.blank(channels, call.left, call.right)
        image[:num_heads, ..., :columns] = scores.transpose(0, 1)
        if call.bias_channels:
            assert bias is not None
            image[num_heads:, ..., :columns] = bias.transpose(0, 1)
        self.seen_last = self.last.new_full((1, 1), columns - 1) if call.leak else self.last
        self.hide(image[..., :columns], self.first, self.seen_last)

        self.a, hidden = self.blank(width, call.left, call.right)
        flat = self.a[:, call.left : call.left + self.flat]
        if call.hidden is not None:
            assert call.edges is not None
            reach = columns + call.right
            hidden[..., :reach] = self.by_distance(call.hidden, -call.right, reach)[:, None]
            for c, edge in enumerate(call.edges[:columns]):
                hidden[..., c] = self.by_distance(edge, -call.right, c + 1)[:, None, :, c]
        else:
            assert call.b1 is not None
            flat += call.b1[:, None]
        for t in range(kernel_size):
            flat.addmm_(call.w1[:, :, t], self.x[:, t : t + self.flat])
        torch.nn.functional.leaky_relu_(flat, call.slope)
        self.hidden_last = self.seen_last if call.leak else self.last + call.right * call.causal
        self.hide(hidden, self.first, self.hidden_last)

        refined = call.b2[:, None].expand(num_heads, self.flat).contiguous()
        for t in range(kernel_size):
            refined.addmm_(call.w2[:, :, t], self.a[:, t : t + self.flat])
        return self.image(refined)[..., :columns].transpose(0, 1)

    def keep(self, like: Tensor, index: int) -> Tensor:
        """The dropout mask, already divided by the probability of keeping: the same in both passes."""
        generator = torch.Generator(like.device).manual_seed(int(self.call.seed) + index)
        keep = 1 - self.call.dropout
        return torch.empty_like(like).bernoulli_(keep, generator=generator) / keep


class _Gradients:
    """Accumulates the gradients of all inputs over the tiles."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.q = torch.empty_like(call.q)
        self.k, self.v = torch.zeros_like(call.keys), torch.zeros_like(call.vals)
        names = ("w1", "b1", "w2", "b2", "dense", "values", "hidden", "edges")
        self.rest = {
            name: torch.zeros_like(x) if (x := getattr(call, name)) is not None else None for name in names
        }

    def add_tile(self, tile: _Tile, grad_out: Tensor, out: Tensor, lse: Tensor, index: int) -> None:
        call = self.call
        logits = tile.forward()
        weights = torch.exp(logits - tile.take(lse[..., None]))
        keep = tile.keep(weights, index) if call.dropout else None
        dropped = weights if keep is None else weights * keep
        grad_out, out = tile.take(grad_out), tile.take(out)
        self.v[tile.entries, :, tile.keys] += tile.grouped(dropped).transpose(-1, -2) @ tile.grouped(grad_out)
        grad_weights = tile.ungrouped(tile.grouped(grad_out) @ tile.v.transpose(-1, -2))
        if keep is not None:
            grad_weights *= keep
        delta = (grad_out * out).sum(-1, keepdim=True)
        grad_logits = weights.mul_(grad_weights.sub_(delta))
        grad_scores = grad_logits
        grad_bias = grad_logits if call.residual_bias else None
        if call.w1 is not None:
            grad_image = self._through_convolutions(tile, grad_logits)
            grad_scores = grad_logits + grad_image[:, : call.num_heads]
            if call.bias_channels:
                through = grad_image[:, call.num_heads :]
                grad_bias = through if grad_bias is None else grad_bias + through
        grouped = tile.grouped(grad_scores * call.scale)
        tile.put(self.q, tile.ungrouped(grouped @ tile.k))
        self.k[tile.entries, :, tile.keys] += grouped.transpose(-1, -2) @ tile.grouped(tile.q)
        if grad_bias is not None:
            self._add_bias(tile, grad_bias)

    def _add_bias(self, tile: _Tile, grad: Tensor) -> None:
        """grad: [entries, H, rows, columns], zero where hidden."""
        call = self.call
        if (dense := self.rest["dense"]) is not None:
            shared = dense.shape[0] == 1
            entries = slice(0, 1) if shared else tile.entries
            dense[entries, :, tile.rows, tile.keys] += (grad.sum(0, keepdim=True) if shared else grad).flip(2)
        if (values := self.rest["values"]) is not None:
            image = torch.nn.functional.pad(grad.sum(0), (0, tile.pitch - tile.num_columns))
            tile.add_diagonals(values, call.lowest, image, tile.num_columns)

    def _through_convolutions(self, tile: _Tile, grad_logits: Tensor) -> Tensor:
        """Gradient of the image [entries, channels, rows, columns]; adds those of the weights."""
        call, rest = self.call, self.rest
        assert call.w1 is not None and call.w2 is not None and call.b2 is not None
        left, right, flat, columns = call.left, call.right, tile.flat, tile.num_columns
        width, channels, kernel_size = call.w1.shape
        w1, w2, b2 = rest["w1"], rest["w2"], rest["b2"]
        assert w1 is not None and w2 is not None and b2 is not None

        dy, image = tile.blank(call.num_heads, right, left)
        image[..., :columns] = grad_logits.transpose(0, 1)
        b2 += dy.sum(1)
        dz, hidden = tile.blank(width, right, left)
        inner = dz[:, right : right + flat]
        for t in range(kernel_size):
            # Output f reads input f + t − left, so input f is read by output f + left − t.
            inner.addmm_(call.w2[:, :, t].T, dy[:, kernel_size - 1 - t : kernel_size - 1 - t + flat])
            w2[:, :, t] += dy[:, right : right + flat] @ tile.a[:, t : t + flat].T
        active = tile.a[:, left : left + flat] > 0
        inner.copy_(torch.where(active, inner, inner * call.slope))
        tile.hide(hidden, tile.first, tile.hidden_last)

        if (b1 := rest["b1"]) is not None:
            b1 += inner.sum(1)
        grad_image = torch.zeros(channels, flat, dtype=call.dtype, device=dz.device)
        for t in range(kernel_size):
            grad_image.addmm_(call.w1[:, :, t].T, dz[:, kernel_size - 1 - t : kernel_size - 1 - t + flat])
            w1[:, :, t] += inner @ tile.x[:, t : t + flat].T
        grad_image = tile.image(grad_image)[..., :columns]
        tile.hide(grad_image, tile.first, tile.seen_last)
        if rest["hidden"] is not None:
            self._add_tables(tile, hidden.sum(1))
        return grad_image.transpose(0, 1)

    def _add_tables(self, tile: _Tile, grad: Tensor) -> None:
        """grad: [W, rows, pitch], of the hidden map before its activation."""
        hidden, edges = self.rest["hidden"], self.rest["edges"]
        assert hidden is not None and edges is not None
        right, columns = self.call.right, tile.num_columns
        top = tile.rows.stop - 1 + self.call.offset + right
        for c in range(min(edges.shape[0], columns)):
            place = slice(max(0, top - c - tile.num_rows + 1), top - c + 1)
            length = place.stop - place.start
            edges[c, :, place] += grad[:, :length, c].flip(1)
            grad[:, :, c] = 0.0
        tile.add_diagonals(hidden, -right, grad, columns + right)


@torch.library.custom_op("dape::tiled_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None, seed: Tensor,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, leak: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, Tq, D] and log-sum-exp of the logits [B, H, Tq]."""
    call = _Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last, seed,
                 lowest, causal, scale, left, slope, residual_bias, leak, dropout)  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=call.dtype, device=q.device)
    for index, tile in enumerate(call.tiles()):
        logits = tile.forward()
        row_lse = torch.logsumexp(logits, -1, keepdim=True)
        # A row that sees nothing: weights exp(−∞ − 0) = 0.
        row_lse.masked_fill_(row_lse == -torch.inf, 0.0)
        weights = logits.sub_(row_lse).exp_()
        if dropout:
            weights *= tile.keep(weights, index)
        tile.put(out, tile.ungrouped(tile.grouped(weights) @ tile.v))
        tile.put(lse[..., None], row_lse)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("dape::tiled_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None, seed: Tensor,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, leak: bool,
    dropout: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the eleven tensors from q to edges; an absent input has an empty one."""
    call = _Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last, seed,
                 lowest, causal, scale, left, slope, residual_bias, leak, dropout)  # fmt: skip
    grads = _Gradients(call)
    for index, tile in enumerate(call.tiles()):
        grads.add_tile(tile, grad_out, out, lse, index)
    absent = q.new_empty(0)
    rest = [grad if grad is not None else absent.clone() for grad in grads.rest.values()]
    return [grads.q, grads.k.to(k.dtype), grads.v.to(v.dtype), *rest]


@_backward.register_fake
def _(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    return [out.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:11]]


make_differentiable(_forward, _backward, num_tensors=14, num_grads=11)
