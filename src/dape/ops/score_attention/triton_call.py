"""One call of the Triton backend: its arguments in the forms that the kernels want, and how kernels are started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.library import CallTensors
from dape.ops.score_attention.types import Visible

# Queries and key streams of a program: the smallest that tensor cores take.
BLOCK_Q = STREAMS = 16
# How much of the head width a program holds at a time.
PART = 32


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass
class Call(CallTensors):
    """The arguments of one call and the forms in which the kernels want them."""

    lowest: int
    causal: bool
    scale: float
    left: int
    slope: float
    residual_bias: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.q, self.k, self.v = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v)
        )
        # Keys and values are addressed alike.
        if self.k.stride() != self.v.stride():
            self.k, self.v = self.k.contiguous(), self.v.contiguous()
        self.heads = padded(self.num_heads)
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
            "w1": pad(w1[:, :, : self.num_heads], width, heads),
            "wb": pad(w1[:, :, self.num_heads :], width, heads),
            "w2": pad(self.w2.permute(2, 0, 1).to(dtype), heads, width),
            "b2": pad(self.b2.float(), heads),
            "b1": self.q,
            "table": self.q,
        }
        if self.b1 is not None:
            taps["b1"] = pad(self.b1.float(), width)
        if self.hidden is not None and self.edges is not None:
            planes = torch.cat([self.edges, self.hidden[None]]).transpose(1, 2)
            taps["table"] = pad(planes.to(dtype), planes.shape[1], width)
        return taps

    def variants(self) -> list[dict[str, Any]]:
        """Ways to walk along the keys, the one that keeps the most on the chip first.

        HOLD: the queries stay on the chip, or are loaded again at each step.
        """
        widest = min(PART, padded(self.head_width))
        small = self.heads * padded(self.head_width) * self.q.element_size() <= 2048
        found = []
        for hold, part, stages in ((True, widest, 2), (True, widest, 1), (False, 16, 1)):
            if (hold and not small) or (stages > 1 and self.dense is not None):
                continue
            # A whole number of parts that ends with the head width's last: nothing behind it may be read.
            dims = -(-self.head_width // part) * part
            found.append({"HOLD": hold, "PART": part, "DIMS": dims, "num_warps": 8, "num_stages": stages})
        return found

    def arguments(self) -> dict[str, Any]:
        """What every walk along the keys takes."""
        # The steps of the bias from one batch entry, head, query and key to the next.
        bias = self.q
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if self.values is not None:
            table = pad(self.values.T.float(), self.values.shape[1], self.heads)
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
            "HEADS": self.heads, "WIDTH": self.width,
            "KERNEL": self.kernel_size, "LEFT": self.left, "BLOCK_Q": BLOCK_Q, "STREAMS": STREAMS,
            "CAUSAL": self.causal, "CONV": self.w1 is not None, "BIAS": self.bias,
            "TABLE": self.hidden is not None, "RESIDUAL_BIAS": self.residual_bias, "PRECISION": precision(),
        }  # fmt: skip
        return arguments


def pad(x: Tensor, *sizes: int) -> Tensor:
    """x with its last dimensions padded with zeros to `sizes`, contiguous."""
    pads: list[int] = []
    for size, have in zip(reversed(sizes), reversed(x.shape), strict=False):
        pads += [0, size - have]
    return F.pad(x, pads).contiguous()


def precision() -> str:
    """How float32 products are made: three passes over tensor cores unless PyTorch's setting allows one."""
    if interpreting():
        return "interpreted"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def blank_memory(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory: the kernels write every number that is read later."""
    return torch.empty(shape, dtype=dtype, device=device)
