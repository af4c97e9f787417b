"""The public function: checks its input, brings the bias into a backend's form, chooses the backend."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dape.ops.score_attention import cpu, reference, sdpa, tiled, triton
from dape.ops.score_attention.library import unsupported_transform
from dape.ops.score_attention.types import (
    EVERYTHING,
    Bias,
    ConvWeights,
    DistanceBias,
    Problem,
    TileBias,
    Visible,
)

# In order of speed, for most calls. A backend is a module with `attend(problem)` and `unsupported(problem)`, which
# returns None or the sentence that says why it cannot run this call. Importing one must be quick:
# what it needs beyond torch, it imports when it runs.
BACKENDS: dict[str, ModuleType] = {
    "sdpa": sdpa,
    "triton": triton,
    "cpu": cpu,
    "tiled": tiled,
    "reference": reference,
}

# From so many multiplications of plain attention (B · H · Tq · Tk · D) on, the C++ kernel, which reads no mask and
# leaves out what no query sees, is faster than PyTorch's own; before, what a call costs by itself decides.
LARGE_PLAIN = 4 * 1024 * 1024

# Those that run any stack of kq×k convolutions; the others run the paper's two of 1×k.
ANY_STACK = ("tiled", "reference")

# Those whose derivative is written by hand, for `backward` alone.
BACKWARD_ONLY = ("triton", "cpu", "tiled")

# A tile bias is evaluated for as many query rows at a time as fit in this many numbers.
TILE_NUMBERS = 4 * 1024 * 1024


@runtime_checkable
class HasConvWeights(Protocol):
    """A module, such as ScoreConv, that hands out its weights."""

    def weights(self) -> ConvWeights: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ConvWeights | HasConvWeights | None,
    *,
    bias: Bias = None,
    causal: bool = True,
    visible: Visible | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention output [B, H, Tq, D], its scores refined by a convolution over heads and neighbouring keys.

    q: [B, H, Tq, D]; k, v: [B, G, Tk, D], where G divides H (query head h reads head h · G // H).
    conv:    a ScoreConv, its ConvWeights, or None for plain attention (with whatever bias).
    bias:    None, a tensor [1 or B, H, Tq, Tk], a DistanceBias, or a TileBias.
    causal:  the last query stands at the last key and nobody sees ahead; False: everybody sees everything.
    visible: further limits, an interval of keys for each query (padding, windows, packed documents).
    scale:   of the dot products, 1/√D by default, applied before the convolution.
    dropout: probability, on the softmax weights.
    backend: "auto" takes the fastest that can run; a name takes that one or raises with its reason.
    """
    weights = conv.weights() if isinstance(conv, HasConvWeights) else conv
    visible = EVERYTHING if visible is None else visible
    if q.dim() == 4 and q.shape[3] == 0:
        raise ValueError("q has head width 0: a dot product needs at least one number a head")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    _check(q, k, v, weights, bias, visible, causal=causal, scale=scale, dropout=dropout, backend=backend)
    if isinstance(bias, TileBias) and (weights is None or weights.is_pair):
        return _attend_by_tiles(q, k, v, weights, bias, visible, causal, scale, dropout, backend)
    problem = Problem(q, k, v, weights, bias, visible, causal, scale, dropout)
    if q.shape[2] == 0:
        return q.clone()
    if q.numel() == 0:
        return reference.attend(problem)
    return choose(problem, backend).attend(problem)


def choose(problem: Problem, backend: str = "auto") -> ModuleType:
    """The backend module for a call: the one named, or the fastest that can run."""
    names = _by_speed(problem) if backend == "auto" else [backend]
    reasons = []
    for name in names:
        module = BACKENDS[name]
        reason = module.unsupported(problem) or _unsupported_stack(name, problem.conv)
        if reason is None and name in BACKWARD_ONLY:
            reason = unsupported_transform(problem)
        if reason is None:
            return module
        reasons.append(f'backend="{name}" cannot run this call: {reason}')
    raise ValueError("; ".join(reasons))


def _by_speed(problem: Problem) -> list[str]:
    """All backends, the fastest for this call first."""
    if math.prod(problem.sizes) < LARGE_PLAIN:
        return list(BACKENDS)
    return ["cpu", *(name for name in BACKENDS if name != "cpu")]


