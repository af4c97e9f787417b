"""The C++ kernel against the definition in float64: every shape, bias, visibility, build and thread count."""

from __future__ import annotations

import ctypes
import itertools
from contextlib import nullcontext

import pytest
import torch
from cpu_cases import SHAPES, Case, check, evaluate, kernel_expected, needs_kernel, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dape.ops.score_attention import PLAIN, DistanceBias, attention, conv_program, cpu, native, op, sdpa
from dape.ops.score_attention.api import choose
from dape.ops.score_attention.types import EVERYTHING, Problem, Visible

pytestmark = needs_kernel

BIASES = ("none", "distance", "shared", "dense")
VISIBLE = ("all", "padded", "window", "cache", "nothing")


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_and_biases(shape, bias, causal):
    check(SHAPES[shape].but(bias=bias, causal=causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("visible", VISIBLE[1:])
@pytest.mark.parametrize(("heads", "width"), [(4, 0), (4, 6), (8, 9)])
def test_visibility(visible, bias, causal, heads, width):
    case = Case(batch=2, heads=heads, queries=50, keys=61, width=width, bias=bias, causal=causal)
    check(case.but(visible=visible))


@pytest.mark.parametrize("visible", ["all", "window"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("left", [0, 1, 2])
def test_pairs_of_columns_for_every_alignment_of_the_kernel(left, bias, visible):
    check(Case(heads=8, queries=51, keys=64, width=9, left=left, bias=bias, visible=visible))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kernel_size", "left"), [(k, left) for k in range(1, 5) for left in range(k)])
def test_every_reach_at_every_place_in_a_chunk(kernel_size, left, causal):
    """Nothing is lost at the end of the walk, wherever the last key falls around the end of a chunk of keys."""
    torch.set_num_threads(1)
    # Linear, so that no sign can flip and a plain tolerance holds.
    small = Case(heads=1, groups=1, head_dim=2, width=2, kernel_size=kernel_size, left=left, slope=1.0)
    # A chunk has 24 keys, or 72 in a build for few queries.
    for keys, bias in itertools.product(range(61, 75), BIASES):
        case = small.but(queries=keys, keys=keys, causal=causal, bias=bias, seed=keys)
        inputs = tensors(case)
        exact = evaluate(case, inputs, torch.float64, "reference")
        for build in native.builds()[:2]:
            with native.use_build(build):
                found = evaluate(case, inputs, torch.float32, "cpu")
            for name, ours in found.items():
                expected = exact[name].float()
                torch.testing.assert_close(
                    ours, expected, rtol=1e-4, atol=1e-4, msg=f"{name} of {case}, {build}"
                )


@pytest.mark.parametrize("bias", ["distance", "shared"])
@pytest.mark.parametrize("shape", ["two tiles", "few queries"])
def test_residual_of_scores_alone(shape, bias):
    check(SHAPES[shape].but(bias=bias, residual="scores"))


@pytest.mark.parametrize("bias", ["none", "distance", "shared"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("build", native.builds())
def test_every_build(build, shape, bias):
    with native.use_build(build):
        check(SHAPES[shape].but(bias=bias))


@pytest.mark.parametrize(
    ("environment", "compiler", "expected"),
    [
        ({}, None, False),
        ({}, "/usr/bin/g++", True),
        ({"CI": "true"}, None, True),
        ({"CI": "false"}, None, False),
    ],
)
def test_a_missing_kernel_is_a_failure_where_it_could_be_built(environment, compiler, expected):
    assert kernel_expected(environment, lambda name: compiler if name == "g++" else None) is expected


def test_few_queries_have_a_build_of_their_own():
    """Where its smaller tiles compute less; 64 queries are four tiles of 16, or two of 48."""
    every = ["avx512", "avx512_short", "avx2", "portable"]

    def chosen(queries: int, available: list[str], causal: bool = True, rows: int = 1) -> str:
        stage = native.StageCall(rows=rows)
        program = native.Program(num_pre=1, stages=ctypes.addressof(stage))
        call = native.Call(
            queries=queries,
            keys=queries,
            causal=causal,
            program=ctypes.addressof(program) if rows > 1 else None,
        )
        return native.build_for(call, available)

    assert {n: chosen(n, every) for n in (16, 48, 64, 128, 256, 2048)} == {
        16: "avx512_short", 48: "avx512_short", 64: "avx512_short", 128: "avx512_short", 256: "avx512_short",
        2048: "avx512",
    }  # fmt: skip
    assert chosen(48, every, causal=False) == "avx512"
    # Eight of sixteen rows would be computed twice.
    assert chosen(64, every, rows=9) == "avx512"
    assert chosen(64, ["avx2", "portable"]) == "avx2"


def test_unknown_build():
    with pytest.raises(ValueError, match='no build "sse9"'), native.use_build("sse9"):
        pass


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(data):
    groups, repeats = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    queries, kernel_size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 8))
    case = Case(
        batch=data.draw(st.integers(1, 3)),
        heads=groups * repeats,
        groups=groups,
        queries=queries,
        keys=queries + data.draw(st.integers(0, 40)),
        head_dim=data.draw(st.integers(1, 40)),
        width=data.draw(st.integers(0, 10)),
        kernel_size=kernel_size,
        left=data.draw(st.integers(0, kernel_size - 1)),
        bias=data.draw(st.sampled_from(BIASES)),
        causal=data.draw(st.booleans()),
        visible=data.draw(st.sampled_from(VISIBLE)),
        residual=data.draw(st.sampled_from(["scores+bias", "scores"])),
    )
    check(case)


def test_more_queries_than_keys():
    check(Case(queries=40, keys=9, causal=False, bias="distance"))


@pytest.mark.parametrize("bias", ["distance", "shared"])
@pytest.mark.parametrize("shape", ["two tiles", "decode", "kernel 1"])
def test_threads(shape, bias):
    case = SHAPES[shape].but(bias=bias, batch=2)
    results = {}
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results[threads] = evaluate(case, tensors(case), torch.float32, "cpu")
        again = evaluate(case, tensors(case), torch.float32, "cpu")
        for name, value in results[threads].items():
            assert torch.equal(value, again[name]), f"{name} differs between two runs on {threads} threads"
    for name, value in results[1].items():
        torch.testing.assert_close(results[5][name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [0, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_threads_that_lose_their_core(batch, width, dtype):
    """More threads than cores: gradients of keys that were put aside are added in the same order."""
    case = Case(
        batch=batch, heads=12, groups=12, head_dim=8, queries=700, keys=700, width=width, bias="distance"
    )
    inputs = tensors(case)
    torch.set_num_threads(1)
    alone = evaluate(case, inputs, dtype, "cpu")
    torch.set_num_threads(8)
    together = evaluate(case, inputs, dtype, "cpu")
    for _ in range(3):
        again = evaluate(case, inputs, dtype, "cpu")
        for name, value in together.items():
            assert torch.equal(value, again[name]), f"{name} differs between two runs"
    for name, value in together.items():
        scale = max(1.0, float(alone[name].abs().max()))
        tolerance = 1e-4 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert float((value - alone[name]).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    case = Case(bias="distance")
    inputs = {name: x.to(dtype).double() for name, x in tensors(case).items()}
    exact = evaluate(case, inputs, torch.float64, "reference")
    ours = evaluate(case, inputs, dtype, "cpu")
    for name in ("out", "dq", "dv"):
        assert ours[name].dtype == dtype
        scale = float(exact[name].abs().max())
        assert float((ours[name].double() - exact[name]).abs().max()) <= 4 * torch.finfo(dtype).eps * scale


def test_strided_inputs():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 30, 3, 4, 10).permute(2, 0, 3, 1, 4)
    odd = torch.randn(2, 4, 10, 30).transpose(2, 3)
    for a, b, c in [
        (q, k, v),
        (odd, odd, odd),
        (q[:, :, ::2], k[:, :, ::2], v[:, :, ::2]),
        (q[..., ::2],) * 3,
    ]:
        strided = attention(a, b, c, None, bias=DistanceBias(torch.ones(4, 30)), backend="cpu")
        dense = attention(
            *(x.contiguous() for x in (a, b, c)),
            None,
            bias=DistanceBias(torch.ones(4, 30)),
            backend="reference",
        )
        torch.testing.assert_close(strided, dense, rtol=1e-5, atol=1e-6)


def problem(**changes) -> Problem:
    q = torch.zeros(1, 2, 3, 4)
    weights = [torch.zeros(5, 2, 1, 3), torch.zeros(5), torch.zeros(2, 5, 1, 3), torch.zeros(2)]
    conv = conv_program(*weights, 1, leak_future=changes.pop("leak_future", False))
    fields = {"q": q, "k": q, "v": q, "program": conv, "bias": None, "visible": EVERYTHING, "causal": True,
              "scale": 1.0, "dropout": 0.0}  # fmt: skip
    return Problem(**{**fields, **changes})


def test_chosen_on_the_processor():
    assert choose(problem()) is cpu
    assert choose(problem(leak_future=True)).__name__.endswith("tiled")


def test_chosen_for_plain_calls(monkeypatch):
    assert choose(problem(program=PLAIN)) is cpu
    assert choose(problem(program=PLAIN, dropout=0.1)) is sdpa
    monkeypatch.setattr(native, "PROBLEM", native.NOT_BUILT)
    assert choose(problem(program=PLAIN)) is sdpa


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": torch.zeros(1, 2, 3, 4, dtype=torch.float64)}, "float32 only"),
        ({"q": torch.zeros(1, 2, 3, 4, device="meta")}, "tensors are on meta"),
        ({"dropout": 0.1}, "dropout is not supported"),
        ({"leak_future": True}, "leak_future"),
    ],
)
def test_says_why_it_cannot_run(changes, sentence):
    assert sentence in cpu.unsupported(problem(**changes))


def test_says_what_to_do_without_a_kernel(monkeypatch):
    monkeypatch.setattr(native, "PROBLEM", native.NOT_BUILT)
    assert "install g++ or clang" in cpu.unsupported(problem())
    assert choose(problem()).__name__.endswith("tiled")


def test_opcheck():
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 12, 6, requires_grad=True) for _ in range(3))
    weights = [torch.randn(shape, requires_grad=True) for shape in ((5, 8, 1, 3), (5,), (4, 5, 1, 3), (4,))]
    bias = DistanceBias(torch.randn(4, 12, requires_grad=True))
    visible = Visible(torch.tensor([[0], [3]]))
    described = cpu.describe(Problem(q, k, v, conv_program(*weights, 1), bias, visible, True, 0.4, 0.0))
    tensors, plan, lowest = {n: x for n, x in described[0].items() if x is not None}, *described[1:]
    numbers: list[float] = []
    text = op.encode(plan, numbers)
    arguments = list(tensors.values()), ",".join(tensors), "cpu", text, numbers, lowest
    torch.library.opcheck(op._forward, arguments)


def test_second_derivative_is_refused():
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    bias = DistanceBias(torch.zeros(2, 5, requires_grad=True))
    out = attention(q, k, v, None, bias=bias, backend="cpu")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        grad.sum().backward()


class Layer(torch.nn.Module):
    """A small module that calls the op."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 3 * 8)
        self.expand = torch.nn.Conv2d(4, 6, (1, 3))
        self.reduce = torch.nn.Conv2d(2, 2, (1, 3))
        self.out = torch.nn.Parameter(torch.randn(2, 6, 1, 3) / 4)
        self.slopes = torch.nn.Parameter(torch.rand(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        bias = DistanceBias(-self.slopes * torch.arange(x.shape[1]))
        conv = conv_program(self.expand.weight, self.expand.bias, self.out, self.reduce.bias, 1)
        return attention(q, k, v, conv, bias=bias, backend="cpu").transpose(1, 2).flatten(2)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # PyTorch's own, when inductor is imported
def test_compiles_whole():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 20, 8)
    compiled = torch.compile(layer, fullgraph=True)
    expected, found = layer(x), compiled(x)
    torch.testing.assert_close(found, expected)
    parameters = [p for name, p in layer.named_parameters() if "reduce.weight" not in name]
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_traces_whole():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 20, 8)
    traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x), layer(x))
    traced(x).sum().backward()
    assert layer.slopes.grad is not None


def test_autocast():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.out.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), layer(x), rtol=0.1, atol=0.1)


def test_memory_is_linear(monkeypatch):
    """A dense bias that needs no gradient gets none: nothing of T×T is made."""
    found = []
    forward, backward = op.KERNELS["cpu"]

    def spy(*arguments):
        found.append(backward(*arguments))
        return found[-1]

    monkeypatch.setitem(op.KERNELS, "cpu", (forward, spy))
    made = []
    monkeypatch.setattr(op.torch, "zeros_like", lambda x: made.append(x.shape))
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    attention(q, q, q, None, bias=torch.zeros(1, 2, 64, 64), backend="cpu").sum().backward()
    assert set(found[0]) == {"q", "k", "v"}
    assert made == []


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

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    assert calls(q) == 0
    assert calls(leaf) == 0
    with torch.no_grad():
        assert calls(leaf) == 0
    with Mode():
        assert calls(leaf) == 1
    with torch.device("cpu"):
        assert calls(q) == 1
    assert calls(q.as_subclass(Subclass)) == 1


@pytest.mark.parametrize("program", ["pair", "plain"])
def test_a_ragged_batch_decodes_as_its_entries_alone(program):
    """One query each; keys before `first` are padding, those after `last` room of a cache."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 4, n, 16) for n in (1, 700, 700))
    first, last = torch.tensor([[0], [5], [650], [0]]), torch.tensor([[699], [699], [699], [350]])
    conv = None
    if program == "pair":
        weights = torch.randn(8, 4, 1, 3) / 4, torch.randn(8), torch.randn(4, 8, 1, 3) / 5, torch.randn(4)
        conv = conv_program(*weights, 1)
    out = attention(q, k, v, conv, visible=Visible(first, last), backend="cpu")
    for entry, (start, stop) in enumerate(zip(first[:, 0].tolist(), (last[:, 0] + 1).tolist(), strict=True)):
        one = slice(entry, entry + 1)
        alone = attention(q[one], k[one, :, start:stop], v[one, :, start:stop], conv, backend="cpu")
        torch.testing.assert_close(out[one], alone, rtol=1e-5, atol=1e-5)


def test_gradients_with_and_without_the_operator():
    """The derivative is the same, bit for bit, whoever asks for it: a backward pass that a mode watches too."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 20, 8)
    gradients: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for forward, backward in ((False, False), (False, True), (True, True)):
        seen: list[object] = []
        with Mode() if forward else nullcontext():
            loss = layer(x).square().sum()
        with Mode() if backward else nullcontext():
            gradients[forward, backward] = list(
                torch.autograd.grad(loss, list(layer.parameters()), allow_unused=True)
            )
        assert (torch.ops.dape.attention_backward.default in seen) == backward
    for one, other in zip(gradients[False, False], gradients[True, True], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    for one, other in zip(gradients[False, False], gradients[False, True], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
