"""One attention call to be measured, the same for every backend, and a correctness check of backends."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.bench.listing import listing_attention
from dape.methods import parse_method
from dape.ops.score_attention import Bias, DistanceBias, SeparableBias, attention
from dape.ops.score_attention.api import BACKENDS, choose
from dape.ops.score_attention.types import EVERYTHING, Problem
from dape.positions.base import Positions
from dape.positions.fire import FIRE
from dape.positions.kerple import Kerple

LISTING, SDPA, SDPA_BIAS = "listing", "sdpa", "sdpa with bias"
# Candidates that build T×T maps.
QUADRATIC = (LISTING, SDPA_BIAS, "reference")
# The reference without program and bias, which SDPA is compared with.
PLAIN = "plain"
FORWARD, BOTH = "forward", "forward+backward"
BIAS = Literal["distance", "separable", "tiles"]
# Pairs of a query and a key, about as many as are checked, in rows of all keys.
CHECKED = 40_000


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; the queries are the last of the keys.

    bias:      its form, all with gradients: by "distance" (Kerple), "separable" (numbers per token) or by "tiles" (FIRE).
    processor: a score processor as in method names, "talking" or "dape1x3[groups=3,width=24]"; empty: dape1xKERNEL.
    """

    keys: int
    queries: int
    batch: int = 1
    heads: int = 12
    head_dim: int = 64
    width: int = 32
    kernel: int = 3
    processor: str = ""
    bias: BIAS = "distance"

    @classmethod
    def of(cls, options: Any, keys: int, queries: int) -> Sizes:
        """Sizes for a number of keys and queries, the others from options of the same names."""
        others = [field.name for field in fields(cls) if field.name not in ("keys", "queries")]
        return cls(keys, queries, **{name: getattr(options, name) for name in others})

    @property
    def method(self) -> str:
        """The method of the processor."""
        name, bracket, options = (self.processor or f"dape1x{self.kernel}").partition("[")
        return ("kerple" if name == "plain" else f"{name}-kerple") + bracket + options


class Workload:
    """The tensors of one call, drawn from a fixed seed, and a function for every backend."""

    def __init__(
        self,
        sizes: Sizes,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        rounded: torch.dtype | None = None,
    ) -> None:
        """rounded: a lower-precision dtype to which all numbers are rounded."""
        self.sizes, self.device = sizes, torch.device(device)
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, bound: float | None = None) -> Tensor:
            numbers = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
            # √3 gives a uniform number unit variance.
            numbers = (numbers * (3**0.5 if bound is None else bound)).to(rounded or dtype)
            return numbers.to(device=self.device, dtype=dtype).requires_grad_()

        s = sizes

        def rows(x: Tensor) -> Tensor:
            """Those of the queries: calls that differ by the number of queries have the same last rows."""
            return x.detach()[:, :, -s.queries :].clone().requires_grad_()

        q, self.k, self.v, grad_out = (draw(s.batch, s.heads, s.keys, s.head_dim) for _ in range(4))
        self.q, self.grad_out = rows(q), rows(grad_out).detach()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            program = parse_method(s.method).build_scores(s.heads, width=s.width).program()
        # An identity initialisation would hide mistakes; small numbers keep its scale.
        tensors = {
            name: (tensor.detach().to(self.device) + draw(*tensor.shape, bound=0.05).detach())
            .to(dtype)
            .requires_grad_()
            for name, tensor in program.tensors()
        }
        self.program = program.with_tensors(tensors)
        if s.bias == "separable":
            row, column = (draw(s.batch, s.heads, s.keys) for _ in range(2))
            self.of_bias = {"row": rows(row), "column": column}
        else:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                encoding = Kerple(s.heads) if s.bias == "distance" else FIRE(s.heads, threshold=s.keys / 2)
            self.encoding = encoding.to(rounded or dtype).to(self.device, dtype)
            self.of_bias = dict(self.encoding.named_parameters())
            index = torch.arange(s.keys, device=self.device)[None]
            self.positions = Positions(index[:, -s.queries :], index, consecutive=True)
        parameters = (tensor for _, tensor in self.program.tensors())
        self.leaves = [self.q, self.k, self.v, *parameters, *self.of_bias.values()]

    def bias(self) -> Bias:
        """The bias in the form of the op's argument."""
        if self.sizes.bias == "separable":
            return SeparableBias(self.of_bias["row"], self.of_bias["column"])
        return self.encoding.bias(self.q, self.k, self.positions, scale=1.0)

    def attend(self, backend: str) -> Tensor:
        if backend == SDPA:
            return F.scaled_dot_product_attention(
                self.q, self.k, self.v, is_causal=self.sizes.queries == self.sizes.keys > 1
            )
        if backend == PLAIN:
            return attention(self.q, self.k, self.v, backend="reference")
        if backend in (LISTING, SDPA_BIAS):
            index = torch.arange(self.sizes.keys, device=self.device)
            distance = index[-self.sizes.queries :, None] - index
            bias = self._by_distance()[None, :, distance.clamp(min=0)]
            if backend == LISTING:
                return listing_attention(self.q, self.k, self.v, self.program, bias.to(self.q.dtype))
            masked = bias.masked_fill(distance < 0, -torch.inf).to(self.q.dtype)
            return F.scaled_dot_product_attention(self.q, self.k, self.v, masked)
        return attention(self.q, self.k, self.v, self.program, bias=self.bias(), backend=backend)

    def _by_distance(self) -> Tensor:
        """Kerple's bias by distance [H, keys]."""
        bias = self.bias()
        assert isinstance(bias, DistanceBias)
        return bias.values

    def run(self, backend: str, name: str) -> None:
        """Run the pass `name` once."""
        if name == FORWARD:
            with torch.no_grad():
                self.attend(backend)
        else:
            torch.autograd.grad(self.attend(backend), self.leaves, self.grad_out, allow_unused=True)

    def problem(self) -> Problem:
        """The call as backends get it."""
        return Problem(self.q, self.k, self.v, self.program, self.bias(), EVERYTHING, True, 1.0, 0.0)

    def unsupported(self, backend: str) -> str | None:
        """Why a candidate cannot run this call, or None."""
        if backend not in BACKENDS and self.sizes.bias != "distance":
            return f'"{backend}" is written here for a bias by distance, not bias="{self.sizes.bias}"'
        if backend not in BACKENDS or backend == SDPA:
            return None
        try:
            choose(self.problem(), backend)
        except ValueError as error:
            return str(error)
        return None

    def results(self, backend: str, rows: slice = slice(None)) -> list[Tensor]:
        """The output and every gradient, as functions of those rows of the output."""
        out = self.attend(backend)[:, :, rows]
        grads = torch.autograd.grad(out, self.leaves, self.grad_out[:, :, rows], allow_unused=True)
        zero = torch.zeros((), device=self.device)
        return [out.detach(), *(zero if grad is None else grad for grad in grads)]


