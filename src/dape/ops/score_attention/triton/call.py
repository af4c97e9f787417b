"""One call of the Triton backend: kernel arguments and chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.types import Visible

# Bytes of a chunk's images: for small calls what fits into the L2 cache of a large GPU; for calls with more numbers in
# k (for all heads) more, because launching kernels would take longer than running them. In the forward pass, rows over
# so many keys that a block of them is larger take a smaller block, or the third number.
SCRATCH, LARGE_SCRATCH, MOST_SCRATCH = 40 * 2**20, 96 * 2**20, 192 * 2**20
SMALL_CALL = 3 * 2**20
# Minimum rows of a chunk of the backward pass: with fewer, the keys are split into segments.
CHUNK_ROWS = 128
# Rows of a block in an image, and keys of a tile.
BLOCK_R, BLOCK_K = 64, 64
# Rows at a time where weights and their gradients are in registers together.
ROWS = 32
# Programs that fill a GPU: two for each of an A100's multiprocessors.
PROGRAMS = 216


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def precision() -> str:
    """Precision of float32 products: three passes over tensor cores unless PyTorch's setting allows one."""
    if interpreting():
        return "interpreted"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def padded(size: int) -> int:
    """The smallest power of two, at least 16, that is not below `size`."""
    return max(16, 1 << (size - 1).bit_length())


