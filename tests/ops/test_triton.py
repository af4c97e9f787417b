"""The Triton backend: numerics in the interpreter, compilation without a GPU, refusals, launches."""

import math
import os
import re
import subprocess
import sys
import time
import timeit
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from op_cases import Live
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dape.ops.score_attention import ScoreProgram, Stage, api, attention, conv_program
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.api import BACKENDS, choose
from dape.ops.score_attention.op import Arguments
from dape.ops.score_attention.program import PLAIN
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton import launch, passes, selftest
from dape.ops.score_attention.types import EVERYTHING, Problem
from dev import gpu

pytest.importorskip("triton")
HERE = Path(__file__).parent


def interpret(*options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-x", *options, str(HERE / "triton_interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", ["test_output", "test_gradients", "not (test_output or test_gradients)"])
def test_numerics_in_the_interpreter(part):
    interpret("-k", part, "-m", "not slow")


@pytest.mark.slow
def test_numerics_of_larger_calls_in_the_interpreter():
    interpret("-m", "slow")


def distinct(launches):
    """The first launch of every kernel and its constants."""
    return list({code_of(x): x for x in reversed(launches)}.values())[::-1]


def code_of(launched) -> tuple:
    """What a launch is compiled for, but for its variants and alignment."""
    places = launch.declared(launched.kernel)
    given = launched.arguments | launched.variants[0]
    return (launched.kernel.__name__, *(given[name] for name in places.constants))


SHAPES = {
    "125m": {},
    "350m": {"num_heads": 16},
    "2.7b": {"num_heads": 32, "head_dim": 80},
    "6.7b": {"num_heads": 32, "head_dim": 128},
    "llama-3-8b": {"num_heads": 32, "num_groups": 8, "head_dim": 128},
    "float32": {"dtype": torch.float32},
    "wide float32": {"dtype": torch.float32, "num_heads": 32, "head_dim": 128},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("capability", [80, 90])
def test_the_shapes_of_models_compile_without_spills(capability, shape):
    launches = distinct(gpu.record_launches(length=2048, **shape))
    spills = {x.kernel.__name__: gpu.inspect(x, capability).spills for x in launches}
    # The stores and loads of one register or two are nothing.
    assert max(spills.values()) <= 16, spills


ASSEMBLED = {
    "standard": {},
    "tiny preset": {"dtype": torch.float32, "num_heads": 4, "head_dim": 32},
    "wide float32": {"dtype": torch.float32, "num_heads": 2, "head_dim": 256, "bias": "separable"},
    "seven keys": {"kernel_size": 7},
    "dense bfloat16": {"dtype": torch.bfloat16, "bias": "dense"},
    "talking heads": {
        "signature": (((12, 12, 1, 1, False, 0, 1, 1.0),),) * 2
        + ("none", True, True, True, False, 0.0, None, False, "softmax")
    },
    "plain float32": {"dtype": torch.float32, "width": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ASSEMBLED.values(), ids=ASSEMBLED.keys())
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_kernel_is_assembled_and_fits(capability, shape):
    """Shared and tensor memory of some variant, by the assembler of that generation; products on tensor cores."""
    for launched in distinct(gpu.record_launches(length=512, **shape)):
        ptx = gpu.inspect(launched, capability).ptx
        by_rows = launched.kernel.__name__ in ("diagonals_kernel", "merge_kernel")
        assert by_rows or re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx), launched.kernel.__name__


# Launches of a forward and a backward pass: three and twelve for each chunk of rows that the scratch holds.
COUNTS = {
    "512": ({"length": 512}, 3, 12),
    "4,096": ({"length": 4096}, 3, 12),
    "batch 32, 512": ({"length": 512, "batch": 32}, 3, 12),
    "batch 32, 2,048": ({"length": 2048, "batch": 32}, 6, 60),
    "8,192": ({"length": 8192}, 6, 36),
    "decoding": ({"length": 2048, "queries": 1}, 4, None),
    "decoding, batch 64": ({"length": 2048, "queries": 1, "batch": 64}, 4, None),
    "plain": ({"length": 4096, "batch": 32, "width": None}, 1, None),
}


@pytest.mark.parametrize(("shape", "forward", "backward"), COUNTS.values(), ids=COUNTS.keys())
def test_a_pass_launches_few_kernels(shape, forward, backward):
    """On a GPU of 40 GB."""
    before = len(gpu.record_launches(**shape, backward=False))
    assert before <= forward
    if backward is not None:
        assert len(gpu.record_launches(**shape)) - before <= backward


def test_a_launch_costs_little_on_the_host():
    """At most 15 times what it takes to merge two dictionaries of arguments, about a microsecond."""
    one, two = ({f"name {n} {i}": i for i in range(40)} for n in range(2))
    unit = min(timeit.repeat(lambda: one | two, number=1000, repeat=20, timer=time.thread_time)) * 1000
    for times in gpu.host_times(length=2048).values():
        assert max(times.values()) <= 15 * unit, times


@pytest.mark.parametrize("length", [2048, 8192, 65536])
@pytest.mark.parametrize("shape", ["125m", "llama-3-8b"])
def test_launches_fill_the_gpu(length, shape):
    """A program for each of 108 multiprocessors, and two in most kernels, for the last rows of one sequence."""
    launches = distinct(gpu.record_launches(length=length, **SHAPES[shape]))
    assert not [(x.kernel.__name__, x.grid) for x in launches if math.prod(x.grid) < 108]
    assert sum(math.prod(x.grid) >= 2 * 108 for x in launches) >= 0.7 * len(launches)


@pytest.mark.parametrize("shape", [{}, {"num_heads": 32, "num_groups": 8, "head_dim": 128}, {"width": None}])
def test_a_decoding_step_runs_on_many_multiprocessors(shape):
    launches = gpu.record_launches(length=8192, queries=1, backward=False, **shape)
    assert min(math.prod(x.grid) for x in launches if x.kernel.__name__ != "merge_kernel") >= 64


@pytest.mark.parametrize(("length", "sums"), [(2048, 60), (16384, 180)])
def test_scratch_is_bounded(length, sums, monkeypatch):
    """What a pass of 12 heads of 64 holds: a thirty-second of the memory of a GPU, results, and sums of gradients."""
    marks = []

    def measured(function):
        def run(*args):
            with (live := Live()):
                result = function(*args)
            marks.append(live.most)
            return result

        return run

    # A recorded launch would keep its tensors alive.
    monkeypatch.setattr(calls, "run", lambda *args: None)
    monkeypatch.setattr(calls, "SCRATCH", 0.005)
    monkeypatch.setattr(backend, "_forward", measured(backend._forward))
    monkeypatch.setattr(backend, "_backward", measured(backend._backward))
    gpu.record_launches(length=length)
    assert min(marks) > 10**7
    assert max(marks) <= 0.005 * 40 * 2**30 + sums * 10**6


@pytest.mark.parametrize("width", [32, 128])
def test_images_have_addresses_of_32_bits_on_any_card(monkeypatch, width):
    """Also where a thirty-second of the memory holds more numbers."""
    monkeypatch.setattr(calls, "card", lambda device: (148, 288 * 2**30))
    launches = gpu.record_launches(length=65536, width=width)
    names = ("image", "kept", "result")
    images = [x.arguments[name] for x in launches for name in names if name in x.arguments]
    assert 2**28 < max(x[0].numel() for x in images) < 2**31


class Counted(TorchDispatchMode):
    """How many operations of PyTorch there are that start something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        idle = function.is_view or function.namespace == "prim" or "empty" in str(function)
        self.number += not idle
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [{"length": 2048}, {"length": 2048, "batch": 32}, {"length": 16384}])
def test_pytorch_starts_little_beside_the_kernels(shape, monkeypatch):
    """However long the sequences are, and however many: nothing between the kernels of chunks."""
    counted, backward = Counted(), backend._backward

    def measured(*args):
        with counted:
            return backward(*args)

    monkeypatch.setattr(backend, "_backward", measured)
    gpu.record_launches(**shape)
    assert 0 < counted.number <= 60


TALKING = (
    ((4, 4, 1, 1, False, 0, 1, 1.0),),
    ((4, 4, 1, 3, True, 1, 2, 1.0),),
    *("none", True, True, True, False, 0.0, None, False, "softmax"),
)


@pytest.mark.parametrize("bias", ["none", "distance", "separable", "dense"])
def test_nothing_waits_for_the_device(bias):
    """Launches are recorded on tensors without numbers: a pass that reads one back, and so would wait, fails on them."""
    for causal, bounded in ((True, (False, False)), (True, (True, True)), (False, (True, False))):
        shape = {
            "bias": bias, "causal": causal, "bounded": bounded, "length": 100, "batch": 2, "num_heads": 4
        }  # fmt: skip
        assert gpu.record_launches(**shape)
        signature = TALKING if bias == "none" else None
        assert gpu.record_launches(**shape, signature=signature, width=None)
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.empty(1).item()


@pytest.mark.parametrize("own", [{"bias": "dense"}, {"bias": "separable"}, {"width": None}])
def test_all_memory_is_on_the_device_of_the_tensors(own):
    """Nothing comes from the host or from another GPU: here from any device but that of tensors without memory."""
    shape = {"bounded": (True, False), "length": 100, "batch": 2, "num_heads": 4, "num_groups": 2, **own}
    launches = gpu.record_launches(**shape, device="meta")
    given = [x for launched in launches for x in launched.arguments.values()]
    assert {x.device for x in given if torch.is_tensor(x)} == {torch.device("meta")}


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch):
    """The current device may be another one."""
    said = []

    @contextmanager
    def guard(x):
        said.append(x.device)
        yield
        said.append("left")

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    monkeypatch.setattr(backend, "Call", lambda arguments: None)
    monkeypatch.setattr(passes, "forward_pass", lambda call: said.append("started"))
    with FakeTensorMode():
        arguments = Arguments({"q": torch.empty(1, device="cuda:1")}, {}, 0)
    backend._forward(arguments)
    assert said == [torch.device("cuda:1"), "started", "left"]


def test_a_signature_says_all_that_launches_depend_on():
    assert backend.program_like(TALKING, 4).signature == TALKING


def test_lengths_share_compiled_kernels():
    """Nothing is compiled anew for a length but by what it is a multiple of."""
    with gpu.idle_driver() as idle:
        for length in (200, 201, 208, 239, 256):
            backend._forward(gpu.arguments_of(length=length, num_heads=2, width=None))
        assert sum(idle.launched.values()) == 5
        assert len(launch._handles) <= 2


def small_card(monkeypatch, **limits):
    """A GPU whose blocks have that much shared memory, or as many columns of tensor memory."""
    from triton.compiler import compiler

    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: limits.get("shared", 10**6))


def test_a_smaller_variant_is_taken_where_the_first_does_not_fit(monkeypatch):
    small_card(monkeypatch, shared=20_000)
    with gpu.idle_driver():
        backend._forward(gpu.arguments_of(length=256, num_heads=2, width=None))
        ((*_, constants),) = launch._handles.values()
    assert constants[-1] < 3


def test_a_call_that_no_variant_fits_says_so(monkeypatch):
    small_card(monkeypatch, shared=1000)
    with (
        gpu.idle_driver(),
        pytest.raises(RuntimeError, match=r"attend_kernel does not fit .*shared memory.* 1000"),
    ):
        backend._forward(gpu.arguments_of(length=256, num_heads=2, width=None))


@pytest.fixture
def untested(monkeypatch, tmp_path):
    """A GPU on which no call was tested, in front of the backends that can run here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "_known", {})
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    monkeypatch.setattr(backend, "unproven", lambda call: selftest.fault(0, **backend.kind_of(call)))
    monkeypatch.setattr(BACKENDS["cpu"], "unsupported", lambda call: "the tensors are on a GPU")


@pytest.mark.usefixtures("untested")
def test_auto_goes_on_after_any_failure_with_one_warning(monkeypatch):
    """Here a real one: there is no GPU, whatever the fixture says."""
    call = problem()
    with pytest.warns(UserWarning, match="Triton kernels are not used: a test call failed with ") as said:
        outs = [attention(call.q, call.k, call.v, call.program) for _ in range(2)]
    assert len(said) == 1
    assert torch.equal(*outs)
    monkeypatch.setattr(selftest, "errors", lambda device, **kind: {"out": 1e-4, "v": 0.5})
    call = problem(program=with_kernel_size(5))
    with pytest.warns(UserWarning, match=r"is off: v by 5.0e-01, tolerance 0.02$"):
        assert choose(call) is BACKENDS["tiled"]


@pytest.mark.usefixtures("untested")
def test_auto_takes_the_kernels_for_calls_that_passed(monkeypatch):
    tested = []
    monkeypatch.setattr(selftest, "errors", lambda device, **kind: tested.append(kind) or {"out": 1e-4})
    assert choose(problem()) is backend
    assert choose(problem()) is backend
    # Another process finds the result on the disk.
    selftest._known.clear()
    assert choose(problem()) is backend
    assert len(tested) == 1
    assert choose(problem(program=with_kernel_size(5))) is backend
    assert len(tested) == 2
    monkeypatch.setattr(api, "DISABLED", ("triton", "sdpa"))
    assert choose(problem()) is BACKENDS["tiled"]
    assert choose(problem(), "triton") is backend


@pytest.mark.usefixtures("untested")
def test_the_self_test_does_not_break_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(selftest, "errors", lambda device, **kind: {"out": 1e-4})

    @torch.compile(backend="eager", fullgraph=True)
    def double(x):
        return x * (2 if selftest.fault(0, dtype=x.dtype, num_heads=x.shape[1]) is None else 0)

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


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ({"capability": (7, 0)}, "it needs a GPU of compute capability 8.0 or later, this one has 7.0"),
        ({"capability": (7, 5)}, "it needs a GPU of compute capability 8.0 or later, this one has 7.5"),
        ({"hip": "6.2"}, "its kernels are compiled for NVIDIA GPUs, this PyTorch is built for HIP 6.2"),
    ],
)
def test_other_cards_are_refused(kind, sentence):
    with card(**kind) as q:
        assert backend.unsupported(Problem(q, q, q, PLAIN, None, EVERYTHING, True, 1.0, 0.0)) == sentence


def test_a_strided_bias_beyond_32_bits_is_refused(monkeypatch):
    """A dense bias that is a view of a large tensor: few numbers, far apart."""
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
    "rows": (lambda: problem(program=ScoreProgram((Stage(torch.zeros(4, 4, 2, 3)),))), "bring no earlier"),
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
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    assert backend.unsupported(problem()) is None
    reason = backend.unsupported(make())
    assert reason is not None
    assert words in reason
