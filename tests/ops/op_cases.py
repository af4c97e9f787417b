"""Calls of the op, built from a table, and how two results are compared."""

import ctypes
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    native,
)
from dape.positions import FIRE, Positions

# Where a compiler is, a missing kernel is a failure.
needs_kernel = pytest.mark.skipif(
    not native.builds()
    and not os.environ.get("CI")
    and not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="no compiled kernel, and no compiler to build it",
)


def wake_threads() -> None:
    """Let the kernel compute calls of any size on several threads, not large ones alone."""
    if native.KERNEL is not None:
        ctypes.c_int64.in_dll(native.KERNEL, "dape_share").value = 1


wake_threads()
BIASES = ("none", "dense", "dense of the batch", "distance", "separable", "tile")
VISIBILITIES = ("all", "left padding", "window", "documents", "room of a cache", "rows that see nothing")
# Kernel size and padding; a kernel of one has no padding to choose.
KERNELS = [(1, "same")] + [(k, padding) for k in (2, 3, 5, 7) for padding in ("same", "causal")]


@dataclass(frozen=True)
class Case:
    """One call, made of numbers that float32 holds exactly."""

    batch: int = 2
    heads: int = 3
    groups: int = 3
    queries: int = 11
    keys: int = 11
    head_dim: int = 4
    width: int = 5
    kernel: int | None = 3
    # Or how many keys the kernel reaches to the left.
    padding: str | int = "same"
    bias: str = "distance"
    causal: bool = True
    visible: str = "all"
    residual: str = "scores+bias"
    leak: bool = False
    query_kernel: int = 1
    depth: int = 2
    slope: float = 0.01
    # A key of PROGRAMS or MORE, in place of the convolutions that the fields above describe.
    program: str | None = None

    def but(self, **changes: object) -> "Case":
        return replace(self, **changes)


# Ragged against every block size of the C++ kernel: rows, chunks of keys, channels, lanes.
SMALL = Case(batch=1, heads=4, groups=4, queries=40, keys=40, head_dim=16, width=8, bias="none")
SHAPES = {
    "tile": SMALL.but(queries=48, keys=48),
    "one key": SMALL.but(queries=1, keys=1, heads=1, groups=1, head_dim=1, width=1),
    "two tiles": SMALL.but(queries=25, keys=49, heads=6, groups=3, head_dim=20, width=7, kernel=5),
    "kernel 1": SMALL.but(batch=2, heads=3, groups=1, queries=37, keys=53, head_dim=10, width=5, kernel=1),
    "even kernel": SMALL.but(batch=2, heads=2, groups=2, queries=11, keys=90, head_dim=8, width=4, kernel=4),
    "causal padding": SMALL.but(groups=2, queries=30, keys=30, head_dim=7, width=9, kernel=7, padding=6),
    "long reach": SMALL.but(heads=2, groups=2, queries=33, head_dim=5, width=3, kernel=31),
    "decode": SMALL.but(batch=3, heads=5, groups=5, queries=1, keys=600, head_dim=70, width=6),
    "few queries": SMALL.but(groups=1, queries=3, keys=310, head_dim=9, width=6, kernel=5),
    "default widths": SMALL.but(heads=12, groups=12, queries=50, keys=74, head_dim=64, width=32),
    "no convolution": SMALL.but(batch=2, queries=51, keys=51, kernel=None),
}
RAGGED = Case(heads=4, groups=2, queries=61, keys=75, head_dim=9, width=9)


