"""Tensor parallelism: a share of the heads for each process, exact if heads do not mix across shares.

If the groups of every stage can be divided among the processes, a process's heads have the same score program with
their part of the weights. A program that mixes all heads cannot be split, and raises.

    own = program_of_heads(conv.program(), rank, world)
    out = dape.attention(q, k, v, own, bias=bias_of_heads(bias, rank, world))   # q, k, v of this process's heads
    dist.all_reduce(project(out))                                              # rows of the output projection
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dape.ops.score_attention import Bias, DistanceBias, ScoreProgram, SeparableBias, Stage, TileBias


@dataclass(frozen=True)
class HeadShare:
    """This process's share of the heads: `part` of `parts` equal ones, among the processes in `group`."""

    part: int
    parts: int
    group: dist.ProcessGroup | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Replicated x; its gradient is summed over the processes."""
        return _Enter.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum of x over the processes; its gradient is replicated."""
        return _Leave.apply(x, self.group)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def program_of_heads(program: ScoreProgram, part: int, parts: int) -> ScoreProgram:
    """The program of the heads from part · H / parts on, one of `parts` equal shares; raises if shares would mix."""
    if not 0 <= part < parts:
        raise ValueError(f"part={part} is none of {parts} parts")

    def fewer(stage: Stage) -> Stage:
        if stage.groups % parts:
            raise ValueError(
                f"a {stage} mixes heads of different processes: {parts} of them can share the heads only if its "
                f"groups are a multiple of {parts}, as in dape1x3[groups={parts}]; else leave attention whole and split "
                f"the MLPs"
            )
        return replace(stage, groups=stage.groups // parts)

    own = replace(program, pre=tuple(map(fewer, program.pre)), post=tuple(map(fewer, program.post)))
    # Output channels or heads are the first dimension of every tensor.
    return own.with_tensors({name: _share(tensor, 0, part, parts) for name, tensor in program.tensors()})


def bias_of_heads(bias: Bias, part: int, parts: int) -> Bias:
    """The bias of the heads of that share, of the same type."""
    if bias is None:
        return None
    if isinstance(bias, DistanceBias):
        return replace(bias, values=_share(bias.values, 0, part, parts))
    if isinstance(bias, SeparableBias):
        return SeparableBias(_share(bias.row, 1, part, parts), _share(bias.column, 1, part, parts))
    if isinstance(bias, TileBias):
        whole = bias.tile
        return TileBias(lambda rows, num_keys: _share(whole(rows, num_keys), 1, part, parts), bias.batch)
    return _share(bias, 1, part, parts)


def _share(x: Tensor, dim: int, part: int, parts: int) -> Tensor:
    if x.shape[dim] % parts:
        raise ValueError(f"{x.shape[dim]} heads or channels do not divide evenly across {parts} ranks")
    size = x.shape[dim] // parts
    return x.narrow(dim, part * size, size)
