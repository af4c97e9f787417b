"""The compiled kernel, loaded with ctypes: its call structure, its builds and how to run them."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

NOT_BUILT = (
    "its compiled kernel is missing: no C++ compiler was found when dape was installed; "
    "install g++ or clang and run `pip install --force-reinstall --no-deps` on dape again"
)
if sys.platform == "win32":
    NOT_BUILT = (
        "its compiled kernel is missing: it builds with clang alone on Windows (`pip install ziglang`, then "
        "`pip install --force-reinstall --no-deps --no-build-isolation` on dape again), where it is untested"
    )
REBUILD = "rebuild it, by `python setup.py build_ext --inplace` in a clone, or by installing dape again"
_SIZES = [
    "batch",
    "heads",
    "groups",
    "queries",
    "keys",
    "head_width",
    "width",
    "taps",
    "left",
    "channels",
    "causal",
    "residual_bias",
    "bias",
    "bias_tables",
    "lowest",
    "distances",
    "table_length",
    "dense_batch",
    "dense_grad",
    "dtype",
    "pieces",
]
_STRIDES = ["q_stride", "k_stride", "v_stride", "out_stride", "grad_stride"]
_POINTERS = [
    "q",
    "k",
    "v",
    "w1",
    "b1",
    "w2",
    "b2",
    "dense",
    "values",
    "knots",
    "slopes",
    "offsets",
    "row_scale",
    "hidden",
    "edges",
    "first",
    "last",
    "out",
    "lse",
    "grad_out",
    "dq",
    "dk",
    "dv",
    "dq_low",
    "dk_low",
    "dv_low",
    "dw1",
    "db1",
    "dw2",
    "db2",
    "ddense",
    "dvalues",
    "dslopes",
    "doffsets",
    "drow_scale",
    "dhidden",
    "dedges",
    "program",
]


# In the order of csrc/call.h.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What has the call's own dtype; all else is float32, but for places and the lower halves of sums.
OF_CALL = frozenset(("q", "k", "v", "out", "grad_out", "dq", "dk", "dv"))
OTHERS = {
    **dict.fromkeys(_POINTERS, torch.float32),
    **dict.fromkeys(("weight", "offset", "dweight", "doffset"), torch.float32),
    **dict.fromkeys(
        (f"{d}{name}" for d in ("", "d") for name in ("sink", "factor", "row", "column")), torch.float32
    ),
    "row": torch.float64,
    "column": torch.float64,
    "left": torch.float64,
    **dict.fromkeys(("first", "last", "earlier"), torch.int32),
    **dict.fromkeys(("dq_low", "dk_low", "dv_low"), torch.int16),
}


class Structure(ctypes.Structure):
    """A C structure of csrc/call.h, field by field, all of eight bytes or arrays of them."""

    # The number of each field's first word, and the type of all words.
    index: ClassVar[dict[str, int]] = {}
    words: ClassVar[Any] = None

    def memory(self) -> Any:
        """The structure's memory as whole numbers."""
        if self.words is None:
            cls = type(self)
            cls.index = {name: getattr(cls, name).offset // 8 for name, *_ in self._fields_}
            cls.words = ctypes.c_uint64 * (ctypes.sizeof(cls) // 8)
        return self.words.from_buffer(self)

    def point(self, **tensors: Tensor | None) -> None:
        """Set pointers, after checking that the kernel may follow them."""
        words, index = self.memory(), self.index
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            dtype = DTYPES[self.dtype] if name in OF_CALL else OTHERS[name]
            assert tensor.dtype is dtype and tensor.is_cpu, (name, tensor.dtype, tensor.device)
            words[index[name]] = tensor.data_ptr()


class StageCall(Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "groups", "rows", "taps", "left")),
        ("slope", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("weight", "offset", "dweight", "doffset")),
    ]


class Program(Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("num_pre", "num_post", "residual_scores", "residual_bias", "stick")
        ),
        ("softcap", ctypes.c_double),
        ("stages", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("sink", "factor", "row", "column", "earlier", "left")),
        *((name, ctypes.c_void_p) for name in ("dsink", "dfactor", "drow", "dcolumn")),
    ]


class Call(Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int64 * 3) for name in _STRIDES),
        ("scale", ctypes.c_double),
        ("slope", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]

    def stride(self, **tensors: Tensor) -> None:
        words, index = self.memory(), self.index
        for name, tensor in tensors.items():
            first = index[STRIDES[name]]
            *outer, last = tensor.stride()
            assert last == 1 or tensor.shape[3] == 1, (name, tensor.stride())
            words[first : first + 3] = outer


STRIDES = {name.removesuffix("_stride"): name for name in _STRIDES}
STEPS = ("forward", "backward", "decode", "program_forward", "program_backward", "program_decode")


class _Selected:
    build = b""


