"""Linear stages of single heads, folded into keys and values: then what is left of many programs is plain attention.

A linear 1×k stage of one head before the softmax convolves that head's keys, Σₗ wₗ (q · kⱼ₋ₗ) = q · Σₗ wₗ kⱼ₋ₗ, and one
after it the values. If its taps reach earlier tokens only, all rows read the same keys, so that it costs O(T).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dape.ops.score_attention.program import Stage
from dape.ops.score_attention.reference import repeat_heads
from dape.ops.score_attention.types import Problem

# From this many queries on, scores cost more than another pass over keys and values.
MANY_QUERIES = 256


def folded(problem: Problem) -> Problem:
    """The same call with as few stages as possible; the call itself where nothing can be folded."""
    program, num_heads = problem.program, problem.q.shape[1]
    # Where rows begin at different keys, they read different neighbours of the same key.
    if problem.visible.first is not None or torch.compiler.is_exporting():
        return problem
    if not (program.pre or program.post) or problem.q.shape[2] < MANY_QUERIES:
        return problem
    k, v = problem.k, problem.v
    linear = program.residual == "bias" and program.softcap is None and not program.leak_future
    if linear and _reads_one_head(program.pre, num_heads) and program.pre[0].right == 0:
        k = _convolved(k, program.pre[0].weight[:, 0, 0].flip(1))
        program = replace(program, pre=(), residual="scores+bias")
    # Dropout zeroes weights after the stage.
    if not problem.dropout and _reads_one_head(program.post, num_heads) and program.post[0].left == 0:
        v = _convolved(v, program.post[0].weight[:, 0, 0])
        program = replace(program, post=())
    if program is problem.program:
        return problem
    return replace(problem, k=repeat_heads(k, num_heads), v=repeat_heads(v, num_heads), program=program)


def _reads_one_head(stages: tuple[Stage, ...], num_heads: int) -> bool:
    """Whether the stages are one, linear, of each head by itself, within a query's own row."""
    if len(stages) != 1:
        return False
    (stage,) = stages
    single = stage.groups == stage.outputs == stage.inputs == num_heads
    return single and stage.query_kernel_size == 1 and stage.offset is None and stage.slope == 1


def _convolved(x: Tensor, taps: Tensor) -> Tensor:
    """Σₗ taps[:, l] · x of the token l before, [B, H, T, D], of x [B, G, T, D] and taps [H, k]."""
    x = repeat_heads(x, taps.shape[0])
    factors = taps.to(x.dtype)[:, :, None, None].unbind(1)
    total = x * factors[0]
    for distance, factor in enumerate(factors[1:], start=1):
        total[:, :, distance:].addcmul_(x[:, :, :-distance], factor)
    return total