def required_bytes(sizes: Sizes, backend: str) -> int:
    """Approximate peak memory of a call: T×T maps for backends that build them, else a few times its inputs."""
    s = sizes
    if backend in QUADRATIC:
        return 4 * s.batch * s.queries * s.keys * (11 * s.heads + 2 * s.width)
    return 4 * 10 * s.batch * s.heads * s.keys * s.head_dim


def compare_with_reference(
    backend: str, sizes: Sizes, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> float:
    """Largest error of a backend on a call of these sizes, in its last rows; raises if it is wrong.

    Errors are distances to float64, relative to the largest value.
    """
    sizes = replace(sizes, batch=min(sizes.batch, 2))
    call = Workload(sizes, dtype, device)
    # The listing's last rows depend on the tensor's edge; the reference's do not.
    right = sum(stage.right for stage in (*call.program.pre, *call.program.post))
    after = right if backend == LISTING and sizes.queries > right else 0
    count = max(8, CHECKED // sizes.keys)
    last = min(sizes.queries, count + after + call.program.earlier_rows)
    exact = Workload(replace(sizes, queries=last), torch.float64, rounded=dtype)
    rows = slice(max(0, last - after - count), last - after)
    truth = exact.results(PLAIN if backend == SDPA else "reference", rows)
    before = sizes.queries - last
    ours = call.results(backend, slice(before + rows.start, before + rows.stop))
    half, greatest = dtype.itemsize < 4, 0.0
    names = "output", "q", "k", "v", *(name for name, _ in exact.program.tensors()), *exact.of_bias
    sizes_of = {name: float(true.abs().max()) for name, true in zip(names, truth, strict=True)}
    # The gradient of the last offset is zero, a sum of numbers that cancel; that of the first is over the same pairs.
    cancels = f"pre.{len(exact.program.pre) - 1}.offset"
    if cancels in sizes_of:
        sizes_of[cancels] = max(sizes_of[cancels], sizes_of.get("pre.0.offset", 0.0))
    for name, result, true in zip(names, ours, truth, strict=True):
        # Zero without dimensions where there is no gradient.
        result = result[:, :, -last:] if name in ("q", "row") and result.dim() else result
        # A LeakyReLU that flips near zero costs float32 gradients some digits; a mistake costs all of them.
        tolerance = (3e-2 if half else 1e-4) if name == "output" else (2e-1 if half else 1e-2)
        error = float((result.double().cpu() - true).abs().max()) / max(sizes_of[name], 1e-2)
        greatest = max(greatest, error)
        if not error <= tolerance:
            what = name if name == "output" else f"gradient of {name}"
            raise ValueError(
                f'backend "{backend}" is wrong: its {what} is off by {error:.1e} of the greatest value, '
                f"tolerance {tolerance:.0e} (nothing was timed)"
            )
    return greatest
