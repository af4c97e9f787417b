"""Calls of the op, built from a table, and how two results are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dape.ops.score_attention import (
    Bias,
    DistanceBias,
    ScoreProgram,
    SeparableBias,
    Stage,
    TileBias,
    Visible,
    attention,
    conv_program,
)

BIASES = ("none", "dense", "dense of the batch", "distance", "separable", "tile")
VISIBILITIES = ("all", "left padding", "window", "rows that see nothing")
# Kernel size and padding; a kernel of one has no padding to choose.
KERNELS = [(1, "same")] + [(k, padding) for k in (2, 3, 5, 7) for padding in ("same", "causal")]


@dataclass(frozen=True)
class Case:
    batch: int = 2
    heads: int = 3
    groups: int = 3
    queries: int = 11
    keys: int = 11
    head_dim: int = 4
    width: int = 5
    kernel: int | None = 3
    padding: str = "same"
    bias: str = "distance"
    causal: bool = True
    visible: str = "all"
    residual: str = "scores+bias"
    leak: bool = False
    query_kernel: int = 1
    depth: int = 2
    # A key of PROGRAMS, in place of the convolutions that the fields above describe.
    program: str | None = None


@dataclass
class Call:
    """Arguments of attention and the tensors that want gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    program: ScoreProgram | None
    bias: Bias
    visible: Visible
    causal: bool
    leaves: dict[str, Tensor]

    def attend(self, backend: str, **options: object) -> Tensor:
        return attention(
            self.q, self.k, self.v, self.program,
            bias=self.bias, visible=self.visible, causal=self.causal, backend=backend, **options,
        )  # fmt: skip

    def results(self, backend: str, **options: object) -> dict[str, Tensor]:
        """The output and every gradient, for a fixed gradient of the output."""
        out = self.attend(backend, **options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(out, list(self.leaves.values()), weights.to(out.dtype), allow_unused=True)
        named = zip(self.leaves.items(), grads, strict=True)
        return {"out": out.detach()} | {
            name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in named
        }


def build(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Call:
    """The call of a case; the same numbers for every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    leaves: dict[str, Tensor] = {}

    def draw(name: str, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        leaves[name] = numbers.to(dtype).requires_grad_()
        return leaves[name]

    c = case
    q = draw("q", c.batch, c.heads, c.queries, c.head_dim)
    k, v = (draw(name, c.batch, c.groups, c.keys, c.head_dim) for name in "kv")
    program = None
    if c.program is not None:
        program = PROGRAMS[c.program](c, draw)
    elif c.kernel is not None:
        channels = c.heads * (1 if c.bias == "none" else 2)
        left = {"same": c.kernel // 2, "causal": c.kernel - 1}[c.padding]
        kernel = (c.query_kernel, c.kernel)
        program = conv_program(
            draw("w1", c.width, channels, *kernel), draw("b1", c.width),
            draw("w2", c.heads, c.width, *kernel), draw("b2", c.heads),
            left, c.residual, c.leak,
            middle=tuple((draw(f"w1.{n}", c.width, c.width, *kernel), draw(f"b1.{n}", c.width))
                         for n in range(1, c.depth - 1)),
        )  # fmt: skip
    bias = _bias(c, draw)
    return Call(q, k, v, program, bias, _visible(c, generator), c.causal, leaves)


def _talking(c: Case, draw) -> ScoreProgram:
    return ScoreProgram(
        (Stage(draw("w1", c.heads, c.heads, 1, 1)),), (Stage(draw("w2", c.heads, c.heads, 1, 1)),), "bias"
    )


def _mta(c: Case, draw) -> ScoreProgram:
    pre = Stage(draw("w1", c.heads, 1, 3, 4), left=2, groups=c.heads)
    return ScoreProgram((pre,), (Stage(draw("w2", c.heads, c.heads // 2, 1, 1), groups=2),), "bias")


def _keyconv(c: Case, draw) -> ScoreProgram:
    return ScoreProgram((Stage(draw("w1", c.heads, 1, 1, 3), left=1, groups=c.heads),), residual="bias")


def _grouped(c: Case, draw) -> ScoreProgram:
    """Two groups of heads, the bias read beside the scores where there is one."""
    channels = c.heads // 2 * (1 if c.bias == "none" else 2)
    expand = Stage(draw("w1", 6, channels, 1, 3), draw("b1", 6), 1, 2, 0.01)
    return ScoreProgram((expand, Stage(draw("w2", c.heads, 3, 1, 3), draw("b2", c.heads), 1, 2)))


def _scores_alone(c: Case, draw) -> ScoreProgram:
    """Convolutions of different kernels that read no bias, and no residual."""
    expand = Stage(draw("w1", c.width, c.heads, 1, 3), draw("b1", c.width), 1, slope=0.2)
    return ScoreProgram((expand, Stage(draw("w2", c.heads, c.width, 1, 2))), residual="none")


def _post(c: Case, draw) -> ScoreProgram:
    """A plain softmax, then two convolutions over queries and keys with an activation between."""
    expand = Stage(draw("w1", c.width, c.heads, 2, 3), draw("b1", c.width), 1, slope=0.1)
    return ScoreProgram(post=(expand, Stage(draw("w2", c.heads, c.width, 2, 2), left=1)))


def _sink(c: Case, draw) -> ScoreProgram:
    return replace(_talking(c, draw), sink=draw("sink", c.heads))


def _ssmax(c: Case, draw) -> ScoreProgram:
    vectors = {name: draw(name, c.heads) for name in ("length_scale", "length_offset")}
    return replace(_grouped(c, draw), **vectors)


def _capped(c: Case, draw) -> ScoreProgram:
    return ScoreProgram(softcap=1.5, sink=draw("sink", c.heads), length_scale=draw("length_scale", c.heads))


# Programs other than the paper's, one of each kind.
PROGRAMS = {
    "talking": _talking,
    "mta": _mta,
    "keyconv": _keyconv,
    "grouped": _grouped,
    "scores alone": _scores_alone,
    "post": _post,
    "sink": _sink,
    "ssmax": _ssmax,
    "capped": _capped,
}


def _bias(c: Case, draw) -> Bias:
    if c.bias == "none":
        return None
    if c.bias == "separable":
        return SeparableBias(draw("row", c.batch, c.heads, c.queries), draw("column", 1, c.heads, c.keys))
    if c.bias.startswith("dense"):
        return draw("bias", c.batch if c.bias == "dense of the batch" else 1, c.heads, c.queries, c.keys)
    lowest = 0 if c.causal else 1 - c.queries
    # A table may cover more than the call needs.
    distance = DistanceBias(draw("bias", c.heads, c.keys - lowest + 5), lowest - 2)
    if c.bias == "distance":
        return distance
    return TileBias(
        lambda rows, num_keys: distance.dense(c.queries, c.keys, rows)[..., :num_keys] ** 2 / 2, batch=1
    )


def _visible(c: Case, generator: torch.Generator) -> Visible:
    if c.visible == "all":
        return Visible()
    if c.visible == "left padding":
        return Visible(first=torch.randint(0, c.keys, (c.batch, 1), generator=generator))
    if c.visible == "window":
        return Visible(first=(torch.arange(c.queries) + c.keys - c.queries - 4)[None])
    if c.visible == "documents":
        place = torch.arange(c.queries) + c.keys - c.queries
        return Visible(first=torch.stack([place // (3 + n) * (3 + n) for n in range(c.batch)]))
    # Any interval, some of them empty.
    first, last = (torch.randint(-1, c.keys, (c.batch, c.queries), generator=generator) for _ in range(2))
    return Visible(first, last)


def distances(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The greatest error of each result, in units of the truth's greatest number (at least one)."""
    errors = {}
    for name, true in truth.items():
        assert results[name].shape == true.shape, name
        if true.numel():
            error = (results[name].double() - true.double()).abs().max()
            errors[name] = float(error / true.double().abs().max().clamp(min=1.0))
    return errors


def assert_as_exact(case: Case, backend: str) -> None:
    """In float32 the backend is at most twice as far from the float64 reference as the float32 reference is."""
    truth = build(case).results("reference")
    single = build(case, torch.float32)
    ours, theirs = (distances(single.results(name), truth) for name in (backend, "reference"))
    # A floor below which a ratio means nothing. The gradient of the last bias is zero in exact arithmetic: every row
    # sums to zero up to a rounding error of its own.
    eps = torch.finfo(torch.float32).eps
    floor = {"b2": case.batch * case.queries * eps}
    worse = {
        name: (ours[name], theirs[name])
        for name in ours
        if not ours[name] <= 2 * theirs[name] + floor.get(name, 16 * eps)
    }
    assert not worse, worse


def assert_equal(results: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    # Not `error > tolerance`, which NaN would pass.
    wrong = {name: error for name, error in distances(results, truth).items() if not error <= tolerance}
    assert not wrong, wrong


__all__ = [
    "BIASES",
    "KERNELS",
    "PROGRAMS",
    "VISIBILITIES",
    "Call",
    "Case",
    "assert_as_exact",
    "assert_equal",
    "build",
    "distances",
    "replace",
]
