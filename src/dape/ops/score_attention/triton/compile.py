"""Compilation of kernels without a GPU: the launches of a call, and their resources.

A launch with more shared memory than a block may have fails on the device. Therefore the launches of a call are
recorded on tensors without data, compiled for the device, and compared with its limit before anything runs.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Shared memory that a block may have, in bytes, by compute capability times ten.
SHARED_MEMORY = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    120: 101_376,
}

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}

Options = dict[str, Any]

_recorded: ContextVar[list[list[Launch]] | None] = ContextVar("recorded", default=None)
_shared: dict[tuple, int] = {}
# Compile time of a kernel in seconds from which a message is logged, once.
LONG = 2.0
_announced: list[str] = []


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the kernel, its grid, its arguments, the compiler's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    def key(self) -> tuple:
        """Properties on which the compiled kernel depends."""
        values = []
        for parameter in self.kernel.params:
            value = self.arguments[parameter.name]
            if torch.is_tensor(value):
                value = value.dtype
            elif isinstance(value, int) and not parameter.is_constexpr:
                value = "any" if parameter.do_not_specialize else (value == 1, value % 16 == 0)
            elif isinstance(value, float):
                value = float
            values.append(value)
        return (self.kernel.__name__, *values, *self.options.items())


@dataclass(frozen=True)
class Compiled:
    """Resources of a kernel, in bytes (registers: per thread), and its code."""

    registers: int
    spills: int
    shared: int
    ptx: str
    cubin: bytes


@contextmanager
def recording() -> Iterator[list[list[Launch]]]:
    """Append launches in the block to the list, each with all its variants, instead of executing them."""
    launches: list[list[Launch]] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], variants: Sequence[Options]) -> None:
    """Launch a kernel with those arguments that it declares, in the first variant that the device can hold.

    variants: compiler options and constants of the kernel, the fastest first. The device is the tensors'.
    """
    if 0 in grid:
        return
    # Lazily: building a launch takes time, and the first nearly always fits.
    launches = (_launch(kernel, grid, arguments, variant) for variant in variants)
    if (recorded := _recorded.get()) is not None:
        recorded.append(list(launches))
        return
    device = next(x.device for x in arguments.values() if torch.is_tensor(x))
    if device.type != "cuda":
        _start(next(launches))
        return
    fitting = first_that_fits(launches, *limits(device))
    if fitting is None:
        every = [_launch(kernel, grid, arguments, variant) for variant in variants]
        raise RuntimeError(too_large(every, *limits(device)))
    # The current device may be another one than the tensors'.
    with torch.cuda.device(device):
        _start(fitting)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], variant: Options) -> Launch:
    given = arguments | variant
    options = {name: value for name, value in variant.items() if name not in kernel.arg_names}
    return Launch(kernel, grid, {name: given[name] for name in kernel.arg_names}, options)


def _start(launch: Launch) -> None:
    launch.kernel[launch.grid](**launch.arguments, **launch.options)


def first_that_fits(launches: Iterable[Launch], capability: int, limit: int) -> Launch | None:
    """The first launch whose shared memory fits the limit, or None."""
    return next((launch for launch in launches if shared_memory(launch, capability) <= limit), None)


def too_large(launches: Sequence[Launch], capability: int, limit: int) -> str:
    """Error message for launches of which none fits."""
    least = min(shared_memory(launch, capability) for launch in launches)
    return (
        f"{launches[0].kernel.__name__} needs {least} bytes of shared memory for this shape, "
        f"a block of this GPU has {limit}"
    )


def compile_launch(launch: Launch, capability: int) -> Any:
    """Triton's compiled kernel for a GPU generation, specialised as the launch would be."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        # Arguments equal to 1 become constants, multiples of 16 are marked: as at a launch.
        special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (special and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        kinds = {float: "fp32", int: "i32"}
        signature[name] = POINTERS[value.dtype] if torch.is_tensor(value) else kinds[type(value)]
        if torch.is_tensor(value) or (special and value % 16 == 0):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))


def shared_memory(launch: Launch, capability: int) -> int:
    """Bytes of shared memory per block of the launch; compiled once, with a message if that takes long."""
    key = (capability, launch.key())
    if key not in _shared:
        start = time.perf_counter()
        _shared[key] = int(compile_launch(launch, capability).metadata.shared)
        if time.perf_counter() - start > LONG and not _announced:
            _announced.append(launch.kernel.__name__)
            logging.getLogger(__name__).warning(
                "compiling the Triton kernels for a new shape takes a while, once: Triton keeps them in %s",
                os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"),
            )
    return _shared[key]


def inspect(launch: Launch, capability: int) -> Compiled:
    """Registers, spills, shared memory and code of a launch."""
    compiled = compile_launch(launch, capability)
    cubin = compiled.asm["cubin"]
    registers, stack = resources(cubin)
    spills = 0
    if stack:
        # Assembling again for this message takes as long as the first time.
        match = re.search(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads", _assemble(compiled.asm["ptx"], capability)
        )
        spills = sum(map(int, match.groups())) if match else stack
    return Compiled(registers, spills, int(compiled.metadata.shared), compiled.asm["ptx"], cubin)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory, which hold spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools() / "cuobjdump"), "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (re.search(rf"{name}:(\d+)", report) for name in ("REG", "STACK", "LOCAL"))
    assert registers and stack and local, report
    return int(registers[1]), int(stack[1]) + int(local[1])


def tools() -> Path:
    """The folder of the assembler and disassembler that come with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _assemble(ptx: str, capability: int) -> str:
    """The assembler's report on registers."""
    tool = tools() / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    command = [str(tool), "-v", f"--gpu-name={name}", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


@lru_cache
def limits(device: torch.device) -> tuple[int, int]:
    """Compute capability times ten, and bytes of shared memory that a block may have."""
    from triton.runtime import driver

    major, minor = torch.cuda.get_device_capability(device)
    # The limit that Triton itself checks at a launch.
    return 10 * major + minor, driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
