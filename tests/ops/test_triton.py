"""The Triton backend: numerics in the interpreter, compilation without a GPU, refusals, expected cost."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dape.ops.score_attention import ScoreProgram, Stage, attention, conv_program
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.api import BACKENDS
from dape.ops.score_attention.triton import compile as compiling
from dape.ops.score_attention.types import EVERYTHING, Problem

HERE = Path(__file__).parent


def interpret(*options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", *options, str(HERE / "triton_interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", ["test_output", "test_gradients", "not (test_output or test_gradients)"])
def test_numerics_in_the_interpreter(part):
    pytest.importorskip("triton")
    interpret("-k", part, "-m", "not slow")


@pytest.mark.slow
def test_numerics_of_larger_calls_in_the_interpreter():
    pytest.importorskip("triton")
    interpret("-m", "slow")


def distinct(launches):
    """The first launch, in its first variant, of every kernel and its constants."""
    return list({variants[0].key(): variants[0] for variants in reversed(launches)}.values())[::-1]


SHAPES = {
    "125m": {},
    "350m": {"num_heads": 16},
    "2.7b": {"num_heads": 32, "head_width": 80},
    "6.7b": {"num_heads": 32, "head_width": 128},
    "llama-3-8b": {"num_heads": 32, "num_groups": 8, "head_width": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("capability", [80, 90])
def test_the_shapes_of_models_compile_without_spills(capability, shape):
    pytest.importorskip("triton")
    spills = {
        launch.kernel.__name__: compiling.inspect(launch, capability).spills
        for launch in distinct(backend.record_launches(**shape))
    }
    assert not any(spills.values()), spills


@pytest.mark.parametrize("length", [2048, 8192])
def test_launches_fill_the_gpu(length):
    """At least two programs for each of 108 multiprocessors, in every kernel, for the last rows of one sequence."""
    pytest.importorskip("triton")
    few = [
        (launch.kernel.__name__, launch.grid)
        for launch in distinct(backend.record_launches(length=length, backward=length == 2048))
        if math.prod(launch.grid) < 2 * 108
    ]
    assert not few


LAUNCHABLE = {
    "standard": {},
    "tiny preset": {"dtype": torch.float32, "num_heads": 4, "head_width": 32},
    "seven keys": {"kernel_size": 7},
    "dense bfloat16": {"dtype": torch.bfloat16, "bias": "dense"},
    "plain float32": {"dtype": torch.float32, "width": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", LAUNCHABLE.values(), ids=LAUNCHABLE.keys())
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100])
def test_what_is_accepted_can_be_launched(capability, shape):
    pytest.importorskip("triton")
    limit = compiling.SHARED_MEMORY[capability]
    for variants in backend.record_launches(**shape):
        assert compiling.first_that_fits(variants, capability, limit) is not None


@pytest.fixture
def a_small_gpu(monkeypatch):
    """A GPU whose blocks have 100 kB, and a compiler that reports 40 kB for each stage of a loop."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "_answers", {})
    monkeypatch.setattr(backend, "limits", lambda device: (86, 100_000))

    def size(launch, capability):
        assert capability == 86
        return 40_000 * launch.arguments.get("STAGES", 1)

    monkeypatch.setattr(compiling, "shared_memory", size)


@pytest.mark.usefixtures("a_small_gpu")
def test_a_smaller_variant_is_taken_where_the_first_does_not_fit():
    assert backend.missing_resources(0, dtype=torch.float16) is None
    (variants, *_) = backend.record_launches()
    assert compiling.first_that_fits(variants, 86, 100_000) is variants[1]


@pytest.mark.usefixtures("a_small_gpu")
def test_a_call_that_no_variant_fits_is_refused_with_one_warning(monkeypatch):
    monkeypatch.setattr(backend, "limits", lambda device: (86, 1000))
    with pytest.warns(UserWarning, match="a block of this GPU has 1000") as said:
        reasons = [backend.missing_resources(0, dtype=torch.float16) for _ in range(2)]
    assert len(said) == 1
    assert reasons[0] == reasons[1]
    assert "bytes of shared memory" in reasons[0]


@pytest.mark.usefixtures("a_small_gpu")
def test_the_question_of_resources_does_not_break_a_compiled_graph():
    @torch.compile(backend="eager", fullgraph=True)
    def double(x):
        return x * (2 if backend.missing_resources(0, num_heads=x.shape[1]) is None else 0)

    assert torch.equal(double(torch.ones(1, 3)), torch.full((1, 3), 2.0))


def problem(**changes) -> Problem:
    q = torch.zeros(1, 4, 3, 16)
    conv = conv_program(torch.zeros(8, 4, 1, 3), torch.zeros(8), torch.zeros(4, 8, 1, 3), torch.zeros(4), 1)
    return replace(Problem(q, q, q, conv, None, EVERYTHING, True, 0.25, 0.0), **changes)


def with_kernel_size(size: int) -> ScoreProgram:
    shapes = ((8, 4, 1, size), (8,), (4, 8, 1, size), (4,))
    return conv_program(*(torch.zeros(shape) for shape in shapes), size // 2)


REFUSALS = {
    "float64": (lambda: problem(q=torch.zeros(1, 4, 3, 16, dtype=torch.float64)), "float64"),
    "dropout": (lambda: problem(dropout=0.1), "dropout=0.1"),
    "leak": (lambda: problem(program=replace(problem().program, leak_future=True)), "leak_future"),
    "kernel size": (lambda: problem(program=with_kernel_size(17)), "15 keys in the reach of a stage, got 17"),
    "softcap": (lambda: problem(program=replace(problem().program, softcap=30.0)), "softcap=30.0"),
    "stages after": (
        lambda: problem(program=replace(problem().program, post=problem().program.pre)),
        "after the softmax",
    ),
    "rows": (lambda: problem(program=ScoreProgram((Stage(torch.zeros(4, 4, 2, 3)),))), "pre[0] reads 2"),
    "heads": (lambda: problem(q=torch.zeros(1, 129, 3, 16)), "128 heads, got 129"),
    "head width": (lambda: problem(q=torch.zeros(1, 4, 3, 257)), "256 numbers a head, got 257"),
}


def test_it_is_chosen_before_the_portable_backends_but_needs_a_gpu():
    names = list(BACKENDS)
    assert names.index("sdpa") < names.index("triton") < names.index("tiled")
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match="CUDA devices, q is on cpu"):
        attention(q, q, q, None, backend="triton")


@pytest.mark.parametrize(("make", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_are_sentences(make, words, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    assert backend.unsupported(problem()) is None
    reason = backend.unsupported(make())
    assert reason is not None
    assert words in reason


def test_a_cpu_call_does_not_import_triton():
    code = (
        "import sys, torch; from dape.ops.score_attention import attention as attend;"
        "q = torch.zeros(1, 2, 3, 16); attend(q, q, q, None); sys.exit('triton' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