def kernel_table() -> Iterator[Case]:
    """What the C++ kernel has loops for: every shape, program, bias and visibility, the directions in turn."""

    def pairs(ones: Iterable[str], others: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
        """Every pair; both directions with each of either, in half as many calls."""
        for (n, one), (m, other) in product(enumerate(ones), enumerate(others)):
            yield one, other, (n + m) % 2 == 0

    for shape, bias, causal in pairs(SHAPES, BIASES):
        yield SHAPES[shape].but(bias=bias, causal=causal)
    for visible, bias, causal in pairs(VISIBILITIES[1:], BIASES[:4]):
        for heads, width, kernel in ((4, 0, None), (4, 6, 3), (8, 9, 3)):
            own = {"heads": heads, "groups": heads, "width": width, "kernel": kernel, "causal": causal}
            yield SMALL.but(batch=2, queries=50, keys=61, bias=bias, visible=visible, **own)
    for name, bias, causal in pairs(PROGRAMS, BIASES):
        yield RAGGED.but(program=name, bias=bias, causal=causal)
    for name, visible, causal in pairs(PROGRAMS, VISIBILITIES[1:]):
        yield RAGGED.but(program=name, visible=visible, causal=causal)
    for name, bias, visible in product(MORE, ("none", "distance", "separable"), ("all", "documents")):
        yield RAGGED.but(program=name, bias=bias, visible=visible)
    # As many queries as keys, nothing hidden: the first stage begins from a table by distance.
    for name, tokens in product([*PROGRAMS, *MORE], (101, 5)):
        yield RAGGED.but(queries=tokens, keys=tokens, program=name)
    # Pairs of columns, for every alignment of the kernel.
    eight = SMALL.but(heads=8, groups=8, queries=51, keys=64, width=9)
    for left, bias, visible in product(range(3), ("none", "dense", "distance"), ("all", "window")):
        yield eight.but(padding=left, bias=bias, visible=visible)
    yield SHAPES["two tiles"].but(bias="distance", residual="scores")
    yield SHAPES["few queries"].but(bias="dense", residual="scores")
    yield SMALL.but(keys=9, causal=False, bias="distance")
    # Both passes compute the same logits, bit for bit, where gradients are wanted.
    yield RAGGED.but(queries=7, keys=7, program="ssmax")


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
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        # Parts of a bias's graph are there before the call.
        kept = {"allow_unused": True, "retain_graph": True}
        grads = torch.autograd.grad(out, list(self.leaves.values()), weights.to(out.dtype), **kept)
        named = zip(self.leaves.items(), grads, strict=True)
        return {"out": out.detach()} | {
            name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in named
        }


def build(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> Call:
    """The call of a case; the same numbers for float32 and float64."""
    generator = torch.Generator().manual_seed(seed)
    leaves: dict[str, Tensor] = {}

    def draw(name: str, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator)
        if name.startswith("w"):
            # What is read keeps its size, so that no softmax is a step.
            numbers /= max(1, numbers[0].numel()) ** 0.5
        leaves[name] = numbers.to(dtype).requires_grad_()
        return leaves[name]

    c = case
    q = draw("q", c.batch, c.heads, c.queries, c.head_dim)
    k, v = (draw(name, c.batch, c.groups, c.keys, c.head_dim) for name in "kv")
    program = None
    if c.program is not None:
        program = (PROGRAMS | MORE)[c.program](c, draw)
    elif c.kernel is not None:
        channels = c.heads * (1 if c.bias == "none" else 2)
        left = {"same": c.kernel // 2, "causal": c.kernel - 1}.get(c.padding, c.padding)
        kernel = (c.query_kernel, c.kernel)
        program = conv_program(
            draw("w1", c.width, channels, *kernel), draw("b1", c.width),
            draw("w2", c.heads, c.width, *kernel), draw("b2", c.heads),
            left, c.residual, c.leak, c.slope,
            middle=tuple((draw(f"w1.{n}", c.width, c.width, *kernel), draw(f"b1.{n}", c.width))
                         for n in range(1, c.depth - 1)),
        )  # fmt: skip
    visible = _visible(c, generator)
    bias = _curve(c, dtype, leaves, visible) if c.bias == "curve" else _bias(c, draw)
    stick = program is not None and program.normaliser == "stickbreaking"
    return Call(q, k, v, program, bias, visible, c.causal or stick, leaves)


def _curve(c: Case, dtype: torch.dtype, leaves: dict[str, Tensor], visible: Visible) -> Bias:
    """FIRE, with a threshold in the middle: some queries are measured by it, some by their own place."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        fire = FIRE(c.heads, width=c.width, threshold=c.keys / 2).to(dtype)
    leaves |= dict(fire.named_parameters())
    place = torch.arange(c.keys)[None]
    if visible.first is not None:
        place = (place - visible.first).clamp(min=0)
    positions = Positions(place[:, c.keys - c.queries :], place, c.causal, visible, consecutive=True)
    return fire.bias(leaves["q"], leaves["k"], positions, scale=1.0)


def _talking(c: Case, draw) -> ScoreProgram:
    before, after = (Stage(draw(name, c.heads, c.heads, 1, 1)) for name in ("w1", "w2"))
    return ScoreProgram((before,), (after,), "bias")


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
    vectors = {name: draw(name, c.heads) for name in ("length_scale", "length_offset", "length_power")}
    return replace(_grouped(c, draw), **vectors, length_shift=1.0)


def _capped(c: Case, draw) -> ScoreProgram:
    return ScoreProgram(softcap=1.5, sink=draw("sink", c.heads), length_scale=draw("length_scale", c.heads))


# Programs other than the paper's, one of each kind.
PROGRAMS = {
    "talking": _talking, "mta": _mta, "keyconv": _keyconv, "grouped": _grouped,
    "scores alone": _scores_alone, "post": _post, "sink": _sink, "ssmax": _ssmax, "capped": _capped
}  # fmt: skip


def _conv(c: Case, draw, kernel: tuple[int, int], left: int, depth: int = 2) -> ScoreProgram:
    channels, stages = c.heads * (1 if c.bias == "none" else 2), []
    for n in range(depth):
        last = n == depth - 1
        outputs = c.heads if last else c.width
        weight, offset = draw(f"w{n}", outputs, channels, *kernel), draw("b2" if last else f"b{n}", outputs)
        stages.append(Stage(weight, offset, left, slope=1.0 if last else 0.01))
        channels = outputs
    return ScoreProgram(tuple(stages))


def _activated(c: Case, draw, slope: float) -> ScoreProgram:
    stage = Stage(draw("w1", c.heads, c.heads, 1, 3), draw("b2", c.heads), 1, slope=slope)
    return ScoreProgram((stage,), residual="scores")


def _stick(program: ScoreProgram) -> ScoreProgram:
    return replace(program, normaliser="stickbreaking")


def _by_heads(c: Case, draw, *kernel: int, left: int) -> Stage:
    return Stage(draw("w1", c.heads, 1, *kernel), left=left, groups=c.heads)


# What the C++ kernel has loops for beyond those: kernels over queries and keys, depths, reaches.
MORE = {
    "3x3": lambda c, draw: _conv(c, draw, (3, 3), 1),
    "2x5 to the left": lambda c, draw: _conv(c, draw, (2, 5), 4),
    "2x4 to the right": lambda c, draw: _conv(c, draw, (2, 4), 0),
    "1x3, three deep": lambda c, draw: _conv(c, draw, (1, 3), 1, depth=3),
    "3x2, three deep": lambda c, draw: _conv(c, draw, (3, 2), 1, depth=3),
    "6x11 by heads": lambda c, draw: ScoreProgram((_by_heads(c, draw, 6, 11, left=5),), residual="bias"),
    "12 rows": lambda c, draw: ScoreProgram((_by_heads(c, draw, 12, 2, left=1),)),
    "2x5 by heads, with the bias": lambda c, draw: ScoreProgram(
        (Stage(draw("w1", c.heads, 1 + (c.bias != "none"), 2, 5), draw("b2", c.heads), 2, c.heads, 0.2),)
    ),
    "capped 3x3": lambda c, draw: replace(_conv(c, draw, (3, 3), 1), softcap=0.7),
    "capped, loosely": lambda c, draw: ScoreProgram(softcap=50.0),
    "steeper below zero": lambda c, draw: _activated(c, draw, 2.5),
    "activated logits": lambda c, draw: _activated(c, draw, 0.3),
    "stick": lambda c, draw: _stick(ScoreProgram()),
    "stick, 3x3": lambda c, draw: _stick(_conv(c, draw, (3, 3), 1)),
    "stick, capped": lambda c, draw: _stick(replace(_capped(c, draw), sink=None)),
    "stick, mta": lambda c, draw: _stick(_mta(c, draw)),
    "stick, post": lambda c, draw: _stick(_post(c, draw)),
    "after the softmax by heads": lambda c, draw: ScoreProgram(
        post=(_by_heads(c, draw, 3, 3, left=2), Stage(draw("w2", c.heads, 2, 1, 1), groups=c.heads // 2))
    ),
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
    return TileBias(lambda rows, n: distance.dense(c.queries, c.keys, rows)[..., :n] ** 2 / 4, batch=1)


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
    if c.visible == "room of a cache":
        last = (c.keys - 4 - torch.arange(c.batch)[:, None]).clamp(min=0)
        return Visible(torch.ones(1, 1, dtype=torch.int32), last)
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


# Sums over the whole map, most of whose terms cancel (the last bias's to zero): their errors are those of the rows.
SUMS = (
    "b1", "b2", "b3", "row", "sink", "length_scale", "length_offset", "length_power", "rate",
    "threshold_factor"
)  # fmt: skip


def assert_as_exact(case: Case, backend: str) -> None:
    """Float32 results are at most twice as far from float64 as those of the reference in float32."""
    truth, single = build(case).results("reference"), build(case, torch.float32)
    ours, theirs = (distances(single.results(name), truth) for name in (backend, "reference"))
    # A floor below which a ratio means nothing.
    eps, terms = torch.finfo(torch.float32).eps, 4 * case.batch * case.queries * case.head_dim**0.5
    if case.bias == "curve":
        terms *= case.heads * case.head_dim**0.5 / 4
    worse = {
        name: (error, theirs[name])
        for name, error in ours.items()
        if not error <= 2 * theirs[name] + eps * (terms if name in SUMS or name.startswith("mlp") else 16)
    }
    assert not worse, worse


def assert_equal(results: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    # Not `error > tolerance`, which NaN would pass.
    wrong = {name: error for name, error in distances(results, truth).items() if not error <= tolerance}
    assert not wrong, wrong


class Live(TorchDispatchMode):
    """Bytes of the tensors alive that were made inside, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        self.known = {name: entry for name, entry in self.known.items() if not entry[0].expired()}
        return sum(size for _, size in self.known.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Not views of tensors from outside.
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.bytes)
        return result
