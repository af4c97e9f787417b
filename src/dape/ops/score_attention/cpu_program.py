"""The C++ kernel for every score program: its tensors, its plan, and how the kernel sees them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import native, op
from dape.ops.score_attention.op import Arguments
from dape.ops.score_attention.program import ScoreProgram
from dape.ops.score_attention.tables import stage_tables
from dape.ops.score_attention.types import EVERYTHING, DistanceBias, Problem, SeparableBias

NO_BIAS, BY_DISTANCE, DENSE, SEPARABLE = range(4)

# Up to this many queries, a kernel whose lanes are keys is faster than one whose lanes are queries.
DECODE_QUERIES = 8

# What csrc/filter.h has room for.
MAX_STAGES, MAX_EARLIER_ROWS = 12, 11


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot run the program or its bias, or None."""
    program = problem.program
    if program.leak_future:
        return "it never reads keys that a query may not see, which leak_future=True asks for"
    if program.normaliser != "softmax":
        return f'it has no normaliser="{program.normaliser}"'
    stages = (*program.pre, *program.post)
    if len(stages) > MAX_STAGES:
        return f"it runs up to {MAX_STAGES} stages, got {len(stages)}"
    if program.earlier_rows > MAX_EARLIER_ROWS:
        return f"its tiles bring {MAX_EARLIER_ROWS} earlier queries along, the program reads {program.earlier_rows}"
    return None


def attend(problem: Problem, earlier: Tensor | None = None) -> Tensor:
    """Attention output [B, H, Tq, D].

    earlier: [1 or B, Tq], how many rows before its own each may read; None: as visibility says.
    """
    batch, num_heads, num_queries, num_keys, _ = problem.sizes
    bias, device = problem.bias, problem.q.device
    program, tables = _with_tables(problem)
    tensors: dict[str, Tensor | None] = {"q": problem.q, "k": problem.k, "v": problem.v, **tables}
    lowest = 0
    plan: dict[str, Any] = {
        "causal": problem.causal,
        "scale": problem.scale,
        "residual": program.residual,
        "softcap": program.softcap or 0.0,
        "pre": [[stage.left, stage.groups, stage.slope] for stage in program.pre],
        "post": [[stage.left, stage.groups, stage.slope] for stage in program.post],
    }
    visible = problem.visible
    for name, bound in (("first", visible.first), ("last", visible.last)):
        if bound is not None:
            tensors[name] = native.places(bound, batch, num_queries, num_keys)
    if earlier is None and visible.first is not None and program.earlier_rows:
        earlier = visible.readable_rows(num_queries, num_keys, device=device)
    if earlier is not None:
        tensors["earlier"] = earlier.expand(batch, -1).to(torch.int32).contiguous()
    if isinstance(bias, DistanceBias):
        tensors["values"], lowest = bias.values.float(), bias.lowest
    elif isinstance(bias, SeparableBias):
        tensors["row"], tensors["column"] = (
            x.double().expand(batch, num_heads, -1) for x in (bias.row, bias.column)
        )
    elif isinstance(bias, Tensor):
        tensors["dense"], plan["dense_grad"] = bias.float(), bias.requires_grad
    for name, tensor in program.tensors():
        if name not in ("length_scale", "length_offset"):
            tensors[name] = tensor
    if program.length_scale is not None:
        first, last = visible.bounds(num_queries, num_keys, causal=problem.causal, device=device)
        length = torch.log((last - first + 1).clamp(min=1).float())
        factor = program.length_scale[:, None] * length[:, None]
        if program.length_offset is not None:
            factor = factor + program.length_offset[:, None]
        tensors["factor"] = factor.expand(batch, -1, -1)
    # The backward pass computes logits as the kernel for many queries does, to the last bit.
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.values())
    plan["decode"] = "row" not in tensors and not wanted
    return op.run("cpu program", tensors, plan, lowest=lowest)


