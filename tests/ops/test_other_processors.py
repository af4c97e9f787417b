"""The kernel's sources for processors that are not here: 16 lanes by generic vectors, and an emulated ARM.

The portable build has the 4 lanes of ARM on every processor, and is tested beside the others.
"""

import ctypes
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_cpu_curve
import torch
from op_cases import (
    BIASES,
    MORE,
    PROGRAMS,
    RAGGED,
    SHAPES,
    VISIBILITIES,
    assert_as_exact,
    build,
    needs_kernel,
)
from test_cpu_halves import HALVES, twice  # noqa: F401  # a fixture

from dape.ops.score_attention import native

pytestmark = [needs_kernel, pytest.mark.slow]

SOURCES = Path(native.__file__).parent / "csrc"
FLAGS = ["-std=c++17", "-O1", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread", "-w"]
FLAGS += ['-DDAPE_SOURCES=""']


@dataclass(frozen=True)
class Processor:
    """What compiles for it, with which flags, and what runs its programs here."""

    compiler: str
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()


COMPILER = os.environ.get("CXX", "c++")
PROCESSORS = {
    "16 lanes": Processor(COMPILER, ("-DDAPE_LANES=16",)),
    "aarch64": Processor("aarch64-linux-gnu-g++", (), ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
}


class Driver:
    """A process that runs calls in place of the kernel of this process."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # Tensors by address: how much memory a pointer leads to.
        self.tensors: dict[int, torch.Tensor] = {}

    def run(self, step: str, call: native.Call) -> None:
        blocks: list[tuple[int, int]] = []
        places: list[tuple[int, int, int]] = []

        def add(address: int, size: int, structures: list[native.Structure]) -> int:
            number = len(blocks)
            blocks.append((address, size))
            for index, structure in enumerate(structures):
                for name, kind, *_ in structure._fields_:
                    pointer = getattr(structure, name)
                    if kind is not ctypes.c_void_p or not pointer:
                        continue
                    offset = index * ctypes.sizeof(structure) + getattr(type(structure), name).offset
                    places.append((number, offset, target(name, pointer)))
            return number

        def target(name: str, pointer: int) -> int:
            if name == "program":
                found = native.Program.from_address(pointer)
                return add(pointer, ctypes.sizeof(found), [found])
            if name == "stages":
                program = native.Program.from_address(call.program)
                count = max(1, program.num_pre + program.num_post)
                size = ctypes.sizeof(native.StageCall)
                return add(
                    pointer,
                    count * size,
                    [native.StageCall.from_address(pointer + n * size) for n in range(count)],
                )
            tensor = self.tensors[pointer]
            numbers = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            return add(pointer, tensor.element_size() * numbers if tensor.numel() else 0, [])

        add(ctypes.addressof(call), ctypes.sizeof(call), [call])
        request = struct.pack(
            f"=i{len(step)}sii", len(step), step.encode(), torch.get_num_threads(), len(blocks)
        )
        for address, size in blocks:
            request += struct.pack("=q", size) + ctypes.string_at(address, size)
        request += struct.pack("=i", len(places)) + b"".join(struct.pack("=iqi", *place) for place in places)
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(request)
        stdin.flush()
        (code,) = struct.unpack("=i", stdout.read(4))
        assert code == 0
        for address, size in blocks:
            answer = stdout.read(size)
            # Structures hold the other process's addresses.
            if address in self.tensors:
                ctypes.memmove(address, answer, size)


@contextmanager
def runs_on(processor: Processor, folder: Path) -> Iterator[list[str]]:
    """Calls go to a process of that processor; gives the list of the passes that it has run."""
    for program in (processor.compiler, *processor.runner[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: qemu-user, g++-aarch64-linux-gnu)")
    binary = folder / "driver"
    sources = [SOURCES / "kernel.cpp", SOURCES / "dispatch.cpp", Path(__file__).parent / "driver.cpp"]
    flags = [*FLAGS, *processor.flags, "-DBUILD=portable"]
    subprocess.run([processor.compiler, *flags, *map(str, sources), "-ldl", "-o", str(binary)], check=True)
    made = Driver([*processor.runner, str(binary)])
    point = native.Structure.point
    ran: list[str] = []

    def recording(self: native.Structure, **tensors: torch.Tensor | None) -> None:
        made.tensors.update({x.data_ptr(): x for x in tensors.values() if x is not None})
        point(self, **tensors)

    def run(step: str, call: native.Call) -> None:
        ran.append(step)
        made.run(step, call)
        made.tensors.clear()

    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native.Structure, "point", recording)
        patch.setattr(native, "run", run)
        torch.set_num_threads(2)
        yield ran
        torch.set_num_threads(before)
    with made.process as process:
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture(scope="module", params=PROCESSORS)
def driver(request, tmp_path_factory):
    with runs_on(PROCESSORS[request.param], tmp_path_factory.mktemp("driver")) as ran:
        yield
        # Nothing went by the kernel of this process.
        assert {"forward", "backward", "program_forward", "program_backward"} <= set(ran)


def test_no_race_between_threads(tmp_path):
    """By ThreadSanitizer, which ends its process at the first one; more threads than cores."""
    # setarch: without the random addresses of some systems, which it does not know.
    runner = ("env", "TSAN_OPTIONS=halt_on_error=1", "setarch", "-R")
    sanitized = Processor(COMPILER, ("-fsanitize=thread",), runner)
    case = SHAPES["default widths"].but(head_dim=8, queries=300, keys=300, width=6, bias="distance")
    with runs_on(sanitized, tmp_path) as ran:
        torch.set_num_threads(6)
        for batch, kernel in itertools.product((1, 3), (None, 3)):
            build(case.but(batch=batch, kernel=kernel), torch.float32).results("cpu")
        for program in ("mta", "talking"):
            build(RAGGED.but(queries=RAGGED.keys, program=program), torch.float32).results("cpu")
        assert ran.count("backward") == 4
        assert ran.count("program_backward") == 2


@pytest.mark.parametrize("bias", ["none", "distance", "dense"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("driver")
def test_the_shape_table(shape, bias):
    assert_as_exact(SHAPES[shape].but(bias=bias), "cpu")


@pytest.mark.parametrize(("number", "program"), list(enumerate([*PROGRAMS, *MORE])))
@pytest.mark.usefixtures("driver")
def test_every_program(number, program):
    """Each with one bias and one visibility, all of which are there."""
    bias, visible = BIASES[number % len(BIASES)], VISIBILITIES[number % 5]
    assert_as_exact(RAGGED.but(program=program, bias=bias, visible=visible, causal=number % 2 == 0), "cpu")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.usefixtures("driver")
def test_numbers_of_two_bytes(dtype, twice):  # noqa: F811  # the fixture
    for shape in SHAPES.values():
        build(shape.but(bias="distance"), dtype).results("cpu")
    assert len(twice) == 2 * len(SHAPES)


@pytest.mark.parametrize("case", test_cpu_curve.CASES)
@pytest.mark.usefixtures("driver")
def test_a_bias_that_is_a_curve(case):
    assert_as_exact(test_cpu_curve.CASES[case], "cpu")
