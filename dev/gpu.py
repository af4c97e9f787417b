"""The Triton kernels without a GPU: launches of a call, resources of compiled kernels, host time of launching.

`python -m dev.gpu [LENGTH] [BATCH]` prints the launches of a forward and a backward pass of 12 heads of 64, and their
host time, by a driver that launches nothing.
"""

from __future__ import annotations

import collections
import functools
import re
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.op import Arguments
from dape.ops.score_attention.program import PLAIN, conv_program
from dape.ops.score_attention.triton import launch
from dape.ops.score_attention.types import (
    EVERYTHING,
    Bias,
    DistanceBias,
    Problem,
    SeparableBias,
    Visible,
)

# Shared memory that a block may have, in bytes, by compute capability times ten.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# Columns of tensor memory of a multiprocessor.
TENSOR_MEMORY = 512


def arguments_of(
    *,
    dtype: torch.dtype = torch.float16,
    num_heads: int = 12,
    num_groups: int | None = None,
    head_dim: int = 64,
    width: int | None = 32,
    kernel_size: int = 3,
    signature: tuple | None = None,
    bias: str = "distance",
    causal: bool = True,
    bounded: tuple[bool, bool] = (False, False),
    batch: int = 1,
    length: int = 256,
    queries: int | None = None,
) -> Arguments:
    """Arguments of a call: its program is that of a `signature`, or two convolutions (width=None: plain scores).

    bounded: whether queries have a first and a last visible key of their own. length: number of keys, and of queries
    unless given.
    """
    groups, queries = num_groups or num_heads, queries or length
    q = torch.zeros(batch, num_heads, queries, head_dim, dtype=dtype)
    k, v = (torch.zeros(batch, groups, length, head_dim, dtype=dtype) for _ in range(2))
    program = PLAIN
    if signature is not None:
        program = backend.program_like(signature, num_heads)
    elif width is not None:
        channels = num_heads * (1 if bias == "none" else 2)
        shapes = (
            (width, channels, 1, kernel_size),
            (width,),
            (num_heads, width, 1, kernel_size),
            (num_heads,),
        )
        w1, b1, w2, b2 = (torch.zeros(shape) for shape in shapes)
        program = conv_program(w1, b1, w2, b2, kernel_size // 2)
    lowest = 0 if causal else 1 - length
    encodings: dict[str, Any] = {
        "none": lambda: None,
        "distance": lambda: DistanceBias(torch.zeros(num_heads, length - lowest), lowest),
        "separable": lambda: SeparableBias(
            torch.zeros(1, num_heads, queries), torch.zeros(1, num_heads, length)
        ),
        "dense": lambda: torch.zeros(batch, num_heads, queries, length),
    }
    encoding: Bias = encodings[bias]()
    first, last = (torch.zeros(1, 1, dtype=torch.int64) if given else None for given in bounded)
    visible = Visible(first, last) if any(bounded) else EVERYTHING
    return backend.arguments_of(Problem(q, k, v, program, encoding, visible, causal, 1.0, 0.0))


@dataclass(frozen=True)
class Launch:
    """A kernel launch: the kernel, its grid, its arguments, and the variants of constants and compiler options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    variants: tuple[dict[str, Any], ...]


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Append launches in the block to the list instead of executing them."""
    launches: list[Launch] = []
    with mock.patch.object(launch, "start", lambda *launched: launches.append(Launch(*launched))):
        yield launches


def record_launches(*, backward: bool = True, device: str = "cpu", **shape: Any) -> list[Launch]:
    """Kernel launches of a call of that shape, recorded on tensors without data."""
    with FakeTensorMode(), torch.device(device):
        arguments = arguments_of(**shape)
        with recording() as launches:
            out, lse = backend._forward(arguments)
            if backward:
                backend._backward(arguments, torch.empty_like(out), out, lse)
    return launches


@dataclass(frozen=True)
class Compiled:
    """Resources of a kernel, in bytes (registers: per thread), and its code."""

    registers: int
    spills: int
    shared: int
    tensor_memory: int
    ptx: str
    cubin: bytes
    # The variant of the launch that fits.
    variant: dict[str, Any]


def inspect(launched: Launch, capability: int) -> Compiled:
    """The first variant of a launch that fits a GPU generation, compiled as the launch would."""
    from triton.backends.compiler import GPUTarget

    for variant in launched.variants:
        given = {**launched.arguments, **variant}
        places = launch.declared(launched.kernel)
        values = places.values(given)
        aligned = [x.storage_offset() * x.itemsize % 16 == 0 for x in values[: places.num_tensors]]
        aligned += [values[n] % 16 == 0 for n in places.multiples]
        target = GPUTarget("cuda", capability, 32)
        compiled = launch.compiled_kernel(launched.kernel, values, aligned, given, target)
        columns = getattr(compiled.metadata, "tmem_size", None) or 0
        if compiled.metadata.shared <= SHARED_MEMORY[capability] and columns <= TENSOR_MEMORY:
            break
    else:
        raise RuntimeError(
            f"{launched.kernel.__name__}: {compiled.metadata.shared} bytes of shared memory, {columns} columns of tensor "
            f"memory on sm_{capability}"
        )
    cubin = compiled.asm["cubin"]
    registers, stack = resources(cubin)
    spills = 0
    if stack:
        # Assembling again for this message takes as long as the first time.
        report = assemble(compiled.asm["ptx"], capability)
        match = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        spills = sum(map(int, match.groups())) if match else stack
    shared = int(compiled.metadata.shared)
    return Compiled(registers, spills, shared, columns, compiled.asm["ptx"], cubin, variant)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory, which hold spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools() / "cuobjdump"), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.findall(rf"{name}:(\d+)", report)[0]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def tools() -> Path:
    """The folder of the assembler and disassembler that come with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def assemble(ptx: str, capability: int) -> str:
    """The assembler's report on registers."""
    tool = tools() / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    command = [str(tool), "-v", f"--gpu-name={name}", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[80], "multiprocessor_count": 108, "warpSize": 32}

    def load_binary(self, *binary: Any) -> tuple:
        return 1, 1, 100, 0, 1024


