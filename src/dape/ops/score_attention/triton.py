"""Triton kernels for GPUs: fp16, bf16 and fp32, any bias, O(T) memory. Importing this does not import triton.

The forward pass is one kernel (triton_forward.py). The backward pass goes by chunks of query rows, so that
its scratch stays linear in T (triton_gradients.py): one kernel repeats the forward walk and writes scores, weights
and logit gradients, a second goes through the convolutions (triton_backward.py), and plain matrix products give
the gradients of q, k and v. Sums over programs are partial buffers added in order: results are deterministic.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import triton_call
from dape.ops.score_attention.library import make_differentiable
from dape.ops.score_attention.program import PLAIN, conv_program
from dape.ops.score_attention.tables import hidden_tables
from dape.ops.score_attention.triton_call import BLOCK_Q, Call, interpreting, padded
from dape.ops.score_attention.triton_compile import (
    Launch,
    first_that_fits,
    limits,
    recording,
    run,
    too_large,
)
from dape.ops.score_attention.triton_gradients import Gradients
from dape.ops.score_attention.types import EVERYTHING, Bias, DistanceBias, Problem, Visible

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# What a program can hold: keys of a kernel's reach, heads, and numbers of a row's sums.
MAX_KERNEL, MAX_HEADS, MAX_SUMS = 7, 32, 2048


def unsupported(problem: Problem) -> str | None:
    q, conv = problem.q, problem.pair
    if q.device.type != "cuda" and not interpreting():
        return f"its kernels run on CUDA devices, q is on {q.device}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if q.dtype not in DTYPES:
        return f"it computes in float16, bfloat16 or float32, q is {q.dtype}"
    if problem.dropout:
        return f"it has no dropout, got dropout={problem.dropout}"
    if conv is not None and conv.leak_future:
        return "it cannot read keys that the query may not see (leak_future=True)"
    return _too_large(problem) or _cannot_launch(problem)


def _too_large(problem: Problem) -> str | None:
    """Why the sizes of a call do not fit into a program, or None."""
    _, num_heads, num_queries, num_keys, head_width = problem.sizes
    if problem.pair is not None and problem.pair.kernel_size > MAX_KERNEL:
        return f"the convolution reaches over {problem.pair.kernel_size} keys, its kernels keep {MAX_KERNEL}"
    if num_heads > MAX_HEADS:
        return f"a program holds all heads, at most {MAX_HEADS}, got {num_heads} heads"
    if padded(num_heads) * padded(head_width) > MAX_SUMS:
        return f"a program holds the sums of all heads: {num_heads} heads of width {head_width} are too many"
    spans = [
        sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True))
        for x in (problem.q, problem.k)
    ]
    if isinstance(problem.bias, Tensor):
        spans.append(num_heads * num_queries * num_keys)
    if max(spans) >= 2**31:
        return f"its addresses have 32 bits, an input spans {max(spans)} numbers"
    return None


def _cannot_launch(problem: Problem) -> str | None:
    """Why the device cannot hold the kernels of a call, or None."""
    if problem.q.device.type != "cuda" or interpreting():
        return None
    conv, bias = problem.pair, problem.bias
    tensors = [problem.q, problem.k, problem.v, *(() if conv is None else conv.tensors)]
    tensors += [
        x for x in (bias.values if isinstance(bias, DistanceBias) else bias,) if isinstance(x, Tensor)
    ]
    return missing_resources(
        problem.q.device.index or 0,
        dtype=problem.q.dtype,
        num_heads=problem.q.shape[1],
        num_groups=problem.k.shape[1],
        head_width=problem.q.shape[3],
        width=None if conv is None else conv.width,
        kernel_size=1 if conv is None else conv.kernel_size,
        left=0 if conv is None else conv.left,
        bias="none" if bias is None else "distance" if isinstance(bias, DistanceBias) else "dense",
        causal=problem.causal,
        cut=problem.visible.last is not None,
        backward=torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )


def missing_resources(device: int, **shape: Any) -> str | None:
    """The sentence that says which kernel of such a call the device cannot hold, or None; a warning at the first time."""
    key = (device, *shape.items())
    if key not in _answers:
        capability, limit = limits(torch.device("cuda", device))
        reason = None
        for launches in record_launches(**shape):
            if first_that_fits(launches, capability, limit) is None:
                reason = too_large(launches, capability, limit)
                warnings.warn(f"the Triton kernels cannot run: {reason}", stacklevel=2)
                break
        _answers[key] = reason
    return _answers[key]


# torch.compile takes the answer as it is: what torch._dynamo.assume_constant_result does, which is slow to import.
missing_resources._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute
_answers: dict[tuple, str | None] = {}


def record_launches(
    *,
    dtype: torch.dtype = torch.float16,
    num_heads: int = 12,
    num_groups: int | None = None,
    head_width: int = 64,
    width: int | None = 32,
    kernel_size: int = 3,
    left: int | None = None,
    bias: str = "distance",
    causal: bool = True,
    cut: bool = False,
    backward: bool = True,
    batch: int = 1,
    length: int = 128,
) -> list[list[Launch]]:
    """What a call of that shape would launch, each with its variants: recorded on small CPU tensors.

    cut: queries have a last visible key of their own.
    """
    with torch.device("cpu"):
        q = torch.zeros(batch, num_heads, length, head_width, dtype=dtype, requires_grad=backward)
        groups = num_groups or num_heads
        k, v = (
            torch.zeros(batch, groups, length, head_width, dtype=dtype, requires_grad=backward)
            for _ in range(2)
        )
        channels = num_heads * (1 if bias == "none" else 2)
        program = PLAIN
        if width is not None:
            left = kernel_size // 2 if left is None else left
            shapes = (
                (width, channels, 1, kernel_size),
                (width,),
                (num_heads, width, 1, kernel_size),
                (num_heads,),
            )
            w1, b1, w2, b2 = (torch.zeros(shape) for shape in shapes)
            program = conv_program(w1, b1, w2, b2, left)
        lowest = 0 if causal else 1 - length
        encodings: dict[str, Callable[[], Bias]] = {
            "none": lambda: None,
            "distance": lambda: DistanceBias(torch.zeros(num_heads, length - lowest), lowest),
            "dense": lambda: torch.zeros(batch, num_heads, length, length),
        }
        visible = Visible(last=torch.zeros(1, 1, dtype=torch.int64)) if cut else EVERYTHING
        problem = Problem(q, k, v, program, encodings[bias](), visible, causal, 1.0, 0.0)
        with recording() as launches:
            out = attend(problem)
            if backward:
                out.backward(torch.zeros_like(out))
    return launches


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    conv, bias = problem.pair, problem.bias
    values = bias.values.float() if isinstance(bias, DistanceBias) else None
    lowest = bias.lowest if isinstance(bias, DistanceBias) else 0
    dense = bias if isinstance(bias, Tensor) else None
    w1 = b1 = w2 = b2 = hidden = edges = None
    left, slope, residual_bias = 0, 0.0, True
    if conv is not None:
        left, slope, residual_bias = conv.left, conv.negative_slope, conv.residual == "scores+bias"
        w1, w2, b2 = conv.expand_weight[:, :, 0], conv.project_weight[:, :, 0], conv.project_bias
        # Tables want rows that end at distance 0, wherever they begin.
        if isinstance(bias, DistanceBias) and problem.causal and problem.visible.last is None:
            hidden, edges = hidden_tables(bias, conv, problem.k.shape[2], torch.float32)
            w1 = w1[:, : problem.q.shape[1]]
        else:
            b1 = conv.expand_bias
    out, _ = _forward(
        problem.q, problem.k, problem.v, w1, b1, w2, b2, dense, values, hidden, edges,
        problem.visible.first, problem.visible.last,
        lowest, problem.causal, problem.scale, left, slope, residual_bias,
    )  # fmt: skip
    return out


@torch.library.custom_op("dape::triton_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, Tq, D] and log-sum-exp of the logits [B, H, Tq]."""
    from dape.ops.score_attention.triton_forward import forward_kernel

    call = Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last,
                 lowest, causal, scale, left, slope, residual_bias)  # fmt: skip
    out = triton_call.blank_memory(*q.shape, dtype=q.dtype, device=q.device)
    lse = triton_call.blank_memory(*q.shape[:3], dtype=torch.float32, device=q.device)
    grid = (-(-call.num_queries // BLOCK_Q), call.batch)
    run(forward_kernel, grid, call.arguments() | {"out": out, "lse": lse}, call.variants())
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dape::triton_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the eleven tensors from q to edges; an absent input has an empty one."""
    call = Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last,
                 lowest, causal, scale, left, slope, residual_bias)  # fmt: skip
    grads = Gradients(call)
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    delta = (grad_out.float() * out.float()).sum(-1)
    chunk = grads.rows_per_chunk()
    for start in range(0, call.num_queries, chunk):
        grads.add_rows(slice(start, min(start + chunk, call.num_queries)), grad_out, lse, delta)
    inputs = (w1, b1, w2, b2, dense, values, hidden, edges)
    rest = [
        q.new_empty(0) if x is None or grad is None else grad.to(x.dtype)
        for x, grad in zip(inputs, grads.rest.values(), strict=True)
    ]
    return [grads.q, grads.k.to(k.dtype), grads.v.to(v.dtype), *rest]


@_backward.register_fake
def _(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    return [out.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:11]]


make_differentiable(_forward, _backward, num_tensors=13, num_grads=11)
