"""What the backends have in common: the choice among them, layouts, and how PyTorch's own machinery sees them."""

import pytest
import torch
from op_cases import MORE, PROGRAMS, RAGGED, Case, assert_equal, build, needs_kernel

from dape.ops.score_attention import ScoreProgram, Stage, attention, cpu, native, op, sdpa, tiled
from dape.ops.score_attention.api import choose, make_problem

pytestmark = needs_kernel
BACKENDS = ["cpu", "tiled"]


def problem(case: Case, dtype: torch.dtype = torch.float32, **changes):
    call = build(case, dtype)
    given = {"bias": call.bias, "visible": call.visible, "causal": call.causal, **changes}
    return make_problem(call.q, call.k, call.v, given.pop("program", call.program), **given)


def test_auto_takes_the_fastest_that_can(monkeypatch):
    for program in (None, *PROGRAMS, *MORE):
        for bias in ("none", "separable", "tile"):
            assert choose(problem(RAGGED.but(program=program, bias=bias))) is cpu, (program, bias)
    assert choose(problem(Case(kernel=None, bias="none"))) is cpu
    assert choose(problem(Case(kernel=None, bias="none"), dropout=0.1)) is sdpa
    assert choose(problem(Case(leak=True))) is tiled
    q = torch.zeros(1, 2, 3, 4, device="meta")
    assert "tensors are on meta" in cpu.unsupported(make_problem(q, q, q, None))
    monkeypatch.setattr(native, "PROBLEM", native.NOT_BUILT)
    assert "install g++ or clang" in cpu.unsupported(problem(Case()))
    assert choose(problem(Case(kernel=None, bias="none"))) is sdpa
    for case in (Case(), RAGGED.but(program="3x3")):
        assert choose(problem(case)) is tiled


def deep(count: int, rows: int) -> ScoreProgram:
    return ScoreProgram((Stage(torch.zeros(3, 1, rows, 1), groups=3),) * count)


REFUSED = {
    "float64": (lambda: problem(Case(), torch.float64), "float32 only"),
    "dropout": (lambda: problem(Case(), dropout=0.1), "dropout is not supported"),
    "leak": (lambda: problem(Case(leak=True)), "leak_future"),
    "leak of rows": (lambda: problem(Case(leak=True, query_kernel=2)), "leak_future"),
    "rows": (lambda: problem(Case(), program=deep(12, 2)), "the program reads 12"),
    "stages": (lambda: problem(Case(), program=deep(13, 1)), "at most 12 stages, got 13"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_kernel_says_why_it_cannot_run(case):
    make, sentence = REFUSED[case]
    call = make()
    assert sentence in cpu.unsupported(call)
    with pytest.raises(ValueError, match='backend="cpu" cannot run this call: '):
        choose(call, "cpu")
    assert choose(call) is tiled


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["by token", "by feature", "sliced", "every second token"])
@pytest.mark.parametrize("kernel", [None, 3])
def test_any_strides(layout, backend, kernel):
    call = build(Case(queries=40, keys=40, kernel=kernel), torch.float32)
    truth = call.results("reference")
    for name in "qkv":
        x = getattr(call, name).detach()
        if layout == "every second token":
            x = torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2]
        elif layout == "sliced":
            x = torch.cat([x, x], -1)[..., : x.shape[-1]]
        else:
            dims = (1, 2) if layout == "by token" else (2, 3)
            x = x.transpose(*dims).contiguous().transpose(*dims)
        call.leaves[name] = x.requires_grad_()
        setattr(call, name, x)
    assert_equal(call.results(backend), truth, 1e-4)
    # A gradient of the output that is broadcast, as that of a sum is.
    ours, theirs = (torch.autograd.grad(call.attend(b).sum(), call.q)[0] for b in (backend, "reference"))
    assert_equal({"q": ours}, {"q": theirs}, 1e-4)


WATCHED = [Case(visible="left padding"), RAGGED.but(program="sink", visible="window")]


@pytest.mark.parametrize("case", WATCHED, ids=str)
def test_is_a_well_behaved_operator(case, monkeypatch):
    calls = []
    forward = op._forward
    monkeypatch.setattr(op, "_watched", lambda tensors: True)
    monkeypatch.setattr(op, "_forward", lambda *arguments: calls.append(arguments) or forward(*arguments))
    build(case.but(head_dim=3), torch.float32).attend("cpu")
    tensors, *rest = calls[0]
    leaves = [x.detach().requires_grad_() if x.requires_grad else x for x in tensors]
    torch.library.opcheck(forward, (leaves, *rest))


@pytest.mark.parametrize("program", [None, "talking"])
def test_a_second_derivative_is_refused(program):
    call = build(Case(heads=4, groups=2, program=program), torch.float32)
    (grad,) = torch.autograd.grad(call.attend("cpu").square().sum(), call.q, create_graph=True)
    with pytest.raises(RuntimeError, match=r'second derivatives are not implemented.* backend="reference"'):
        grad.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("visible", ["all", "rows that see nothing"])
@pytest.mark.parametrize("queries", [2, 40])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "bias"])
def test_what_is_not_a_number_spreads_as_in_the_reference(name, value, queries, visible, backend):
    for kernel in (None, 3):
        case = Case(queries=queries, keys=40, bias="dense", kernel=kernel, visible=visible)
        call = build(case, torch.float32)
        with torch.no_grad():
            call.leaves[name][0, 1, queries // 2, 3] = value
            ours, expected = call.attend(backend), call.attend("reference")
        assert torch.equal(ours.isnan(), expected.isnan())
        torch.testing.assert_close(ours, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("factor", [30.0, 1e4])
def test_large_scores(factor, queries, backend):
    results = {}
    for dtype, name in ((torch.float64, "reference"), (torch.float32, "reference"), (torch.float32, backend)):
        call = build(Case(queries=queries, keys=40, head_dim=64), dtype)
        with torch.no_grad():
            call.q.mul_(factor)
            results[dtype, name] = call.attend(name)
            exact = results[torch.float64, "reference"]
    theirs = (results[torch.float32, "reference"] - exact).abs().max()
    assert (results[torch.float32, backend] - exact).abs().max() <= 2 * theirs + 1e-5


@pytest.mark.parametrize("sizes", [(2, 0), (0, 3)], ids=["no queries", "no batch entries"])
@pytest.mark.parametrize("bias", ["none", "dense", "distance"])
@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_a_call_without_numbers_has_gradients_of_zero(sizes, bias, backend):
    batch, queries = sizes
    results = build(Case(batch=batch, queries=queries, bias=bias), torch.float32).results(backend)
    assert results["out"].shape == (batch, 3, queries, 4)
    assert not any(x.any() for x in results.values())
    assert results.keys() > {"out", "k", "w1"}


def test_a_scale_that_is_not_positive_is_like_any_other():
    q, k, v = torch.randn(3, 1, 2, 19, 4)
    for scale in (0.0, -0.5):
        exact = attention(q, k, v, scale=scale, backend="reference")
        torch.testing.assert_close(attention(q, k, v, scale=scale), exact)
