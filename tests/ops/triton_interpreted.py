"""The Triton kernels against the definition, run by the interpreter: pytest collects this with TRITON_INTERPRET=1.

test_triton.py starts it in a process of its own, because Triton decides at import whether to interpret.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, replace
from typing import Any

import fuzz
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import interpreter

from dape.cli import doctor, main
from dape.ops.score_attention import (
    DistanceBias,
    ScoreProgram,
    SeparableBias,
    Stage,
    Visible,
    attention,
    conv_program,
    reference,
)
from dape.ops.score_attention import (
    triton as backend,
)
from dape.ops.score_attention.program import PLAIN
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton import selftest
from dape.ops.score_attention.types import EVERYTHING, Problem

NAMES = ("q", "k", "v", "expand_weight", "expand_bias", "project_weight", "project_bias", "bias")


@dataclass(frozen=True)
class Case:
    """One call: sizes, forms, dtype."""

    batch: int = 1
    heads: int = 3
    groups: int | None = None
    queries: int = 19
    keys: int | None = None
    head_dim: int = 32
    width: int = 32
    kernel: int = 3
    left: int | None = None
    bias: str = "distance"
    shared: bool = False
    residual: str = "scores+bias"
    causal: bool = True
    visible: Visible = EVERYTHING
    conv: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def reach(self) -> int:
        return self.kernel // 2 if self.left is None else self.left

    @property
    def num_keys(self) -> int:
        return self.queries if self.keys is None else self.keys

    @property
    def lowest(self) -> int:
        return 0 if self.causal else 1 - max(self.queries, self.num_keys)

    def tensors(self) -> dict[str, Tensor]:
        """Random inputs by name, in float64 but with values that the case's dtype can hold."""
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return numbers.to(self.dtype).double()

        groups = self.groups or self.heads
        channels = self.heads * (1 if self.bias == "none" else 2)
        tensors = {
            "q": draw(self.batch, self.heads, self.queries, self.head_dim),
            "k": draw(self.batch, groups, self.num_keys, self.head_dim),
            "v": draw(self.batch, groups, self.num_keys, self.head_dim),
        }
        if self.conv:
            tensors |= {
                "expand_weight": draw(
                    self.width, channels, 1, self.kernel, scale=(channels * self.kernel) ** -0.5
                ),
                "expand_bias": draw(self.width, scale=0.3),
                "project_weight": draw(
                    self.heads, self.width, 1, self.kernel, scale=(self.width * self.kernel) ** -0.5
                ),
                "project_bias": draw(self.heads, scale=0.3),
            }
        shapes = {
            "distance": (self.heads, self.num_keys - self.lowest),
            "dense": (1 if self.shared else self.batch, self.heads, self.queries, self.num_keys),
        }
        if self.bias in shapes:
            tensors["bias"] = draw(*shapes[self.bias])
        return tensors

    def problem(self, tensors: dict[str, Tensor]) -> Problem:
        conv = (
            conv_program(*(tensors[name] for name in NAMES[3:7]), self.reach, self.residual)
            if self.conv
            else PLAIN
        )
        bias = tensors.get("bias")
        if bias is not None and self.bias == "distance":
            bias = DistanceBias(bias, self.lowest)
        scale = self.head_dim**-0.5
        return Problem(*(tensors[x] for x in "qkv"), conv, bias, self.visible, self.causal, scale, 0.0)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x with the values that `dtype` can hold; the gradient goes straight through."""
    return x + (x.to(dtype).to(x.dtype) - x).detach()


def rounding_reference(case: Case, problem: Problem) -> Tensor:
    """The definition, with the images that the kernels keep in low precision rounded to it: float16 for both halves.

    Rounding flips signs before the LeakyReLU, so that gradients differ visibly from those of the definition.
    """
    conv, dtype, heads = problem.pair, torch.float16, case.heads
    if conv is None or case.dtype == torch.float32:
        return reference.attend(problem)
    scores = problem.q @ reference.repeat_heads(problem.k, heads).transpose(-1, -2) * problem.scale
    bias = problem.dense_bias()
    sizes = {
        "num_queries": case.queries,
        "num_keys": case.num_keys,
        "causal": case.causal,
        "device": scores.device,
    }
    shown = case.visible.mask(**sizes)
    table = case.bias == "distance" and case.causal and case.visible.last is None

    def expand(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.pad(x.masked_fill(~shown, 0.0), (conv.left, 2 * conv.right)), weight)

    hidden = expand(rounded(scores, dtype), conv.expand_weight[:, :heads])
    start = conv.expand_bias[:, None, None]
    if bias is not None:
        start = start + expand(bias if table else rounded(bias, dtype), conv.expand_weight[:, heads:])
    hidden = hidden + (rounded(start, dtype) if table else start)
    hidden = rounded(F.leaky_relu(hidden, conv.negative_slope), dtype)
    first, last = case.visible.bounds(**sizes)
    column = torch.arange(case.num_keys + conv.right)
    inside = (column >= first[..., None]) & (column <= (last + conv.right * case.causal)[..., None])
    hidden = hidden.masked_fill(~inside[:, None], 0.0)
    refined = F.conv2d(F.pad(hidden, (conv.left, 0)), conv.project_weight, conv.project_bias)
    residual = scores if bias is None or case.residual == "scores" else scores + bias
    weights = reference.softmax_visible((residual + refined).masked_fill(~shown, -torch.inf))
    return weights @ reference.repeat_heads(problem.v, heads)


def outputs(case: Case, dtype: torch.dtype, attend, *, gradients: bool) -> dict[str, Tensor]:
    """The output and, if wanted, the gradient of every input, by name."""
    companion = torch.promote_types(dtype, torch.float32)
    tensors = {
        name: x.to(dtype if name in "qkv" else companion).requires_grad_(gradients)
        for name, x in case.tensors().items()
    }
    out = attend(case.problem(tensors))
    results = {"out": out.detach()}
    if gradients:
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        out.backward(direction.to(case.dtype).to(out.dtype))
        results |= {name: x.grad for name, x in tensors.items() if x.grad is not None}
        assert results.keys() == {"out", *tensors}
    return results


def compare(case: Case, *, gradients: bool) -> None:
    found = outputs(case, case.dtype, backend.attend, gradients=gradients)
    expected = outputs(case, torch.float64, lambda p: rounding_reference(case, p), gradients=gradients)
    # A result is a sum over chains of a handful of rounded maps; float32 accumulates everything in float32.
    epsilon = torch.finfo(case.dtype).eps
    sizes = {name: max(1.0, x.abs().max().item()) for name, x in expected.items()}
    # The gradient of b₂ is zero, a sum of many numbers that cancel; b₁'s is a sum over the same pairs.
    sizes["project_bias"] = 4 * sizes.get("expand_bias", 1.0)
    for name, wanted in expected.items():
        assert found[name].dtype == (case.dtype if name in ("out", *"qkv") else torch.float32), name
        error = (found[name].double() - wanted).abs().max().item()
        bound = (32 if case.dtype == torch.float32 else 8) * epsilon * sizes[name]
        assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.2e}"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The smallest blocks and tiles there are: several of each in a small case."""
    monkeypatch.setattr(calls, "BLOCK_R", 16)
    monkeypatch.setattr(calls, "BLOCK_K", 16)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    def blank(*shape, dtype, device):
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(calls, "blank_memory", blank)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def device_functions_are_prepared_once(monkeypatch):
    """The interpreter prepares triton.language anew for each call of a device function; once a module is enough."""
    prepared: set[str] = set()
    prepare = interpreter._patch_lang

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in prepared:
            prepared.add(self.fn.__module__)
            prepare(self.fn)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture(autouse=True)
