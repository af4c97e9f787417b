"""The Triton kernels against the definition, run by the interpreter: pytest collects this with TRITON_INTERPRET=1.

test_triton.py starts it in a process of its own, because Triton decides at import whether to interpret.
"""

import inspect
import json
from typing import Any

import fuzz
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import interpreter

from dape.cli import doctor, main
from dape.ops.score_attention import DistanceBias, SeparableBias, Visible, attention, conv_program
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.program import PLAIN
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton import selftest
from dape.ops.score_attention.types import EVERYTHING, Problem

CPU = torch.device("cpu")
HALF = {"dtype": torch.float16}
# Errors as shares of norms: float32 sums in other orders; results in half precision are chains of rounded maps.
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def stage(outputs: int, inputs: int, kernel: int, left: int, groups: int = 1, slope: float = 1.0, offset: bool = True) -> tuple:  # fmt: skip
    return (outputs, inputs // groups, 1, kernel, offset, left, groups, slope)


def signature(pre: tuple, post: tuple = (), residual: str = "scores+bias", **vectors: bool) -> tuple:
    given = [vectors.get(name, False) for name in ("sink", "scale", "offset", "power")]
    return (pre, post, residual, *given, 0.0, None, False, "softmax")


def compare(gradients: bool = True, **own: Any) -> None:
    """A call against the definition; its program is that of a signature, or two convolutions (width=None: plain scores)."""
    call = {"num_heads": 3, "bias": "distance"} | own
    width, kernel = call.pop("width", 8), call.pop("kernel", 3)
    left, residual = call.pop("left", kernel // 2), call.pop("residual", "scores+bias")
    heads = call["num_heads"]
    pair = ()
    if width is not None:
        channels = heads * (1 if call["bias"] == "none" else 2)
        pair = (stage(width, channels, kernel, left, slope=0.01), stage(heads, width, kernel, left))
    kind = {
        "dtype": torch.float32, "num_groups": heads, "head_dim": 16, "signature": signature(pair, (), residual), "causal": True,
        "bounded": (False, False), "backward": gradients, "length": 19, "batch": 1, "rows": 10**6,
    } | call  # fmt: skip
    found = selftest.errors(CPU, **kind)
    assert len(found) >= 4 * gradients
    # The gradient of a last offset is a sum of numbers that cancel.
    large = {
        n: x for n, x in found.items() if not x <= LIMITS[kind["dtype"]] * (10 if n.endswith("offset") else 1)
    }
    assert not large, large


@pytest.fixture(autouse=True)
def small_blocks():
    torch.set_num_threads(1)
    with fuzz.small_blocks():
        yield


@pytest.fixture(autouse=True)
def rounding_is_to_nearest(monkeypatch):
    """The interpreter cuts off bits on the way to bfloat16, where GPUs round."""
    convert = interpreter._convert_float

    def nearest(x, source, target, mode):
        if source.name == "fp32" and target.name == "bf16":
            return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        return convert(x, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)


PADDED = {"batch": 2, "visible": Visible(first=torch.tensor([[6], [0]]))}
CUT = {"batch": 2, "visible": Visible(first=torch.tensor([[2], [0]]), last=torch.tensor([[11], [16]]))}
EMPTY = {"batch": 2, "visible": Visible(first=torch.tensor([[4], [0]]), last=torch.tensor([[2], [9]]))}


def window(length: int, keys: int) -> dict[str, Any]:
    return {"length": length, "visible": Visible(first=torch.arange(length)[None] - keys)}


FORWARD = {
    "one key": {"length": 1},
    "decoding": {"queries": 1, "length": 70, "num_heads": 4, "num_groups": 2},
    "one tile exactly": {"length": 16},
    "standard shape": {"num_heads": 12, "head_dim": 64, "width": 32},
    "many heads": {"num_heads": 17, "kernel": 1},
    "wide heads": {"head_dim": 128, "kernel": 2},
    "all to the right": {"left": 0},
    "all to the left": {"left": 2},
    "an empty row": EMPTY,
    "window": window(19, 4),
    "more queries than keys": {"causal": False, "queries": 21, "length": 9},
    "float16": {"queries": 37, "length": 40, "num_heads": 2, "width": 32, **HALF},
    "float16, window": {**window(19, 4), **HALF},
}

SLOW_FORWARD = {
    "very long": {"length": 300, "num_heads": 2, "width": 32, **HALF},
    "128 heads": {"num_heads": 128, "num_groups": 8, "width": 16, "length": 6},
    "128 hidden channels": {"width": 128, "kernel": 5, "length": 9},
    "15 keys": {"kernel": 15, "length": 20},
    "15 keys to the left": {"kernel": 15, "left": 14, "length": 20},
    "head width 256": {"head_dim": 256, "num_heads": 2, "length": 9},
}

GRADIENTS = {
    "distance": {"length": 17, "num_heads": 2, "width": 32},
    "none": {"bias": "none", "kernel": 2, "length": 12},
    "dense": {"bias": "dense", "batch": 2, "residual": "scores", "length": 9},
    "grouped heads, a chunk": {"num_heads": 4, "num_groups": 2, "queries": 5, "length": 23},
    "left padding": {**PADDED, "kernel": 2, "left": 0, "length": 9},
    "last key": {**CUT, "queries": 9, "length": 17},
    "bidirectional": {"causal": False, "queries": 9, "length": 12},
    "plain, distance": {"width": None, "queries": 33, "length": 35, "batch": 2},
    "plain, dense": {"width": None, "bias": "dense", "batch": 2, "num_heads": 5},
    "plain, separable": {"width": None, "bias": "separable"},
    "plain": {"width": None, "bias": "none", **PADDED},
    "float16": {"length": 17, **HALF},
    "bfloat16": {"length": 9, "dtype": torch.bfloat16},
    "bfloat16, plain": {"width": None, "dtype": torch.bfloat16},
}

SLOW_GRADIENTS = {
    "standard shape": {"num_heads": 12, "head_dim": 64, "width": 32, "length": 33},
    "k=15": {"kernel": 15, "length": 20, "bias": "none"},
    "wide hidden": {"width": 128, "kernel": 2, "bias": "none", "length": 9},
    "many heads": {"num_heads": 40, "num_groups": 8, "length": 9},
    "many heads, dense": {"num_heads": 33, "length": 5, "bias": "dense", "kernel": 1},
    "bfloat16, none": {"bias": "none", "length": 12, "dtype": torch.bfloat16},
    "bfloat16, dense": {"bias": "dense", "length": 12, "dtype": torch.bfloat16},
    # Chunks of 16 rows.
    "chunks": {"num_heads": 2, "queries": 67, "length": 69, "rows": 1, **HALF},
    "chunks, a window": {**window(40, 9), "kernel": 2, "rows": 1},
    "chunks, many to the right": {"length": 40, "kernel": 5, "left": 0, "rows": 1},
    "chunks, bidirectional": {"causal": False, "queries": 19, "length": 34, "bias": "dense", "rows": 1},
    "chunks, padding": {**PADDED, "length": 20, "bias": "none", "rows": 1},
}


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD.keys())
def test_output(case):
    compare(gradients=False, **case)


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradients(case):
    compare(**case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_FORWARD.values(), ids=SLOW_FORWARD.keys())
def test_output_of_larger_calls(case):
    compare(gradients=False, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_GRADIENTS.values(), ids=SLOW_GRADIENTS.keys())
def test_gradients_of_larger_calls(case):
    compare(**case)


# No multiple of 16, multiples of 16 and 32 between powers of two: a tile of the head width ends inside a row.
@pytest.mark.parametrize("head_dim", [1, 24, 112])
def test_every_head_dim(head_dim):
    own = {"num_heads": 2, "num_groups": 1, "head_dim": head_dim, "length": 5}
    compare(width=None, **own)
    compare(gradients=False, kernel=1, width=4, **own, **HALF)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [24, 96, 256])