def _unsupported_stack(name: str, conv: ConvWeights | None) -> str | None:
    if conv is None or name in ANY_STACK or conv.is_pair:
        return None
    return (
        f"it runs two convolutions of 1×k, not {conv.depth} of {conv.query_kernel_size}×{conv.kernel_size}; "
        f"{' and '.join(ANY_STACK)} do"
    )


def _attend_by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ConvWeights | None,
    bias: TileBias,
    visible: Visible,
    causal: bool,
    scale: float,
    dropout: float,
    backend: str,
) -> Tensor:
    """The same attention, a tile of queries at a time, so that the bias never exists as a whole."""
    num_heads, num_queries, num_keys = q.shape[1], q.shape[2], k.shape[2]
    rows_per_tile = max(1, TILE_NUMBERS // max(1, bias.batch * num_heads * num_keys))
    first, last = visible.bounds(num_queries, num_keys, causal=causal, device=q.device)
    reads_ahead = not causal or (conv is not None and conv.leak_future)

    def attend_rows(q_tile: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        rows = slice(start, start + q_tile.shape[2])
        # Rows of a causal tile need the keys up to the tile's last row only.
        stop = num_keys if reads_ahead else rows.stop + num_keys - num_queries
        problem = Problem(
            q_tile,
            k[:, :, :stop],
            v[:, :, :stop],
            conv,
            bias.checked(rows, stop, num_heads),
            Visible(first[:, rows], last[:, rows]),
            causal,
            scale,
            dropout,
        )
        return choose(problem, backend).attend(problem)

    if rows_per_tile >= num_queries:
        return attend_rows(q, k, v, 0)
    starts = range(0, num_queries, rows_per_tile)
    tiles = [q[:, :, start : start + rows_per_tile] for start in starts]
    if torch.is_grad_enabled():
        # Recomputing a tile in the backward pass is what keeps the memory linear in T.
        outputs = [
            checkpoint(attend_rows, tile, k, v, start, use_reentrant=False)
            for tile, start in zip(tiles, starts, strict=True)
        ]
    else:
        outputs = [attend_rows(tile, k, v, start) for tile, start in zip(tiles, starts, strict=True)]
    return torch.cat(outputs, dim=2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    conv: ConvWeights | None,
    bias: Bias,
    visible: Visible,
    *,
    causal: bool,
    scale: float,
    dropout: float,
    backend: str,
) -> None:
    _check_qkv(q, k, v, causal=causal)
    batch, num_queries, num_keys = q.shape[0], q.shape[2], k.shape[2]
    _check_bias(bias, q, num_keys, causal=causal)
    if conv is not None:
        _check_conv(conv, q, num_keys, has_bias=bias is not None)
    if not isinstance(visible, Visible):
        raise TypeError(
            f"visible is a {type(visible).__name__}, expected a dape.Visible or None; "
            f"dape.Visible.from_padding(mask) makes one of a padding mask [batch, keys]"
        )
    for name, bound in (("first", visible.first), ("last", visible.last)):
        if bound is None:
            continue
        if bound.is_floating_point() or bound.dtype == torch.bool:
            raise TypeError(f"visible.{name} holds key indices (integers), got {bound.dtype}")
        if bound.dim() != 2 or bound.shape[0] not in (1, batch) or bound.shape[1] not in (1, num_queries):
            raise ValueError(
                f"visible.{name} has shape {tuple(bound.shape)}, expected [1 or {batch}, 1 or {num_queries}]"
            )
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} is not finite")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} is not a probability in [0, 1)")
    check_backend(backend)