def rounding_is_to_nearest(monkeypatch):
    """The interpreter cuts off bits on the way to bfloat16, where GPUs round."""
    convert = interpreter._convert_float

    def nearest(x, source, target, mode):
        if source.name == "fp32" and target.name == "bf16":
            return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        return convert(x, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)


PADDED = Visible(first=torch.tensor([[6], [0]]))
CUT = Visible(first=torch.tensor([[2], [0]]), last=torch.tensor([[11], [16]]))

FORWARD = {
    "one key": Case(queries=1),
    "decoding": Case(queries=1, keys=70, heads=4, groups=2),
    "one tile exactly": Case(queries=16, keys=16),
    "standard shape": Case(heads=12, head_dim=64, queries=18),
    "many heads": Case(heads=17, kernel=1, head_dim=16),
    "wide heads": Case(head_dim=128, kernel=2),
    "all to the right": Case(left=0),
    "all to the left": Case(left=2),
    "an empty row": Case(
        batch=2, visible=Visible(first=torch.tensor([[4], [0]]), last=torch.tensor([[2], [9]]))
    ),
    "window": Case(visible=Visible(first=torch.arange(19)[None] - 4)),
    "more queries than keys": Case(causal=False, queries=21, keys=9),
    "float16": Case(queries=37, keys=40, dtype=torch.float16, heads=2, head_dim=16),
    "float16, window": Case(
        dtype=torch.float16, visible=Visible(first=torch.arange(19)[None] - 4), head_dim=16
    ),
}

