"""Calls of the op to compare backends on: shapes, biases and visibilities, and what comes back with gradients."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dape.ops.score_attention import DistanceBias, Visible, attention, conv_program, native

EPSILON = 2.0**-23


def kernel_expected(
    environment: Mapping[str, str] = os.environ, which: Callable[[str], str | None] = shutil.which
) -> bool:
    """Whether the kernel must have been built: in CI, and wherever there is a compiler."""
    if environment.get("CI", "").lower() not in ("", "0", "false"):
        return True
    return any(which(name) for name in (environment.get("CXX", "c++"), "g++", "clang++"))


needs_kernel = pytest.mark.skipif(
    not native.builds() and not kernel_expected(), reason="no compiled kernel, and no compiler to build it"
)


@dataclass(frozen=True)
class Case:
    """One call, made of numbers that float32 holds exactly."""

    batch: int = 1
    heads: int = 4
    groups: int = 4
    queries: int = 40
    keys: int = 40
    head_dim: int = 16
    width: int = 8  # 0: no convolution
    kernel_size: int = 3
    left: int = 1
    bias: str = "none"  # none, distance, shared, dense
    causal: bool = True
    visible: str = "all"  # all, padded, window, cache, nothing
    residual: str = "scores+bias"
    slope: float = 0.01
    seed: int = 0

    def but(self, **changes: object) -> Case:
        return replace(self, **changes)


# Ragged against every block size of the kernel: rows, chunks of keys, channels, lanes.
SHAPES = {
    "tile": Case(queries=48, keys=48),
    "one key": Case(queries=1, keys=1, heads=1, groups=1, head_dim=1, width=1),
    "two tiles": Case(queries=25, keys=49, heads=6, groups=3, head_dim=20, width=7, kernel_size=5, left=2),
    "kernel 1": Case(
        batch=2, heads=3, groups=1, queries=37, keys=53, head_dim=10, width=5, kernel_size=1, left=0
    ),
    "even kernel": Case(
        batch=2, heads=2, groups=2, queries=11, keys=90, head_dim=8, width=4, kernel_size=4, left=2
    ),
    "causal padding": Case(
        heads=4, groups=2, queries=30, keys=30, head_dim=7, width=9, kernel_size=7, left=6
    ),
    "long reach": Case(heads=2, groups=2, queries=33, keys=40, head_dim=5, width=3, kernel_size=31, left=15),
    "decode": Case(batch=3, heads=5, groups=5, queries=1, keys=600, head_dim=70, width=6),
    "few queries": Case(heads=4, groups=1, queries=3, keys=310, head_dim=9, width=6, kernel_size=5, left=2),
    "default widths": Case(heads=12, groups=12, queries=50, keys=74, head_dim=64, width=32),
    "no convolution": Case(batch=2, queries=51, keys=51, width=0),
}
NAMES = ("q", "k", "v", "expand_weight", "expand_bias", "project_weight", "project_bias", "bias")


def tensors(case: Case) -> dict[str, Tensor]:
    """The float64 inputs of a call and the gradient of its output."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).double()

    batch, heads, queries, keys = case.batch, case.heads, case.queries, case.keys
    made = {
        "q": normal(batch, heads, queries, case.head_dim),
        "k": normal(batch, case.groups, keys, case.head_dim),
        "v": normal(batch, case.groups, keys, case.head_dim),
        "grad": normal(batch, heads, queries, case.head_dim),
    }
    if case.width:
        channels = heads * (1 if case.bias == "none" else 2)
        fan_in, fan_mid = channels * case.kernel_size, case.width * case.kernel_size
        made["expand_weight"] = normal(case.width, channels, 1, case.kernel_size, scale=fan_in**-0.5)
        made["expand_bias"] = normal(case.width, scale=0.3)
        made["project_weight"] = normal(heads, case.width, 1, case.kernel_size, scale=fan_mid**-0.5)
        made["project_bias"] = normal(heads, scale=0.3)
    if case.bias == "distance":
        # A few distances more than needed at both ends.
        made["bias"] = normal(heads, keys + 5 if case.causal else keys + queries + 6)
    elif case.bias != "none":
        made["bias"] = normal(1 if case.bias == "shared" else batch, heads, queries, keys)
    return made


def visible(case: Case) -> Visible | None:
    entry = torch.arange(case.batch)[:, None]
    query = torch.arange(case.queries)[None]
    place = query + case.keys - case.queries
    return {
        "all": None,
        "padded": Visible(first=(entry * 5 + 3) % case.keys),
        "window": Visible(first=(place - 9).clamp(min=0)),
        "cache": Visible(
            first=torch.ones(1, 1, dtype=torch.int32), last=(case.keys - 4 - entry).clamp(min=0)
        ),
        # Some rows see nothing, some a single key.
        "nothing": Visible(first=torch.where(query % 3 == 0, place + 1, place), last=place),
    }[case.visible]


def evaluate(case: Case, inputs: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """The output and the gradients of all inputs."""
    leaves = {name: inputs[name].to(dtype).requires_grad_() for name in NAMES if name in inputs}
    conv = bias = None
    if case.width:
        weights = (leaves[name] for name in NAMES[3:7])
        conv = conv_program(*weights, case.left, case.residual, negative_slope=case.slope)  # type: ignore[arg-type]  # the literal is a string here
    if "bias" in leaves:
        lowest = -2 if case.causal else -case.queries - 2
        bias = DistanceBias(leaves["bias"], lowest) if case.bias == "distance" else leaves["bias"]
    out = attention(
        leaves["q"], leaves["k"], leaves["v"], conv,
        bias=bias, causal=case.causal, visible=visible(case), backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(leaves.values()), inputs["grad"].to(dtype), allow_unused=True)
    found = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {"out": out.detach(), **found}


def check(case: Case, backend: str = "cpu") -> None:
    """At most twice the error of the float32 reference, against float64."""
    inputs = tensors(case)
    exact = evaluate(case, inputs, torch.float64, "reference")
    plain = evaluate(case, inputs, torch.float32, "reference")
    ours = evaluate(case, inputs, torch.float32, backend)
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        floor = 16 * EPSILON * max(1.0, float(expected.abs().max()))
        if name in ("dproject_bias", "dexpand_bias"):
            # Sums over all rows and keys of terms that cancel, the former to zero: what is left is their rounding.
            floor = EPSILON * float(inputs["grad"].abs().sum())
        allowed = 2 * float((plain[name] - expected).abs().max()) + floor
        error = float((ours[name] - expected).abs().max())
        assert error <= allowed, f"{name} is off by {error:.3g}, allowed {allowed:.3g}"