def load(path: Path) -> ctypes.CDLL:
    """A kernel's shared library, ready to call; an OSError if it was not built from the sources beside this file."""
    kernel = ctypes.CDLL(str(path))
    built_from = getattr(kernel, "dape_sources", None)
    if built_from is not None:
        built_from.restype = ctypes.c_char_p
    if built_from is None or built_from().decode() != sources():
        raise OSError("it was built from other sources")
    for name in STEPS:
        getattr(kernel, f"dape_{name}").argtypes = [ctypes.c_char_p, ctypes.POINTER(Call), ctypes.c_int]
    kernel.dape_build_name.restype = kernel.dape_build_for.restype = ctypes.c_char_p
    kernel.dape_stage.restype = ctypes.c_double
    kernel.dape_stage.argtypes = [ctypes.c_char_p, ctypes.POINTER(Call), ctypes.c_int, ctypes.c_int64]
    return kernel


def sources() -> str:
    """Digest of the kernel's sources, as setup.py puts it into the library."""
    files = sorted((Path(__file__).parent / "csrc").glob("*.[ch]*"), key=lambda path: path.name)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def share_openmp() -> None:
    """Make the OpenMP library of torch's wheel visible to the kernel, on macOS, where libraries load privately."""
    library = Path(torch.__file__).parent / "lib" / "libomp.dylib"
    if sys.platform == "darwin" and library.exists():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _find() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernel that was built with this package, or why there is none."""
    folder = Path(__file__).parent
    # After the plain name, those of versions that named it after a Python.
    paths = [*folder.glob("_kernel.dll"), *folder.glob("_kernel.so"), *sorted(folder.glob("_kernel.*.so"))]
    if not paths:
        return None, NOT_BUILT
    try:
        share_openmp()
        return load(paths[0]), None
    except OSError as error:
        return None, f"its compiled kernel does not load ({error}): {REBUILD}"


KERNEL, PROBLEM = _find()


def builds() -> list[str]:
    """The builds that this processor can run, fastest first: of avx512, avx512_short, avx2 and portable."""
    names: list[str] = []
    while KERNEL is not None and (name := KERNEL.dape_build_name(len(names))) is not None:
        names.append(name.decode())
    return names


@contextmanager
def use_build(name: str) -> Iterator[None]:
    """Run a given build inside the block instead of the fastest."""
    if name not in builds():
        raise ValueError(f'this processor has no build "{name}": choose one of {", ".join(builds())}')
    before, _Selected.build = _Selected.build, name.encode()
    try:
        yield
    finally:
        _Selected.build = before


def build_for(call: Call) -> str:
    """The build that a forward or backward call runs: the fastest, or that for few queries where its tiles waste less."""
    assert KERNEL is not None
    return KERNEL.dape_build_for(ctypes.byref(call)).decode()


def run(step: str, call: Call) -> None:
    """Run one of STEPS on PyTorch's number of threads; the GIL is released meanwhile."""
    code = getattr(KERNEL, f"dape_{step}")(_Selected.build, call, torch.get_num_threads())
    if code == 2:
        raise MemoryError(f"not enough memory for the {step.replace('program_', '')} pass")
    assert code == 0, code


def run_stage(stage: int, call: Call, repeats: int) -> float:
    """Run one stage of csrc/stages.h on this thread; its multiply-accumulates each time, below 0 for no such stage."""
    assert KERNEL is not None
    return KERNEL.dape_stage(_Selected.build, ctypes.byref(call), stage, repeats)


def allocate(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory that the kernel writes completely."""
    return torch.empty(shape, dtype=dtype)


def rows_contiguous(x: Tensor) -> Tensor:
    """x [B, H, T, D] with contiguous rows."""
    return x if x.stride(3) == 1 else x.contiguous()


def places(bound: Tensor, batch: int, num_queries: int, num_keys: int) -> Tensor:
    """A bound of visible keys [B, Tq] as the kernel reads it; causality and the first key limit it there."""
    # Bounds far outside the keys mean the same as just outside.
    return bound.long().clamp(-1, num_keys).to(torch.int32).expand(batch, num_queries).contiguous()


def gradients(
    given: dict[str, Tensor], *, dense: bool, rows: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Memory for the gradients of tensors, and for the lower halves of those that are sums and have two bytes.

    dense: whether a dense bias has a gradient. rows: whether tiles add to each other's rows of q's gradient.
    """
    grads, low = {}, {}
    for name, x in given.items():
        if not x.is_floating_point() or name == "knots" or (name == "dense" and not dense):
            continue
        dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
        # The gradient of q is written, the others are summed into.
        grads[name] = allocate(*x.shape, dtype=dtype) if name == "q" else torch.zeros(x.shape, dtype=dtype)
        if dtype != torch.float32 and (name in ("k", "v") or rows):
            low[f"d{name}_low"] = torch.zeros(x.shape, dtype=torch.int16)
    return grads, low