SLOW_FORWARD = {
    "longer": Case(queries=67, heads=2),
    "very long": Case(queries=300, heads=2, dtype=torch.float16),
    "128 heads": Case(heads=128, groups=8, head_dim=16, width=16, queries=6),
    "128 hidden channels": Case(width=128, kernel=5, queries=9),
    "15 keys": Case(kernel=15, queries=20),
    "15 keys to the left": Case(kernel=15, left=14, queries=20),
    "head width 256": Case(head_dim=256, heads=2, queries=9),
    "documents": Case(visible=Visible(first=torch.tensor([[0] * 7 + [7] + [8] * 11]))),
}

GRADIENTS = {
    "distance": Case(queries=17, head_dim=16, heads=2),
    "none": Case(bias="none", kernel=2, queries=12, head_dim=16),
    "dense": Case(bias="dense", batch=2, shared=True, residual="scores", queries=9, head_dim=16),
    "grouped heads, a chunk": Case(heads=4, groups=2, queries=5, keys=23, head_dim=16),
    "left padding": Case(batch=2, visible=PADDED, kernel=2, left=0, queries=9, head_dim=16),
    "last key": Case(batch=2, visible=CUT, queries=9, keys=17, head_dim=16),
    "bidirectional": Case(causal=False, queries=9, keys=12, head_dim=16),
    "plain, distance": Case(conv=False, queries=33, keys=35, batch=2),
    "plain, dense": Case(conv=False, bias="dense", batch=2, heads=5),
    "plain": Case(conv=False, bias="none", visible=PADDED, batch=2),
    "float16": Case(dtype=torch.float16, queries=17, head_dim=16),
    "bfloat16": Case(dtype=torch.bfloat16, queries=9, head_dim=16),
    "bfloat16, plain": Case(dtype=torch.bfloat16, conv=False),
}

