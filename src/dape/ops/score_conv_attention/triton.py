"""Triton kernels for GPUs: fp16, bf16 and fp32, any bias, O(T) memory. Importing this does not import triton.

The forward pass is one kernel (triton_forward.py). The backward pass goes by chunks of query rows, so that
its scratch stays linear in T: one kernel repeats the forward walk and writes scores, weights and logit
gradients, a second goes through the convolutions (triton_backward.py), and plain matrix products give
the gradients of q, k and v. Sums over programs are partial buffers added in order: results are deterministic.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_conv_attention.tables import hidden_tables
from dape.ops.score_conv_attention.types import DistanceBias, Problem, Visible

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Queries and key streams of a program: the smallest that tensor cores take.
BLOCK_Q = STREAMS = 16
# How much of the head width a program holds at a time.
PART = 32
# Rows of a program that walks along distances, and the distances that it owns.
BLOCK_R, SEGMENT = 16, 64
# What a program can hold: keys of a kernel's reach, heads, and numbers of a row's sums.
MAX_KERNEL, MAX_HEADS, MAX_SUMS = 7, 32, 2048
# The backward pass goes by as many query rows at a time as keep each of its maps below this many numbers.
SCRATCH_NUMBERS = 32 * 1024 * 1024


def unsupported(problem: Problem) -> str | None:
    q, conv = problem.q, problem.conv
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
    return _too_large(problem)


def _too_large(problem: Problem) -> str | None:
    """Why the sizes of a call do not fit into a program, or None."""
    _, num_heads, num_queries, num_keys, head_width = problem.sizes
    if problem.conv is not None and problem.conv.kernel_size > MAX_KERNEL:
        return f"the convolution reaches over {problem.conv.kernel_size} keys, its kernels keep {MAX_KERNEL}"
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


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    conv, bias = problem.conv, problem.bias
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


@dataclass
class _Call:
    """The arguments of one call and the forms in which the kernels want them."""

    q: Tensor
    k: Tensor
    v: Tensor
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None
    b2: Tensor | None
    dense: Tensor | None
    values: Tensor | None
    hidden: Tensor | None
    edges: Tensor | None
    first: Tensor | None
    last: Tensor | None
    lowest: int
    causal: bool
    scale: float
    left: int
    slope: float
    residual_bias: bool

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.num_queries, self.head_width = self.q.shape
        self.num_groups, self.num_keys = self.k.shape[1], self.k.shape[2]
        self.offset = self.num_keys - self.num_queries
        self.q, self.k, self.v = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v)
        )
        # Keys and values are addressed alike.
        if self.k.stride() != self.v.stride():
            self.k, self.v = self.k.contiguous(), self.v.contiguous()
        self.heads, self.dims = padded(self.num_heads), padded(self.head_width)
        # Whether two stages of keys and values fit on the chip beside the queries.
        self.small = self.heads * self.dims * self.q.element_size() <= 2048
        self.stages = 2 if self.small and self.dense is None else 1
        self.width = 16 if self.w1 is None else padded(self.w1.shape[0])
        self.kernel_size = 1 if self.w1 is None else self.w1.shape[2]
        self.right = self.kernel_size - 1 - self.left
        bounds = Visible(self.first, self.last).bounds(
            self.num_queries, self.num_keys, causal=self.causal, device=self.q.device
        )
        self.first_key, self.last_key = (x.to(torch.int32).contiguous() for x in bounds)
        self.bias = "none" if self.values is None and self.dense is None else "dense"
        if self.values is not None:
            self.bias = "distance"

    def taps(self) -> dict[str, Tensor]:
        """The weights, a matrix a tap, padded with zeros; an absent one is any tensor."""
        if self.w1 is None or self.w2 is None or self.b2 is None:
            return dict.fromkeys(("w1", "wb", "w2", "b1", "b2", "table"), self.q)
        heads, width, dtype = self.heads, self.width, self.q.dtype
        w1 = self.w1.permute(2, 0, 1).to(dtype)
        taps = {
            "w1": _pad(w1[:, :, : self.num_heads], width, heads),
            "wb": _pad(w1[:, :, self.num_heads :], width, heads),
            "w2": _pad(self.w2.permute(2, 0, 1).to(dtype), heads, width),
            "b2": _pad(self.b2.float(), heads),
            "b1": self.q,
            "table": self.q,
        }
        if self.b1 is not None:
            taps["b1"] = _pad(self.b1.float(), width)
        if self.hidden is not None and self.edges is not None:
            planes = torch.cat([self.edges, self.hidden[None]]).transpose(1, 2)
            taps["table"] = _pad(planes.to(dtype), planes.shape[1], width)
        return taps

    def arguments(self) -> dict[str, Any]:
        """What every walk along the keys takes."""
        # The steps of the bias from one batch entry, head, query and key to the next.
        bias = self.q
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if self.values is not None:
            table = _pad(self.values.T.float(), self.values.shape[1], self.heads)
            bias, strides = table[self.offset - self.lowest :], (0, 1, self.heads, -self.heads)
        elif self.dense is not None:
            bias = self.dense
            strides = (bias.stride(0) if bias.shape[0] > 1 else 0, *bias.stride()[1:])
        taps = self.taps()
        arguments: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v}
        arguments |= {"first": self.first_key, "last": self.last_key, **taps, "bias": bias}
        for name, x in (("q", self.q), ("k", self.k)):
            arguments |= {
                f"{name}_batch": x.stride(0),
                f"{name}_head": x.stride(1),
                f"{name}_token": x.stride(2),
            }
        arguments |= {
            "first_batch": self.num_queries * (self.first_key.shape[0] > 1),
            "last_batch": self.num_queries * (self.last_key.shape[0] > 1),
            "bias_batch": strides[0], "bias_head": strides[1], "bias_row": strides[2], "bias_step": strides[3],
            "table_plane": 0 if self.hidden is None else self.hidden.shape[1] * self.width,
            "num_queries": self.num_queries, "offset": self.offset,
            "scale": self.scale, "slope": self.slope,
            "H": self.num_heads, "G": self.num_groups, "D": self.head_width,
            "HEADS": self.heads, "DIMS": self.dims, "PART": min(PART, self.dims) if self.small else 16, "WIDTH": self.width,
            "KERNEL": self.kernel_size, "LEFT": self.left, "BLOCK_Q": BLOCK_Q, "STREAMS": STREAMS,
            "CAUSAL": self.causal, "CONV": self.w1 is not None, "BIAS": self.bias,
            "TABLE": self.hidden is not None, "RESIDUAL_BIAS": self.residual_bias, "PRECISION": _precision(), "HOLD": self.small,
        }  # fmt: skip
        return arguments


def _pad(x: Tensor, *sizes: int) -> Tensor:
    """x with its last dimensions padded with zeros to `sizes`, contiguous."""
    pads: list[int] = []
    for size, have in zip(reversed(sizes), reversed(x.shape), strict=False):
        pads += [0, size - have]
    return F.pad(x, pads).contiguous()


def _precision() -> str:
    """How float32 products are made: three passes over tensor cores unless PyTorch's setting allows one."""
    if interpreting():
        return "interpreted"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **options: int) -> None:
    """Run a kernel with those of the arguments that it takes."""
    kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, **options)


