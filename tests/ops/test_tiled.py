"""The tiled backend against the definition, in float64: output and every gradient, over all options."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from op_cases import (
    BIASES,
    KERNELS,
    PROGRAMS,
    VISIBILITIES,
    Case,
    Live,
    assert_as_exact,
    assert_equal,
    build,
    replace,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from dape.ops.score_attention import reference, tiled
from dape.ops.score_attention.api import make_problem

# Queries and keys, causal: ragged, and long enough for tiles of their own.
SHAPES = [(11, 11), (1, 9), (35, 41), (67, 67), (1, 1), (8, 33)]
# Of programs over several queries or stages.
SHORT = [(11, 11), (9, 13), (1, 6), (1, 1), (22, 25)]
# Kernel over queries, kernel over keys, padding, depth.
STACKS = [(3, 3, "same", 2), (2, 2, "causal", 2), (4, 1, "same", 2), (1, 3, "same", 3), (1, 4, "same", 4), (2, 3, "causal", 3)]  # fmt: skip


def stack(number: int, **changes) -> Case:
    query_kernel, kernel, padding, depth = STACKS[number % len(STACKS)]
    return Case(query_kernel=query_kernel, kernel=kernel, padding=padding, depth=depth, **changes)


def table():
    """Every form of bias and visibility, with the pair, with other stacks of convolutions and with other programs."""
    kernels, shapes = itertools.cycle(KERNELS), itertools.cycle(SHAPES)
    residuals = itertools.cycle(["scores+bias", "scores", "scores"])
    short = itertools.cycle(SHORT)
    for number, (bias, causal, visible) in enumerate(itertools.product(BIASES, (True, False), VISIBILITIES)):
        options = {"bias": bias, "causal": causal, "visible": visible, "residual": next(residuals)}
        if number % 2:
            queries, keys = next(short)
            yield stack(number // 2, queries=queries, keys=keys, **options)
        else:
            (kernel, padding), (queries, keys) = next(kernels), next(shapes)
            sizes = {"queries": queries if causal else keys, "keys": keys if causal else queries}
            yield Case(kernel=kernel, padding=padding, **sizes, **options)
    yield stack(0, heads=6, groups=2, queries=9, keys=20)
    yield stack(3, heads=4, groups=1, bias="none", queries=20, keys=20)
    yield stack(5, leak=True, queries=9, keys=12, visible="left padding")
    yield stack(4, leak=True, bias="dense", visible="rows that see nothing")
    yield stack(0, leak=True, causal=False, queries=9, keys=9)
    yield stack(3, causal=False, queries=20, keys=5)
    biases = itertools.cycle(BIASES)
    for program, causal, visible in itertools.product(PROGRAMS, (True, False), VISIBILITIES):
        queries, keys = next(short)
        yield Case(program=program, heads=4, groups=2, queries=queries, keys=keys, bias=next(biases), causal=causal, visible=visible)  # fmt: skip


@pytest.fixture(params=["large tiles", "small tiles"])
def _tiles(request, monkeypatch):
    if request.param == "small tiles":
        _small_tiles(monkeypatch)


def _small_tiles(monkeypatch):
    for name, number in {"MOST_ROWS": 2, "PIXELS": 1, "FEWEST_COLUMNS": 3}.items():
        monkeypatch.setattr(tiled, name, number)


OTHERS = {
    "plain attention": Case(kernel=None, queries=40, keys=40),
    "plain attention, no bias": Case(kernel=None, bias="none"),
    "plain attention, windows, bias by distance": Case(kernel=None, visible="rows that see nothing", keys=70),
    "grouped heads": Case(heads=6, groups=2, queries=9, keys=33),
    "one key head": Case(heads=4, groups=1, bias="none"),
    "one head, one channel": Case(heads=1, groups=1, width=1, head_dim=1),
    "kernel longer than the row": Case(kernel=9, queries=2, keys=2),
    "decoding": Case(batch=3, queries=1, keys=70),
    "whole batch in a tile": Case(batch=9, queries=5, keys=5),
    "leak": Case(leak=True, queries=40, keys=44),
    "leak, dense bias": Case(leak=True, bias="dense", kernel=5),
    "leak, left padding": Case(leak=True, visible="left padding"),
    "leak, right ends": Case(leak=True, visible="rows that see nothing"),
    "leak, bidirectional": Case(leak=True, causal=False, visible="rows that see nothing", kernel=7),
    "more queries than keys": Case(causal=False, queries=40, keys=3, bias="distance"),
}


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("case", [*table(), *OTHERS.values()], ids=str)
def test_equals_the_reference(case):
    call = build(case)
    assert_equal(call.results("tiled"), call.results("reference"))


FLOAT32 = [
    Case(queries=70, keys=70, bias=bias, visible=visible, kernel=kernel)
    for bias, visible, kernel in (
        ("distance", "all", 3), ("distance", "left padding", 3), ("dense", "all", 5), ("none", "window", 1),
        ("none", "all", 7), ("distance", "all", None),
    )
]  # fmt: skip
FLOAT32 += [stack(0, queries=40, keys=40), stack(3, queries=40, keys=40, bias="dense")]


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_float32_is_as_exact_as_the_reference(case):
    assert_as_exact(case, "tiled")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    case = Case(queries=40, keys=40)
    half = build(case, dtype)
    wide = build(case, torch.float32)
    with torch.no_grad():
        for name, leaf in wide.leaves.items():
            leaf.copy_(half.leaves[name])
    assert half.attend("tiled").dtype == dtype
    # One rounding of the result, and in the gradients one of the saved output.
    assert_equal(half.results("tiled"), wide.results("tiled"), 8 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("_tiles")
def test_dropout_is_the_same_in_both_passes():
    call = build(stack(0, queries=24, keys=24, head_dim=24))
    given = {"bias": call.bias, "visible": call.visible, "causal": True, "dropout": 0.4}
    problem = make_problem(call.q, call.k, call.v, call.program, **given)
    weights = reference.weights(problem)
    # With the identity for values the output is the weights, so the mask can be read off.
    identity = torch.eye(24, dtype=torch.float64).expand_as(call.v)
    torch.manual_seed(5)
    mask = (tiled.attend(replace(problem, v=identity)) / weights.clamp(min=1e-300)).detach()
    kept = mask[(weights > 0).expand_as(mask)]
    assert set(kept.round(decimals=6).tolist()) == {0.0, round(1 / 0.6, 6)}
    assert 0.5 < (kept > 0).double().mean() < 0.7
    torch.manual_seed(5)
    out = tiled.attend(problem)
    # Whatever is drawn in between, the backward pass draws what the forward pass drew.
    torch.manual_seed(6)
    leaves = list(call.leaves.values())
    ours = torch.autograd.grad(out.square().sum(), leaves)
    truth = torch.autograd.grad(((weights * mask) @ call.v).square().sum(), leaves)
    assert_equal(dict(enumerate(ours)), dict(enumerate(truth)))


def test_dropout_masks_differ_between_rows_and_calls():
    call = build(Case(batch=2, queries=64, keys=64, bias="none"))
    first, second = call.attend("tiled", dropout=0.5), call.attend("tiled", dropout=0.5)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("case", [Case(queries=40, keys=44), Case(bias="dense", causal=False, kernel=5),
                                  Case(visible="rows that see nothing", kernel=2), Case(leak=True)])  # fmt: skip
def test_reads_nothing_that_it_did_not_write(case, monkeypatch):
    call = build(case)
    truth = call.results("reference")
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    _small_tiles(monkeypatch)
    assert_equal(call.results("tiled"), truth)


@pytest.fixture
def _on_a_gpu(monkeypatch):
    """Calls are computed as on a GPU, in tiles of a hundredth of the size."""
    monkeypatch.setattr(tiled, "on_gpu", lambda x: True)
    monkeypatch.setattr(tiled, "gpu_bytes", lambda device: 2**29 // 100)


class Seen(Live):
    """Also the dtypes of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.products = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if any(word in str(function) for word in ("mm", "convolution")):
            self.products |= {x.dtype for x in tree_leaves((args, result)) if torch.is_tensor(x)}
        return result


