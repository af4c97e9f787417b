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
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v))
        # Keys and values are addressed alike.
        if self.k.stride() != self.v.stride():
            self.k, self.v = self.k.contiguous(), self.v.contiguous()
        self.heads, self.dims = padded(self.num_heads), padded(self.head_width)
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
        bias, strides = self.q, (0, 0, 0, 0)
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
            arguments |= {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_token": x.stride(2)}
        arguments |= {
            "first_batch": self.num_queries * (self.first_key.shape[0] > 1),
            "last_batch": self.num_queries * (self.last_key.shape[0] > 1),
            "bias_batch": strides[0], "bias_head": strides[1], "bias_row": strides[2], "bias_step": strides[3],
            "table_plane": 0 if self.hidden is None else self.hidden.shape[1] * self.width,
            "num_queries": self.num_queries, "offset": self.offset,
            "scale": self.scale, "slope": self.slope,
            "H": self.num_heads, "G": self.num_groups, "D": self.head_width,
            "HEADS": self.heads, "DIMS": self.dims, "PART": min(self.dims, PART), "WIDTH": self.width,
            "KERNEL": self.kernel_size, "LEFT": self.left, "BLOCK_Q": BLOCK_Q, "STREAMS": STREAMS,
            "CAUSAL": self.causal, "CONV": self.w1 is not None, "BIAS": self.bias,
            "TABLE": self.hidden is not None, "RESIDUAL_BIAS": self.residual_bias, "PRECISION": _precision(),
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
    kernel[grid](**arguments, **options)


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
    _launch(forward_kernel, grid, call.arguments() | {"out": out, "lse": lse}, num_warps=8, num_stages=2)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
