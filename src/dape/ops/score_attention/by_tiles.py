"""Attention with a bias evaluated for a tile of query rows at a time, passed to a backend as a dense tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dape.ops.score_attention.types import Problem, TileBias, Visible

# Maximum number of elements of a tile bias that are evaluated at a time, and how many times as many on a GPU.
TILE_NUMBERS, ON_GPU = 4 * 1024 * 1024, 32


def attend(
    problem: Problem, bias: TileBias, attend_tile: Callable[[Problem, Tensor | None], Tensor]
) -> Tensor:
    """Attention output [B, H, Tq, D]; `bias` replaces the problem's own.

    attend_tile(tile, earlier): output of some rows as a separate call. earlier [1 or B, rows]: number of rows right
    before its own that each row may read, if the program reads any and visibility limits it; it does not follow from
    the tile's own visibility, because the last query of a bidirectional tile need not be at the last key.
    """
    causal, program = problem.causal, problem.program
    # A tile's visibility holds its rows' causality, past which a leak would have to read.
    assert not program.leak_future
    _, num_heads, num_queries, num_keys, _ = problem.sizes
    first, last = problem.visible.bounds(num_queries, num_keys, causal=causal, device=problem.q.device)
    earlier = None
    if program.earlier_rows and problem.visible.first is not None:
        earlier = problem.visible.readable_rows(num_queries, num_keys, device=problem.q.device)

    def attend_rows(q: Tensor, k: Tensor, v: Tensor, start: int, drop: int) -> Tensor:
        rows = slice(start, start + q.shape[2])
        # Rows of a causal tile need the keys up to the tile's last row only.
        stop = rows.stop + num_keys - num_queries if causal else num_keys
        tile = replace(
            problem,
            q=q,
            k=k[:, :, :stop],
            v=v[:, :, :stop],
            bias=bias.checked(rows, stop, num_heads),
            visible=Visible(first[:, rows], last[:, rows]),
        )
        return attend_tile(tile, None if earlier is None else earlier[:, rows])[:, :, drop:]

    # A length-dependent number of tiles cannot be exported.
    if torch.compiler.is_exporting():
        return attend_rows(problem.q, problem.k, problem.v, 0, 0)
    most = TILE_NUMBERS * (1 if problem.q.device.type == "cpu" else ON_GPU)
    rows_per_tile = most // max(1, bias.batch * num_heads * num_keys)
    # The rows that a tile reads before its own are recomputed: they should be the smaller part.
    rows_per_tile = max(1, 4 * program.earlier_rows, rows_per_tile)
    if rows_per_tile >= num_queries:
        return attend_rows(problem.q, problem.k, problem.v, 0, 0)
    outputs = []
    for start in range(0, num_queries, rows_per_tile):
        first_row = max(0, start - program.earlier_rows)
        q = problem.q[:, :, first_row : start + rows_per_tile]
        arguments = (q, problem.k, problem.v, first_row, start - first_row)
        if torch.is_grad_enabled():
            # Recomputing a tile in the backward pass keeps the memory linear in T.
            outputs.append(checkpoint(attend_rows, *arguments, use_reentrant=False))
        else:
            outputs.append(attend_rows(*arguments))
    return torch.cat(outputs, dim=2)
