"""One call of the Triton backend: kernel arguments and chunks of query rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.op import Arguments
from dape.ops.score_attention.triton.launch import interpreting, run
from dape.ops.score_attention.types import Visible

# Share of a GPU's memory for the images of a pass, freed after it.
SCRATCH = 1 / 16
# Rows of a block in an image, and keys of a tile.
BLOCK_R, BLOCK_K = 64, 64
# Blocks on a multiprocessor at a time, for most kernels.
RESIDENT = 4
# Tensors that kernels declare and not every call has, and numbers and constants that go with their absence.
OPTIONAL = (
    "image", "column_bias", "factor", "sink", "table", "values", "offsets", "gate", "residual", "given", "grad_out",
    "weights", "grad_factor", "lse", "delta",
)  # fmt: skip
NEUTRAL = {
    "FACTOR": False, "SCORES": True, "IMAGE": False, "OFFSETS": False, "TABLE": False, "table_plane": 0,
    "table_lowest": 0, "PLANES": 0, "VALUES": False, "values_plane": 0, "values_lowest": 0, "REPEAT": 1,
    "RESIDUALS": 0, "slope": 1.0, "LINEAR": False,
}  # fmt: skip


@functools.cache
def card(device: torch.device) -> tuple[int, int]:
    """Multiprocessors and bytes of memory of a GPU; without one, those of an A100."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 108, 40 * 2**30
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.total_memory


def precision() -> str:
    """Precision of float32 products: three passes over tensor cores unless PyTorch's setting allows one."""
    if interpreting():
        return "interpreted"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded(size: int) -> int:
    """The smallest power of two, at least 16, that is not below `size`."""
    return max(16, 1 << (size - 1).bit_length())