class IdleDriver:
    """A driver for Triton that launches nothing, on an A100 that does not exist; counts launches by kernel."""

    def __init__(self) -> None:
        self.utils, self.launched = _Utils(), collections.Counter[str]()

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def start(*arguments: Any) -> None:
            self.launched[metadata.name] += 1

        return start

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 80, 32)


@contextmanager
def idle_driver() -> Iterator[IdleDriver]:
    """Kernels are compiled for an A100, and started by a driver that launches nothing."""
    from triton.runtime import driver

    idle, handles, before = IdleDriver(), dict(launch._handles), driver._active
    driver.set_active(idle)
    launch._handles.clear()
    try:
        yield idle
    finally:
        driver._active = before
        launch._handles.clear()
        launch._handles.update(handles)


def host_times(rounds: int = 10, **shape: Any) -> dict[str, dict[str, float]]:
    """Microseconds of the thread that launching each kernel of a forward and a backward pass takes, by kernel."""
    # Tensors without memory.
    with torch.device("meta"):
        arguments = arguments_of(**shape)
    with recording() as forward:
        out, lse = backend._forward(arguments)
    with recording() as backward:
        backend._backward(arguments, out, out, lse)
    found: dict[str, dict[str, float]] = {}
    with idle_driver():
        for name, launches in {"forward": forward, "backward": backward}.items():
            times = found[name] = {}
            for number, x in enumerate(launches):
                start = functools.partial(launch.run, x.kernel, x.grid, x.arguments, *x.variants)
                start()
                seconds = min(timeit.repeat(start, number=20, repeat=rounds, timer=time.thread_time)) / 20
                times[f"{number} {x.kernel.__name__}"] = 1e6 * seconds
    return found


if __name__ == "__main__":
    length, batch = (*map(int, sys.argv[1:]), *(2048, 1)[len(sys.argv) - 1 :])
    for name, times in host_times(length=length, batch=batch).items():
        print(
            f"{name}: {len(times)} launches, {sum(times.values()) / len(times):.1f} µs of host time each",
            times,
        )
