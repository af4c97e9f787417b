"""The fused C++ kernel on the processor: float32 arithmetic, all cores, O(T) memory, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from dape.ops.score_attention import cpu_program, native
from dape.ops.score_attention.library import make_differentiable
from dape.ops.score_attention.tables import hidden_tables
from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias, Visible

NO_BIAS, BY_DISTANCE, DENSE = range(3)

# Up to this many queries, a kernel whose lanes are keys is faster than one whose lanes are queries.
DECODE_QUERIES = 8


def unsupported(problem: Problem) -> str | None:
    if problem.q.device.type != "cpu":
        return f"it runs on the processor, the tensors are on {problem.q.device}"
    if problem.compute_dtype != torch.float32:
        return f"it computes in float32, the tensors are {problem.q.dtype}"
    if problem.dropout:
        return f"it has no dropout, got dropout={problem.dropout}"
    return cpu_program.unsupported(problem) or native.PROBLEM


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    if isinstance(problem.bias, SeparableBias) or not (problem.program.is_plain or problem.pair):
        return cpu_program.attend(problem)
    conv, bias = problem.pair, problem.bias
    values = bias.values.float() if isinstance(bias, DistanceBias) else None
    lowest = bias.lowest if isinstance(bias, DistanceBias) else 0
    dense = bias.float() if isinstance(bias, Tensor) else None
    w1 = b1 = w2 = b2 = hidden = edges = None
    left, slope, residual_bias = 0, 0.0, True
    if conv is not None:
        left, slope, residual_bias = conv.left, conv.negative_slope, conv.residual == "scores+bias"
        w1, w2 = conv.expand_weight[:, :, 0].float(), conv.project_weight[:, :, 0].float()
        b1, b2 = conv.expand_bias.float(), conv.project_bias.float()
        if _takes_tables(problem):
            assert isinstance(bias, DistanceBias)
            hidden, edges = hidden_tables(bias, conv, problem.k.shape[2], torch.float32)
            w1, b1 = w1[:, : problem.q.shape[1]], None
    out, _ = _forward(
        problem.q, problem.k, problem.v, w1, b1, w2, b2, dense, values, hidden, edges,
        problem.visible.first, problem.visible.last,
        lowest, problem.causal, problem.scale, left, slope, residual_bias,
        dense is not None and dense.requires_grad,
    )  # fmt: skip
    return out


def _takes_tables(problem: Problem) -> bool:
    """Whether the bias half of the first convolution is worth a table by distance."""
    return (
        isinstance(problem.bias, DistanceBias)
        and problem.causal
        and problem.visible.last is None
        and problem.q.shape[2] > DECODE_QUERIES
    )


def allocate(*shape: int) -> Tensor:
    """Memory that the kernel writes completely."""
    return torch.empty(shape, dtype=torch.float32)


def _call(
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, dense_grad: bool,
) -> tuple[native.Call, list[Tensor | None]]:  # fmt: skip
    """The kernel's view of the arguments, and the tensors that must stay alive while it runs."""
    batch, num_heads, num_queries, head_width = q.shape
    num_keys = k.shape[2]
    q, k, v = (_rows_contiguous(x) for x in (q, k, v))
    w1, b1, w2, b2, dense, values, hidden, edges = (
        None if x is None else x.contiguous() for x in (w1, b1, w2, b2, dense, values, hidden, edges)
    )
    if first is not None or last is not None:
        bounds = Visible(first, last).bounds(num_queries, num_keys, causal=causal, device=q.device)
        # Bounds far outside the keys mean the same as just outside.
        first, last = (
            x.clamp(-1, num_keys).expand(batch, num_queries).to(torch.int32).contiguous() for x in bounds
        )
    call = native.Call(
        batch=batch, heads=num_heads, groups=k.shape[1], queries=num_queries, keys=num_keys,
        head_width=head_width,
        width=0 if w1 is None else w1.shape[0], taps=1 if w1 is None else w1.shape[2], left=left,
        channels=num_heads if w1 is None else w1.shape[1],
        causal=causal, residual_bias=residual_bias, tables=hidden is not None,
        bias=DENSE if dense is not None else BY_DISTANCE if values is not None else NO_BIAS,
        lowest=lowest, distances=0 if values is None else values.shape[1],
        table_length=0 if hidden is None else hidden.shape[1],
        dense_batch=0 if dense is None else dense.shape[0], dense_grad=dense_grad,
        scale=scale, slope=slope,
    )  # fmt: skip
    call.point(q=q, k=k, v=v, w1=w1, b1=b1, w2=w2, b2=b2, dense=dense, values=values)
    call.point(hidden=hidden, edges=edges, first=first, last=last)
    call.stride(q=q, k=k, v=v)
    return call, [q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last]


def _rows_contiguous(x: Tensor) -> Tensor:
    """x [B, H, T, D] in float32 with contiguous rows."""
    x = x.float()
    return x if x.stride(3) == 1 else x.contiguous()


@torch.library.custom_op("dape::cpu_attention", mutates_args=(), device_types="cpu")
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, dense_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, Tq, D] and log-sum-exp of the logits [B, H, Tq]."""
    call, _alive = _call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last,
                         lowest, causal, scale, left, slope, residual_bias, dense_grad)  # fmt: skip
    out, lse = allocate(*q.shape), allocate(*q.shape[:3])
    call.point(out=out, lse=lse)
    call.stride(out=out)
    native.run("decode" if q.shape[2] <= DECODE_QUERIES else "forward", call)
    return out.to(q.dtype), lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dape::cpu_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, dense_grad: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the eleven tensors from q to edges; an absent input has an empty one."""
    call, _alive = _call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last,
                         lowest, causal, scale, left, slope, residual_bias, dense_grad)  # fmt: skip
    grad_out, out, lse = _rows_contiguous(grad_out), _rows_contiguous(out), lse.contiguous()
    call.point(grad_out=grad_out, out=out, lse=lse)
    call.stride(grad=grad_out, out=out)
    dq, dk, dv = allocate(*q.shape), _zeros(k), _zeros(v)
    named = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "values": values, "hidden": hidden, "edges": edges}
    grads = {name: None if x is None else _zeros(x) for name, x in named.items()}
    grads["dense"] = _zeros(dense) if dense is not None and dense_grad else None
    call.point(dq=dq, dk=dk, dv=dv, **{f"d{name}": grad for name, grad in grads.items()})
    native.run("backward", call)
    order = ("w1", "b1", "w2", "b2", "dense", "values", "hidden", "edges")
    absent = q.new_empty(0)
    rest = [grad if (grad := grads[name]) is not None else absent.clone() for name in order]
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *rest]


def _zeros(x: Tensor) -> Tensor:
    """Contiguous zeros to sum into."""
    return torch.zeros(x.shape, dtype=torch.float32)


@_backward.register_fake
def _(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    return [out.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:11]]


make_differentiable(_forward, _backward, num_tensors=13, num_grads=11)
