"""Context parallelism: the tokens of a sequence sharded over processes, exactly.

A row of scores depends on its query and on all keys before it, so the rows are sharded: each process computes queries,
keys and values of its part of the tokens, and gathers the keys and values of all. Score programs do not cross rows,
except kernels over several queries, for which the earlier queries are gathered too.

The cost of a causal row grows with its number of keys. Each process therefore has two chunks of the sequence, one from
the front and its mirror image from the back: 0 and 3, 1 and 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dape.ops.score_attention import ScoreProgram, attention
from dape.ops.score_attention.api import HasProgram
from dape.positions import PositionEncoding, Positions


class Shares:
    """This process's share of `num_tokens` tokens.

    group: process group, by default all processes.
    """

    def __init__(self, num_tokens: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if num_tokens % (2 * self.world):
            raise ValueError(
                f"{num_tokens} tokens do not divide evenly across {self.world} ranks: pad them to a "
                f"multiple of {2 * self.world}"
            )
        self.num_tokens, self.size = num_tokens, num_tokens // (2 * self.world)

    def chunks(self, rank: int) -> tuple[slice, slice]:
        """The two chunks of the sequence that belong to process `rank`."""
        first, last = (slice(n * self.size, (n + 1) * self.size) for n in (rank, 2 * self.world - 1 - rank))
        return first, last

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This process's tokens of x, which has all tokens along `dim`."""
        return torch.cat([x[(slice(None),) * dim + (chunk,)] for chunk in self.chunks(self.rank)], dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather the tokens of all processes along `dim`; gradients are reduced to the process that owns the token."""
        return _Gather.apply(x, self, dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of this process's tokens [1, T / processes]."""
        return self.part(torch.arange(self.num_tokens, device=device)[None], 1)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares, dim: int) -> Tensor:
        ctx.shares, ctx.dim = shares, dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shares.world)]
        dist.all_gather(parts, x.contiguous(), group=shares.group)
        halves = [half for part in parts for half in part.chunk(2, dim)]
        order = halves[::2] + halves[1::2][::-1]
        return torch.cat(order, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.shares.group)
        return ctx.shares.part(total, ctx.dim), None, None


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreProgram | HasProgram | None = None,
    *,
    shares: Shares,
    encoding: PositionEncoding | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of this process's tokens [B, H, T / processes, D] over those of all processes.

    q, k, v:  of this process's tokens, not yet rotated; k and v may have fewer heads.
    encoding: position encoding; its gradients, summed over the processes, are those of the whole sequence.
    state:    encoding.token_state of this process's tokens, if the encoding has one.
    """
    program = scores.program() if isinstance(scores, HasProgram) else scores
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = shares.whole(k, 2), shares.whole(v, 2)
    rotates = encoding is not None and type(encoding).rotate is not PositionEncoding.rotate
    earlier = 0 if program is None else program.earlier_rows
    positions = torch.arange(shares.num_tokens, device=q.device)[None]
    queries = shares.whole(q, 2) if rotates or earlier else None
    if rotates:
        assert encoding is not None and queries is not None
        # All at once: some scalings depend on the length of the whole input.
        keys, queries = encoding.rotate_keys(keys, positions), encoding.rotate(queries, positions)
    states = None if state is None else shares.whole(state, 2)
    results = []
    for own, chunk in zip(q.chunk(2, 2), shares.chunks(shares.rank), strict=True):
        start, stop = max(0, chunk.start - earlier), chunk.stop
        rows = own if queries is None else queries[:, :, start:stop]
        seen_keys, seen_values = keys[:, :, :stop], values[:, :, :stop]
        bias = None
        if encoding is not None:
            seen = Positions(positions[:, stop - rows.shape[2] : stop], positions[:, :stop], consecutive=True)
            further = {} if states is None else {"state": states[:, :, :stop]}
            bias = encoding.bias(rows, seen_keys, seen, scale=scale, **further)
        out = attention(rows, seen_keys, seen_values, program, bias=bias, scale=scale, backend=backend)
        results.append(out[:, :, -shares.size :])
    return torch.cat(results, 2)