def test_gradients_of_every_head_dim(head_dim):
    compare(num_heads=2, num_groups=1, head_dim=head_dim, length=7, kernel=2, width=4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_of_the_real_size(monkeypatch, dtype):
    monkeypatch.setattr(calls, "BLOCK_R", 64)
    monkeypatch.setattr(calls, "BLOCK_K", 64)
    compare(queries=150, length=160, num_heads=2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_chunks_of_rows_batches_and_splits_of_keys_change_nothing(monkeypatch, dtype):
    monkeypatch.setattr(calls, "card", lambda device: (10**6, 1))
    own = {"num_heads": 1, "width": 4, "dtype": dtype, "rows": 1}
    compare(gradients=False, queries=18, length=70, kernel=2, **own)
    compare(length=17, batch=2, kernel=1, **own)
    compare(length=70, signature=signature((), sink=True), **own)


PROGRAMS = {
    "three stages": signature((stage(6, 8, 3, 1, slope=0.01), stage(5, 6, 2, 0, slope=0.1), stage(4, 5, 1, 0))),
    "groups with a bias": signature((stage(6, 8, 3, 1, groups=2, slope=0.01), stage(4, 6, 3, 1, groups=2))),
    # The second stage reads twice as many channels as there are heads, as a first one with a bias does.
    "groups, twice as wide": signature((stage(8, 8, 3, 1, groups=2, slope=0.01), stage(4, 8, 2, 1, groups=2))),
    "talking heads before": signature((stage(4, 4, 1, 0, offset=False),), residual="none"),
    "key convolution": signature((stage(4, 4, 3, 2, groups=4, offset=False),), residual="bias"),
    "a sink": signature((stage(6, 8, 2, 1, slope=0.01), stage(4, 6, 2, 1)), sink=True),
    "ssmax": signature((stage(6, 8, 2, 1, slope=0.01), stage(4, 6, 2, 1)), scale=True),
    "plain ssmax with a sink": signature((), sink=True, scale=True),
    "talking heads": signature((stage(4, 4, 1, 0, offset=False),), (stage(4, 4, 1, 0, offset=False),), "none"),
    "stages after, in groups": signature(
        (), (stage(6, 4, 3, 1, groups=2, slope=0.1), stage(4, 6, 2, 0, groups=2)), sink=True
    ),
    "everything": signature(
        (stage(6, 8, 3, 1, slope=0.01), stage(4, 6, 3, 1)), (stage(4, 4, 3, 2),), sink=True, scale=True, offset=True
    ),
}  # fmt: skip


# Parts of others.
PARTS = ("groups with a bias", "talking heads before", "a sink", "ssmax", "plain ssmax with a sink")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in PARTS else name for name in PROGRAMS]
)
def test_programs(name):
    compare(signature=PROGRAMS[name], num_heads=4, head_dim=8, length=9)


