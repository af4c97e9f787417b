"""Linear stages of single heads, folded into keys and values: then what is left of many programs is plain attention.

A linear 1×k stage of one head before the softmax convolves that head's keys, Σₗ wₗ (q · kⱼ₋ₗ) = q · Σₗ wₗ kⱼ₋ₗ, and one
after it the values. If its taps reach earlier tokens only, all rows read the same keys, so that it costs O(T).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.program import ScoreProgram, Stage
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
    k, v = problem.k, problem.v
    linear = program.residual == "bias" and program.softcap is None and not program.leak_future
    keys = linear and _reads_one_head(program.pre, num_heads) and program.pre[0].right == 0
    # Dropout zeroes weights after the stage.
    values = not problem.dropout and _reads_one_head(program.post, num_heads) and program.post[0].left == 0
    # The length is asked last: a compiled graph that has asked serves only lengths with the same answer.
    if not (keys or values) or problem.q.shape[2] < MANY_QUERIES:
        return problem
    if keys:
        k, program = convolved(k, program.pre[0]), without_pre(program)
    if values:
        # A tap to the right of a weight is one to the left of a value.
        v = convolved(v, replace(program.post[0], weight=program.post[0].weight.flip(3)))
        program = replace(program, post=())
    return replace(problem, k=repeat_heads(k, num_heads), v=repeat_heads(v, num_heads), program=program)


def without_pre(program: ScoreProgram) -> ScoreProgram:
    """The program for keys that its stages before the softmax are folded into."""
    return replace(program, pre=(), residual="scores+bias")


def _reads_one_head(stages: tuple[Stage, ...], num_heads: int) -> bool:
    """Whether the stages are one, linear, of each head by itself, within a query's own row."""
    if len(stages) != 1:
        return False
    (stage,) = stages
    single = stage.groups == stage.outputs == stage.inputs == num_heads
    return single and stage.query_kernel_size == 1 and stage.offset is None and stage.slope == 1


def convolved(x: Tensor, stage: Stage, starts: Tensor | None = None) -> Tensor:
    """The keys [B, H, T, D] that a stage of single heads makes of x [B, G, T, D].

    starts: [1 or B, T], True at the first token of each row or document, which reads none before it.
    """
    own, *earlier = stage.weight[:, 0, 0].to(x.dtype).flip(1)[:, :, None, None].unbind(1)
    x = repeat_heads(x, stage.outputs)
    total = x * own
    for distance, factor in enumerate(earlier, start=1):
        if starts is None:
            total[:, :, distance:].addcmul_(x[:, :, :-distance], factor)
        else:
            x = F.pad(x[:, :, :-1], (0, 0, 1, 0)).masked_fill(starts[:, None, :, None], 0.0)
            total = total + x * factor
    return total
