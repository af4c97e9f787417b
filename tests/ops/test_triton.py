"""The Triton backend: numerics in the interpreter, compilation without a GPU, refusals, expected cost."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dape.ops.score_attention import ScoreProgram, Stage, attention, conv_program
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.api import BACKENDS
from dape.ops.score_attention.program import PLAIN
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton import compile as compiling
from dape.ops.score_attention.triton import passes
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


@pytest.fixture
def only_the_first_chunks(monkeypatch):
    """Two chunks of a pass or of a segment of the keys, those of the last rows: all others are alike, with fewer keys."""
    every = calls.Call._chunks
    monkeypatch.setattr(calls.Call, "_chunks", lambda self, *sizes: itertools.islice(every(self, *sizes), 2))


@pytest.mark.usefixtures("only_the_first_chunks")
@pytest.mark.parametrize("shape", ["125m", "llama-3-8b"])
@pytest.mark.parametrize("length", [2048, 8192, 65536])
def test_launches_fill_the_gpu(length, shape):
    """At least two programs for each of 108 multiprocessors, in every kernel, for the last rows of one sequence."""
    pytest.importorskip("triton")
    few = [
        (launch.kernel.__name__, launch.grid)
        for launch in distinct(backend.record_launches(length=length, **SHAPES[shape]))
        if math.prod(launch.grid) < 2 * 108
    ]
    assert not few


@pytest.mark.parametrize(
    "shape", [{}, {"num_heads": 32, "num_groups": 8, "head_width": 128}, {"width": None}]
)
def test_a_decoding_step_runs_on_many_multiprocessors(shape):
    pytest.importorskip("triton")
    launches = backend.record_launches(length=8192, queries=1, backward=False, **shape)
    assert min(math.prod(variants[0].grid) for variants in launches) >= 64


class Live(TorchDispatchMode):
    """Bytes of the tensors alive that were made inside, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes(self) -> int:
        self.known = {name: entry for name, entry in self.known.items() if not entry[0].expired()}
        return sum(size for _, size in self.known.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.bytes)
        return result


@pytest.mark.usefixtures("only_the_first_chunks")
@pytest.mark.parametrize(("length", "megabytes"), [(2048, 64), (65536, 256)])
def test_scratch_is_bounded(length, megabytes, monkeypatch):
    """What a forward and a backward pass of 12 heads of 64 hold beside their results, sums of gradients among it."""
    pytest.importorskip("triton")
    live, marks = Live(), []

    def measured(function):
        def run(*args):
            live.most = live.bytes
            with live:
                result = function(*args)
            marks.append(live.most - live.bytes)
            return result

        return run

    # A recorded launch would keep its tensors alive. Results stay behind the pass; what is let go of by then was scratch.
    monkeypatch.setattr(passes, "run", lambda *args: None)
    monkeypatch.setattr(backend, "_forward", measured(backend._forward))
    monkeypatch.setattr(backend, "_backward", measured(backend._backward))
    backend.record_launches(length=length)
    forward, backward = marks
    assert forward > 10**6
    assert backward > 10**6
    assert max(forward, backward) <= megabytes * 10**6