@pytest.mark.slow
@pytest.mark.parametrize("own", [{"causal": False}, {"bias": "separable"}, {"length": 37, "rows": 1}])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in PARTS])
def test_programs_of_other_calls(name, own):
    compare(**{"signature": PROGRAMS[name], "num_heads": 4, "head_dim": 8, "length": 9} | own)


def test_a_separable_bias():
    compare(signature=PROGRAMS["groups with a bias"], num_heads=4, bias="separable", length=9)


def test_sums_of_many_tokens_lose_nothing():
    """Parts of a separable bias as after 65,536 tokens, of which the differences count."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.rand(1, 2, 40, generator=generator, dtype=torch.float64).cumsum(2) + 3e4
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=generator, dtype=torch.float64).float().double()

    def attend(dtype: torch.dtype, backend: str) -> Tensor:
        inputs = (x.to(dtype) for x in (q, k, v))
        return attention(*inputs, bias=SeparableBias(-sums, sums), backend=backend).double()

    expected = attend(torch.float64, "reference")
    assert (attend(torch.float32, "triton") - expected).abs().max() < 1e-5


# The first: a residual of the bias alone, which the first stage reads.
@pytest.mark.parametrize("number", [81, *(pytest.param(n, marks=pytest.mark.slow) for n in range(10))])
def test_random_calls(number):
    """Groups, depths, stages after the softmax, sinks, biases and visibilities as the fuzzer draws them, with gradients.

    Hundreds more: `TRITON_INTERPRET=1 python tests/fuzz.py --kinds triton --cases 200`.
    """
    draw, wrong = fuzz.run("triton", number)
    assert not wrong, (wrong, draw.made)


def test_batch_entries_far_apart():
    """More than 2³¹ numbers from the first batch entry to the last: of that memory only the entries are touched."""
    shape, distance = (3, 1, 5, 16), 2**30
    memory = torch.empty(2 * distance + 5 * 16, dtype=torch.float16)
    far = memory.as_strided(shape, (distance, 80, 16, 1))
    near = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    far.copy_(near)
    results = [
        backend.attend(Problem(x, x, x, PLAIN, None, EVERYTHING, True, 0.25, 0.0)) for x in (near, far)
    ]
    assert torch.equal(*results)


def training_call(**own: Any) -> dict[str, Tensor]:
    """Inputs of a call by the public function, and its bias."""
    generator = torch.Generator().manual_seed(7)
    shapes = dict.fromkeys("qkv", (1, 2, 9, 16)) | {"values": (2, 9), "w1": (4, 4, 1, 1), "w2": (2, 4, 1, 1)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {n: x.to(own.get("dtype") if n in "qkv" else None).requires_grad_() for n, x in found.items()}


def by_the_public_function(x: dict[str, Tensor]) -> Tensor:
    program = conv_program(x["w1"], torch.zeros(4), x["w2"], torch.zeros(2), 0)
    return attention(x["q"], x["k"], x["v"], program, bias=DistanceBias(x["values"]), backend="triton")


def test_the_same_call_gives_the_same_bits_and_dtypes():
    tensors = training_call(dtype=torch.float16)
    one, two = (
        torch.autograd.grad(by_the_public_function(tensors).float().sum(), list(tensors.values()))
        for _ in range(2)
    )
    assert all(torch.equal(*pair) for pair in zip(one, two, strict=True))
    assert [x.dtype for x in one] == [x.dtype for x in tensors.values()]


def test_a_compiled_graph_holds_the_whole_operation():
    tensors = training_call()

    def step(tensors: dict[str, Tensor]) -> Tensor:
        return by_the_public_function(tensors) * 2

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out = function(tensors)
        results.append([out, *torch.autograd.grad(out.sum(), list(tensors.values()))])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_autocast_changes_nothing_inside():
    tensors = training_call(dtype=torch.bfloat16)
    plain = by_the_public_function(tensors)
    with torch.autocast("cpu", torch.bfloat16):
        cast = by_the_public_function(tensors)
    assert torch.equal(plain, cast)


def test_tensors_without_numbers_have_shapes():
    with FakeTensorMode():
        q = torch.empty(2, 3, 70, 16, requires_grad=True)
        program = conv_program(*map(torch.empty, ((8, 3, 1, 3), 8, (3, 8, 1, 3), 3)), 1)
        out = attention(q, q, q, program, backend="triton")
        out.sum().backward()
        assert out.shape == q.shape
        assert q.grad.shape == q.shape


def short(name: str) -> dict[str, Any]:
    """A call of doctor's self-test, shorter by as much as the blocks."""
    kind = selftest.SUITE[name]
    return kind | {"length": kind.get("length", 300) // 4, "batch": 1}


# Kernels with a path without masks, in each of their modes.
MASKED = {
    *(("pairs_kernel", mode) for mode in ("scores", "weights", "gradients", "given")),
    ("attend_kernel", "softmax"), ("attend_kernel", "linear"), ("convolve_kernel", "forget"), ("convolve_kernel", "keep"),
}  # fmt: skip
UNMASKED = {(f"{name}_kernel", "") for name in ("stage", "taps", "keys", "diagonals", "merge")}


@pytest.mark.slow
def test_the_self_test_passes_and_enters_every_loop(monkeypatch):
    """Every kernel in every mode, also over tiles in which every row sees every key, which short calls never have."""
    entered, running = set(), [("", "")]
    run, call = interpreter.InterpretedFunction.run, interpreter.InterpretedFunction.__call__

    def started(self, *args, **given):
        mode = given.get("MODE", "")
        if "LINEAR" in given:
            mode = "linear" if given["LINEAR"] else "softmax"
        elif "KEEP" in given:
            mode = "keep" if given["KEEP"] else "forget"
        running[0] = (self.fn.__name__, mode)
        entered.add((*running[0], "", False))
        return run(self, *args, **given)

    def called(self, *args, **kwargs):
        if running[0] in MASKED and "EDGE" in self.arg_names:
            given = inspect.signature(self.fn).bind(*args, **kwargs)
            given.apply_defaults()
            entered.add((*running[0], self.fn.__name__, bool(given.arguments["EDGE"])))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", started)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)
    for name in selftest.SUITE:
        found = selftest.errors(torch.device("cpu"), **short(name))
        assert selftest.wrong(found, short(name)["dtype"]) is None, name
    assert {x[:2] for x in entered} == MASKED | UNMASKED
    edges = {x[:3] for x in entered if x[3]}
    assert {x[:2] for x in edges} == MASKED
    assert edges <= {x[:3] for x in entered if not x[3]}


@pytest.mark.parametrize("mistake", ["head", "tap"])
def test_the_self_test_finds_a_mistake(monkeypatch, mistake):
    """Heads or taps that are mixed up make it fail."""
    kind = selftest.SUITE["stages in groups, separable"] | {"length": 20, "batch": 1}
    assert selftest.wrong(selftest.errors(torch.device("cpu"), **kind), kind["dtype"]) is None
    made = calls.StageTensors.taps.func
    turn = {"head": lambda x: x.roll(1, 1), "tap": lambda x: x.flip(0)}[mistake]
    monkeypatch.setattr(calls.StageTensors, "taps", property(lambda stage: turn(made(stage))))
    assert "is off: out by" in selftest.wrong(selftest.errors(torch.device("cpu"), **kind), kind["dtype"])


def test_the_self_test_does_not_depend_on_the_default_device():
    kind = selftest.SUITE["plain, sink"] | {"length": 20, "batch": 1, "num_heads": 2, "num_groups": 2}
    with torch.device("meta"):
        found = selftest.errors(torch.device("cpu"), **kind)
    assert selftest.wrong(found, kind["dtype"]) is None


@pytest.mark.slow
def test_doctor_runs_the_kernels(monkeypatch):
    found = [x for x in doctor.kernels(torch.device("cpu")) if x["backend"] == "triton"]
    assert len(found) >= 3
    assert all(x["passes"] for x in found), found


def test_the_benchmark_checks_and_times_the_kernels(tmp_path):
    file = tmp_path / "cells.json"
    sizes = ["--lengths", "6", "--heads", "2", "--head-dim", "16", "--width", "4", "--kernel", "1"]
    arguments = ["--backends", "triton,sdpa", "--rounds", "1", "--json", str(file)]
    assert main(["bench", "attention", *sizes, *arguments]) == 0
    assert {(x["backend"], x["pass"]) for x in json.loads(file.read_text())} == {
        (name, which) for name in ("triton", "sdpa") for which in ("forward", "forward+backward")
    }
    assert main(["bench", "decode", *sizes, *arguments]) == 0
    assert [x["backend"] for x in json.loads(file.read_text())] == ["triton", "sdpa"]


@pytest.mark.slow
def test_a_benchmark_of_training_runs_the_kernels(tmp_path):
    file = tmp_path / "records.json"
    sizes = [f"--{name}=1" for name in ("batch", "rounds", "steps")] + ["--length=4", "--backend=triton"]
    assert main(["bench", "train", "--methods=dape1x3-kerple", *sizes, "--json", str(file)]) == 0
    assert {x["method"] for x in json.loads(file.read_text())} == {"kerple", "dape1x3-kerple"}


def test_second_derivatives_are_refused():
    q = torch.randn(1, 2, 5, 16, requires_grad=True)
    out = attention(q, q, q, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad.sum().backward()
