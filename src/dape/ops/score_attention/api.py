"""Public functions of the op: check the arguments, choose a backend, convert the bias to its form."""

from __future__ import annotations

import math
import os
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention import by_tiles, cpu, reference, sdpa, tiled, triton
from dape.ops.score_attention.fold import folded
from dape.ops.score_attention.op import differentiable, in_own_dtype
from dape.ops.score_attention.plans import PLANS, Signed, sign
from dape.ops.score_attention.program import PLAIN, ScoreProgram
from dape.ops.score_attention.types import (
    EVERYTHING,
    HIDING,
    Bias,
    DistanceBias,
    Problem,
    SeparableBias,
    TileBias,
    Visible,
)

# In order of speed. A backend is a module with `attend(problem)` and `unsupported(problem)`, which
# returns None or the reason, as a sentence, why it cannot run this call. Importing one must be quick: dependencies
# beyond torch are imported when it runs.
BACKENDS: dict[str, ModuleType] = {
    "cpu": cpu,
    "sdpa": sdpa,
    "triton": triton,
    "tiled": tiled,
    "reference": reference,
}

# Backends that "auto" does not choose: DAPE_DISABLE=triton, or several, separated by commas.
DISABLED = tuple(os.environ.get("DAPE_DISABLE", "").split(","))


