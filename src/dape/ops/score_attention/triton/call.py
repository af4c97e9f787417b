"""One call of the Triton backend: kernel arguments and chunks of query rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.op import Arguments
from dape.ops.score_attention.triton.launch import interpreting
from dape.ops.score_attention.types import Visible

# Share of a GPU's memory for the images of a pass, freed after it.
SCRATCH = 1 / 32
# Rows of a block in an image, and keys of a tile.
BLOCK_R, BLOCK_K = 64, 64
# Rows at a time where weights and their gradients are in registers together.
ROWS = 32
# Blocks on a multiprocessor at a time, for most kernels.
RESIDENT = 4


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


def head_part(head_dim: int) -> int:
    """Number of a head's features that the kernels process at a time."""
    widths = [64, 32, 16] if head_dim % 128 else [128]
    return next((part for part in widths if -(-head_dim // part) * part <= 1.1 * head_dim), 16)


def blank_memory(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory: the kernels write every number that is read later."""
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class StageTensors:
    """One stage: weight [out, in, k], offset [out] or None, and the slope of the activation after it (1: none)."""

    weight: Tensor
    offset: Tensor | None
    left: int
    slope: float
    # Kernel arguments derived from them, computed once for all chunks.
    made: dict[tuple, Tensor] = field(default_factory=dict, compare=False)

    @property
    def num_out(self) -> int:
        return self.weight.shape[0]

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]

    @property
    def kernel_size(self) -> int:
        return self.weight.shape[2]

    @property
    def right(self) -> int:
        return self.kernel_size - 1 - self.left

    def taps(self, dtype: torch.dtype) -> Tensor:
        """[k, in, out], padded."""
        if ("taps", dtype) not in self.made:
            weight = self.weight.permute(2, 1, 0).to(dtype)
            self.made["taps", dtype] = pad(weight, padded(self.num_in), padded(self.num_out))
        return self.made["taps", dtype]

    def turned(self, dtype: torch.dtype) -> Tensor:
        """Taps of the transposed stage, from gradients of the result to those of the image, [k, out, in], padded."""
        if ("turned", dtype) not in self.made:
            weight = self.weight.permute(2, 0, 1).flip(0).to(dtype)
            self.made["turned", dtype] = pad(weight, padded(self.num_out), padded(self.num_in))
        return self.made["turned", dtype]

    def offsets(self) -> Tensor:
        """[out] in float32, padded."""
        if ("offsets",) not in self.made:
            offset = self.weight.new_zeros(self.num_out) if self.offset is None else self.offset
            self.made["offsets",] = pad(offset.float(), padded(self.num_out))
        return self.made["offsets",]


@dataclass(frozen=True)
class Chain:
    """Consecutive stages; held: columns past the visible ones in the image before each stage, and in the last image."""

    stages: list[StageTensors]
    held: list[int]

    @staticmethod
    def of(arguments: Arguments, side: str) -> Chain:
        """The stages before ("pre") or after ("post") the softmax."""
        stages = [
            StageTensors(
                arguments[f"{side}.{n}.weight"], arguments.get(f"{side}.{n}.offset"), left, float(slope)
            )
            for n, (left, slope) in enumerate(arguments.plan[side])
        ]  # fmt: skip
        # Reach of the later stages; without causality images end with the visible keys.
        rights = [stage.right if arguments.plan["causal"] else 0 for stage in stages]
        return Chain(stages, [0, *(sum(rights[s:]) for s in range(1, len(rights))), 0])

    def __bool__(self) -> bool:
        return bool(self.stages)

    @property
    def widths(self) -> list[int]:
        """Channels of the image before each stage and after the last."""
        return [self.stages[0].num_in, *(stage.num_out for stage in self.stages)] if self.stages else []


class Call:
    """A call, or the part of it that belongs to some of its batch entries.

    Optional tensors: values, bias by distance [H, distances] from `lowest` on; dense [1 or B, H, Tq, Tk]; row and
    column, the parts of a separable bias, [1 or B, H, Tq] and [1 or B, H, Tk]; table, the first stage of a bias by
    distance, [planes, distances, W] (tables.py), without which a bias is further channels of the first image; factor of
    the logits [1 or B, H, Tq]; sink [H]. residual: which of "scores" and "bias" are added to the output of the stages.
    whole: only causality hides keys.
    """

    def __init__(self, arguments: Arguments, whole: Call | None = None) -> None:
        """whole: the call that this one is a part of."""
        plan, get = arguments.plan, arguments.get
        self.given = arguments
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
        self.values, self.dense, self.table, self.sink = map(get, ("values", "dense", "table", "sink"))
        self.dense = None if self.dense is None else unit_stride(self.dense)
        # Addressed by batch entry; broadcasting one is cheap.
        self.row, self.column = (
            None if x is None else x.expand(self.batch, -1, -1).contiguous()
            for x in (get("row"), get("column"))
        )
        factor = get("factor")
        self.factor = None if factor is None else factor.float().contiguous()
        self.whole = get("first") is None and get("last") is None
        # Kernel arguments derived from the tensors, computed once for all chunks and batch entries.
        self.made: dict[str, Any] = {} if whole is None else whole.made
        if whole is None:
            self.pre, self.post = Chain.of(arguments, "pre"), Chain.of(arguments, "post")
            limits = Visible(get("first"), get("last")).bounds(
                self.num_queries, self.num_keys, causal=self.causal, device=self.device
            )
            entries = max(x.shape[0] for x in limits)
            self.first, self.last = (
                x.clamp(-1, self.num_keys).to(torch.int32).expand(entries, -1).contiguous() for x in limits
            )
        else:
            self.pre, self.post, self.whole = whole.pre, whole.post, whole.whole
            self.first, self.last = arguments["first"], arguments["last"]
        self.part = head_part(self.head_dim)
        self.multiprocessors, memory = card(self.device)
        # Addresses inside of an image have 32 bits.
        self.scratch = min(int(memory * SCRATCH), 2**31)
        self.arguments = self._arguments()

    @property
    def bias_in_image(self) -> bool:
        """Whether the bias goes through the first stage, as channels of the first image."""
        return bool(self.pre) and self.pre.stages[0].num_in > self.num_heads

    def batches(self, bytes_per_pair: int) -> Iterator[tuple[slice, Call]]:
        """Parts of the call with as many batch entries as the scratch has room for."""
        pairs = -(-self.num_queries // 16) * 16 * self.num_keys
        size = max(1, min(self.batch, self.scratch // max(1, bytes_per_pair * pairs)))
        for start in range(0, self.batch, size):
            part = slice(start, start + size)
            yield part, self if size >= self.batch else self._some(part)

    def _some(self, part: slice) -> Call:
        own = {"q", "k", "v", "dense", "row", "column", "factor", "first", "last"}
        tensors = self.given.tensors | {"first": self.first, "last": self.last}
        tensors = {n: x[part] if n in own and x.shape[0] > 1 else x for n, x in tensors.items()}
        return Call(Arguments(tensors, self.given.plan, self.lowest), self)

    def chunks(self, bytes_per_pair: int) -> Iterator[Chunk]:
        """Consecutive query rows whose images fit into the scratch, in blocks, from the last on."""
        stop = self.num_queries
        while stop > 0:
            columns = stop + self.offset if self.causal else self.num_keys
            rows = min(stop, max(16, self.scratch // max(1, bytes_per_pair * columns * self.batch)))
            block = next(
                size for size in (BLOCK_R, 32, 16) if size <= max(16, rows if rows < stop else padded(rows))
            )
            start = max(0, -(-(stop - max(block, rows)) // block) * block)
            yield Chunk(self, start, stop, block)
            stop = start

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Result of `make`, computed once for all chunks and batch entries."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def _arguments(self) -> dict[str, Any]:
        """Arguments of kernels that read q, k, v and the bias."""
        bias, kind = self.q, "none"
        strides: tuple[int, ...] = (0, 0, 0)
        if self.values is not None:
            kind, values = "distance", self.once("values", self.values.float().contiguous)
            # A view that starts at query 0 and key 0.
            bias, strides = values.view(-1)[self.offset - self.lowest :], (0, values.shape[1], 0)
        elif self.dense is not None:
            bias, kind = self.dense, "dense"
            strides = (bias.stride(0) if bias.shape[0] > 1 else 0, *bias.stride()[1:3])
        elif self.row is not None:
            bias, kind, strides = self.row, "separable", (self.row.stride(0), self.num_queries, 0)
        column, factor, sink = (self.q if x is None else x for x in (self.column, self.factor, self.sink))
        return {
            "q": self.q, "k": self.k, "v": self.v, "first": self.first, "last": self.last,
            "bias": bias, "column_bias": column, "BIAS": kind, "bias_batch": strides[0], "bias_head": strides[1],
            "bias_row": strides[2], "factor": factor, "FACTOR": self.factor is not None, "sink": sink,
            "factor_step": factor.stride(0) if self.factor is not None and factor.shape[0] > 1 else 0,
            **strides_of("q", self.q), **strides_of("k", self.k), "WHOLE": self.whole,
            "bounds_step": self.num_queries if self.first.shape[0] > 1 else 0,
            "num_queries": self.num_queries, "num_keys": self.num_keys, "offset": self.offset,
            "scale": self.scale, "H": self.num_heads, "G": self.num_groups, "D": self.head_dim,
            "PART": self.part, "PARTS": -(-self.head_dim // self.part), "CAUSAL": self.causal,
            "PRECISION": precision(), "BLOCK_K": BLOCK_K,
        }  # fmt: skip


@dataclass
class Chunk:
    """The query rows start … stop − 1 of a call, and their images [B, channels, columns, size], in blocks of rows."""

    call: Call
    start: int
    stop: int
    block: int

    def __post_init__(self) -> None:
        call = self.call
        held = max(*call.pre.held, *call.post.held)
        self.columns = self.stop + call.offset + held if call.causal else call.num_keys
        self.blocks = -(-(self.stop - self.start) // self.block)
        self.size = self.blocks * self.block
        # Columns of a program that walks: enough programs to fill the GPU, but few halos.
        seen = self.columns - call.causal * (self.stop - self.start) // 2
        share = call.batch * self.blocks * seen // (RESIDENT * call.multiprocessors)
        self.walk = max(8, min(128, share))
        self.walks = -(-self.columns // self.walk)
        self.arguments = call.arguments | {
            "row_start": self.start, "row_stop": self.stop, "num_rows": self.size, "columns": self.columns,
            "walk": self.walk, "BLOCK_R": self.block,
        }  # fmt: skip

    def image(self, channels: int, dtype: torch.dtype) -> Tensor:
        call = self.call
        return blank_memory(call.batch, channels, self.columns, self.size, dtype=dtype, device=call.device)


def unit_stride(x: Tensor) -> Tensor:
    """x with neighbours in its last dimension next to each other in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(name: str, x: Tensor) -> dict[str, int]:
    """Strides of x [B, H, T, D]."""
    return {f"{name}_batch": x.stride(0), f"{name}_head": x.stride(1), f"{name}_token": x.stride(2)}


def pad(x: Tensor, *sizes: int) -> Tensor:
    """x with its last dimensions padded with zeros to `sizes`, contiguous."""
    pads: list[int] = []
    for size, have in zip(reversed(sizes), reversed(x.shape), strict=False):
        pads += [0, size - have]
    return F.pad(x, pads).contiguous()