def check_backend(name: str) -> None:
    """Raise if there is no backend of that name, whatever this machine can run."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f'unknown backend "{name}": choose "auto" or one of {", ".join(BACKENDS)}')


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected [batch, heads, tokens, head width]"
            )
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}, expected a floating point dtype")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v have different dtypes: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected the same")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch size {q.shape[0]} and k {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head width {q.shape[3]} and k {k.shape[3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key/value heads do not divide {q.shape[1]} query heads")
    if k.shape[2] == 0:
        raise ValueError("there are no keys to attend to: k and v have length 0")
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(
            f"causal attention needs a key for every query, got {q.shape[2]} queries and {k.shape[2]} keys"
        )


def _check_bias(bias: Bias, q: Tensor, num_keys: int, *, causal: bool) -> None:
    batch, num_heads, num_queries, _ = q.shape
    allowed = {q.dtype, torch.promote_types(q.dtype, torch.float32)}
    if isinstance(bias, Tensor):
        _check_companion("bias", bias, q, allowed)
        if (
            bias.dim() != 4
            or bias.shape[0] not in (1, batch)
            or bias.shape[1:] != (num_heads, num_queries, num_keys)
        ):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, expected [1 or {batch}, {num_heads}, {num_queries}, {num_keys}]"
            )
    elif isinstance(bias, DistanceBias):
        _check_companion("bias.values", bias.values, q, allowed)
        if bias.values.dim() != 2 or bias.values.shape[0] != num_heads:
            raise ValueError(
                f"bias.values has shape {tuple(bias.values.shape)}, expected [{num_heads} heads, distances]"
            )
        lowest, highest = (0 if causal else 1 - num_queries), num_keys - 1
        if bias.lowest > lowest or bias.lowest + bias.values.shape[1] - 1 < highest:
            raise ValueError(
                f"the bias covers distances {bias.lowest} to {bias.lowest + bias.values.shape[1] - 1}, "
                f"but the tokens are {lowest} to {highest} apart"
            )
    elif isinstance(bias, TileBias):
        if bias.batch not in (1, batch):
            raise ValueError(f"the tile bias says batch={bias.batch}, expected 1 or {batch}")
    elif bias is not None:
        raise TypeError(
            f"bias is a {type(bias).__name__}, expected None, a tensor, a DistanceBias or a TileBias"
        )


def _check_conv(conv: ConvWeights, q: Tensor, num_keys: int, *, has_bias: bool) -> None:
    if not isinstance(conv, ConvWeights):
        raise TypeError(f"conv is a {type(conv).__name__}, expected a ScoreConv, ConvWeights or None")
    num_heads, channels = q.shape[1], conv.expand_weight.shape[1]
    if conv.project_weight.shape[0] != num_heads:
        raise ValueError(
            f"the convolution gives scores of {conv.project_weight.shape[0]} heads, but q has {num_heads}: "
            f"build it with num_heads={num_heads}"
        )
    if has_bias and channels == num_heads:
        raise ValueError(
            f"the convolution reads {channels} channels, the scores of {num_heads} heads alone, but there is a "
            f"bias: build it with bias_channels=True"
        )
    if not has_bias and channels == 2 * num_heads:
        raise ValueError(
            f"the convolution reads {channels} channels, scores and bias of {num_heads} heads, but bias=None: "
            f"build it with bias_channels=False"
        )
    allowed = {q.dtype, torch.promote_types(q.dtype, torch.float32)}
    width, kernel = conv.width, (conv.query_kernel_size, conv.kernel_size)
    names = ["expand", *["middle"] * len(conv.middle), "project"]
    inputs = num_heads * (2 if has_bias else 1)
    for name, (weight, offset) in zip(names, conv.layers, strict=True):
        outputs = num_heads if name == "project" else width
        expected = {f"conv.{name}_weight": (outputs, inputs, *kernel), f"conv.{name}_bias": (outputs,)}
        for (called, shape), tensor in zip(expected.items(), (weight, offset), strict=True):
            _check_companion(called, tensor, q, allowed)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{called} has shape {tuple(tensor.shape)}, expected {shape}")
        inputs = width
    if conv.earlier_rows and q.shape[2] > num_keys:
        raise ValueError(
            f"a kernel over {conv.query_kernel_size} queries needs a key for every query, got {q.shape[2]} queries "
            f"and {num_keys} keys"
        )
    if not 0 <= conv.left < conv.kernel_size:
        raise ValueError(f"conv.left={conv.left} is outside the kernel of size {conv.kernel_size}")
    if conv.negative_slope < 0:
        raise ValueError(f"conv.negative_slope={conv.negative_slope} is negative")
    if conv.residual not in ("scores+bias", "scores"):
        raise ValueError(f'conv.residual="{conv.residual}", expected "scores+bias" or "scores"')


def _check_companion(name: str, tensor: Tensor, q: Tensor, allowed: set[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        expected = " or ".join(sorted(str(dtype) for dtype in allowed))
        raise TypeError(f"{name} has dtype {tensor.dtype} beside q of {q.dtype}, expected {expected}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