def head_part(head_width: int) -> int:
    """Number of a head's features that the kernels process at a time."""
    widths = [64, 32, 16] if head_width % 128 else [128]
    return next((part for part in widths if -(-head_width // part) * part <= 1.1 * head_width), 16)


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
    def of(stages: list[StageTensors], *, causal: bool) -> Chain:
        # Reach of the later stages; without causality images end with the visible keys.
        rights = [stage.right if causal else 0 for stage in stages]
        return Chain(stages, [0, *(sum(rights[s:]) for s in range(1, len(rights))), 0])

    def __bool__(self) -> bool:
        return bool(self.stages)

    @property
    def widths(self) -> list[int]:
        """Channels of the image before each stage and after the last."""
        return [self.stages[0].num_in, *(stage.num_out for stage in self.stages)] if self.stages else []


@dataclass
class Call:
    """A call, or the part of it that belongs to some of its batch entries.

    values: bias by distance [H, distances] from `lowest` on; dense: [1 or B, H, Tq, Tk]; row, column: the parts of a
    separable bias, [1 or B, H, Tq] and [1 or B, H, Tk]; table: first stage of a bias by distance,
    [planes, distances, W] (tables.py). Without a table, a bias is further channels of the first image.
    residual: which of "scores" and "bias" are added to the output of the stages. factor: of the logits,
    [1 or B, H, Tq]; sink: [H]. whole: only causality hides keys. scratch: bytes for images, decided by the whole call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    values: Tensor | None
    dense: Tensor | None
    row: Tensor | None
    column: Tensor | None
    table: Tensor | None
    first: Tensor
    last: Tensor
    pre: Chain
    post: Chain
    lowest: int
    causal: bool
    scale: float
    residual: tuple[str, ...]
    factor: Tensor | None = None
    sink: Tensor | None = None
    whole: bool = False
    scratch: int = 0
    # Kernel arguments derived from the tensors, computed once for all chunks and batch entries.
    made: dict[str, Any] = field(default_factory=dict)
    grad_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.q, self.k, self.v = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v)
        )
        # Keys and values are addressed alike.
        if self.k.stride() != self.v.stride():
            self.k, self.v = self.k.contiguous(), self.v.contiguous()
        self.batch, self.num_heads, self.num_queries, self.head_width = self.q.shape
        self.num_groups, self.num_keys = self.k.shape[1], self.k.shape[2]
        self.offset = self.num_keys - self.num_queries
        self.device, self.grad_dtype = self.q.device, self.q.dtype
        # Scores have more digits in float16 than in bfloat16, and are far from its range.
        self.dtype = torch.float32 if self.q.dtype == torch.float32 else torch.float16
        if self.factor is not None:
            self.factor = self.factor.float().contiguous()
        if self.row is not None and self.column is not None:
            # Addressed by batch entry; broadcasting one is cheap.
            self.row, self.column = (
                x.expand(self.batch, -1, -1).contiguous()
                if x.shape[0] > 1 or self.batch > 1
                else x.contiguous()
                for x in (self.row, self.column)
            )
        self.part = head_part(self.head_width)
        small = self.batch * self.num_keys * self.num_heads * self.head_width <= SMALL_CALL
        self.scratch = self.scratch or (SCRATCH if small else LARGE_SCRATCH)
        self._arguments: dict[str, Any] | None = None

    @property
    def channels(self) -> int:
        """Channels of the first image: the scores, and the bias if it goes through the first stage."""
        return self.pre.stages[0].num_in

    @property
    def bias_in_image(self) -> bool:
        return bool(self.pre) and self.channels > self.num_heads

    def batches(self, bytes_per_pair: int) -> Iterator[tuple[slice, Call]]:
        """Parts of the call with as few batch entries as make full chunks."""
        pairs = self.scratch // bytes_per_pair
        size = max(1, pairs // (256 * self.num_keys))
        for start in range(0, self.batch, size):
            part = slice(start, min(start + size, self.batch))
            yield part, self if size >= self.batch else self._some(part)

    def _some(self, part: slice) -> Call:
        dense = self.dense if self.dense is None or self.dense.shape[0] == 1 else self.dense[part]
        first, last = (x if x.shape[0] == 1 else x[part] for x in (self.first, self.last))
        row, column = (None if x is None else x[part] for x in (self.row, self.column))
        factor = self.factor if self.factor is None or self.factor.shape[0] == 1 else self.factor[part]
        return replace(
            self, q=self.q[part], k=self.k[part], v=self.v[part], dense=dense, row=row, column=column, first=first,
            last=last, factor=factor,
        )  # fmt: skip

    def chunks(self, bytes_per_pair: int) -> Iterator[Chunk]:
        """Consecutive query rows whose images, over all keys, fit into the scratch, from the last on."""
        return self._chunks(Segment(0, NO_LIMIT, 0), bytes_per_pair)

    def segments(self, bytes_per_pair: int) -> Iterator[tuple[Segment, list[Chunk]]]:
        """Segments of the keys, and for each the chunks of rows that see some of them.

        With the log-sum-exp known, a pass needs no complete rows. Stages after the softmax need sums over a row.
        """
        pairs = max(1, self.scratch // (bytes_per_pair * self.batch))
        if self.post or self.num_keys * CHUNK_ROWS <= pairs:
            yield (whole := Segment(0, NO_LIMIT, 0)), list(self._chunks(whole, bytes_per_pair))
            return
        # Range on which a key's gradient depends: the reach of the stages, forward and backward.
        halo = sum(stage.kernel_size - 1 for stage in self.pre.stages)
        most = max(1, (pairs // (2 * CHUNK_ROWS) - 2 * halo) // BLOCK_K)
        count = -(-self.num_keys // (most * BLOCK_K))
        size = -(-self.num_keys // (count * BLOCK_K)) * BLOCK_K
        for start in range(0, self.num_keys, size):
            stop = start + size if start + size < self.num_keys else NO_LIMIT
            segment = Segment(start, stop, halo)
            yield segment, list(self._chunks(segment, bytes_per_pair))

    def _chunks(self, segment: Segment, bytes_per_pair: int) -> Iterator[Chunk]:
        block = min(BLOCK_R, padded(self.num_queries))
        # Hidden maps go on past a row's last visible key.
        least = max(0, segment.start - self.offset - max(self.pre.held)) if self.causal else 0
        least = least // BLOCK_R * BLOCK_R
        stop = self.num_queries
        while stop > least:
            columns = stop + self.offset if self.causal else self.num_keys
            columns = min(columns, segment.stop + segment.halo) - max(0, segment.start - segment.halo)
            size = self._rows(columns * self.batch * bytes_per_pair)
            size = min(size, -(-(stop - least) // block) * block)
            # All but the first chunk start at a multiple of their blocks.
            start = -(-(stop - size) // BLOCK_R) * BLOCK_R if size >= BLOCK_R else stop - size
            start = max(least, start)
            yield Chunk(
                self, start, stop, -(-(stop - start) // block) * block if size >= block else size, segment
            )
            stop = start

    def _rows(self, bytes_per_row: int) -> int:
        """Rows of a chunk: whole blocks, or half and quarter blocks if one is too large."""
        if bytes_per_row <= 0:
            return -(-self.num_queries // BLOCK_R) * BLOCK_R
        if (rows := self.scratch // bytes_per_row) >= BLOCK_R:
            return rows // BLOCK_R * BLOCK_R
        most = MOST_SCRATCH // bytes_per_row
        return next(rows for rows in (BLOCK_R, 32, 16) if rows <= max(16, min(most, BLOCK_R)))

    def arguments(self) -> dict[str, Any]:
        """Arguments of kernels that read q, k, v and the bias, as a new dict."""
        if self._arguments is None:
            self._arguments = self._make_arguments()
        return dict(self._arguments)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Result of `make`, computed once for all chunks and batch entries."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def _make_arguments(self) -> dict[str, Any]:
        bias, kind = self.q, "none"
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if self.values is not None:
            kind = "strided"
            values = self.once("values", self.values.float().contiguous)
            # A view that starts at query 0 and key 0; distances grow with the query and fall with the key.
            bias, strides = values.view(-1)[self.offset - self.lowest :], (0, values.shape[1], 1, -1)
        elif self.dense is not None:
            bias, kind = self.dense, "strided"
            strides = (bias.stride(0) if bias.shape[0] > 1 else 0, *bias.stride()[1:])
        elif self.row is not None:
            bias, kind, strides = self.row, "separable", (self.row.stride(0), self.num_queries, 1, 0)
        column = self.q if self.column is None else self.column
        factor = self.q if self.factor is None else self.factor
        arguments: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "first": self.first}
        arguments |= {"last": self.last, "bias": bias, "column_bias": column, "BIAS": kind}
        arguments |= {"factor": factor, "FACTOR": self.factor is not None, "WHOLE": self.whole}
        arguments["factor_batch"] = factor.stride(0) if self.factor is not None and factor.shape[0] > 1 else 0
        for name, x in (("q", self.q), ("k", self.k)):
            arguments |= dict(
                zip((f"{name}_batch", f"{name}_head", f"{name}_token"), x.stride()[:3], strict=True)
            )
        arguments |= dict(zip(("bias_batch", "bias_head", "bias_row", "bias_key"), strides, strict=True))
        arguments |= {
            "bounds_batch": self.num_queries if self.first.shape[0] > 1 else 0,
            "num_queries": self.num_queries, "num_keys": self.num_keys, "offset": self.offset,
            "scale": self.scale, "H": self.num_heads, "G": self.num_groups, "D": self.head_width,
            "PART": self.part, "PARTS": -(-self.head_width // self.part), "CAUSAL": self.causal,
            "PRECISION": precision(), "BLOCK_K": BLOCK_K,
        }  # fmt: skip
        return arguments


NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Segment:
    """The keys start … stop − 1, to the last if there is no limit; halo: columns on each side that they depend on."""

    start: int
    stop: int
    halo: int


@dataclass
class Chunk:
    """The query rows start … stop − 1 of a call over a segment of the keys, and their images.

    An image is [B, channels, columns, size] and begins with column `left`, the segment's first less its halo; `right`
    is the column after its last.
    """

    call: Call
    start: int
    stop: int
    size: int
    segment: Segment

    def __post_init__(self) -> None:
        call, segment = self.call, self.segment
        held = max(*call.pre.held, *call.post.held)
        self.left = max(0, segment.start - segment.halo)
        columns = self.stop + call.offset + held if call.causal else call.num_keys
        self.right = max(self.left, min(columns, segment.stop + segment.halo))
        self.columns = self.right - self.left
        # Keys of its own that some row may see.
        self.own_stop = min(segment.stop, self.right)
        self.own_keys = max(0, min(self.own_stop, call.num_keys) - segment.start)
        self.block = min(BLOCK_R, self.size)
        self.blocks = self.size // self.block

    def image(self, channels: int, dtype: torch.dtype) -> Tensor:
        call = self.call
        return blank_memory(call.batch, channels, self.columns, self.size, dtype=dtype, device=call.device)

    def walk(self) -> int:
        """Number of columns per program: enough programs to fill the GPU, but few halos."""
        share = self.call.batch * self.blocks * self.columns // PROGRAMS
        return max(8, min(128, share))

    @property
    def walks(self) -> int:
        return -(-self.columns // self.walk())

    def arguments(self) -> dict[str, Any]:
        return {
            "row_start": self.start, "row_stop": self.stop, "num_rows": self.size, "left": self.left,
            "right": self.right, "own_start": self.segment.start, "own_stop": self.own_stop, "walk": self.walk(),
            "BLOCK_R": self.block,
        }  # fmt: skip


def bounds(first: Tensor | None, last: Tensor | None, num_queries: int, num_keys: int, causal: bool,
           device: torch.device) -> tuple[Tensor, Tensor]:  # fmt: skip
    """First and last visible key, [1 or B, Tq] each, of the same batch size."""
    limits = Visible(first, last).bounds(num_queries, num_keys, causal=causal, device=device)
    batch = max(x.shape[0] for x in limits)
    low, high = (x.clamp(-1, num_keys).to(torch.int32).expand(batch, -1).contiguous() for x in limits)
    return low, high


def pad(x: Tensor, *sizes: int) -> Tensor:
    """x with its last dimensions padded with zeros to `sizes`, contiguous."""
    pads: list[int] = []
    for size, have in zip(reversed(sizes), reversed(x.shape), strict=False):
        pads += [0, size - have]
    return F.pad(x, pads).contiguous()
