"""Calls of the op, built from a table, and how two results are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dape.ops.score_attention import (
    Bias,
    ConvWeights,
    DistanceBias,
    TileBias,
    Visible,
    attention,
)

BIASES = ("none", "dense", "dense of the batch", "distance", "tile")
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
    head_width: int = 4
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


@dataclass
class Call:
    """Arguments of attention and the tensors that want gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    conv: ConvWeights | None
    bias: Bias
    visible: Visible
    causal: bool
    leaves: dict[str, Tensor]

    def attend(self, backend: str, **options: object) -> Tensor:
        return attention(
            self.q, self.k, self.v, self.conv,
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
    q = draw("q", c.batch, c.heads, c.queries, c.head_width)
    k, v = (draw(name, c.batch, c.groups, c.keys, c.head_width) for name in "kv")
    conv = None
    if c.kernel is not None:
        channels = c.heads * (1 if c.bias == "none" else 2)
        left = {"same": c.kernel // 2, "causal": c.kernel - 1}[c.padding]
        kernel = (c.query_kernel, c.kernel)
        conv = ConvWeights(
            draw("w1", c.width, channels, *kernel), draw("b1", c.width),
            draw("w2", c.heads, c.width, *kernel), draw("b2", c.heads),
            left, c.residual, c.leak,
            middle=tuple((draw(f"w1.{n}", c.width, c.width, *kernel), draw(f"b1.{n}", c.width))
                         for n in range(1, c.depth - 1)),
        )  # fmt: skip
    bias = _bias(c, draw)
    return Call(q, k, v, conv, bias, _visible(c, generator), c.causal, leaves)


def _bias(c: Case, draw) -> Bias:
    if c.bias == "none":
        return None
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
    "VISIBILITIES",
    "Call",
    "Case",
    "assert_as_exact",
    "assert_equal",
    "build",
    "distances",
    "replace",
]
