"""Self-test of the kernels: a call of a given kind against the definition in float64, output and every gradient.

`backend="auto"` takes the kernels for calls of a kind that passed on this GPU. Passed kinds are kept in a file, so that
a program tests each once: that takes as long as compiling, which its first call would need anyway, and seconds later.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dape.files import read_json, write_atomically
from dape.ops.score_attention import reference
from dape.ops.score_attention.edges import Edges
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.types import Bias, DistanceBias, Problem, SeparableBias, Visible

# Largest error of a gradient, as a share of its norm; of the output, a tenth of it. Rounding flips a LeakyReLU here and
# there, a mistake in a kernel changes everything.
TOLERANCE = {torch.float16: 0.1, torch.bfloat16: 0.15, torch.float32: 0.02}

# Reason why calls of a kind do not pass on a GPU, or None.
_known: dict[tuple, str | None] = {}


def fault(device: int, **kind: Any) -> str | None:
    """Reason why calls of a kind (triton.kind_of) are wrong or fail on a GPU, or None; warns the first time."""
    key = (device, *kind.items())
    if key not in _known:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "calls of this kind were not tested before a CUDA graph is captured"
        name = _name(device, kind)
        passed = name in _passed()
        _known[key] = None if passed else examined(torch.device("cuda", device), **kind)["reason"]
        if (reason := _known[key]) is not None:
            warnings.warn(f"the Triton kernels are not used: {reason}", stacklevel=2)
        elif not passed:
            _file().parent.mkdir(parents=True, exist_ok=True)
            write_atomically(_file(), json.dumps([*_passed(), name]))
    return _known[key]


# torch.compile treats the result as a constant: as torch._dynamo.assume_constant_result, which is slow to import.
fault._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function takes any attribute


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dape" / "triton.json"


def _passed() -> list[str]:
    try:
        return list(read_json(_file(), list))
    except (OSError, ValueError):
        return []


def _name(device: int, kind: dict[str, Any]) -> str:
    """Name of a kind on a GPU with these versions."""
    card = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "none"
    versions = (torch.__version__, torch.version.cuda, version("triton"), version("dape"))
    return hashlib.sha256(repr((card, *versions, sorted(kind.items()))).encode()).hexdigest()


def examined(device: torch.device, **kind: Any) -> dict[str, Any]:
    """The errors of a call, and the reason why it does not pass, or None."""
    try:
        found = errors(device, **kind)
    # A compiler or a driver may fail in any way, and another backend can run the call.
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return {"reason": f"a test call failed with {type(error).__name__}: {first}"}
    return {"errors": found, "reason": wrong(found, kind["dtype"])}


def wrong(found: dict[str, float], dtype: torch.dtype) -> str | None:
    """A sentence about the errors that are too large, or None."""
    limits = {name: TOLERANCE[dtype] / (10 if name == "out" else 1) for name in found}
    large = [f"{n} by {x:.1e}, tolerance {limits[n]:g}" for n, x in found.items() if not x <= limits[n]]
    return f"a test call in {dtype} is off: {'; '.join(large)}" if large else None


def errors(
    device: torch.device,
    *,
    length: int = 300,
    queries: int | None = None,
    batch: int = 2,
    visible: Visible | None = None,
    rows: int = 150,
    **kind: Any,
) -> dict[str, float]:
    """Errors of the output and all gradients of a call of a kind, as shares of their norms, by name.

    visible: by default, a window on each bounded side. rows: about as many are a chunk.
    """
    from dape.ops.score_attention import triton as backend

    dtype, num_heads, head_dim, signature, bias, causal, bounded, backward = (
        kind[name]
        for name in ("dtype", "num_heads", "head_dim", "signature", "bias", "causal", "bounded", "backward")
    )
    generator = torch.Generator("cpu").manual_seed(0)
    queries = queries or length
    lowest = 0 if causal else 1 - max(queries, length)
    program = backend.program_like(signature, num_heads)
    of_program = dict(program.tensors())
    of_bias: dict[str, dict[str, tuple[int, ...]]] = {
        "none": {}, "distance": {"values": (num_heads, length - lowest)},
        "separable": {"row": (batch, num_heads, queries), "column": (batch, num_heads, length)},
        "dense": {"dense": (batch, num_heads, queries, length)},
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"q": (batch, num_heads, queries, head_dim)}
    shapes |= dict.fromkeys("kv", (batch, kind["num_groups"], length, head_dim)) | of_bias[bias]
    shapes |= {name: tuple(x.shape) for name, x in of_program.items()}
    # Numbers that the dtype can hold, but for scaled weights.
    tensors = {
        name: torch.randn(shape, generator=generator, device="cpu").to(dtype).double()
        for name, shape in shapes.items()
    }
    for name, x in of_program.items():
        tensors[name] *= math.prod(x.shape[1:]) ** -0.5 if x.dim() > 1 else 0.3
    direction = torch.randn(shapes["q"], generator=generator, device="cpu").to(dtype).double()
    row = torch.arange(queries, device="cpu")[None] + length - queries
    first = (row - length // 2).clamp(min=0) if bounded[0] else None
    last = (row + (0 if causal else length // 4)).clamp(max=length - 3) if bounded[1] else None
    visible = visible or Visible(first, last)

    def results(place: torch.device, exact: bool, attend: Callable[[Problem], Tensor]) -> dict[str, Tensor]:
        own = {}
        for name, x in tensors.items():
            wanted = dtype if name in ("q", "k", "v", "dense") else torch.float32
            own[name] = x.to(place, torch.float64 if exact else wanted).requires_grad_(backward)
        encoding: Bias = own.get("dense")
        if bias == "distance":
            encoding = DistanceBias(own["values"], lowest)
        elif bias == "separable":
            encoding = SeparableBias(own["row"], own["column"])
        bounds = (None if x is None else x.to(place) for x in (visible.first, visible.last))
        problem = Problem(
            own["q"], own["k"], own["v"], program.with_tensors(own), encoding, Visible(*bounds), causal, head_dim**-0.5, 0.0,
        )  # fmt: skip
        out = attend(problem)
        found = {"out": out.detach()}
        if backward:
            gradients = torch.autograd.grad(out, list(own.values()), direction.to(out), allow_unused=True)
            found |= {n: torch.zeros(()) if g is None else g for n, g in zip(own, gradients, strict=True)}
        return {name: x.double().cpu() for name, x in found.items()}

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        exact = results(torch.device("cpu"), True, lambda problem: definition(problem, dtype))
        channels = num_heads + sum(stage[0] for stage in (*signature[0], *signature[1]))
        with scratch(device, rows * batch * length * 2 * channels):
            ours = results(device, False, backend.attend)
    # The gradient of the last offset is zero, a sum of numbers that cancel: its error is that of a sum of its terms.
    least = {name: 0.03 * length * x.numel() ** 0.5 for name, x in exact.items() if name.endswith("offset")}
    # So is that of a row's part of the bias, where nothing but the softmax reads it; columns sum the same terms.
    least["row"] = float(exact["column"].norm()) if backward and bias == "separable" else 0.0
    return {
        name: float((ours[name] - x).norm() / max(x.norm(), least.get(name, 0.0), 1e-9))
        for name, x in exact.items()
    }


@contextmanager
def scratch(device: torch.device, size: int) -> Iterator[None]:
    """Images of a pass take as many bytes."""
    before = calls.SCRATCH
    calls.SCRATCH = size / calls.card(device)[1]
    try:
        yield
    finally:
        calls.SCRATCH = before


def definition(problem: Problem, dtype: torch.dtype) -> Tensor:
    """The output by the definition, with maps rounded as the kernels keep them; gradients go straight through."""

    def rounded(x: Tensor) -> Tensor:
        return x + (x.to(torch.float32 if dtype == torch.float32 else torch.float16).to(x.dtype) - x).detach()

    class Rounded(Edges):
        def image(self, x: Tensor) -> Tensor:
            return rounded(super().image(x))

        def hidden(self, x: Tensor) -> Tensor:
            return rounded(super().hidden(x))

    return reference.attend(problem, Rounded)


CONV3 = (((32, 24, 1, 3, True, 1, 1, 0.01), (12, 32, 1, 3, True, 1, 1, 1.0)), ())
# As many channels as they are padded to: no masks.
FULL = (((32, 32, 1, 3, True, 1, 1, 0.01), (16, 32, 1, 3, True, 1, 1, 1.0)), ())
CONV7 = (((32, 12, 1, 7, True, 3, 1, 0.01), (12, 32, 1, 7, True, 3, 1, 1.0)), ())
IN_GROUPS = (((24, 8, 1, 3, True, 1, 3, 0.01), (12, 8, 1, 3, True, 1, 3, 1.0)), ())
TALKING = (((12, 12, 1, 1, False, 0, 1, 1.0),), ((12, 12, 1, 3, True, 1, 1, 1.0),))


def _kind(stages: tuple, residual: str = "scores+bias", sink: bool = False, **own: Any) -> dict[str, Any]:
    kind = {
        "dtype": torch.float16, "num_heads": 12, "num_groups": 12, "head_dim": 64, "bias": "distance", "causal": True,
        "bounded": (False, False), "backward": True,
        "signature": (*stages, residual, sink, False, False, False, 0.0, None, False, "softmax"),
    }  # fmt: skip
    return kind | own


# Calls that together enter every loop of every kernel.
SUITE: dict[str, dict[str, Any]] = {
    "kernel 3": _kind(CONV3, batch=3),
    "kernel 3, bfloat16": _kind(CONV3, dtype=torch.bfloat16),
    "kernel 3, float32": _kind(CONV3, dtype=torch.float32),
    "kernel 7, no bias, grouped heads of 128": _kind(CONV7, bias="none", num_groups=3, head_dim=128),
    "stages in groups, separable": _kind(IN_GROUPS, bias="separable"),
    "dense, window": _kind(CONV3, bias="dense", bounded=(True, True)),
    "encoder, 16 heads": _kind(FULL, causal=False, num_heads=16, num_groups=16),
    "talking heads": _kind(TALKING, "none", bias="none"),
    "plain, sink": _kind(((), ()), sink=True),
    "decoding": _kind(CONV3, queries=1, length=2100, batch=1, backward=False),
}


def run_suite(
    device: torch.device, report: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """The results of all calls: whether each passes, its errors or why it fails."""
    results = []
    for name, kind in SUITE.items():
        report(f"self-test: {name}")
        result = {"call": name, **examined(device, **kind)}
        results.append(result | {"passes": result["reason"] is None})
    return results
