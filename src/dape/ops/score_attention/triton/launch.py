"""Launching kernels: compiled once for constants, dtypes and alignment, then started with their arguments by position."""

from __future__ import annotations

import inspect
import logging
import os
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
# Arguments NAME_batch and such are strides of the tensor NAME.
DIMENSIONS = {"batch": 0, "head": 1, "channel": 1, "token": 2, "row": 2, "column": 2, "pixel": 3}

_handles: dict[tuple, tuple] = {}
_places: dict[int, Places] = {}


def interpreting() -> bool:
    """Whether Triton runs its kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Places:
    """A kernel's parameters: names of tensors, then numbers, then constants."""

    def __init__(self, kernel: Any) -> None:
        from triton.language import constexpr

        parameters = inspect.signature(kernel.fn).parameters.values()
        self.constants = tuple(x.name for x in parameters if x.annotation is constexpr)
        self.names = tuple(x.name for x in parameters if x.annotation is not constexpr)
        self.values, self.chosen = itemgetter(*self.names), itemgetter(*self.constants)
        # By convention the first number is a stride, or how many parts there are.
        self.num_tensors = next(n for n, x in enumerate(self.names) if x.endswith(("_batch", "num_splits")))
        parts = {name: name.rpartition("_") for name in self.names[self.num_tensors :]}
        self.strides = [
            (name, tensor, DIMENSIONS[dimension])
            for name, (tensor, _, dimension) in parts.items()
            if tensor in self.names[: self.num_tensors] and dimension in DIMENSIONS
        ]
        # Compiled for multiples of 16 if they are one: strides and sizes of images, never lengths.
        multiples = {name for name, *_ in self.strides} | {"table_plane", "values_plane", "num_rows"}
        self.multiples = [n for n, name in enumerate(self.names) if name in multiples]


def declared(kernel: Any) -> Places:
    # Hashing a kernel takes longer than launching it.
    if id(kernel) not in _places:
        _places[id(kernel)] = Places(kernel)
    return _places[id(kernel)]


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], *variants: dict[str, Any]) -> None:
    """Launch a kernel with those arguments that it declares, in the first variant that the device can hold.

    variants: constants of the kernel and compiler options, the fastest first. The tensors are on the current device.
    Strides are added to the arguments; that of a batch of one is 0.
    """
    if 0 in grid:
        return
    arguments = dict(arguments)
    for name, tensor, dimension in declared(kernel).strides:
        x = arguments[tensor]
        arguments[name] = x.stride(dimension) if dimension or x.shape[0] > 1 else 0
    start(kernel, grid, arguments, variants)


def start(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], variants: tuple) -> None:
    """Launch a kernel whose arguments are complete, or interpret it."""
    given = {**arguments, **variants[0]}
    if interpreting():
        kernel[grid](**{name: given[name] for name in kernel.arg_names})
        return
    from triton.runtime import driver

    places, device = declared(kernel), driver.active.get_current_device()
    values = places.values(given)
    tensors = values[: places.num_tensors]
    aligned = [x.data_ptr() & 15 == 0 for x in tensors] + [values[n] & 15 == 0 for n in places.multiples]
    options = (id(kernel), device, given["num_warps"])
    key = (*options, *aligned, *places.chosen(given), *[x.dtype for x in tensors])
    handle = _handles.get(key)
    if handle is None:
        handle = _handles[key] = _load(kernel, values, aligned, arguments, variants)
    begin, function, metadata, constants = handle
    stream = driver.active.get_current_stream(device)
    begin(*grid, stream, function, metadata, None, None, None, *values, *constants)


def _load(
    kernel: Any, values: tuple, aligned: list[bool], arguments: dict[str, Any], variants: tuple
) -> tuple:
    """The first variant that the device can hold, compiled and loaded."""
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    logging.getLogger(__name__).info("compiling %s, once", kernel.__name__)
    reasons = []
    for variant in variants:
        given = {**arguments, **variant}
        compiled = compiled_kernel(kernel, values, aligned, given, driver.active.get_current_target())
        try:
            begin = compiled.run
        except OutOfResources as reason:
            reasons.append(str(reason))
            continue
        return begin, compiled.function, compiled.packed_metadata, declared(kernel).chosen(given)
    raise RuntimeError(f"{kernel.__name__} does not fit on this GPU in any variant: {'; '.join(reasons)}")


def compiled_kernel(
    kernel: Any, values: tuple, aligned: list[bool], given: dict[str, Any], target: Any
) -> Any:
    """Triton's compiled kernel for a target, for arguments like these; aligned: of tensors, then of strides."""
    import triton
    from triton.compiler import ASTSource

    def kind(name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            return POINTERS[value.dtype]
        # Batch entries may be far apart.
        return "fp32" if isinstance(value, float) else "i64" if name.endswith("_batch") else "i32"

    places = declared(kernel)
    by_16 = zip((*range(places.num_tensors), *places.multiples), aligned, strict=True)
    constants = {name: given[name] for name in places.constants}
    source = ASTSource(
        fn=kernel,
        signature={name: kind(name, value) for name, value in zip(places.names, values, strict=True)}
        | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place, multiple in by_16 if multiple},
    )
    return triton.compile(source, target=target, options={"num_warps": given["num_warps"]})
