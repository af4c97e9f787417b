"""Gradients of the tiled backend: the maps of every tile are recomputed and differentiated by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from dape.ops.score_attention.tiled_forward import Call, DistanceTable, Tile


class TableGradient:
    """The gradient of a DistanceTable, summed over tiles."""

    def __init__(self, table: DistanceTable) -> None:
        self.table = table
        self.reverse = torch.zeros_like(table.reverse)

    def add_diagonals(self, top: int, image: Tensor) -> None:
        """Add image [channels, entries, rows, pitch], whose element (0, 0) is at distance `top`.

        Its rows must end in as many zeros as the view along diagonals overruns.
        """
        channels, entries, rows, pitch = image.shape
        skewed = image.as_strided(
            (channels, entries, rows, pitch), (image.stride(0), image.stride(1), pitch - 1, 1)
        )
        start = self.table.index(top)
        self.reverse[:, start : start + pitch] += skewed.sum((1, 2))

    def result(self) -> Tensor:
        return self.reverse.flip(1)[:, self.table.below :].contiguous()


class Gradients:
    """The gradients of all inputs of a call, summed over its tiles."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.q = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
        self.k, self.v = torch.zeros_like(call.keys), torch.zeros_like(call.vals)
        self.dense = None if call.dense is None else torch.zeros(call.dense.shape, **_like(call.dense))
        self.values = None if call.bias_table is None else TableGradient(call.bias_table)
        self.hidden = None if call.hidden_table is None else TableGradient(call.hidden_table)
        self.edges = None if call.edge_table is None else TableGradient(call.edge_table)
        self.b1, self.b2 = (None if x is None else torch.zeros_like(x) for x in (call.b1, call.b2))
        if call.w1 is not None:
            self.expand, self.project = torch.zeros_like(call.expand), torch.zeros_like(call.project)

    def results(self) -> dict[str, Tensor]:
        """The gradients by the names of a call's tensors."""
        call, w1, w2 = self.call, None, None
        if call.w1 is not None:
            w1 = self.expand.unflatten(1, (call.kernel_size, -1)).transpose(1, 2).contiguous()
            w2 = self.project.unflatten(0, (call.kernel_size, -1)).permute(1, 2, 0).contiguous()
        values, hidden, edges = (
            None if table is None else table.result() for table in (self.values, self.hidden, self.edges)
        )
        if edges is not None:
            edges = edges.unflatten(0, (call.left, call.width))
        grads = {
            "q": self.q, "k": self.k, "v": self.v, "w1": w1, "b1": self.b1, "w2": w2, "b2": self.b2,
            "dense": self.dense, "values": values, "hidden": hidden, "edges": edges,
        }  # fmt: skip
        return {name: grad for name, grad in grads.items() if grad is not None}

    def add_tile(self, tile: Tile, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        call = self.call
        weights = tile.forward().sub_(tile.take(lse[..., None])).exp_()
        grad_out = tile.take(grad_out)
        delta = (grad_out * tile.take(out)).sum(-1, keepdim=True)
        grad_weights = tile.scores_like("gradient")
        torch.bmm(tile.grouped(grad_out), tile.v.transpose(1, 2), out=tile.grouped(grad_weights))
        dropped = weights
        if call.dropout:
            keep = tile.keep(weights)
            dropped = weights * keep
            grad_weights *= keep
        self._add_rows(self.v, tile, dropped, grad_out)
        grad_logits = grad_weights.sub_(delta).mul_(weights)
        if call.residual_bias and not call.bias_channels:
            self._add_bias(tile, grad_logits)
        if call.w1 is not None:
            self._through_convolutions(tile, grad_logits)
        grad_q = torch.bmm(tile.grouped(grad_logits), tile.k).mul_(call.scale)
        tile.put(self.q, grad_q.view(tile.q.shape))
        self._add_rows(self.k, tile, grad_logits, tile.q)

    def _add_rows(self, target: Tensor, tile: Tile, weights: Tensor, rows: Tensor) -> None:
        """Add weightsᵀ · rows to the tile's keys of target [B, G, Tk, D]."""
        part = target[tile.entries, :, tile.keys].flatten(0, 1)
        torch.baddbmm(part, tile.grouped(weights).transpose(1, 2), tile.grouped(rows), out=part)

    def _through_convolutions(self, tile: Tile, grad_logits: Tensor) -> None:
        """Backward pass of the convolutions: adds to grad_logits the scores' gradients, and to those of the weights."""
        call = self.call
        assert self.b2 is not None
        backwards = [-shift for shift in call.shifts]
        grad_image = grad_logits.transpose(0, 1)
        self.b2 += grad_image.sum((1, 2, 3))
        outputs = tile.stack("taps", [grad_image], backwards)
        grad_hidden = tile.map_like("hidden gradient", call.width)
        flat = grad_hidden.view(call.width, -1)
        torch.mm(call.project.T, outputs, out=flat)
        self.project.addmm_(outputs, tile.flat.T)
        torch.ops.aten.leaky_relu_backward.grad_input(flat, tile.flat, call.slope, True, grad_input=flat)
        tile.hidden.fill(grad_hidden, 0.0)

        if self.b1 is not None:
            self.b1 += flat.sum(1)
        self.expand.addmm_(flat, tile.stacked.T)
        taps = tile.map_like("taps", call.kernel_size, call.channels)
        torch.mm(call.expand.T, flat, out=taps.view(-1, flat.shape[1]))
        if call.bias_channels:
            grad_bias = tile.scores_like("bias")
            grad_bias.copy_(grad_logits) if call.residual_bias else grad_bias.zero_()
            tile.add_taps(grad_bias.transpose(0, 1), taps[:, call.num_heads :], backwards)
            tile.shown.fill(grad_bias.transpose(0, 1), 0.0)
            self._add_bias(tile, grad_bias)
        tile.add_taps(grad_image, taps[:, : call.num_heads], backwards)
        tile.shown.fill(grad_image, 0.0)
        self._add_tables(tile, grad_hidden)

    def _add_bias(self, tile: Tile, grad: Tensor) -> None:
        """Add to the gradient of the bias; grad: [entries, H, rows, columns], zero where not visible."""
        if self.dense is not None:
            shared = self.dense.shape[0] == 1
            part = self.dense[slice(None) if shared else tile.entries, :, tile.rows, tile.keys]
            part += (grad.sum(0, keepdim=True) if shared else grad).flip(2)
        if self.values is not None:
            # Reversed causal rows end one column earlier each: one zero then separates their diagonals.
            call = self.call
            triangular = call.causal and call.last is None
            pitch = tile.columns + (1 if triangular else tile.num_rows - 1)
            image = call.scratch.take("diagonals", call.num_heads, tile.num_entries, tile.num_rows, pitch)
            image[..., : tile.columns] = grad.transpose(0, 1)
            image[..., tile.columns :] = 0.0
            self.values.add_diagonals(tile.top, image)

    def _add_tables(self, tile: Tile, grad: Tensor) -> None:
        """Add to the gradients of the tables; grad: [W, entries, rows, pitch], of the hidden map before its activation.

        The first columns of grad are cleared.
        """
        if self.hidden is None or self.edges is None:
            return
        edges = self.edges.reverse.unflatten(0, (self.call.left, self.call.width))
        for c in range(min(self.call.left, tile.columns)):
            start = self.edges.table.index(tile.top) + c
            edges[c, :, start : start + tile.num_rows] += grad[..., c].sum(1)
            grad[..., c] = 0.0
        self.hidden.add_diagonals(tile.top, grad)


def _like(x: Tensor) -> dict:
    return {"dtype": x.dtype, "device": x.device}