def _blank(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory: the kernels write every number that is read later."""
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.custom_op("dape::triton_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, Tq, D] and log-sum-exp of the logits [B, H, Tq]."""
    from dape.ops.score_conv_attention.triton_forward import forward_kernel

    call = _Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last,
                 lowest, causal, scale, left, slope, residual_bias)  # fmt: skip
    out = _blank(*q.shape, dtype=q.dtype, device=q.device)
    lse = _blank(*q.shape[:3], dtype=torch.float32, device=q.device)
    grid = (-(-call.num_queries // BLOCK_Q), call.batch)
    _launch(
        forward_kernel, grid, call.arguments() | {"out": out, "lse": lse}, num_warps=8, num_stages=call.stages
    )
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


class _Gradients:
    """Gradients of all inputs, gathered over chunks of query rows."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self.arguments = call.arguments()
        self.q = torch.empty_like(call.q)
        self.k, self.v = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (call.k, call.v)
        )
        names = ("w1", "b1", "w2", "b2", "dense", "values", "hidden", "edges")
        self.rest = {
            name: torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            if (x := getattr(call, name)) is not None
            else None
            for name in names
        }

    def rows_per_chunk(self) -> int:
        call = self.call
        rows = SCRATCH_NUMBERS // (call.batch * call.num_keys * call.heads)
        return max(BLOCK_R, rows // BLOCK_R * BLOCK_R)

    def add_rows(self, rows: slice, grad_out: Tensor, lse: Tensor, delta: Tensor) -> None:
        """Add what the queries `rows` contribute."""
        call = self.call
        num_columns = rows.stop + call.offset if call.causal else call.num_keys
        shape = (call.batch, rows.stop - rows.start, num_columns, call.heads)
        scratch = partial(_blank, *shape, dtype=call.q.dtype, device=call.q.device)
        # Matrix products read these two everywhere, the kernels write them where keys are visible.
        weights, grad_scores = scratch().zero_(), scratch().zero_()
        convolved = call.w1 is not None
        maps = {
            "scores": scratch() if convolved else call.q,
            "grad_logits": scratch() if convolved else grad_scores,
        }
        chunk = {"row_start": rows.start, "row_stop": rows.stop, "num_columns": num_columns}
        self._logits(chunk, maps, weights, grad_out, lse, delta)
        grad_bias = grad_scores
        if convolved or call.values is not None:
            dense = convolved and call.dense is not None
            grad_bias = scratch().zero_() if dense else grad_scores
            self._convolutions(chunk, maps, grad_scores, grad_bias)
        if (grad := self.rest["dense"]) is not None:
            through = grad_bias[..., : call.num_heads].permute(0, 3, 1, 2).float()
            grad[:, :, rows, :num_columns] = through.sum(0, keepdim=True) if grad.shape[0] == 1 else through
        self._products(rows, num_columns, weights, grad_scores, grad_out)

    def _logits(
        self, chunk: dict, maps: dict, weights: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> None:
        from dape.ops.score_conv_attention.triton_backward import logits_kernel

        strides = dict(zip(("grad_batch", "grad_head", "grad_token"), grad_out.stride(), strict=False))
        own = {"grad_out": grad_out, "lse": lse, "delta": delta, "weights_out": weights, **strides, **chunk}
        own |= {"scores_out": maps["scores"], "grad_logits": maps["grad_logits"]}
        grid = (-(-(chunk["row_stop"] - chunk["row_start"]) // BLOCK_Q), self.call.batch)
        _launch(logits_kernel, grid, self.arguments | own, num_warps=8, num_stages=self.call.stages)

    def _convolutions(self, chunk: dict, maps: dict, grad_scores: Tensor, grad_bias: Tensor) -> None:
        from dape.ops.score_conv_attention.triton_backward import convolution_kernel

        call, device = self.call, self.call.q.device
        top = chunk["row_stop"] - 1 + call.offset
        bottom = -call.right if call.causal else chunk["row_start"] + call.offset - (call.num_keys - 1)
        distances = top - bottom + 1
        blocks = -(-(chunk["row_stop"] - chunk["row_start"]) // BLOCK_R)
        grid = (-(-distances // SEGMENT), blocks, call.batch)
        blank = partial(_blank, grid[0] * grid[1] * grid[2], dtype=torch.float32, device=device)
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        planes = (call.left + 1, 0 if call.hidden is None else call.hidden.shape[1], call.width)
        sums = {
            "sum_w1": blank(call.kernel_size, call.width, call.heads),
            "sum_wb": blank(call.kernel_size, call.width, call.heads),
            "sum_w2": blank(call.kernel_size, call.width, call.heads),
            "sum_b1": blank(call.width),
            "sum_b2": blank(call.heads),
            "sum_table": zeros(blocks * call.batch, *planes),
            "sum_values": zeros(blocks * call.batch, distances, call.heads),
        }
        own: dict[str, Any] = {
            "top": top,
            "bottom": bottom,
            "num_distances": distances,
            "BLOCK_R": BLOCK_R,
            "SEGMENT": SEGMENT,
        }
        for name in ("w1", "wb", "w2"):
            own[f"{name}_turned"] = self.arguments[name].transpose(-1, -2).contiguous()
        own |= {"grad_scores": grad_scores, "grad_bias": grad_bias, **chunk, **maps, **sums}
        _launch(convolution_kernel, grid, self.arguments | own, num_warps=2, num_stages=2)
        self._add_sums({name: x.sum(0) for name, x in sums.items()}, top, bottom)

    def _add_sums(self, sums: dict[str, Tensor], top: int, bottom: int) -> None:
        """Add the sums over programs, without their padding."""
        call, rest, num_heads = self.call, self.rest, self.call.num_heads
        if (values := rest["values"]) is not None:
            # Below the table's lowest distance nothing is visible.
            skip = max(0, call.lowest - bottom)
            table = sums["sum_values"][skip:, :num_heads].T
            values[:, bottom + skip - call.lowest : top + 1 - call.lowest] += table
        if (w1 := rest["w1"]) is None:
            return
        width = w1.shape[0]
        w1[:, :num_heads] += sums["sum_w1"][:, :width, :num_heads].permute(1, 2, 0)
        if w1.shape[1] > num_heads:
            w1[:, num_heads:] += sums["sum_wb"][:, :width, :num_heads].permute(1, 2, 0)
        assert rest["w2"] is not None and rest["b2"] is not None
        rest["w2"] += sums["sum_w2"].flip(0)[:, :width, :num_heads].permute(2, 1, 0)
        rest["b2"] += sums["sum_b2"][:num_heads]
        if (b1 := rest["b1"]) is not None:
            b1 += sums["sum_b1"][:width]
        if (hidden := rest["hidden"]) is not None and (edges := rest["edges"]) is not None:
            table = sums["sum_table"][..., :width].transpose(1, 2)
            edges += table[: call.left]
            hidden += table[call.left]

    def _products(
        self, rows: slice, num_columns: int, weights: Tensor, grad_scores: Tensor, grad_out: Tensor
    ) -> None:
        """Add the gradients of q, k and v: plain matrix products of the maps [B, rows, keys, HEADS]."""
        call = self.call
        lead = (call.batch, call.num_groups, -1)

        def grouped(x: Tensor) -> Tensor:
            return x.reshape(*lead, x.shape[-1])

        def by_heads(x: Tensor) -> Tensor:
            return grouped(x[..., : call.num_heads].permute(0, 3, 1, 2))

        scores, keys = by_heads(grad_scores), call.k[:, :, :num_columns]
        products = (scores @ keys).view(call.batch, call.num_heads, -1, call.head_width)
        self.q[:, :, rows] = products * call.scale
        grad_k = scores.transpose(-1, -2) @ grouped(call.q[:, :, rows])
        self.k[:, :, :num_columns] += grad_k.float() * call.scale
        self.v[:, :, :num_columns] += by_heads(weights).transpose(-1, -2) @ grouped(grad_out[:, :, rows])


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
    call = _Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last,
                 lowest, causal, scale, left, slope, residual_bias)  # fmt: skip
    grads = _Gradients(call)
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
    return [out.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:NUM_TENSORS]]


NUM_TENSORS = 11


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[NUM_TENSORS + 2 :]  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *inputs[: NUM_TENSORS + 2])


def _differentiate(ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor, _: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
    grads = _backward(grad_out, out, lse, *tensors, *ctx.options)  # type: ignore[attr-defined]
    present = [None if x is None else grad for x, grad in zip(tensors, grads, strict=False)]
    return (*present, *[None] * (2 + len(ctx.options)))  # type: ignore[attr-defined]


def _refuse_second_derivative(ctx: object, *grads: object) -> tuple:
    raise RuntimeError(
        'second derivatives are not implemented by this backend: pass backend="reference", '
        "which differentiates any number of times"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse_second_derivative)