class Counted(TorchDispatchMode):
    """How many operations of PyTorch there are that start something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        idle = function.is_view or function.namespace == "prim" or "empty" in str(function)
        self.number += not idle
        return function(*args, **(kwargs or {}))


def test_chunks_of_a_long_sequence_start_few_kernels(monkeypatch):
    """Chunks are as large as the scratch allows, and PyTorch starts nothing between their kernels."""
    pytest.importorskip("triton")
    counted, backward = Counted(), backend._backward

    def measured(*args):
        with counted:
            return backward(*args)

    monkeypatch.setattr(backend, "_backward", measured)
    kernels, others = [], []
    for length in (2048, 8192):
        counted.number = 0
        forward = len(backend.record_launches(length=length, backward=False))
        kernels.append(len(backend.record_launches(length=length)) - forward)
        others.append(counted.number)
    assert kernels[0] <= 100
    assert kernels[1] <= 520
    assert 0 < others[0] <= others[1] <= 100


TALKING = (
    ((4, 4, 1, 1, False, 0, 1, 1.0),),
    ((4, 4, 1, 3, True, 1, 2, 1.0),),
    "none",
    True,
    True,
    True,
    None,
    False,
)


@pytest.mark.parametrize("bias", ["none", "distance", "separable", "dense"])
def test_nothing_waits_for_the_device(bias):
    """Launches are recorded on tensors without numbers: a pass that reads one back, and so would wait, fails on them."""
    pytest.importorskip("triton")
    for causal, bounded in ((True, (False, False)), (True, (True, True)), (False, (True, False))):
        shape = {
            "bias": bias,
            "causal": causal,
            "bounded": bounded,
            "length": 100,
            "batch": 2,
            "num_heads": 4,
        }
        assert backend.record_launches(**shape)
        signature = TALKING if bias == "none" else None
        assert backend.record_launches(**shape, signature=signature, width=None)
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.empty(1).item()


@pytest.mark.parametrize("own", [{"bias": "dense"}, {"bias": "separable"}, {"width": None}])
def test_all_memory_is_on_the_device_of_the_tensors(own):
    """Nothing comes from the host or from another GPU: here from any device but that of tensors without memory."""
    pytest.importorskip("triton")
    shape = {"bounded": (True, False), "length": 100, "batch": 2, "num_heads": 4, "num_groups": 2, **own}
    found = {
        x.device
        for variants in backend.record_launches(**shape, device="meta")
        for x in variants[0].arguments.values()
        if torch.is_tensor(x)
    }
    assert found == {torch.device("meta")}


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch):
    """The current device may be another one."""
    pytest.importorskip("triton")
    with FakeTensorMode():
        x = torch.empty(3, device="cuda:1")
    said = []

    @contextmanager
    def guard(device):
        said.append(device)
        yield
        said.append("left")

    kernel = SimpleNamespace(arg_names=["x"])
    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(compiling, "limits", lambda device: said.append(device) or (80, 1))
    monkeypatch.setattr(compiling, "shared_memory", lambda launch, capability: 1)
    monkeypatch.setattr(compiling, "_start", lambda launch: said.append("started"))
    compiling.run(kernel, (1,), {"x": x}, [{"num_warps": 4}])
    assert said == [x.device, x.device, "started", "left"]


def test_numbers_that_change_from_call_to_call_are_not_compiled_in():
    """Where rows and keys begin and end, in every kernel: nothing that follows a length is specialised."""
    pytest.importorskip("triton")
    lengths = {
        "row_start", "row_stop", "num_queries", "num_keys", "left", "right", "own_start", "own_stop", "walk",
        "per_split", "out_start", "out_rows", "grad_keys", "offset", "bottom", "lowest", "num_distances",
        "values_length",
    }  # fmt: skip
    seen = set()
    for variants in backend.record_launches():
        for parameter in variants[0].kernel.params:
            if parameter.name in lengths:
                seen.add(parameter.name)
                assert parameter.do_not_specialize, (variants[0].kernel.__name__, parameter.name)
    assert seen == lengths


def test_a_signature_says_all_that_launches_depend_on():
    assert backend.program_of(TALKING, 4).signature == TALKING


def test_lengths_share_compiled_kernels():
    """Nothing is compiled anew for a length but by what it is a multiple of."""
    pytest.importorskip("triton")
    kinds: dict[tuple, set] = {}
    for length in (200, 201, 208, 239, 256):
        for variants in backend.record_launches(length=length):
            kind = (variants[0].kernel.__name__, *sorted(constants(variants[0]).items()))
            kinds.setdefault(kind, set()).add(variants[0].key())
    assert max(map(len, kinds.values())) <= 4


def constants(launch) -> dict[str, str]:
    return {p.name: str(launch.arguments[p.name]) for p in launch.kernel.params if p.is_constexpr}


def test_a_long_compilation_is_announced_once(monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(compiling, "LONG", 0.0)
    monkeypatch.setattr(compiling, "_shared", {})
    monkeypatch.setattr(compiling, "_announced", [])
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=1))
    monkeypatch.setattr(compiling, "compile_launch", lambda launch, capability: compiled)
    for variants in backend.record_launches():
        assert compiling.shared_memory(variants[0], 80) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "once" in caplog.text


LAUNCHABLE = {
    "standard": {},
    "tiny preset": {"dtype": torch.float32, "num_heads": 4, "head_width": 32},
    "seven keys": {"kernel_size": 7},
    "dense bfloat16": {"dtype": torch.bfloat16, "bias": "dense"},
    "talking heads": {
        "signature": (((12, 12, 1, 1, False, 0, 1, 1.0),),) * 2 + ("none", True, True, True, None, False)
    },
    "plain float32": {"dtype": torch.float32, "width": None},
}


@pytest.fixture
def unassembled(monkeypatch, tmp_path):
    """Kernels are compiled until their shared memory is known, into a cache of their own: half of the time."""
    triton = pytest.importorskip("triton")
    compiler = importlib.import_module("triton.backends.nvidia.compiler").CUDABackend

    def no_ptx(self, source, metadata, *options):
        metadata["name"] = "unassembled"
        return ""

    monkeypatch.setattr(compiler, "make_ptx", no_ptx)
    monkeypatch.setattr(compiler, "make_cubin", lambda *arguments: b"")
    monkeypatch.setattr(compiling, "_shared", {})
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("unassembled")
@pytest.mark.parametrize("shape", LAUNCHABLE.values(), ids=LAUNCHABLE.keys())
@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100])
def test_what_is_accepted_can_be_launched(capability, shape):
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
def test_auto_goes_on_where_resources_do_not_fit(monkeypatch):
    monkeypatch.setattr(backend, "limits", lambda device: (86, 1000))
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    # The tensors are not on a GPU here; everything else is as if they were.
    monkeypatch.setattr(BACKENDS["cpu"], "unsupported", lambda call: "the tensors are on a GPU")
    monkeypatch.setattr(
        backend, "_cannot_launch", lambda call: backend.missing_resources(0, **backend.shape_of(call))
    )
    call = problem()
    with pytest.warns(UserWarning, match="a block of this GPU has 1000") as said:
        outs = [attention(call.q, call.k, call.v, call.program) for _ in range(2)]
    assert len(said) == 1
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match=r'backend="triton" cannot run this call: .*bytes of shared memory'):
        attention(call.q, call.k, call.v, call.program, backend="triton")


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


@contextmanager
def card(capability: tuple[int, int] = (8, 0), hip: str | None = None):
    """A GPU of that compute capability, for tensors without memory."""
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.version, "hip", hip)
        yield torch.zeros(1, 4, 3, 16, device="cuda:0", dtype=torch.float16)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_cards_whose_tensor_cores_triton_does_not_use_are_refused(capability):
    pytest.importorskip("triton")
    with card(capability) as q:
        reason = backend.unsupported(Problem(q, q, q, PLAIN, None, EVERYTHING, True, 1.0, 0.0))
    assert (
        reason
        == f"it needs a GPU of compute capability 8.0 or later, this one has {capability[0]}.{capability[1]}"
    )


def test_amd_cards_are_refused():
    pytest.importorskip("triton")
    with card(hip="6.2") as q:
        reason = backend.unsupported(Problem(q, q, q, PLAIN, None, EVERYTHING, True, 1.0, 0.0))
    assert reason == "its kernels are compiled for NVIDIA GPUs, this PyTorch is built for HIP 6.2"


def test_a_strided_bias_beyond_32_bits_is_refused(monkeypatch):
    """A dense bias that is a view of a large tensor: few numbers, far apart."""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    with FakeTensorMode():
        q = torch.zeros(1, 4, 3, 16)
        near, far = (torch.empty(1, 4, 3, 3).as_strided((1, 4, 3, 3), (0, n, 3, 1)) for n in (9, 2**30))
        assert backend.unsupported(Problem(q, q, q, PLAIN, near, EVERYTHING, True, 1.0, 0.0)) is None
        reason = backend.unsupported(Problem(q, q, q, PLAIN, far, EVERYTHING, True, 1.0, 0.0))
    assert reason == f"its addresses have 32 bits, an input spans {3 * 2**30 + 9} numbers"


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_matrix_of_a_stage_in_groups(place, groups):
    """A stage in groups as one matrix: the first one's inputs are sorted into scores and bias, those of later stages not."""
    stage = Stage(torch.randn(8, 8 // groups, 1, 3), groups=groups)
    x = torch.randn(8, 5)
    expected = torch.nn.functional.conv1d(x, stage.weight[:, :, 0], groups=groups)
    if place == 0:
        # The scores of a group's heads, then their bias, to all scores and then every bias.
        x = x.unflatten(0, (groups, 2, -1)).transpose(0, 1).flatten(0, 2)
    found = torch.nn.functional.conv1d(x, backend.stage_weight(stage, reads_bias=place == 0))
    torch.testing.assert_close(found, expected)


def with_kernel_size(size: int) -> ScoreProgram:
    shapes = ((8, 4, 1, size), (8,), (4, 8, 1, size), (4,))
    return conv_program(*(torch.zeros(shape) for shape in shapes), size // 2)


REFUSALS = {
    "float64": (lambda: problem(q=torch.zeros(1, 4, 3, 16, dtype=torch.float64)), "float64"),
    "dropout": (lambda: problem(dropout=0.1), "dropout=0.1"),
    "leak": (lambda: problem(program=replace(problem().program, leak_future=True)), "leak_future"),
    "kernel size": (lambda: problem(program=with_kernel_size(17)), "15 keys in the reach of a stage, got 17"),
    "softcap": (lambda: problem(program=replace(problem().program, softcap=30.0)), "softcap=30.0"),
    "nonlinear": (
        lambda: problem(program=ScoreProgram(post=(Stage(torch.zeros(4, 4, 1, 3), slope=0.5),))),
        "last stage is linear, that of post has slope=0.5",
    ),
    "rows": (
        lambda: problem(program=ScoreProgram((Stage(torch.zeros(4, 4, 2, 3)),))),
        "bring no earlier rows along, pre[0] reads those of 2 queries",
    ),
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
