"""Compiling the Triton kernels without a GPU: what a call would launch, and what the compiler makes of it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dape.ops.score_attention import ConvWeights, DistanceBias, triton_call
from dape.ops.score_attention import triton as backend
from dape.ops.score_attention.types import EVERYTHING, Problem

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}


@dataclass
class Launch:
    """One kernel launch: the kernel, its arguments, the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


@dataclass
class Compiled:
    """What a GPU would need to run a kernel, in bytes (registers: a thread's)."""

    registers: int
    spills: int
    shared: int
    ptx: str


def launches(monkeypatch, *, dtype=torch.float16, bias="distance", num_heads=12, head_width=64, width=32,
             kernel_size=3, length=128) -> list[Launch]:  # fmt: skip
    """The launches of one forward and backward pass, recorded instead of run."""
    recorded: list[Launch] = []

    def record(kernel, grid, arguments, **options):
        recorded.append(Launch(kernel, {name: arguments[name] for name in kernel.arg_names}, options))

    monkeypatch.setattr(triton_call, "launch", record)
    q, k, v = (
        torch.zeros(1, num_heads, length, head_width, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    channels = num_heads * (1 if bias is None else 2)
    shapes = ((width, channels, 1, kernel_size), (width,), (num_heads, width, 1, kernel_size), (num_heads,))
    conv = ConvWeights(*(torch.zeros(shape, requires_grad=True) for shape in shapes), left=kernel_size // 2)
    encoding = {
        None: None,
        "distance": DistanceBias(torch.zeros(num_heads, length, requires_grad=True)),
        "dense": torch.zeros(1, num_heads, length, length, requires_grad=True),
    }[bias]
    out = backend.attend(Problem(q, k, v, conv, encoding, EVERYTHING, True, 0.125, 0.0))
    out.backward(torch.zeros_like(out))
    return recorded


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """The kernel compiled for a GPU generation, as the launch would specialise it."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        kinds = {float: "fp32", int: "i32"}
        signature[parameter.name] = POINTERS[value.dtype] if torch.is_tensor(value) else kinds[type(value)]
        if torch.is_tensor(value) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    ptx = compiled.asm["ptx"]
    report = _assemble(ptx, capability)
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers, report
    assert spills, report
    return Compiled(int(registers[1]), int(spills[1]) + int(spills[2]), compiled.metadata.shared, ptx)


def _assemble(ptx: str, capability: int) -> str:
    """What the assembler says of its use of registers."""
    tool = TOOLS / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    name = f"sm_{capability}{'a' if capability >= 90 else ''}"
    command = [str(tool), "-v", f"--gpu-name={name}", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