def head_part(head_dim: int, *, exact: bool) -> int:
    """Number of a head's features that the kernels process at a time."""
    widths = [64, 32, 16] if head_dim % 128 or exact else [128]
    return next((part for part in widths if -(-head_dim // part) * part <= 1.1 * head_dim), 16)


def blank_memory(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory: the kernels write every number that is read later."""
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass
class StageTensors:
    """One stage: weight [out, in, k], offset [out] or None, and the slope of the activation after it (1: none)."""

    weight: Tensor
    offset: Tensor | None
    left: int
    slope: float
    # Of its image, and of gradients.
    dtype: torch.dtype
    grad_dtype: torch.dtype

    def __post_init__(self) -> None:
        self.num_out, self.num_in, self.kernel_size = self.weight.shape
        self.right = self.kernel_size - 1 - self.left

    @cached_property
    def taps(self) -> Tensor:
        """[k, in, out], padded."""
        return pad(self.weight.permute(2, 1, 0).to(self.dtype), padded(self.num_in), padded(self.num_out))

    @cached_property
    def turned(self) -> Tensor:
        """Taps of the transposed stage, from gradients of the result to those of the image, [k, out, in], padded."""
        weight = self.weight.permute(2, 0, 1).flip(0).to(self.grad_dtype)
        return pad(weight, padded(self.num_out), padded(self.num_in))

    @cached_property
    def offsets(self) -> Tensor:
        """[out] in float32, padded."""
        offset = self.weight.new_zeros(self.num_out) if self.offset is None else self.offset
        return pad(offset.float(), padded(self.num_out))


class Chain(list[StageTensors]):
    """The stages before ("pre") or after ("post") the softmax, and of the images before each and after the last:

    widths: their channels. held: their columns past the visible ones.
    """

    def __init__(self, call: Call, arguments: Arguments, side: str) -> None:
        for number, (left, slope) in enumerate(arguments.plan[side]):
            name = f"{side}.{number}"
            weight, offset = arguments[f"{name}.weight"], arguments.get(f"{name}.offset")
            self.append(StageTensors(weight, offset, left, float(slope), call.dtype, call.grad_dtype))
        self.widths = [self[0].num_in, *(stage.num_out for stage in self)] if self else []
        # Reach of the later stages; without causality images end with the visible keys.
        rights = [stage.right if call.causal else 0 for stage in self]
        self.held = [0, *(sum(rights[s:]) for s in range(1, len(rights))), 0]


class Call:
    """One call of the backend.

    Optional tensors: values, bias by distance [H, distances] from `lowest` on; dense [1 or B, H, Tq, Tk]; row and
    column, the parts of a separable bias, [1 or B, H, Tq] and [1 or B, H, Tk]; table, the first stage of a bias by
    distance, [planes, distances, W] (tables.py), without which a bias is further channels of the first image; factor of
    the logits [1 or B, H, Tq]; sink [H]. residual: which of "scores" and "bias" are added to the output of the stages.
    """

    def __init__(self, arguments: Arguments) -> None:
        plan, get = arguments.plan, arguments.get
        self.q, k, v = (unit_stride(arguments[name]) for name in "qkv")
        # Keys and values are addressed alike.
        self.k, self.v = (k, v) if k.stride() == v.stride() else (k.contiguous(), v.contiguous())
        self.batch, self.num_heads, self.num_queries, self.head_dim = self.q.shape
        self.num_groups, self.num_keys = k.shape[1], k.shape[2]
        self.offset, self.lowest = self.num_keys - self.num_queries, arguments.lowest
        self.causal, self.scale = plan["causal"], float(plan["scale"])
        self.residual = plan["residual"].split("+")
        self.device, self.grad_dtype = self.q.device, self.q.dtype
        # Scores have more digits in float16 than in bfloat16, and are far from its range.
        self.dtype = torch.float32 if self.q.dtype == torch.float32 else torch.float16
        self.exact = self.dtype == torch.float32
        # Sides of a tile in float32, whose operands fill registers and shared memory where heads are wide.
        self.long = max(16, min(64, 4096 // padded(self.head_dim)))
        self.short = max(16, self.long // 2)
        self.values, self.dense, self.row, self.column = map(get, ("values", "dense", "row", "column"))
        self.table, self.factor, self.sink = map(get, ("table", "factor", "sink"))
        self.pre, self.post = (Chain(self, arguments, side) for side in ("pre", "post"))
        chains = (("pre", self.pre), ("post", self.post))
        self.stages = {f"{side}.{n}": stage for side, chain in chains for n, stage in enumerate(chain)}
        # Whether the bias goes through the first stage, as channels of the first image.
        self.bias_in_image = bool(self.pre) and self.pre[0].num_in > self.num_heads
        # Whether the last stage adds the bias to its result: one by distance, used in a table.
        self.adds_values = self.table is not None and "bias" in self.residual
        limits = Visible(get("first"), get("last")).bounds(
            self.num_queries, self.num_keys, causal=self.causal, device=self.device
        )
        entries = max(x.shape[0] for x in limits)
        self.first, self.last = (
            x.clamp(-1, self.num_keys).to(torch.int32).expand(entries, -1).contiguous() for x in limits
        )
        self.multiprocessors, memory = card(self.device)
        # Addresses inside of an image have 32 bits.
        self.scratch = min(int(memory * SCRATCH), 3 * 2**30)
        part = head_part(self.head_dim, exact=self.exact)
        # The bias from query 0 on.
        kind, bias = "none", self.q
        if self.values is not None:
            kind, bias = "distance", self.values.float().contiguous()[None, :, self.offset - self.lowest :]
        elif self.row is not None:
            kind, bias = "separable", halves(self.row)
        elif self.dense is not None:
            kind, bias = "dense", unit_stride(self.dense)
        self.arguments: dict[str, Any] = {**dict.fromkeys(OPTIONAL, self.q), **NEUTRAL}
        self.arguments |= {
            "q": self.q, "k": self.k, "v": self.v, "first": self.first, "last": self.last, "bias": bias, "BIAS": kind,
            "CAUSAL": self.causal, "num_queries": self.num_queries, "num_keys": self.num_keys, "offset": self.offset, "scale": self.scale,
            "H": self.num_heads, "G": self.num_groups, "D": self.head_dim, "PART": part,
            "PARTS": -(-self.head_dim // part), "PRECISION": precision(), "BLOCK_K": BLOCK_K,
        }  # fmt: skip
        if self.column is not None:
            self.arguments["column_bias"] = halves(self.column)
        if self.factor is not None:
            self.arguments |= {"factor": self.factor.float().contiguous(), "FACTOR": True}
        if self.sink is not None:
            self.arguments["sink"] = self.sink

    @cached_property
    def first_table(self) -> dict[str, Any]:
        """The table that the first stage begins with, [planes, distances, width] padded."""
        if self.table is None:
            return {}
        one = self.pre[0]
        table = pad(self.table.to(self.dtype), self.table.shape[1], padded(one.num_out))
        own = {"table": table, "table_plane": table.stride(0), "table_lowest": -one.right}
        return own | {"TABLE": True, "PLANES": one.left}

    @cached_property
    def last_table(self) -> dict[str, Any]:
        """The bias by distance that the last stage begins with, and its offset, [distances, H], padded."""
        if not self.adds_values or self.values is None:
            return {}
        # A pair's second stage has an offset.
        values = self.values.T.float() + self.pre[-1].offsets[: self.num_heads]
        table = pad(values.to(self.dtype), len(values), padded(self.num_heads))
        return {"table": table, "table_plane": table.numel(), "table_lowest": self.lowest, "TABLE": True}

    def chunks(self, bytes_per_pair: int) -> Iterator[Chunk]:
        """Consecutive query rows whose images fit into the scratch, in blocks, from the last on."""
        stop = self.num_queries
        while stop > 0:
            columns = stop + self.offset if self.causal else self.num_keys
            rows = min(stop, max(16, self.scratch // max(1, bytes_per_pair * columns * self.batch)))
            most = max(16, rows if rows < stop else padded(rows))
            block = next(size for size in (BLOCK_R, 32, 16) if size <= most)
            start = max(0, -(-(stop - max(block, rows)) // block) * block)
            yield Chunk(self, start, stop, block)
            stop = start


class Chunk:
    """The query rows start … stop − 1 of a call, and their images [B, channels, columns, size], in blocks of rows."""

    def __init__(self, call: Call, start: int, stop: int, block: int) -> None:
        self.call, self.start, self.stop, self.block = call, start, stop, block
        held = max(*call.pre.held, *call.post.held)
        self.columns = stop + call.offset + held if call.causal else call.num_keys
        self.blocks = -(-(stop - start) // block)
        self.size = self.blocks * block
        # For stages over a block of rows.
        self.warps = max(1, block // (16 if call.exact else 32))
        # Columns of a program that walks: enough programs to fill the GPU, but few halos.
        seen = self.columns - call.causal * (stop - start) // 2
        share = call.batch * self.blocks * seen // (RESIDENT * call.multiprocessors)
        self.walk = max(8, min(128, share))
        self.walks = -(-self.columns // self.walk)
        self.arguments = call.arguments | {
            "row_start": start, "row_stop": stop, "num_rows": self.size, "columns": self.columns, "walk": self.walk,
            "BLOCK_R": block,
        }  # fmt: skip

    def image(self, channels: int, dtype: torch.dtype) -> Tensor:
        call = self.call
        return blank_memory(call.batch, channels, self.columns, self.size, dtype=dtype, device=call.device)

    def run(self, kernel: Any, programs: int, others: int, *variants: dict[str, Any], **own: Any) -> None:
        """Launch a kernel on a grid of programs × others × batch."""
        run(kernel, (programs, others, self.call.batch), self.arguments | own, *variants)


def halves(x: Tensor) -> Tensor:
    """Two float32 numbers for each of x, [..., 2], whose sum has the digits of float64."""
    exact = x.double()
    return torch.stack([exact.float(), (exact - exact.float()).float()], -1)


def unit_stride(x: Tensor) -> Tensor:
    """x with neighbours in its last dimension next to each other in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pad(x: Tensor, *sizes: int) -> Tensor:
    """x with its last dimensions padded with zeros to `sizes`, contiguous."""
    pads: list[int] = []
    for size, have in zip(reversed(sizes), reversed(x.shape), strict=False):
        pads += [0, size - have]
    return F.pad(x, pads).contiguous()
