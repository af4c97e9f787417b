"""Triton kernels for GPUs: fp16, bf16 and fp32, any bias, any number of stages, O(T) memory.

Three steps over chunks of query rows: scores into an image, the stages over it,
softmax · V over recomputed scores and the image (forward.py). The backward pass repeats the first two and walks back
through the stages (backward.py, passes.py). Sums over programs are partial buffers added in order: results are
deterministic. Importing this does not import triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import op
from dape.ops.score_attention.program import VECTORS, ScoreProgram, Stage
from dape.ops.score_attention.tables import stage_tables
from dape.ops.score_attention.triton.call import Call
from dape.ops.score_attention.triton.launch import interpreting
from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias, TileBias

# Earlier tensor cores are not used by Triton's compiler.
LEAST_CAPABILITY = (8, 0)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

TRUSTED = "triton" in os.environ.get("DAPE_TRUST", "").split(",")

# Largest tested sizes.
MAX_KERNEL, MAX_HEADS, MAX_WIDTH, MAX_HEAD_WIDTH = 15, 128, 128, 256


def unsupported(problem: Problem) -> str | None:
    return next(_reasons(problem), None) or op.unsupported_transform(problem)


def _reasons(problem: Problem) -> Iterator[str]:
    """Reasons why the kernels cannot run a call."""
    q, program = problem.q, problem.program
    if not interpreting():
        if q.device.type != "cuda":
            yield f"its kernels run on CUDA devices, q is on {q.device}"
        elif torch.version.hip is not None:
            yield f"its kernels are compiled for NVIDIA GPUs, this PyTorch is built for HIP {torch.version.hip}"
        elif (capability := torch.cuda.get_device_capability(q.device)) < LEAST_CAPABILITY:
            major, minor = capability
            yield f"it needs a GPU of compute capability 8.0 or later, this one has {major}.{minor}"
    if importlib.util.find_spec("triton") is None:
        yield "triton is not installed"
    if q.dtype not in DTYPES:
        yield f"it computes in float16, bfloat16 or float32, q is {q.dtype}"
    if problem.dropout:
        yield f"dropout is not supported, got dropout={problem.dropout}"
    if isinstance(problem.bias, TileBias):
        yield "it takes no bias by tiles"
    if program.leak_future:
        yield "it cannot read keys that the query may not see (leak_future=True)"
    if program.normaliser != "softmax":
        yield f'it has no normaliser="{program.normaliser}"'
    if program.softcap is not None:
        yield f"it has no softcap, got softcap={program.softcap}"
    sizes = [("heads", q.shape[1], MAX_HEADS), ("numbers a head", q.shape[3], MAX_HEAD_WIDTH)]
    for side, stages in (("pre", program.pre), ("post", program.post)):
        for number, stage in enumerate(stages):
            name, rows = f"{side}[{number}]", stage.query_kernel_size
            if rows > 1:
                yield f"its chunks of rows bring no earlier rows along, {name} reads those of {rows} queries"
            if stage.slope > 1:
                yield f"its LeakyReLU has slopes of at most 1, {name} has {stage.slope}"
            sizes.append(("keys in the reach of a stage", stage.kernel_size, MAX_KERNEL))
            sizes.append(("hidden channels", stage.outputs, MAX_WIDTH))
        if stages and stages[-1].slope != 1:
            yield f"its last stage is linear, that of {side} has slope={stages[-1].slope}"
    for name, size, most in sizes:
        if size > most:
            yield f"its kernels take at most {most} {name}, got {size}"
    for x in (q, problem.k, problem.v, *([problem.bias] if isinstance(problem.bias, Tensor) else [])):
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape[1:], x.stride()[1:], strict=True))
        if span > 2**31:
            yield f"its addresses have 32 bits, an input spans {span} numbers"


def unproven(problem: Problem) -> str | None:
    """Reason why `backend="auto"` does not take the kernels for a call that they support, or None.

    They are experimental: calls of its kind must have passed the self-test on this GPU, or the user trusts them by
    DAPE_TRUST=triton.
    """
    if TRUSTED or problem.q.device.type != "cuda":
        return None
    from dape.ops.score_attention.triton import selftest

    return selftest.fault(problem.q.device.index or 0, **kind_of(problem))


def kind_of(problem: Problem) -> dict[str, Any]:
    """Properties of a call that decide its kernels."""
    kinds = {type(None): "none", DistanceBias: "distance", SeparableBias: "separable"}
    visible = problem.visible
    return {
        "dtype": problem.q.dtype, "num_heads": problem.q.shape[1], "num_groups": problem.k.shape[1],
        "head_dim": problem.q.shape[3], "signature": problem.program.signature, "causal": problem.causal,
        "bias": kinds.get(type(problem.bias), "dense"), "bounded": (visible.first is not None, visible.last is not None),
        "backward": torch.is_grad_enabled() and any(x.requires_grad for x in op.differentiable(problem)),
    }  # fmt: skip


def program_like(signature: tuple, num_heads: int) -> ScoreProgram:
    """A program of that signature, with arbitrary values."""
    pre, post, residual, *vectors, shift, softcap, leak_future, _ = signature

    def stage(*signature: Any) -> Stage:
        *shape, offset, left, groups, slope = signature
        return Stage(torch.empty(shape), torch.empty(shape[0]) if offset else None, left, groups, slope)

    given: Any = {name: torch.empty(num_heads) for name, has in zip(VECTORS, vectors, strict=True) if has}
    given |= {"length_shift": shift, "softcap": softcap, "leak_future": leak_future}
    before, after = (tuple(stage(*signature) for signature in side) for side in (pre, post))
    return ScoreProgram(before, after, residual, **given)


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    arguments = arguments_of(problem)
    return op.run("triton", {**arguments.tensors}, arguments.plan, lowest=arguments.lowest)


def arguments_of(problem: Problem) -> op.Arguments:
    """Tensors and plan of a call."""
    program, bias, num_heads = problem.program, problem.bias, problem.q.shape[1]
    tensors: dict[str, Tensor | None] = {"q": problem.q, "k": problem.k, "v": problem.v}
    tensors |= {"first": problem.visible.first, "last": problem.visible.last, "sink": program.sink}
    if isinstance(bias, DistanceBias):
        tensors["values"] = bias.values.float()
    elif isinstance(bias, SeparableBias):
        tensors |= {"row": bias.row, "column": bias.column}
    else:
        assert not isinstance(bias, TileBias)
        tensors["dense"] = bias
    for side, stages in (("pre", program.pre), ("post", program.post)):
        for number, stage in enumerate(stages):
            reads_bias = (side, number) == ("pre", 0) and program.reads_bias(num_heads)
            tensors[f"{side}.{number}.weight"] = stage_weight(stage, reads_bias=reads_bias)
            tensors[f"{side}.{number}.offset"] = stage.offset
    # Tables need rows that end at distance 0, wherever they begin, and include the columns after it that a second
    # stage reads.
    ends_at_0 = problem.causal and problem.visible.last is None
    if isinstance(bias, DistanceBias) and problem.is_pair and ends_at_0:
        first, second = program.pre
        hidden, edges = stage_tables(bias, first, second.right, problem.k.shape[2], torch.float32)
        weight = stage_weight(first, reads_bias=True)[:, :num_heads]
        table = torch.cat([edges, hidden[None]]).transpose(1, 2)
        tensors |= {"table": table, "pre.0.weight": weight, "pre.0.offset": None}
    if program.length_scale is not None:
        sizes = (problem.q.shape[2], problem.k.shape[2])
        begin, end = problem.visible.bounds(*sizes, causal=problem.causal, device=problem.q.device)
        tensors["factor"] = program.length_factor(end - begin + 1).float()
    plan = {
        "pre": [[stage.left, stage.slope] for stage in program.pre], "causal": problem.causal,
        "post": [[stage.left, stage.slope] for stage in program.post],
        "scale": problem.scale, "residual": program.residual if bias is not None else program.residual.split("+")[0],
    }  # fmt: skip
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return op.Arguments(present, plan, bias.lowest if isinstance(bias, DistanceBias) else 0)


def stage_weight(stage: Stage, *, reads_bias: bool) -> Tensor:
    """A stage's weight as one matrix per tap, [out, in, k]: groups are blocks of it.

    reads_bias: the inputs are scores and bias; here all scores come before the bias, as channels of the image.
    """
    weight, groups = stage.weight[:, :, 0], stage.groups
    if groups == 1:
        return weight
    blocks = weight.unflatten(0, (groups, -1))
    unit = torch.eye(groups, dtype=weight.dtype, device=weight.device)
    dense = torch.einsum("goik,gh->gohik", blocks, unit).flatten(2, 3).flatten(0, 1)
    if reads_bias:
        # Channels are ordered group by group, the scores of a group's heads and then their bias.
        dense = dense.unflatten(1, (groups, 2, -1)).transpose(1, 2).flatten(1, 3)
    return dense


def _forward(arguments: op.Arguments) -> tuple[Tensor, Tensor]:
    from dape.ops.score_attention.triton import passes

    # Kernels start on the device of the tensors, whichever is the current one.
    with torch.cuda.device_of(arguments["q"]):
        return passes.forward_pass(Call(arguments))


def _backward(arguments: op.Arguments, grad_out: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    from dape.ops.score_attention.triton import passes

    with torch.cuda.device_of(arguments["q"]):
        return passes.Gradients(Call(arguments), grad_out, out, lse).by_name()


op.KERNELS["triton"] = (_forward, _backward)