def _with_tables(problem: Problem) -> tuple[ScoreProgram, dict[str, Tensor]]:
    """The program in float32; where its first stage reads a bias by distance, without that half, which is a table."""
    program, bias = problem.program.to(torch.float32), problem.bias
    _, num_heads, num_queries, num_keys, _ = problem.sizes
    regular = problem.causal and problem.visible == EVERYTHING and num_queries == num_keys
    # The kernel for a few queries takes no tables.
    regular = regular and num_queries > DECODE_QUERIES
    if not (isinstance(bias, DistanceBias) and program.reads_bias(num_heads) and regular):
        return program, {}
    first, *others = program.pre
    # A later row reads this one's hidden map as far as its own reaches.
    ahead = sum(stage.right + stage.query_kernel_size - 1 for stage in others)
    tables = stage_tables(bias, first, ahead, num_keys, torch.float32)
    scores = replace(first, weight=first.weight[:, : num_heads // first.groups], offset=None)
    return replace(program, pre=(scores, *others)), tables._asdict()


class PlannedCall:
    """The kernel's view of an operator's arguments; it holds on to everything that the kernel points to."""

    def __init__(self, arguments: Arguments) -> None:
        self.plan, self.lowest = arguments.plan, arguments.lowest
        self.tensors = {
            name: native.rows_contiguous(tensor) if name in ("q", "k", "v") else tensor.contiguous()
            for name, tensor in arguments.tensors.items()
        }
        self.stages = [("pre", n, *options) for n, options in enumerate(self.plan["pre"])]
        self.stages += [("post", n, *options) for n, options in enumerate(self.plan["post"])]
        self.stage_calls = (native.StageCall * max(1, len(self.stages)))()
        self.program = native.Program()
        self.call = native.Call()
        self._describe()

    def _describe(self) -> None:
        q, k, plan, call, named = (
            self.tensors["q"], self.tensors["k"], self.plan, self.call, self.tensors,
        )  # fmt: skip
        call.dtype = native.DTYPES.index(q.dtype)
        call.batch, call.heads, call.queries, call.head_width = q.shape
        call.groups, call.keys = k.shape[1], k.shape[2]
        call.channels, call.taps = call.heads, 1
        call.causal, call.scale, call.residual_bias = plan["causal"], plan["scale"], True
        if "values" in named:
            call.bias, call.lowest, call.distances = BY_DISTANCE, self.lowest, named["values"].shape[1]
        elif "dense" in named:
            call.bias, call.dense_batch, call.dense_grad = (
                DENSE, named["dense"].shape[0], plan["dense_grad"],
            )  # fmt: skip
        elif "row" in named:
            call.bias = SEPARABLE
        if "hidden" in named:
            call.bias_tables, call.table_length = True, named["hidden"].shape[1]
        pointers = ("q", "k", "v", "values", "dense", "hidden", "edges", "first", "last")
        call.point(**{name: named[name] for name in pointers if name in named})
        call.stride(q=q, k=k, v=named["v"])
        for stage, (where, n, left, groups, slope) in zip(self.stage_calls, self.stages, strict=False):
            weight, offset = named[f"{where}.{n}.weight"], named.get(f"{where}.{n}.offset")
            stage.outputs, inputs, stage.rows, stage.taps = weight.shape
            stage.inputs, stage.groups, stage.left, stage.slope = inputs * groups, groups, left, slope
            stage.point(weight=weight, offset=offset)
        program, residual = self.program, plan["residual"]
        program.num_pre, program.num_post = len(plan["pre"]), len(plan["post"])
        program.residual_scores = residual in ("scores+bias", "scores")
        program.residual_bias = residual in ("scores+bias", "bias")
        program.softcap = plan["softcap"]
        program.stages = ctypes.addressof(self.stage_calls)
        program.point(
            **{name: named[name] for name in ("sink", "factor", "row", "column", "earlier") if name in named}
        )
        call.program = ctypes.addressof(program)

    def point_gradients(self, grads: dict[str, Tensor]) -> None:
        own = ("q", "k", "v", "values", "dense", "hidden", "edges")
        self.call.point(**{f"d{name}": grads[name] for name in own if name in grads})
        of_program = ("sink", "factor", "row", "column")
        self.program.point(**{f"d{name}": grads[name] for name in of_program if name in grads})
        for stage, (where, n, *_) in zip(self.stage_calls, self.stages, strict=False):
            stage.point(dweight=grads[f"{where}.{n}.weight"], doffset=grads.get(f"{where}.{n}.offset"))


def forward(arguments: Arguments) -> tuple[Tensor, Tensor]:
    planned, q = PlannedCall(arguments), arguments["q"]
    out, lse = native.allocate(*q.shape, dtype=q.dtype), native.allocate(*q.shape[:3])
    planned.call.point(out=out, lse=lse)
    planned.call.stride(out=out)
    decodes = arguments.plan["decode"] and q.shape[2] <= DECODE_QUERIES
    native.run("program_decode" if decodes else "program_forward", planned.call)
    return out, lse


def backward(arguments: Arguments, grad_out: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    planned = PlannedCall(arguments)
    grad_out, out, lse = native.rows_contiguous(grad_out), native.rows_contiguous(out), lse.contiguous()
    planned.call.point(grad_out=grad_out, out=out, lse=lse)
    planned.call.stride(grad=grad_out, out=out)
    over_rows = any(
        tensor.shape[2] > 1 for name, tensor in planned.tensors.items() if name.endswith(".weight")
    )
    grads, low = native.gradients(
        planned.tensors, dense=arguments.plan.get("dense_grad", False), rows=over_rows
    )
    planned.point_gradients(grads)
    planned.call.point(**low)
    native.run("program_backward", planned.call)
    return grads


op.KERNELS["cpu program"] = (forward, backward)