SLOW_GRADIENTS = {
    "standard shape": Case(heads=12, head_dim=64, queries=33),
    "k=1": Case(kernel=1, batch=2),
    "k=5": Case(kernel=5, queries=17, keys=23),
    "k=7 to the left": Case(kernel=7, left=6, queries=20),
    "k=15": Case(kernel=15, queries=20, bias="none"),
    "scores alone": Case(residual="scores", left=2, width=20),
    "odd widths": Case(head_dim=40, width=20, heads=5, bias="dense"),
    "wide hidden": Case(width=128, kernel=2, bias="none", queries=9),
    "many heads": Case(heads=40, groups=8, queries=9, head_dim=16),
    "many heads, dense": Case(heads=33, queries=5, head_dim=16, bias="dense", kernel=1),
    "bidirectional, dense": Case(causal=False, bias="dense", queries=10, width=64, kernel=1),
    "plain, bidirectional": Case(conv=False, causal=False),
    "window": Case(visible=Visible(first=torch.arange(40)[None] - 5), queries=40),
    "float16, dense": Case(dtype=torch.float16, bias="dense", queries=12),
    "float16, grouped": Case(dtype=torch.float16, bias="none", heads=8, groups=2, queries=20),
    "float16, window": Case(
        dtype=torch.float16, visible=Visible(first=torch.arange(30)[None] - 8), queries=30, kernel=5
    ),
    "bfloat16, none": Case(dtype=torch.bfloat16, bias="none", queries=12),
    "bfloat16, dense": Case(dtype=torch.bfloat16, bias="dense", queries=12),
}


@pytest.mark.parametrize("case", FORWARD.values(), ids=FORWARD.keys())
def test_output(case):
    compare(case, gradients=False)


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_gradients(case):
    compare(case, gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_FORWARD.values(), ids=SLOW_FORWARD.keys())
def test_output_of_larger_calls(case):
    compare(case, gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_GRADIENTS.values(), ids=SLOW_GRADIENTS.keys())
def test_gradients_of_larger_calls(case):
    compare(case, gradients=True)


# No multiple of 16, multiples of 16 and 32 between powers of two: a tile of the head width ends inside a row.
@pytest.mark.parametrize("head_dim", [1, 24, 48, 80, 96, 112, 160, 192])
def test_every_head_dim(head_dim):
    case = Case(heads=2, groups=1, head_dim=head_dim, queries=5, conv=False)
    compare(case, gradients=True)
    compare(replace(case, dtype=torch.float16, conv=True, kernel=1, width=4), gradients=False)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [1, 24, 48, 80, 96, 112, 160, 192, 256])
def test_gradients_of_every_head_dim(head_dim):
    compare(Case(heads=2, groups=1, head_dim=head_dim, queries=7, kernel=2, width=4), gradients=True)


