"""Tensor parallelism: a share of the heads for each process, exactly where heads do not mix across shares.

A score program whose stages have groups that the processes divide among them is, for a process's heads, the same program with
their part of the weights. One that mixes all heads cannot be split, and says so.

    own = program_of_heads(conv.program(), rank, world)
    out = dape.attention(q, k, v, own, bias=bias_of_heads(bias, rank, world))   # q, k, v of this process's heads
    dist.all_reduce(project(out))                                              # rows of the output projection
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from dape.ops.score_attention import Bias, DistanceBias, ScoreProgram, SeparableBias, Stage, TileBias


def program_of_heads(program: ScoreProgram, part: int, parts: int) -> ScoreProgram:
    """The program of heads part · H / parts … of `parts` equal shares; a sentence where shares would mix."""
    if not 0 <= part < parts:
        raise ValueError(f"part={part} is none of {parts} parts")

    def share(stage: Stage) -> Stage:
        if stage.groups % parts:
            raise ValueError(
                f"a {stage} mixes heads of different processes: {parts} of them can share the heads only if its "
                f"groups are a multiple of {parts}, as in dape1x3[groups={parts}]; else leave attention whole and split "
                f"the MLPs"
            )
        offset = None if stage.offset is None else _share(stage.offset, 0, part, parts)
        return replace(
            stage, weight=_share(stage.weight, 0, part, parts), offset=offset, groups=stage.groups // parts
        )

    def per_head(value: Tensor | None) -> Tensor | None:
        return None if value is None else _share(value, 0, part, parts)

    return replace(
        program,
        pre=tuple(map(share, program.pre)),
        post=tuple(map(share, program.post)),
        sink=per_head(program.sink),
        length_scale=per_head(program.length_scale),
    )


def bias_of_heads(bias: Bias, part: int, parts: int) -> Bias:
    """The bias of those heads, in the form it has."""
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
        raise ValueError(f"{x.shape[dim]} heads or channels cannot be shared out between {parts} processes")
    size = x.shape[dim] // parts
    return x.narrow(dim, part * size, size)
