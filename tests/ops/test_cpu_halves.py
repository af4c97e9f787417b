"""The C++ kernel on numbers of two bytes: what float32 gives, rounded once, without a float32 copy of the tensors."""

from dataclasses import replace

import pytest
import torch
from op_cases import PROGRAMS, RAGGED, SHAPES, build, needs_kernel
from torch.profiler import ProfilerActivity, profile

from dape.bench.workload import BOTH, FORWARD, Sizes, Workload
from dape.ops.score_attention import Visible, attention, native, op

pytestmark = needs_kernel
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def twice(monkeypatch):
    """Runs every kernel call once more on the same numbers in float32 and compares bit by bit; counts the calls."""
    calls = []

    def wide(arguments):
        floats = {n: x.float() if x.is_floating_point() else x for n, x in arguments.tensors.items()}
        return replace(arguments, tensors=floats)

    def twice_of(forward, backward):
        def run_forward(arguments):
            out, lse = forward(arguments)
            exact, exact_lse = forward(wide(arguments))
            assert out.dtype == arguments["q"].dtype
            torch.testing.assert_close(out, exact.to(out.dtype), rtol=0, atol=0)
            torch.testing.assert_close(lse, exact_lse, rtol=0, atol=0)
            calls.append("forward")
            return out, lse

        def run_backward(arguments, grad_out, out, lse):
            grads = backward(arguments, grad_out, out, lse)
            exact = backward(wide(arguments), grad_out.float(), out.float(), lse)
            assert grads.keys() == exact.keys()
            for name, grad in grads.items():
                assert grad.dtype == arguments[name].dtype
                torch.testing.assert_close(grad, exact[name].to(grad.dtype), rtol=0, atol=0, msg=name)
            calls.append("backward")
            return grads

        return run_forward, run_backward

    monkeypatch.setitem(op.KERNELS, "cpu", twice_of(*op.KERNELS["cpu"]))
    return calls


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_float32s_rounded_once(shape, dtype, twice):
    build(SHAPES[shape].but(bias="distance"), dtype).results("cpu")
    assert twice == ["forward", "backward"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", native.builds())
def test_results_of_every_build(name, dtype, twice):
    with native.use_build(name):
        for shape in ("two tiles", "few queries"):
            build(SHAPES[shape].but(bias="dense", visible="left padding"), dtype).results("cpu")
    assert len(twice) == 4


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_of_every_program(program, dtype, twice):
    """Those over several rows add to each other's gradients of q."""
    case = RAGGED.but(program=program)
    build(case, dtype).results("cpu")
    with torch.no_grad():
        build(case.but(queries=5, keys=300), dtype).attend("cpu")
    assert twice == ["forward", "backward", "forward"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("name", native.builds())
def test_every_number_is_read_and_written(name, queries, dtype):
    """All 65,536 of them, as the value of the only key that a query sees; for many queries those that are finite."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    v = numbers.view(-1, 1, queries, 64)
    v = v.nan_to_num(0.0, 0.0, 0.0) if queries > 1 else v
    own = torch.arange(queries)[None]
    with native.use_build(name):
        out = attention(torch.zeros_like(v), torch.zeros_like(v), v, visible=Visible(own, own), backend="cpu")
    # A sum that begins with 0 has no −0.
    torch.testing.assert_close(out + 0, v + 0, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_no_tensor_is_copied_to_float32(dtype):
    """What PyTorch allocates: the results, and two bytes beside each number of the gradients of k and v."""
    call = Workload(Sizes(512, 512, batch=2, heads=2, head_dim=128, processor="plain"), dtype)
    tensor = 2 * call.q.numel()
    allocated = {}
    for name in (FORWARD, BOTH):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            call.run("cpu", name)
        allocated[name] = sum(max(0, event.self_cpu_memory_usage) for event in record.key_averages())
    assert tensor <= allocated[FORWARD] < 1.5 * tensor
    assert 6 * tensor <= allocated[BOTH] < 6.5 * tensor


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_gradients_that_nearly_cancel_are_as_good_as_pytorchs(backend):
    """All three compute a row's sum of P · dP from the rounded output: see docs/kernels.md."""
    torch.manual_seed(0)
    draws = [torch.randn(1, 2, 64, 16) for _ in range(4)]
    draws[2] += 3.0
    q, k, v, grad = (x.half() for x in draws)

    def error(dtype, attend):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves), leaves, grad.to(dtype))[0].double()

    exact = error(torch.float64, lambda q, k, v: attention(q, k, v, backend="reference"))

    def theirs(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    bound = 2 * (error(torch.float16, theirs) - exact).abs().max()
    found = error(torch.float16, lambda q, k, v: attention(q, k, v, backend=backend))
    assert (found - exact).abs().max() <= bound
    assert bound < 0.2 * exact.abs().max()
