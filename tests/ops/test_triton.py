"""The Triton backend: numerics in the interpreter, compilation without a GPU, refusals, expected cost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dape.ops.score_attention import ScoreProgram, attention, conv_program, triton_compile
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.api import BACKENDS
from dape.ops.score_attention.triton_cost import pair_cost, sdpa_cost, table
from dape.ops.score_attention.types import EVERYTHING, Problem

HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["test_output", "test_gradients", "not (test_output or test_gradients)"])
def test_numerics_in_the_interpreter(part):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-k", part, str(HERE / "triton_interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_standard_shape_compiles_without_spills(capability):
    pytest.importorskip("triton")
    recorded = [variants[0] for variants in backend.record_launches()]
    names = ["forward_kernel", "logits_kernel", "convolution_kernel"]
    assert [launch.kernel.__name__ for launch in recorded] == names
    issued = 0.0
    for launch in recorded:
        compiled = triton_compile.inspect(launch, capability)
        name = launch.kernel.__name__
        assert "mma.sync" in compiled.ptx, f"{name} uses no tensor cores"
        # A step of the loop is all there is: instructions of 16×8×16 products, for each warp.
        pairs = 256 if "STREAMS" in launch.kernel.arg_names else launch.arguments["BLOCK_R"]
        issued += compiled.ptx.count("mma.sync") * launch.options["num_warps"] * 16 * 8 * 16 / pairs
        assert compiled.spills == 0, f"{name} spills {compiled.spills} bytes"
        assert compiled.shared <= triton_compile.SHARED_MEMORY[capability]
    cost = pair_cost(12, 64, 32, 3)
    # The products for dq, dk and dv are PyTorch's.
    assert issued == cost.forward_macs + cost.backward_macs - 3 * 12 * 64


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
    limit = triton_compile.SHARED_MEMORY[capability]
    for variants in backend.record_launches(**shape):
        assert triton_compile.first_that_fits(variants, capability, limit) is not None


@pytest.fixture
def a_small_gpu(monkeypatch):
    """A GPU whose blocks have 100 kB, and a compiler that reports the size of the first variants as 120, 90 …"""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "_answers", {})
    monkeypatch.setattr(backend, "limits", lambda device: (86, 100_000))
    sizes = {}

    def size(launch, capability):
        assert capability == 86
        return sizes.setdefault(launch.key(), 120_000 - 30_000 * (len(sizes) % 2))

    monkeypatch.setattr(triton_compile, "shared_memory", size)


@pytest.mark.usefixtures("a_small_gpu")
def test_a_smaller_variant_is_taken_where_the_first_does_not_fit():
    assert backend.missing_resources(0, dtype=torch.float16) is None
    (variants, *_) = backend.record_launches()
    assert triton_compile.first_that_fits(variants, 86, 100_000) is variants[1]


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
    "kernel size": (lambda: problem(program=with_kernel_size(9)), "9 keys"),
    "heads": (lambda: problem(q=torch.zeros(1, 33, 3, 16)), "33 heads"),
    "heads times width": (lambda: problem(q=torch.zeros(1, 32, 3, 128)), "32 heads of width 128"),
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


def test_the_documented_cost_is_the_computed_one():
    page = (HERE.parents[1] / "docs" / "kernels.md").read_text()
    assert table() in page


def test_the_cost_counts_every_product():
    """By hand for 16 heads of width 16, 16 hidden channels, one key: no padding, one convolution is 256."""
    assert sdpa_cost(16, 16) == (512, 1280, 0, 0)
    cost = pair_cost(16, 16, 16, 1)
    assert cost.forward_macs == 2 * 256 + 2 * 256
    assert cost.backward_macs == (2 * 256 + 2 * 256) + (6 * 256 + 256) + 3 * 256
    assert pair_cost(16, 16, 16, 1, padding=False).backward_macs == cost.backward_macs - 256
