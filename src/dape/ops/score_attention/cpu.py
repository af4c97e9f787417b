"""The fused C++ kernel on the processor: float32 arithmetic, all cores, O(T) memory, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import by_tiles, cpu_program, native, op
from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias, TileBias

NO_BIAS, BY_DISTANCE, DENSE, _SEPARABLE, CURVE = range(5)

DECODE_QUERIES = cpu_program.DECODE_QUERIES


def unsupported(problem: Problem) -> str | None:
    if problem.q.device.type != "cpu":
        return f"it runs on the processor, the tensors are on {problem.q.device}"
    if problem.compute_dtype != torch.float32:
        return f"it computes in float32, the tensors are {problem.q.dtype}"
    if problem.dropout:
        return f"it has no dropout, got dropout={problem.dropout}"
    return cpu_program.unsupported(problem) or native.PROBLEM or op.unsupported_transform(problem)


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    if isinstance(problem.bias, TileBias) and not takes_curve(problem):
        return by_tiles.attend(problem, problem.bias, _attend)
    return _attend(problem)


def takes_curve(problem: Problem) -> bool:
    """Whether the bias is a curve that the kernel evaluates where it needs it; never said of exported lengths."""
    bias = problem.bias
    return (
        isinstance(bias, TileBias)
        and bias.curve is not None
        and not torch.compiler.is_exporting()
        and problem.q.shape[2] > DECODE_QUERIES
        and (problem.program.is_plain or problem.pair is not None)
    )


def _attend(problem: Problem, earlier: Tensor | None = None) -> Tensor:
    """The same for a bias that is not by tiles; earlier [1 or B, Tq]: see by_tiles."""
    if isinstance(problem.bias, SeparableBias) and problem.q.shape[2] <= DECODE_QUERIES:
        problem = replace(problem, bias=problem.dense_bias())
    if isinstance(problem.bias, SeparableBias) or not (problem.program.is_plain or problem.pair):
        return cpu_program.attend(problem, earlier)
    tensors, plan, lowest = describe(problem)
    return op.run("cpu", tensors, plan, lowest=lowest)


def describe(problem: Problem) -> tuple[dict[str, Tensor | None], dict[str, Any], int]:
    """The operator's tensors, plan and lowest distance for a call of plain scores or two convolutions."""
    conv, bias = problem.pair, problem.bias
    values = bias.values.float() if isinstance(bias, DistanceBias) else None
    lowest = bias.lowest if isinstance(bias, DistanceBias) else 0
    dense = bias.float() if isinstance(bias, Tensor) else None
    curve: dict[str, Tensor | None] = {}
    if isinstance(bias, TileBias):
        assert bias.curve is not None
        found = bias.curve()
        values, lowest = found.values[None].float(), found.lowest
        curve = {
            "knots": found.knots.float(), "slopes": found.slopes.T.float(), "offsets": found.offsets.T.float(),
            "row_scale": found.rows.float().expand(problem.q.shape[0], -1),
        }  # fmt: skip
    w1 = b1 = w2 = b2 = None
    left, slope, residual_bias = 0, 0.0, True
    if conv is not None:
        left, slope, residual_bias = conv.left, conv.negative_slope, conv.residual == "scores+bias"
        w1, w2 = conv.expand_weight.float(), conv.project_weight.float()
        b1, b2 = conv.expand_bias.float(), conv.project_bias.float()
    tensors: dict[str, Tensor | None] = {
        "q": problem.q, "k": problem.k, "v": problem.v, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "dense": dense,
        "values": values, "first": problem.visible.first, "last": problem.visible.last, **curve,
    }  # fmt: skip
    plan = {
        "causal": problem.causal, "scale": problem.scale, "left": left, "slope": slope,
        "residual_bias": residual_bias, "dense_grad": dense is not None and dense.requires_grad,
        "tables": conv is not None and _takes_tables(problem),
    }  # fmt: skip
    return tensors, plan, lowest


def _takes_tables(problem: Problem) -> bool:
    """Whether the bias half of the first convolution may be a table by distance, which pays for many queries."""
    return isinstance(problem.bias, DistanceBias) and problem.causal and problem.visible.last is None


def _call(arguments: op.Arguments) -> tuple[native.Call, dict[str, Tensor]]:
    """The kernel's view of the arguments, and the tensors that it points to."""
    plan, q = arguments.plan, arguments["q"]
    (batch, num_heads, num_queries, head_width), num_keys = q.shape, arguments["k"].shape[2]
    given = {
        name: native.rows_contiguous(x) if name in ("q", "k", "v") else x.contiguous()
        for name, x in arguments.tensors.items()
        if name not in ("first", "last")
    }
    for name in ("first", "last"):
        if (bound := arguments.get(name)) is not None:
            given[name] = native.places(bound, batch, num_queries, num_keys)
    tables = plan["tables"] and num_queries > DECODE_QUERIES
    width, channels, _, taps = given["w1"].shape if "w1" in given else (0, num_heads, 1, 1)
    call = native.Call(
        dtype=native.DTYPES.index(q.dtype), batch=batch, heads=num_heads, groups=given["k"].shape[1], queries=num_queries, keys=num_keys,
        head_width=head_width, width=width, taps=taps, left=plan["left"], channels=num_heads if tables else channels,
        causal=plan["causal"], residual_bias=plan["residual_bias"], bias_tables=tables,
        bias=CURVE if "knots" in given else DENSE if "dense" in given else BY_DISTANCE if "values" in given else NO_BIAS,
        pieces=given["slopes"].shape[0] if "slopes" in given else 0,
        lowest=arguments.lowest, distances=given["values"].shape[1] if "values" in given else 0,
        table_length=num_keys + taps - 1 - plan["left"] if tables else 0,
        dense_batch=given["dense"].shape[0] if "dense" in given else 0, dense_grad=plan["dense_grad"],
        scale=plan["scale"], slope=plan["slope"],
    )  # fmt: skip
    call.point(**given)
    call.stride(**{name: given[name] for name in ("q", "k", "v")})
    return call, given


def forward(arguments: op.Arguments) -> tuple[Tensor, Tensor]:
    call, _alive = _call(arguments)
    q = arguments["q"]
    out, lse = native.allocate(*q.shape, dtype=q.dtype), native.allocate(*q.shape[:3])
    call.point(out=out, lse=lse)
    call.stride(out=out)
    native.run("decode" if q.shape[2] <= DECODE_QUERIES else "forward", call)
    return out, lse


def backward_call(
    arguments: op.Arguments, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[native.Call, dict[str, Tensor], list[Tensor]]:
    """The kernel's view of a backward pass, the gradients that it writes, and what else must stay alive."""
    call, given = _call(arguments)
    grad_out, out, lse = native.rows_contiguous(grad_out), native.rows_contiguous(out), lse.contiguous()
    call.point(grad_out=grad_out, out=out, lse=lse)
    call.stride(grad=grad_out, out=out)
    grads, low = native.gradients(given, dense=arguments.plan["dense_grad"], rows=False)
    call.point(**{f"d{name}": grad for name, grad in grads.items()}, **low)
    return call, grads, [grad_out, out, lse, *given.values(), *low.values()]


def _backward(arguments: op.Arguments, grad_out: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    call, grads, _alive = backward_call(arguments, grad_out, out, lse)
    native.run("backward", call)
    return grads


op.KERNELS["cpu"] = (forward, _backward)