ON_A_GPU = {
    "distance": Case(),
    "no bias": Case(bias="none"),
    "dense, window": Case(bias="dense of the batch", visible="window"),
    "tiles, padding": Case(bias="tile", visible="left padding"),
    "separable, bidirectional": Case(bias="separable", causal=False),
    "plain, grouped heads": Case(kernel=None, heads=6, groups=2),
    "kernel over queries": Case(query_kernel=3),
    "talking heads": Case(program="talking"),
    "capped, with a sink": Case(program="capped"),
}


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu_nothing_waits_and_products_are_in_half_precision(case):
    """On tensors without numbers reading one fails."""
    with FakeTensorMode(), (seen := Seen()):
        build(replace(case, queries=70, keys=70), torch.float16).results("tiled")
    assert seen.products == {torch.float16}


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("case", ON_A_GPU.values(), ids=ON_A_GPU)
def test_on_a_gpu_half_precision_is_as_exact_as_its_dtype(case):
    half, exact = (build(replace(case, queries=40, keys=40), x) for x in (torch.float16, torch.float64))
    with torch.no_grad():
        for name, leaf in exact.leaves.items():
            leaf.copy_(half.leaves[name])
    found, expected = half.results("tiled"), exact.results("reference")
    for name, wanted in expected.items():
        # The gradient of the last offset is zero: its error is that of the terms of its sum.
        size = max(wanted.norm(), 10 if name == "b2" else 0)
        assert (found[name].double() - wanted).norm() <= 32 * torch.finfo(torch.float16).eps * size, name


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("batch", [1, 4])
def test_on_a_gpu_tiles_fill_their_memory(batch):
    sizes = {"queries": 200, "keys": 200, "heads": 12, "groups": 12, "width": 32, "head_dim": 16}
    with FakeTensorMode(), (seen := Seen()):
        build(Case(batch=batch, **sizes), torch.float16).results("tiled")
    # Beside a tile, the output and gradients of all tokens.
    assert 0.5 * 2**29 / 100 <= seen.most <= 2**29 / 100 + batch * 200 * 12 * 16 * 2 * 16


@pytest.mark.parametrize(("gigabytes", "megabytes"), [(16, 512), (24, 614), (80, 1024)])
def test_on_a_gpu_tiles_take_a_share_of_its_memory(monkeypatch, gigabytes, megabytes):
    card = SimpleNamespace(total_memory=gigabytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert tiled.gpu_bytes(torch.device("cuda")) // 2**20 == megabytes
