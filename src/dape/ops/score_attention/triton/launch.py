"""Launching kernels: compiled once for constants, dtypes and alignment, then started with their arguments by position."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
# Integers that are compiled for multiples of 16 if they are one: strides, never lengths.
STRIDES = ("_batch", "_head", "_token", "_channel", "_plane", "bias_row", "num_rows")
# Seconds of compilation from which a message is logged, once.
LONG = 2.0

_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)
_handles: dict[tuple, tuple] = {}
_announced: list[str] = []


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], *variants: dict[str, Any]) -> None:
    """Launch a kernel with those arguments that it declares, in the first variant that the device can hold.

    variants: constants of the kernel and compiler options, the fastest first. The tensors are on the current device.
    """
    if 0 in grid:
        return
    if (recorded := _recorded.get()) is not None:
        recorded.append(Launch(kernel, grid, arguments, variants))
        return
    given = {**arguments, **variants[0]}
    if interpreting():
        kernel[grid](**{name: given[name] for name in kernel.arg_names})
        return
    places = declared(kernel)
    from triton.runtime import driver

    device = driver.active.get_current_device()
    values = places.values(given)
    tensors = values[: places.num_tensors]
    aligned = [x.data_ptr() & 15 == 0 for x in tensors] + [
        values[place] & 15 == 0 for place in places.strides
    ]
    key = (
        id(kernel),
        device,
        given["num_warps"],
        *aligned,
        *places.chosen(given),
        *[x.dtype for x in tensors],
    )
    handle = _handles.get(key)
    if handle is None:
        handle = _handles[key] = _load(kernel, values, aligned, arguments, variants)
    start, function, metadata, constants = handle
    start(
        *grid,
        driver.active.get_current_stream(device),
        function,
        metadata,
        None,
        None,
        None,
        *values,
        *constants,
    )


class Places:
    """A kernel's parameters: names of arguments and constants, and which arguments are tensors and strides."""

    def __init__(self, kernel: Any) -> None:
        self.names = tuple(p.name for p in kernel.params if not p.is_constexpr)
        self.constants = tuple(p.name for p in kernel.params if p.is_constexpr)
        self.values, self.chosen = itemgetter(*self.names), itemgetter(*self.constants)
        # By convention tensors come first, then numbers, a stride or a step as the first of them.
        numbers = ("_batch", "_head", "_step", "splits")
        self.num_tensors = next(n for n, name in enumerate(self.names) if name.endswith(numbers))
        self.strides = [
            n for n, name in enumerate(self.names) if n >= self.num_tensors and name.endswith(STRIDES)
        ]


_places: dict[int, Places] = {}


def declared(kernel: Any) -> Places:
    # Hashing a kernel takes longer than launching it.
    if id(kernel) not in _places:
        _places[id(kernel)] = Places(kernel)
    return _places[id(kernel)]


def _load(
    kernel: Any, values: tuple, aligned: list[bool], arguments: dict[str, Any], variants: tuple
) -> tuple:
    """The first variant that the device can hold, compiled and loaded."""
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    reasons = []
    for variant in variants:
        given = {**arguments, **variant}
        begun = time.perf_counter()
        compiled = compiled_kernel(kernel, values, aligned, given, driver.active.get_current_target())
        if time.perf_counter() - begun > LONG and not _announced:
            _announced.append(kernel.__name__)
            logging.getLogger(__name__).warning(
                "compiling the Triton kernels for a new shape takes a while, once: Triton keeps them in %s",
                os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"),
            )
        try:
            start = compiled.run
        except OutOfResources as reason:
            reasons.append(str(reason))
            continue
        return start, compiled.function, compiled.packed_metadata, declared(kernel).chosen(given)
    raise RuntimeError(f"{kernel.__name__} does not fit on this GPU in any variant: {'; '.join(reasons)}")


def compiled_kernel(
    kernel: Any, values: tuple, aligned: list[bool], given: dict[str, Any], target: Any
) -> Any:
    """Triton's compiled kernel for a target, for arguments like these; aligned: of tensors, then of strides."""
    import triton
    from triton.compiler import ASTSource

    places = declared(kernel)
    kinds = {torch.Tensor: lambda x: POINTERS[x.dtype], float: lambda _: "fp32", int: lambda _: "i32"}
    signature = {
        name: "i64"
        if name.endswith("_batch")
        else next(kinds[kind](value) for kind in kinds if isinstance(value, kind))
        for name, value in zip(places.names, values, strict=True)
    }
    by_16 = zip((*range(places.num_tensors), *places.strides), aligned, strict=True)
    constants = {name: given[name] for name in places.constants}
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place, multiple in by_16 if multiple},
    )
    return triton.compile(source, target=target, options={"num_warps": given["num_warps"]})