@runtime_checkable
class HasProgram(Protocol):
    """A module with a score program, such as a ScoreProcessor."""

    def program(self) -> ScoreProgram: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    program: ScoreProgram | HasProgram | None = None,
    *,
    bias: Bias = None,
    causal: bool = True,
    visible: Visible | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention output [B, H, Tq, D], with a trainable bias and processed scores, in O(T) memory.

    q: [B, H, Tq, D]; k, v: [B, G, Tk, D], where G divides H (query head h reads head h · G // H). v may have another
             width; the output has it then, at the cost of the wider.
    program: processing of the scores: a ScoreProgram, a score processor such as ScoreConv, or None for softmax(S + B).
    bias:    None, a tensor [1 or B, H, Tq, Tk], a DistanceBias, a SeparableBias, or a TileBias; all have gradients.
    causal:  mask the future, the last query being at the last key; False: every query sees every key.
    visible: further limits, an interval of keys for each query (padding, windows, packed documents).
    scale:   of the dot products, 1/√D by default, applied before the program.
    dropout: probability, on the attention weights.
    backend: "auto" takes the fastest that can run; a name takes that one or raises with its reason.
    """
    program = program_of(program)
    signed = sign(q, k, v, program, bias, causal, visible, scale, dropout, backend)
    if signed is not None and (out := PLANS.run(signed)) is not None:
        return out
    if q.dim() == k.dim() == v.dim() == 4 and v.shape[3] != k.shape[3]:
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        options: dict[str, Any] = {"bias": bias, "causal": causal, "visible": visible, "scale": scale}
        q, wide, padded = _same_width(q, k, v)
        out = attention(q, wide, padded, program, dropout=dropout, backend=backend, **options)
        return out[..., : v.shape[3]]
    problem = make_problem(
        q, k, v, program, bias=bias, causal=causal, visible=visible, scale=scale, dropout=dropout
    )
    check_backend(backend)
    if q.numel() == 0:
        return q + 0 * sum(tensor.sum() for tensor in differentiable(problem))
    with in_own_dtype(q):
        return _attend(problem, backend, signed)


def attention_weights(
    q: Tensor,
    k: Tensor,
    program: ScoreProgram | HasProgram | None = None,
    *,
    bias: Bias = None,
    causal: bool = True,
    visible: Visible | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention weights [B, H, Tq, Tk] of `attention`, by the reference, for inspection: T×T memory."""
    problem = make_problem(q, k, k, program, bias=bias, causal=causal, visible=visible, scale=scale)
    with in_own_dtype(q):
        return reference.weights(problem).to(q.dtype)


def program_of(program: ScoreProgram | HasProgram | None) -> ScoreProgram:
    """The program itself, a processor's, or softmax(S + B) for None."""
    if type(program) is ScoreProgram:
        return program
    # Called for every decoded token: isinstance with a protocol takes longer than most checks.
    make = getattr(program, "program", None)
    found = PLAIN if program is None else make() if callable(make) else program
    if not isinstance(found, ScoreProgram):
        raise TypeError(
            f"program is a {type(found).__name__}, expected a ScoreProgram, a score processor such as ScoreConv, or None"
        )
    return found


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    program: ScoreProgram | HasProgram | None = None,
    *,
    bias: Bias = None,
    causal: bool = True,
    visible: Visible | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Problem:
    """Check the arguments of `attention`."""
    visible = EVERYTHING if visible is None else visible
    if q.dim() == 4 and q.shape[3] == 0:
        raise ValueError("head_dim must be at least 1, got 0")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    problem = Problem(q, k, v, program_of(program), bias, visible, causal, scale, dropout)
    _check(problem)
    return problem


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors zero-padded to one head_dim; zeros change neither dot products nor the values before them."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _attend(problem: Problem, backend: str, signed: Signed | None) -> Tensor:
    call = problem if backend == "reference" else folded(problem)
    bias = call.bias
    if isinstance(bias, (SeparableBias, TileBias)) and not _takes_bias(call, backend):
        tiles = bias.tiles(problem.compute_dtype) if isinstance(bias, SeparableBias) else bias
        return by_tiles.attend(call, tiles, lambda tile, _: choose(tile, backend).attend(tile))
    chosen = choose(call, backend)
    if signed is not None and call is problem:
        PLANS.add(signed, problem, chosen)
    return chosen.attend(call)


def _takes_bias(problem: Problem, backend: str) -> bool:
    """Whether a backend takes the call's bias in its own form; else it is passed as dense tiles."""
    # For programs that read other rows, or hidden keys, the backends themselves split into tiles.
    if problem.program.earlier_rows or problem.program.leak_future:
        return True
    # Dense tiles of plain attention go to PyTorch's own where that is faster.
    if backend == "auto" and problem.program.is_plain and isinstance(problem.bias, TileBias):
        return cpu.takes_curve(problem) and cpu.unsupported(problem) is None
    # The reference would build all of it.
    names = [name for name in BACKENDS if name != "reference"] if backend == "auto" else [backend]
    return any(_refusal(problem, name, auto=backend == "auto") is None for name in names)


def _refusal(problem: Problem, name: str, *, auto: bool) -> str | None:
    """Reason why a backend does not run a call: it cannot, or "auto" does not choose it."""
    if auto and name in DISABLED:
        return "DAPE_DISABLE names it"
    reason = BACKENDS[name].unsupported(problem)
    if reason is None and auto and name == "triton":
        reason = triton.unproven(problem)
    return reason


def choose(problem: Problem, backend: str = "auto") -> ModuleType:
    """The backend module for a call: the given one, or the fastest that can run."""
    names = list(BACKENDS) if backend == "auto" else [backend]
    reasons = []
    for name in names:
        reason = _refusal(problem, name, auto=backend == "auto")
        if reason is None:
            return BACKENDS[name]
        reasons.append(f'backend="{name}" cannot run this call: {reason}')
    raise ValueError("; ".join(reasons))


def _check(problem: Problem) -> None:
    q, k, visible = problem.q, problem.k, problem.visible
    _check_qkv(q, k, problem.v, causal=problem.causal)
    batch, num_queries, num_keys = q.shape[0], q.shape[2], k.shape[2]
    _check_bias(problem.bias, q, num_keys, causal=problem.causal)
    _check_program(problem)
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
    # A comparison, because a graph for any head_dim has a scale that math.isfinite does not take.
    if not -math.inf < problem.scale < math.inf:
        raise ValueError(f"scale={problem.scale} is not finite")
    if not 0.0 <= problem.dropout < 1.0:
        raise ValueError(f"dropout={problem.dropout} is not a probability in [0, 1)")


def check_backend(name: str) -> None:
    """Raise if there is no backend of that name, whether or not it can run on this machine."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f'unknown backend "{name}": choose "auto" or one of {", ".join(BACKENDS)}')


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [batch, heads, tokens, head_dim]")
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}, expected a floating point dtype")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v have different dtypes: {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")
    if k.shape != v.shape:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}, expected equal shapes but for head_dim"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch size {q.shape[0]} and k {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q has head_dim {q.shape[3]} and k {k.shape[3]}")
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
    elif isinstance(bias, SeparableBias):
        for name, part, tokens in (("row", bias.row, num_queries), ("column", bias.column, num_keys)):
            _check_companion(f"bias.{name}", part, q, {*allowed, torch.float64})
            if part.dim() != 3 or part.shape[0] not in (1, batch) or part.shape[1:] != (num_heads, tokens):
                raise ValueError(
                    f"bias.{name} has shape {tuple(part.shape)}, expected [1 or {batch}, {num_heads} heads, {tokens} tokens]"
                )
    elif isinstance(bias, TileBias):
        if bias.batch not in (1, batch):
            raise ValueError(f"the tile bias has batch={bias.batch}, expected 1 or {batch}")
    elif bias is not None:
        raise TypeError(
            f"bias is a {type(bias).__name__}, expected None, a tensor, a DistanceBias, a "
            f"SeparableBias or a TileBias"
        )


def _holds_a_mask(bias: Bias) -> bool:
    """Whether a constant dense bias hides keys, by its first and last rows; on the CPU, where reading values is cheap."""
    if torch.compiler.is_compiling() or type(bias) is not Tensor or bias.device.type != "cpu":
        return False
    # Few numbers at a time: all of them would take long, and threads that a forked process does not have.
    if bias.requires_grad or not bias.numel():
        return False
    return any((bias[:, head, row] <= HIDING).any() for head in range(bias.shape[1]) for row in (0, -1))


def _check_program(problem: Problem) -> None:
    program, q, num_keys = problem.program, problem.q, problem.k.shape[2]
    if program.normaliser == "stickbreaking" and not problem.causal:
        raise ValueError("stick-breaking runs from a query's key to earlier ones: it needs causal=True")
    program.check(q.shape[1], has_bias=problem.bias is not None)
    if program.reads_bias(q.shape[1]) and _holds_a_mask(problem.bias):
        raise ValueError(
            "bias holds numbers of −10,000 or less, as masks do, but the score program reads the bias: pass "
            "the mask as visible=dape.Visible.from_mask(mask)"
        )
    allowed = {q.dtype, torch.promote_types(q.dtype, torch.float32)}
    for name, tensor in program.tensors():
        _check_companion(name, tensor, q, allowed)
    if program.earlier_rows and q.shape[2] > num_keys:
        raise ValueError(
            f"a kernel over several queries needs a key for every query, got {q.shape[2]} queries and {num_keys} keys"
        )


def _check_companion(name: str, tensor: Tensor, q: Tensor, allowed: set[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        expected = " or ".join(sorted(str(dtype) for dtype in allowed))
        raise TypeError(f"{name} has dtype {tensor.dtype} but q has {q.dtype}; expected {expected}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
