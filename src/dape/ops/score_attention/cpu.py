"""The fused C++ kernel: any score program in float32 arithmetic, on all cores, in O(T) memory, forward and backward.

Plain scores and the paper's two convolutions of 1×k have faster passes of their own, which take the same arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import by_tiles, native, op
from dape.ops.score_attention.op import Arguments
from dape.ops.score_attention.program import ScoreProgram
from dape.ops.score_attention.tables import stage_tables
from dape.ops.score_attention.types import EVERYTHING, DistanceBias, Problem, SeparableBias, TileBias

NO_BIAS, BY_DISTANCE, DENSE, SEPARABLE, CURVE = range(5)

# Up to this many queries, a kernel whose lanes are keys is faster than one whose lanes are queries.
DECODE_QUERIES = 8

# What csrc/filter.h has room for.
MAX_STAGES, MAX_EARLIER_ROWS = 12, 11

# The kernel's names of the pair's tensors; it has the others by their own.
PAIR = {"pre.0.weight": "w1", "pre.0.offset": "b1", "pre.1.weight": "w2", "pre.1.offset": "b2"}


def unsupported(problem: Problem) -> str | None:
    program = problem.program
    if problem.q.device.type != "cpu":
        return f"CPU only; the tensors are on {problem.q.device}"
    if problem.compute_dtype != torch.float32:
        return f"float32 only; the tensors are {problem.q.dtype}"
    if problem.dropout:
        return f"dropout is not supported, got dropout={problem.dropout}"
    if program.leak_future:
        return "it never reads hidden keys, as leak_future=True requires"
    if program.normaliser == "entmax":
        return f'it supports softmax and stick-breaking, got normaliser="{program.normaliser}"'
    if len(program.pre) + len(program.post) > MAX_STAGES:
        return f"it supports at most {MAX_STAGES} stages, got {len(program.pre) + len(program.post)}"
    if program.earlier_rows > MAX_EARLIER_ROWS:
        return f"it supports at most {MAX_EARLIER_ROWS} earlier queries, the program reads {program.earlier_rows}"
    return native.PROBLEM or op.unsupported_transform(problem)


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
        and (problem.program.is_plain or problem.is_pair)
    )


def _attend(problem: Problem, earlier: Tensor | None = None) -> Tensor:
    """The same for a bias that is not by tiles; earlier [1 or B, Tq]: see by_tiles."""
    tensors, plan, lowest = describe(problem, earlier)
    return op.run("cpu", tensors, plan, lowest=lowest)


def describe(
    problem: Problem, earlier: Tensor | None = None
) -> tuple[dict[str, Tensor | None], dict[str, Any], int]:
    """The operator's tensors, plan and lowest distance for a call.

    earlier: [1 or B, Tq], how many rows before its own each may read; None: as visibility says.
    """
    if isinstance(problem.bias, SeparableBias) and problem.q.shape[2] <= DECODE_QUERIES:
        problem = replace(problem, bias=problem.dense_bias())
    batch, num_heads, num_queries, num_keys, _ = problem.sizes
    program, bias, visible, device = problem.program, problem.bias, problem.visible, problem.q.device
    pair = (program.is_plain or problem.is_pair) and not isinstance(bias, SeparableBias)
    tables: dict[str, Tensor] = {}
    if not pair:
        program, tables = _with_tables(problem)
    tensors: dict[str, Tensor | None] = {"q": problem.q, "k": problem.k, "v": problem.v, **tables}
    lowest = 0
    if isinstance(bias, DistanceBias):
        tensors["values"], lowest = bias.values.float(), bias.lowest
    elif isinstance(bias, SeparableBias):
        tensors["row"], tensors["column"] = (
            x.double().expand(batch, num_heads, -1) for x in (bias.row, bias.column)
        )
    elif isinstance(bias, TileBias):
        assert bias.curve is not None
        curve = bias.curve()
        tensors["values"], lowest = curve.values[None].float(), curve.lowest
        tensors |= {
            "knots": curve.knots.float(), "slopes": curve.slopes.T.float(), "offsets": curve.offsets.T.float(),
            "row_scale": curve.rows.float().expand(batch, -1),
        }  # fmt: skip
    elif bias is not None:
        tensors["dense"] = bias.float()
    tensors["first"], tensors["last"] = visible.first, visible.last
    tensors |= {name: tensor.float() for name, tensor in program.tensors() if not name.startswith("length")}
    if earlier is None and visible.first is not None and program.earlier_rows:
        earlier = visible.readable_rows(num_queries, num_keys, device=device)
    if earlier is not None:
        tensors["earlier"] = earlier.expand(batch, -1).to(torch.int32)
    if program.length_scale is not None:
        first, last = visible.bounds(num_queries, num_keys, causal=problem.causal, device=device)
        tensors["factor"] = program.length_factor(last - first + 1).float().expand(batch, -1, -1)
    plan = {
        "pair": pair, "causal": problem.causal, "scale": problem.scale, "residual": program.residual,
        "stick": program.normaliser == "stickbreaking", "softcap": program.softcap or 0.0, "dense_grad": isinstance(bias, Tensor) and bias.requires_grad,
        "pre": [[stage.left, stage.groups, stage.slope] for stage in program.pre],
        "post": [[stage.left, stage.groups, stage.slope] for stage in program.post],
        # The bias half of the pair's first convolution may be a table by distance, which pays for many queries.
        "tables": pair and len(program.pre) > 0 and isinstance(bias, DistanceBias) and problem.causal and visible.last is None,
        # The backward pass computes logits as the kernel for many queries does, to the last bit.
        "decode": pair or not ("row" in tensors or _needs_gradient(tensors)),
    }  # fmt: skip
    return tensors, plan, lowest


def _needs_gradient(tensors: dict[str, Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.values())


def _with_tables(problem: Problem) -> tuple[ScoreProgram, dict[str, Tensor]]:
    """The program in float32; where its first stage reads a bias by distance, without that half, which is a table."""
    program, bias = problem.program.to(torch.float32), problem.bias
    _, num_heads, num_queries, num_keys, _ = problem.sizes
    if not (isinstance(bias, DistanceBias) and program.reads_bias(num_heads)):
        return program, {}
    # The kernel for a few queries takes no tables.
    if not problem.causal or problem.visible != EVERYTHING or num_queries <= DECODE_QUERIES:
        return program, {}
    if num_queries != num_keys:
        return program, {}
    first, *others = program.pre
    # A later row reads this one's hidden map as far as its own reaches.
    ahead = sum(stage.right + stage.query_kernel_size - 1 for stage in others)
    tables = stage_tables(bias, first, ahead, num_keys, torch.float32)
    scores = replace(first, weight=first.weight[:, : num_heads // first.groups], offset=None)
    return replace(program, pre=(scores, *others)), tables._asdict()


class View:
    """The kernel's view of an operator's arguments; it holds on to everything that the kernel points to."""

    def __init__(self, arguments: Arguments, out: Tensor, lse: Tensor) -> None:
        self.plan, self.alive = arguments.plan, [out, lse]
        q, k = arguments.tensors["q"], arguments.tensors["k"]
        batch, _, num_queries, _ = q.shape
        self.tensors = tensors = dict(arguments.tensors)
        for name, x in tensors.items():
            if name not in ("q", "k", "v") or x.stride(3) != 1:
                tensors[name] = x.contiguous()
        for name in ("first", "last"):
            if name in tensors:
                tensors[name] = native.places(tensors[name], batch, num_queries, k.shape[2])
        self.call = self._sizes(arguments.lowest)
        self.call.stride(q=tensors["q"], k=tensors["k"], v=tensors["v"], out=out)
        if self.plan["pair"]:
            self.call.point(**{PAIR.get(name, name): x for name, x in tensors.items()}, out=out, lse=lse)
        else:
            self._point_program(out, lse)

    def _sizes(self, lowest: int) -> native.Call:
        """The call without its pointers."""
        plan, named = self.plan, self.tensors
        (batch, num_heads, num_queries, head_dim), (_, groups, num_keys, _) = (
            named["q"].shape,
            named["k"].shape,
        )
        width, channels, taps, left, slope, tables, columns = 0, num_heads, 1, 0, 0.0, "hidden" in named, 0
        if plan["pair"] and plan["pre"]:
            width, channels, _, taps = named["pre.0.weight"].shape
            (left, _, slope), _ = plan["pre"]
            tables = plan["tables"] and num_queries > DECODE_QUERIES
            channels, columns = (num_heads, num_keys + taps - 1 - left) if tables else (channels, 0)
        elif tables:
            columns = named["hidden"].shape[1]
        if "values" in named:
            kind, distances = (CURVE if "knots" in named else BY_DISTANCE), named["values"].shape[1]
        else:
            kind, distances = DENSE if "dense" in named else SEPARABLE if "row" in named else NO_BIAS, 0
        return native.Call(
            dtype=native.DTYPES.index(named["q"].dtype), batch=batch, heads=num_heads, groups=groups, queries=num_queries,
            keys=num_keys, head_width=head_dim, width=width, taps=taps, left=left, channels=channels,
            causal=plan["causal"], residual_bias=not plan["pair"] or plan["residual"] == "scores+bias",
            bias_tables=tables, bias=kind, pieces=named["slopes"].shape[0] if kind == CURVE else 0, lowest=lowest,
            distances=distances, table_length=columns, dense_batch=named["dense"].shape[0] if kind == DENSE else 0,
            dense_grad=plan["dense_grad"], scale=plan["scale"], slope=slope,
        )  # fmt: skip

    def _point_program(self, out: Tensor, lse: Tensor) -> None:
        plan, named, call = self.plan, self.tensors, self.call
        pointers = ("q", "k", "v", "values", "dense", "hidden", "edges", "first", "last")
        call.point(**{name: named[name] for name in pointers if name in named}, out=out)
        self.stages = [
            (f"{side}.{n}", *plan[side][n]) for side in ("pre", "post") for n in range(len(plan[side]))
        ]
        self.stage_calls = (native.StageCall * max(1, len(self.stages)))()
        for stage, (name, left, groups, slope) in zip(self.stage_calls, self.stages, strict=False):
            weight, offset = named[f"{name}.weight"], named.get(f"{name}.offset")
            stage.outputs, inputs, stage.rows, stage.taps = weight.shape
            stage.inputs, stage.groups, stage.left, stage.slope = inputs * groups, groups, left, slope
            stage.point(weight=weight, offset=offset)
        residual = plan["residual"]
        self.program = native.Program(
            num_pre=len(plan["pre"]),
            num_post=len(plan["post"]),
            residual_scores=residual in ("scores+bias", "scores"),
            residual_bias=residual in ("scores+bias", "bias"),
            stick=plan["stick"],
            softcap=plan["softcap"],
            stages=ctypes.addressof(self.stage_calls),
        )
        self.program.point(
            **{name: named[name] for name in ("sink", "factor", "row", "column", "earlier") if name in named}
        )
        if plan["stick"]:
            self.program.point(left=lse)
        else:
            call.point(lse=lse)
        call.program = ctypes.addressof(self.program)

    def point_gradients(self, grad_out: Tensor) -> dict[str, Tensor]:
        """Gradients by name, which the kernel will write."""
        pair, call = self.plan["pair"], self.call
        grad_out = native.rows_contiguous(grad_out)
        call.point(grad_out=grad_out)
        call.stride(grad=grad_out)
        over_rows = not pair and any(
            x.shape[2] > 1 for name, x in self.tensors.items() if name.endswith(".weight")
        )
        grads, low = native.gradients(self.tensors, dense=self.plan["dense_grad"], rows=over_rows)
        call.point(**low)
        self.alive += [grad_out, *low.values()]
        if pair:
            call.point(**{f"d{PAIR.get(name, name)}": grad for name, grad in grads.items()})
            return grads
        own = ("q", "k", "v", "values", "dense", "hidden", "edges")
        call.point(**{f"d{name}": grads[name] for name in own if name in grads})
        of_program = ("sink", "factor", "row", "column")
        self.program.point(**{f"d{name}": grads[name] for name in of_program if name in grads})
        for stage, (name, *_) in zip(self.stage_calls, self.stages, strict=False):
            stage.point(dweight=grads[f"{name}.weight"], doffset=grads.get(f"{name}.offset"))
        return grads

    def run(self, step: str) -> None:
        native.run(step if self.plan["pair"] else f"program_{step}", self.call)


class DecodeCall:
    """The pair's forward call for few queries, filled but for what changes from step to step: lengths and pointers."""

    def __init__(self, names: tuple[str, ...], plan: dict[str, Any], tensors: list[Tensor]) -> None:
        arguments = Arguments(dict(zip(names, tensors, strict=True)), plan, 0)
        shape = arguments["q"].shape
        call = View(
            arguments, torch.empty(shape, dtype=arguments["q"].dtype), native.allocate(*shape[:3])
        ).call
        self.words, index = bytes(call), call.index
        self.pointers = [index[PAIR.get(name, name)] for name in (*names, "out", "lse")]
        self.strides = [index[native.STRIDES[name]] for name in ("q", "k", "v", "out")]
        self.lengths = index["keys"], index["lowest"], index["distances"]
        self.values = names.index("values") if "values" in names else None

    @staticmethod
    def serves(names: tuple[str, ...], plan: dict[str, Any], num_queries: int) -> bool:
        return plan["pair"] and num_queries <= DECODE_QUERIES and not {"first", "last"} & {*names}

    def run(self, tensors: list[Tensor], lowest: int) -> Tensor | None:
        """The output, or None if a tensor is not laid out as the kernel reads it."""
        q, k, v, *others = tensors
        out = torch.empty_like(q)
        call = native.Call.from_buffer_copy(self.words)
        words = call.memory()
        for first, x in zip(self.strides, (q, k, v, out), strict=True):
            words[first], words[first + 1], words[first + 2], last = x.stride()
            if last != 1:
                return None
        for x in others:
            if not x.is_contiguous():
                return None
        keys, least, distances = self.lengths
        words[keys], words[least] = k.shape[2], lowest
        if self.values is not None:
            words[distances] = tensors[self.values].shape[1]
        lse = torch.empty(q.shape[:3], dtype=torch.float32)
        for place, x in zip(self.pointers, (*tensors, out, lse), strict=True):
            words[place] = x.data_ptr()
        native.run("decode", call)
        return out


def forward(arguments: Arguments) -> tuple[Tensor, Tensor]:
    q = arguments.tensors["q"]
    # The kernel writes all of it.
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if arguments.plan["stick"] else torch.float32)
    decodes = arguments.plan["decode"] and q.shape[2] <= DECODE_QUERIES
    View(arguments, out, lse).run("decode" if decodes else "forward")
    return out, lse


def backward(arguments: Arguments, grad_out: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    view = View(arguments, native.rows_contiguous(out), lse.contiguous())
    grads = view.point_gradients(grad_out)
    view.run("backward")
    return grads


op.KERNELS["cpu"] = (forward, backward)