@pytest.mark.parametrize(
    "case", [Case(queries=37, kernel=2), Case(queries=37, visible=PADDED, batch=2, conv=False)]
)
def test_blocks_of_several_steps(monkeypatch, case):
    monkeypatch.setattr(calls, "BLOCK_R", 32)
    monkeypatch.setattr(calls, "ROWS", 16)
    compare(replace(case, heads=2, head_dim=16, width=4), gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_of_the_real_size(monkeypatch, dtype):
    monkeypatch.setattr(calls, "BLOCK_R", 64)
    monkeypatch.setattr(calls, "BLOCK_K", 64)
    compare(Case(queries=150, keys=160, heads=2, dtype=dtype, head_dim=16), gradients=True)


@pytest.mark.parametrize("case", [Case(), pytest.param(Case(dtype=torch.float16), marks=pytest.mark.slow)])
def test_chunks_of_rows_batches_and_splits_of_keys_change_nothing(monkeypatch, case):
    monkeypatch.setattr(calls, "SCRATCH", 0)
    monkeypatch.setattr(calls, "card", lambda device: (10**6, 1))
    case = replace(case, heads=1, head_dim=16, width=4)
    compare(replace(case, queries=18, keys=70, kernel=2), gradients=False)
    compare(replace(case, queries=17, batch=2, kernel=1), gradients=True)
    sunk = ScoreProgram(sink=draw(4))
    compare_program(sunk, "distance", causal=True, keys=70)


CHUNKED = {
    "longer": Case(heads=2, dtype=torch.float16, queries=67, keys=69),
    "a window": Case(heads=1, queries=40, kernel=2, visible=Visible(first=torch.arange(40)[None] - 9)),
    "many to the right": Case(heads=1, queries=40, kernel=5, left=0),
    "bidirectional": Case(heads=2, causal=False, queries=19, keys=34, bias="dense"),
    "padding": Case(heads=1, batch=2, visible=PADDED, queries=20, bias="none"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CHUNKED.values(), ids=CHUNKED.keys())
def test_chunks_of_rows_change_nothing_in_larger_calls(monkeypatch, case):
    monkeypatch.setattr(calls, "SCRATCH", 0)
    compare(replace(case, head_dim=16, width=4), gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ssmax", "groups with a bias", "three stages", "talking heads"])
@pytest.mark.parametrize("bias", ["distance", "separable"])
def test_chunks_of_rows_with_other_programs(monkeypatch, name, bias):
    monkeypatch.setattr(calls, "SCRATCH", 0)
    compare_program(PROGRAMS[name](), bias, causal=True, keys=37)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / 3


def conv_stage(
    outputs: int, inputs: int, kernel: int, left: int, groups: int = 1, slope: float = 1.0
) -> Stage:
    return Stage(draw(outputs, inputs // groups, 1, kernel), draw(outputs), left, groups, slope)


PROGRAMS = {
    "three stages": lambda: ScoreProgram(
        (conv_stage(6, 8, 3, 1, slope=0.01), conv_stage(5, 6, 2, 0, slope=0.1), conv_stage(4, 5, 1, 0))
    ),
    "groups with a bias": lambda: ScoreProgram(
        (conv_stage(6, 8, 3, 1, groups=2, slope=0.01), conv_stage(4, 6, 3, 1, groups=2))
    ),
    # The second stage reads twice as many channels as there are heads, as a first one with a bias does.
    "groups, twice as wide": lambda: ScoreProgram(
        (conv_stage(8, 8, 3, 1, groups=2, slope=0.01), conv_stage(4, 8, 2, 1, groups=2))
    ),
    "talking heads before": lambda: ScoreProgram((Stage(draw(4, 4, 1, 1)),), residual="none"),
    "key convolution": lambda: ScoreProgram((Stage(draw(4, 1, 1, 3), None, 2, 4),), residual="bias"),
    "a sink": lambda: ScoreProgram(
        (conv_stage(6, 8, 2, 1, slope=0.01), conv_stage(4, 6, 2, 1)), sink=draw(4)
    ),
    "plain with a sink": lambda: ScoreProgram(sink=draw(4)),
    "ssmax": lambda: ScoreProgram(
        (conv_stage(6, 8, 2, 1, slope=0.01), conv_stage(4, 6, 2, 1)), length_scale=draw(4) + 0.5
    ),
    "plain ssmax with a sink": lambda: ScoreProgram(sink=draw(4), length_scale=draw(4) + 0.5),
    "talking heads": lambda: ScoreProgram(
        (Stage(draw(4, 4, 1, 1)),), (Stage(draw(4, 4, 1, 1)),), residual="none"
    ),
    "stages after, in groups": lambda: ScoreProgram(
        (), (conv_stage(6, 4, 3, 1, groups=2, slope=0.1), conv_stage(4, 6, 2, 0, groups=2)), sink=draw(4)
    ),
    "everything": lambda: ScoreProgram(
        (conv_stage(6, 8, 3, 1, slope=0.01), conv_stage(4, 6, 3, 1)),
        (conv_stage(4, 4, 3, 2),),
        sink=draw(4),
        length_scale=draw(4) + 0.5,
        length_offset=draw(4) + 0.5,
    ),
}


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_programs(make):
    compare_program(make(), "distance", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["none", "separable"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_programs_with_other_biases(make, bias, causal):
    program = make()
    if bias == "none" and program.reads_bias(4):
        pytest.skip("the program reads a bias")
    compare_program(program, bias, causal=causal)


def test_a_separable_bias():
    compare_program(ScoreProgram(), "separable", causal=True)
    compare_program(PROGRAMS["groups with a bias"](), "separable", causal=True)


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


def compare_program(program: ScoreProgram, bias: str, *, causal: bool, keys: int = 9) -> None:
    """The output and all gradients by the kernels in float32 against the definition in float64."""
    tensors = {name: torch.randn(1, 4, keys, 8, dtype=torch.float64) for name in "qkv"}
    tensors |= {
        "none": {},
        "distance": {"values": draw(4, 2 * keys - 1)},
        "separable": {"row": draw(1, 4, keys), "column": draw(1, 4, keys)},
    }[bias]
    tensors |= dict(program.tensors())

    def results(dtype: torch.dtype, attend) -> list[Tensor]:
        own = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
        forms = {
            "none": lambda: None,
            "distance": lambda: DistanceBias(own["values"], 1 - keys),
            "separable": lambda: SeparableBias(own["row"], own["column"]),
        }
        problem = Problem(
            own["q"],
            own["k"],
            own["v"],
            program.with_tensors(own),
            forms[bias](),
            EVERYTHING,
            causal,
            0.3,
            0.0,
        )
        out = attend(problem)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(out, list(own.values()), direction.to(dtype), allow_unused=True)
        return [
            out.detach(),
            *(torch.zeros_like(x) if g is None else g for x, g in zip(own.values(), grads, strict=True)),
        ]

    found, expected = results(torch.float32, backend.attend), results(torch.float64, reference.attend)
    for name, one, two in zip(("out", *tensors), found, expected, strict=True):
        error, size = (one.double() - two).abs().max().item(), max(1.0, two.abs().max().item())
        # The gradient of a last offset is a sum of numbers that cancel.
        assert error <= 200 * 2**-23 * size, f"{name}: error {error:.2e} of {size:.2e}"


# The first: a residual of the bias alone, which the first stage reads.
@pytest.mark.parametrize("number", [81, *(pytest.param(n, marks=pytest.mark.slow) for n in range(200))])
def test_random_calls(number):
    """Groups, depths, stages after the softmax, sinks, biases and visibilities as the fuzzer draws them, with gradients."""
    draw, wrong = fuzz.run("triton", number)
    assert not wrong, (wrong, draw.made)


def test_the_same_call_gives_the_same_bits():
    case = Case(dtype=torch.float16, queries=9, heads=2, head_dim=16, kernel=1)
    one, two = (outputs(case, case.dtype, backend.attend, gradients=True) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_strided_inputs():
    case = Case(heads=4, queries=18)
    tensors = case.tensors()
    strided = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in "qkv" else x
        for name, x in tensors.items()
    }
    strided["v"] = strided["v"].transpose(2, 3).contiguous().transpose(2, 3)
    plain, other = (
        backend.attend(case.problem({n: x.float() for n, x in t.items()})) for t in (tensors, strided)
    )
    assert torch.equal(plain, other)


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


def test_the_public_function_chooses_it():
    case = Case(queries=5, kernel=1)
    problem = case.problem({name: x.float() for name, x in case.tensors().items()})
    options = {"bias": problem.bias, "backend": "triton"}
    out = attention(problem.q, problem.k, problem.v, problem.program, **options)
    assert torch.equal(out, backend.attend(problem))


def training_call(**changes) -> tuple[Case, dict[str, Tensor]]:
    case = Case(heads=2, queries=5, head_dim=16, kernel=1, width=4, **changes)
    companion = torch.float32
    tensors = {
        name: x.to(case.dtype if name in "qkv" else companion).requires_grad_()
        for name, x in case.tensors().items()
    }
    return case, tensors


def by_the_public_function(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    call = case.problem(tensors)
    return attention(call.q, call.k, call.v, call.program, bias=call.bias, backend="triton")


def test_a_compiled_graph_holds_the_whole_operation():
    case, tensors = training_call()

    def step(tensors: dict[str, Tensor]) -> Tensor:
        return by_the_public_function(case, tensors) * 2

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out = function(tensors)
        results.append([out, *torch.autograd.grad(out.sum(), list(tensors.values()))])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_autocast_changes_nothing_inside():
    case, tensors = training_call(dtype=torch.bfloat16)
    plain = by_the_public_function(case, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        cast = by_the_public_function(case, tensors)
    assert torch.equal(plain, cast)


def test_tensors_without_numbers_have_shapes():
    with FakeTensorMode():
        q = torch.empty(2, 3, 70, 16, requires_grad=True)
        program = conv_program(
            torch.empty(8, 3, 1, 3), torch.empty(8), torch.empty(3, 8, 1, 3), torch.empty(3), 1
        )
        out = attention(q, q, q, program, backend="triton")
        out.sum().backward()
        assert out.shape == q.shape
        assert q.grad.shape == q.shape


def short(name: str) -> dict[str, Any]:
    """A call of doctor's self-test, shorter by as much as the blocks."""
    kind = selftest.SUITE[name]
    return kind | {"length": kind.get("length", 300) // 4, "batch": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", selftest.SUITE)
def test_the_self_test_passes(name):
    assert selftest.wrong(selftest.errors(torch.device("cpu"), **short(name)), short(name)["dtype"]) is None


# Device functions that have a path without masks, which short calls never take, and the kernels that call them so.
EDGES = {
    ("scores_kernel", "load_rows"), ("convolve_kernel", "load_column"), ("convolve_kernel", "first_terms"),
    ("attend_kernel", "load_rows"), ("attend_kernel", "load_pixels"), ("weights_kernel", "load_rows"),
    ("weights_kernel", "load_pixels"),
}  # fmt: skip


@pytest.mark.slow
def test_the_self_test_enters_every_loop(monkeypatch):
    """Also over tiles in which every row sees every key."""
    entered, kernel = set(), [""]
    run, call = interpreter.InterpretedFunction.run, interpreter.InterpretedFunction.__call__

    def started(self, *args, **kwargs):
        kernel[0] = self.fn.__name__
        return run(self, *args, **kwargs)

    def called(self, *args, **kwargs):
        if (kernel[0], self.fn.__name__) in EDGES:
            given = inspect.signature(self.fn).bind(*args, **kwargs)
            given.apply_defaults()
            entered.add((kernel[0], self.fn.__name__, bool(given.arguments["EDGE"])))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", started)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", called)
    selftest.errors(torch.device("cpu"), **short("kernel 3"))
    assert entered == {(*names, edge) for names in EDGES for edge in (False, True)}


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
    arguments = ["--backends", "triton,sdpa", "--rounds", "1", "--no-memory", "--json", str(file)]
    assert main(["bench", "attention", *sizes, *arguments]) == 0
    assert {(x["backend"], x["pass"]) for x in json.loads(file.read_text())} == {
        (name, which) for name in ("triton", "sdpa") for which in ("forward", "forward+backward")
    }
    assert main(["bench", "decode", *sizes, *arguments]) == 0
    assert [x["backend"] for x in json.loads(file.read_text())] == ["triton", "sdpa"]


@pytest.mark.slow
def test_a_benchmark_of_training_runs_the_kernels(tmp_path):
    file = tmp_path / "records.json"
    sizes = [
        "--length",
        "4",
        "--batch",
        "1",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--methods",
        "dape1x3-kerple",
        "--backend",
        "triton",
    ]
    assert main(["bench", "train", *sizes, "--json", str(file)]) == 0
    assert {x["method"] for x in json.loads(file.read_text())} == {"kerple", "dape1x3-kerple"}


def test_second_derivatives_are_refused():
    case = Case(queries=5, conv=False)
    tensors = {name: x.float().requires_grad_() for name, x in case.tensors().items()}
    out = backend.attend(case.problem(tensors))
    (grad,) = torch.autograd.grad(out.sum(), tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        grad.sum().backward()
