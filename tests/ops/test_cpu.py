"""The C++ kernel against the definition in float64: every shape, program, bias, visibility, build and thread count."""

import ctypes
import itertools
from contextlib import nullcontext

import pytest
import torch
from op_cases import (
    BIASES,
    MORE,
    PROGRAMS,
    RAGGED,
    SHAPES,
    SMALL,
    VISIBILITIES,
    assert_as_exact,
    build,
    distances,
    kernel_table,
    needs_kernel,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dape.ops.score_attention import (
    DistanceBias,
    ScoreProgram,
    Stage,
    Visible,
    attention,
    by_tiles,
    native,
    op,
)

pytestmark = needs_kernel


def check(case):
    assert_as_exact(case, "cpu")


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(2)


@pytest.mark.parametrize("case", list(kernel_table()), ids=str)
def test_results_are_as_exact_as_the_reference(case):
    check(case)


@pytest.mark.parametrize("bias", ["none", "dense", "distance"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", native.builds())
def test_shapes_in_every_build(name, shape, bias):
    with native.use_build(name):
        check(SHAPES[shape].but(bias=bias))


@pytest.mark.parametrize("program", ["talking", "mta", "grouped", "post", "3x3"])
@pytest.mark.parametrize("name", native.builds())
def test_programs_in_every_build(name, program):
    with native.use_build(name):
        check(RAGGED.but(program=program, visible="documents"))
        check(RAGGED.but(program=program, heads=8, groups=8, width=12))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_bias_by_tiles_in_several_tiles(program, causal, monkeypatch):
    """Tiles bring the rows before their own along, and rows stand where they stood in the whole call."""
    monkeypatch.setattr(by_tiles, "TILE_NUMBERS", 4 * RAGGED.keys * 17)
    for visible in ("all", "documents"):
        check(RAGGED.but(program=program, bias="tile", visible=visible, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kernel", "left"), [(k, left) for k in range(1, 5) for left in range(k)])
def test_every_reach_at_every_place_in_a_chunk(kernel, left, causal):
    """Nothing is lost at the end of the walk, wherever the last key falls around the end of a chunk of keys."""
    torch.set_num_threads(1)
    # Linear, so that no sign can flip and a plain tolerance holds.
    sizes = {"heads": 1, "groups": 1, "head_dim": 2, "width": 2}
    # A chunk has 24 keys, or 72 in a build for few queries.
    for keys, bias in itertools.product(range(61, 75), ("none", "dense", "distance")):
        case = SMALL.but(**sizes, kernel=kernel, padding=left, slope=1.0, queries=keys, keys=keys, causal=causal, bias=bias)  # fmt: skip
        exact = build(case, seed=keys).results("reference")
        for name in native.builds()[:2]:
            with native.use_build(name):
                found = distances(build(case, torch.float32, seed=keys).results("cpu"), exact)
            assert max(found.values()) < 1e-4, (case, name, found)


@pytest.mark.parametrize(("left", "taps"), [(left, taps) for taps in (1, 2, 3, 5) for left in range(taps)])
def test_every_reach_of_a_program_at_every_place_in_a_chunk(left, taps, monkeypatch):
    def program(c, draw) -> ScoreProgram:
        pre = (
            Stage(draw("w1", 2, 1, 2, taps), draw("b1", 2), left),
            Stage(draw("w2", 1, 2, 1, taps), draw("b2", 1), left),
        )
        return ScoreProgram(pre, (Stage(draw("w3", 1, 1, 1, taps), draw("b3", 1), left),))

    monkeypatch.setitem(MORE, "reach", program)
    for keys in range(24, 48):
        sizes = {"heads": 1, "groups": 1, "queries": keys, "keys": keys, "head_dim": 2}
        case = SMALL.but(program="reach", causal=keys % 2 == 0, **sizes)
        found = distances(build(case, torch.float32).results("cpu"), build(case).results("reference"))
        assert max(found.values()) < 1e-3, (keys, found)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("program", [*PROGRAMS, *MORE])
@torch.no_grad()
def test_a_few_queries(program, bias):
    """As in decoding, by a kernel whose lanes are keys: several chunks of them, split over threads."""
    torch.set_num_threads(3)
    for number, visible in enumerate(VISIBILITIES):
        queries = (1, 5, 8, 3, 7, 2)[number]
        keys = 613 if number % 2 else queries + number
        causal = ([*PROGRAMS, *MORE].index(program) + BIASES.index(bias) + number) % 2 == 0
        sizes = {"queries": queries, "keys": keys, "causal": causal}
        case = RAGGED.but(program=program, bias=bias, visible=visible, **sizes)
        truth, single = build(case).attend("reference"), build(case, torch.float32)
        ours, theirs = ((single.attend(name) - truth).abs().max() for name in ("cpu", "reference"))
        rounding = torch.finfo(torch.float32).eps * truth.abs().max().clamp(min=1)
        assert ours <= 2 * theirs + 16 * rounding, (case, ours, theirs)


@torch.no_grad()
def test_a_few_queries_that_a_dense_bias_hides():
    q, bias = torch.randn(1, 4, 2, 8), torch.zeros(1, 4, 2, 30)
    bias[:, :, 1] = -torch.inf
    k = torch.randn(1, 4, 30, 8)
    for program in (ScoreProgram(sink=torch.zeros(4)), build(RAGGED.but(program="talking")).program):
        out = attention(q, k, k, program.to(torch.float32), bias=bias, backend="cpu")
        assert out[:, :, 0].isfinite().all()
        assert (out[:, :, 1] == 0).all()


@pytest.mark.parametrize("program", ["pair", "plain"])
def test_a_ragged_batch_decodes_as_its_entries_alone(program):
    """One query each; keys before `first` are padding, those after `last` room of a cache."""
    q, k, v = (torch.randn(4, 4, n, 16) for n in (1, 700, 700))
    first, last = torch.tensor([[0], [5], [650], [0]]), torch.tensor([[699], [699], [699], [350]])
    conv = build(SMALL, torch.float32).program if program == "pair" else None
    out = attention(q, k, v, conv, visible=Visible(first, last), backend="cpu")
    for entry, (start, stop) in enumerate(zip(first[:, 0].tolist(), (last[:, 0] + 1).tolist(), strict=True)):
        one = slice(entry, entry + 1)
        alone = attention(q[one], k[one, :, start:stop], v[one, :, start:stop], conv, backend="cpu")
        torch.testing.assert_close(out[one], alone, rtol=1e-5, atol=1e-5)


def test_few_queries_have_a_build_of_their_own():
    """Where its smaller tiles compute less; 64 queries are four tiles of 16, or two of 48."""

    def chosen(queries: int, causal: bool = True, rows: int = 1) -> str:
        stage = native.StageCall(rows=rows, groups=1)
        program = native.Program(num_pre=1, stages=ctypes.addressof(stage))
        address = ctypes.addressof(program) if rows > 1 else None
        return native.build_for(native.Call(queries=queries, keys=queries, causal=causal, program=address))

    fastest, *others = native.builds()
    short = f"{fastest}_short"
    assert {chosen(n) for n in (16, 48, 64, 128, 256)} == {short if short in others else fastest}
    # Eight of sixteen rows would be computed twice.
    assert chosen(2048) == chosen(48, causal=False) == chosen(64, rows=9) == fastest
    with pytest.raises(ValueError, match='no build "sse9"'), native.use_build("sse9"):
        pass


THREADED = [SHAPES[name].but(batch=2, bias=bias) for name in ("two tiles", "decode", "kernel 1") for bias in ("distance", "dense")]  # fmt: skip
THREADED += [RAGGED.but(kernel=None, visible="left padding", bias="curve")]
THREADED += [RAGGED.but(program=program, bias=bias) for program in ("mta", "post", "grouped") for bias in ("dense", "distance", "separable")]  # fmt: skip


@pytest.mark.parametrize("case", THREADED, ids=str)
def test_threads(case):
    results = {}
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results[threads], again = (build(case, torch.float32).results("cpu") for _ in range(2))
        for name, value in results[threads].items():
            assert torch.equal(value, again[name]), f"{name} differs between two runs on {threads} threads"
    for name, value in results[1].items():
        torch.testing.assert_close(results[5][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [None, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_threads_that_lose_their_core(batch, kernel, dtype):
    """More threads than cores: gradients of keys that were put aside are added in the same order."""
    case = SHAPES["default widths"].but(batch=batch, head_dim=8, queries=700, keys=700, width=6, kernel=kernel, bias="distance")  # fmt: skip
    torch.set_num_threads(1)
    alone = build(case, dtype).results("cpu")
    torch.set_num_threads(8)
    together = build(case, dtype).results("cpu")
    for _ in range(3):
        again = build(case, dtype).results("cpu")
        for name, value in together.items():
            assert torch.equal(value, again[name]), f"{name} differs between two runs"
    tolerance = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert max(distances(together, alone).values()) <= tolerance


def test_a_stick_of_many_keys():
    """What is left of it is a sum of hundreds, whose differences are the weights' logarithms."""
    check(SMALL.but(heads=2, groups=2, queries=1000, keys=1000, head_dim=8, program="stick"))
    check(RAGGED.but(queries=50, keys=130, program="stick, post", bias="separable"))


@pytest.mark.parametrize("sink", [-200.0, 0.0, 200.0])
def test_sinks_of_any_size(sink):
    q = torch.randn(1, 2, 30, 4)
    program = ScoreProgram(sink=torch.full((2,), sink))
    expected = attention(q.double(), q.double(), q.double(), program.to(torch.float64), backend="reference")
    torch.testing.assert_close(attention(q, q, q, program, backend="cpu"), expected.float())


def test_a_dense_bias_that_needs_no_gradient_gets_none(monkeypatch):
    """Nothing of T×T is made."""
    found, made = [], []
    forward, backward = op.KERNELS["cpu"]
    watched = (forward, lambda *given: found.append(backward(*given)) or found[-1])
    monkeypatch.setitem(op.KERNELS, "cpu", watched)
    monkeypatch.setattr(op.torch, "zeros_like", lambda x: made.append(x.shape))
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    attention(q, q, q, None, bias=torch.zeros(1, 2, 64, 64), backend="cpu").sum().backward()
    assert set(found[0]) == {"q", "k", "v"}
    assert made == []


class Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_the_operator_is_called_where_somebody_watches(monkeypatch):
    """Without traces and modes the kernel is called by itself, which decoding and short training steps notice."""
    watched = []
    operator = op._forward
    monkeypatch.setattr(op, "_forward", lambda *arguments: watched.append(1) or operator(*arguments))
    q = torch.randn(1, 2, 3, 4)
    leaf = torch.randn(1, 2, 3, 4, requires_grad=True)

    def calls(q: torch.Tensor) -> int:
        watched.clear()
        attention(q, q, q, bias=DistanceBias(torch.zeros(2, 3)), backend="cpu")
        return len(watched)

    class Subclass(torch.Tensor):
        pass

    assert calls(q) == calls(leaf) == 0
    with torch.no_grad():
        assert calls(leaf) == 0
    with Mode():
        assert calls(leaf) == 1
    with torch.device("cpu"):
        assert calls(q) == 1
    assert calls(q.as_subclass(Subclass)) == 1


def test_gradients_with_and_without_the_operator():
    """The derivative is the same, bit for bit, whoever asks for it: a backward pass that a mode watches too."""
    call, gradients = build(RAGGED, torch.float32), []
    for forward, backward in ((False, False), (False, True), (True, True)):
        with Mode() if forward else nullcontext():
            loss = call.attend("cpu").square().sum()
        with Mode() if backward else nullcontext() as mode:
            gradients.append(torch.autograd.grad(loss, list(call.leaves.values())))
        if backward:
            assert torch.ops.dape.attention_backward.default in mode.seen
    for other in gradients[1:]:
        assert all(map(torch.equal, gradients[0], other))
