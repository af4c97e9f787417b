"""Pure PyTorch by tiles of query rows: any device, dtype, program and bias, O(T) memory, gradients by autograd.

A tile reads as many rows before its own as the program reaches, and is recomputed in the backward pass. Sizes of tiles
follow from shapes alone, so nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dape.ops.score_attention import op, reference
from dape.ops.score_attention.edges import Edges
from dape.ops.score_attention.types import Problem, TileBias, bias_tile

# Rows × columns (over all batch entries) of a tile on a CPU.
PIXELS = 32 * 1024
# Rows of one batch entry in a tile, not counting earlier rows that it reads: more compute too many invisible pairs.
FEWEST_ROWS, MOST_ROWS = 8, 64
# Bytes of a tile's maps on a GPU: a share of its memory, within bounds.
SHARE, FEWEST_BYTES, MOST_BYTES = 1 / 40, 2**29, 2**30
# Minimum difference between the numbers of columns of tiles, and the approximate number of different ones.
FEWEST_COLUMNS, MOST_WIDTHS = 64, 16


def unsupported(problem: Problem) -> str | None:
    return op.unsupported_transform(problem)


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    call = Call(problem)
    names = [name for name, _ in problem.program.tensors()]
    tensors = [problem.q, problem.k, problem.v, *(tensor for _, tensor in problem.program.tensors())]
    rows_of_tiles = []
    for rows, entries_of_rows in call.tiles():
        parts = []
        for entries in entries_of_rows:
            tile = Tile(call, entries, rows, names)
            if torch.is_grad_enabled():
                # A CUDA graph cannot read the state of a generator.
                draws = problem.dropout > 0 or isinstance(problem.bias, TileBias)
                parts.append(checkpoint(tile.attend, *tensors, use_reentrant=False, preserve_rng_state=draws))
            else:
                parts.append(tile.attend(*tensors))
        rows_of_tiles.append(torch.cat(parts))
    return torch.cat(rows_of_tiles[::-1], dim=2)


def on_gpu(x: Tensor) -> bool:
    return x.device.type != "cpu"


def gpu_bytes(device: torch.device) -> int:
    """Bytes for the maps of a tile on a GPU."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return int(min(MOST_BYTES, max(FEWEST_BYTES, SHARE * memory)))


class Call:
    """One call with the visibility of its rows."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.program, self.dtype = problem, problem.program, problem.compute_dtype
        self.batch, self.num_heads, self.num_queries, self.num_keys, _ = problem.sizes
        self.reads_ahead = not problem.causal or self.program.leak_future
        self.edges = Edges.of_call(problem)
        # Products of half precision inputs are in half precision on a GPU, which has units for them.
        self.half = problem.q.dtype != self.dtype and on_gpu(problem.q)
        self.pixels, self.most_rows = PIXELS, MOST_ROWS
        if on_gpu(problem.q):
            self.pixels = gpu_bytes(problem.q.device) // self._bytes_per_pixel()
            self.most_rows = self.num_queries

    def _bytes_per_pixel(self) -> int:
        """Bytes of the maps that a tile holds at a time for a pair of query and key, recomputed with gradients."""
        stages = (*self.program.pre, *self.program.post)
        return (4 if self.half else 6) * (
            5 * self.num_heads + sum(stage.inputs + stage.outputs for stage in stages)
        )

    def tiles(self) -> Iterator[tuple[slice, list[slice]]]:
        """Tiles of rows from the last, which see the most, each with its parts by batch entries."""
        stop = self.num_queries
        if torch.compiler.is_exporting():
            # A number of tiles that depends on the length cannot be exported.
            yield slice(0, stop), [slice(0, self.batch)]
            return
        while stop > 0:
            columns = self.columns(stop)
            rows = min(self.most_rows, max(FEWEST_ROWS, self.pixels // columns), stop)
            entries = max(1, self.pixels // ((rows + self.program.earlier_rows) * columns))
            cuts = [slice(n, min(n + entries, self.batch)) for n in range(0, self.batch, entries)]
            yield slice(stop - rows, stop), cuts
            stop -= rows

    def columns(self, stop: int) -> int:
        """Number of columns of tiles that end before row `stop`: the keys they read, and some invisible ones.

        Libraries plan convolutions for every new shape and cache the plans, so there are few different numbers.
        """
        if torch.compiler.is_exporting():
            return self.num_keys
        needed = self.num_keys if self.reads_ahead else stop + self.num_keys - self.num_queries
        step = max(FEWEST_COLUMNS, self.num_keys // MOST_WIDTHS)
        return min(self.num_keys, -(-needed // step) * step)


@dataclass(frozen=True)
class Tile:
    """The rows `rows` of the batch entries `entries`; names: of the program's tensors."""

    call: Call
    entries: slice
    rows: slice
    names: list[str]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        """Output [entries, H, rows, D]."""
        call = self.call
        dtype = q.dtype if call.half else call.dtype
        program = call.program.with_tensors(
            # Tensors of stages have points in their names; those of the normaliser act on logits.
            {
                name: tensor.to(dtype if "." in name else call.dtype)
                for name, tensor in zip(self.names, tensors, strict=True)
            }
        )
        columns = call.columns(self.rows.stop)
        rows_read = slice(max(0, self.rows.start - program.earlier_rows), self.rows.stop)
        edges = call.edges.tile(self.entries, rows_read, columns)
        q, k, v = (q[self.entries, :, rows_read], k[self.entries, :, :columns], v[self.entries, :, :columns])
        scores = (q.to(dtype) * call.problem.scale).reshape(*k.shape[:2], -1, q.shape[3])
        scores = (scores @ k.to(dtype).transpose(-1, -2)).view(*q.shape[:3], columns)
        with torch.autocast(q.device.type, q.dtype) if call.half else nullcontext():
            logits = reference.process(scores, self._bias(rows_read, columns), program, edges)
            weights = reference.normalise(logits.to(call.dtype), program, edges)[
                :, :, self.rows.start - rows_read.start :
            ]
            weights = F.dropout(weights, call.problem.dropout)
            out = weights.reshape(*k.shape[:2], -1, columns) @ v.to(dtype)
        return out.view(*weights.shape[:3], -1).to(q.dtype)

    def _bias(self, rows_read: slice, columns: int) -> Tensor | None:
        """The bias of the rows `rows_read`, [entries or 1, H, rows, columns], or None."""
        call, bias = self.call, self.call.problem.bias
        if isinstance(bias, TileBias):
            tile: Tensor | None = bias.checked(rows_read, columns, call.num_heads)
        else:
            tile = bias_tile(bias, rows_read, columns, num_queries=call.num_queries, total_keys=call.num_keys)
        if tile is None:
            return None
        return (tile if tile.shape[0] == 1 else tile[self.entries]).to(call.dtype)
