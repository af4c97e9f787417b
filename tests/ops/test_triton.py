"""The Triton backend: numerics in the interpreter, compilation without a GPU, refusals, expected cost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dape.ops.score_attention import ConvWeights, attention
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.api import BACKENDS
from dape.ops.score_attention.triton_cost import pair_cost, sdpa_cost, table
from dape.ops.score_attention.types import EVERYTHING, Problem

HERE = Path(__file__).parent

# Shared memory of a block, in bytes, by GPU generation (compute capability times ten).
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


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


@pytest.mark.parametrize("capability", SHARED)
def test_the_standard_shape_compiles_without_spills(capability, monkeypatch):
    pytest.importorskip("triton")
    from triton_ahead_of_time import compile_launch, launches

    recorded = launches(monkeypatch)
    names = ["forward_kernel", "logits_kernel", "convolution_kernel"]
    assert [launch.kernel.__name__ for launch in recorded] == names
    issued = 0.0
    for launch in recorded:
        compiled = compile_launch(launch, capability)
        name = launch.kernel.__name__
        assert "mma.sync" in compiled.ptx, f"{name} uses no tensor cores"
        # A step of the loop is all there is: instructions of 16×8×16 products, for each warp.
        pairs = 256 if "STREAMS" in launch.kernel.arg_names else launch.arguments["BLOCK_R"]
        issued += compiled.ptx.count("mma.sync") * launch.options["num_warps"] * 16 * 8 * 16 / pairs
        assert compiled.spills == 0, f"{name} spills {compiled.spills} bytes"
        assert compiled.shared <= SHARED[capability], f"{name} wants {compiled.shared} bytes of shared memory"
    cost = pair_cost(12, 64, 32, 3)
    # The products for dq, dk and dv are PyTorch's.
    assert issued == cost.forward_macs + cost.backward_macs - 3 * 12 * 64


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, "distance", "dense"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_dtype_and_bias_fits_in_shared_memory(dtype, bias, monkeypatch):
    pytest.importorskip("triton")
    from triton_ahead_of_time import compile_launch, launches

    for launch in launches(monkeypatch, dtype=dtype, bias=bias):
        compiled = compile_launch(launch, 80)
        assert "mma.sync" in compiled.ptx
        assert compiled.shared <= SHARED[80], f"{launch.kernel.__name__} wants {compiled.shared} bytes"


def problem(**changes) -> Problem:
    q = torch.zeros(1, 4, 3, 16)
    conv = ConvWeights(torch.zeros(8, 4, 1, 3), torch.zeros(8), torch.zeros(4, 8, 1, 3), torch.zeros(4), 1)
    return replace(Problem(q, q, q, conv, None, EVERYTHING, True, 0.25, 0.0), **changes)


def with_kernel_size(size: int) -> ConvWeights:
    shapes = ((8, 4, 1, size), (8,), (4, 8, 1, size), (4,))
    return ConvWeights(*(torch.zeros(shape) for shape in shapes), size // 2)


REFUSALS = {
    "float64": (lambda: problem(q=torch.zeros(1, 4, 3, 16, dtype=torch.float64)), "float64"),
    "dropout": (lambda: problem(dropout=0.1), "dropout=0.1"),
    "leak": (lambda: problem(conv=replace(problem().conv, leak_future=True)), "leak_future"),
    "kernel size": (lambda: problem(conv=with_kernel_size(9)), "9 keys"),
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
