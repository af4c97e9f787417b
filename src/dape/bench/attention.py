"""`dape bench attention`: every backend against the paper's listing and PyTorch's own attention."""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from dape.bench import workload
from dape.bench.report import Record
from dape.bench.timing import Timing, interleave
from dape.bench.workload import BIAS, BOTH, FORWARD, LISTING, SDPA, SDPA_BIAS, Sizes, Workload
from dape.devices import cpu_name, device_name, find_device, free_memory, gigabytes
from dape.ops.score_attention.api import BACKENDS
from dape.settings import TOKENS, setting, split_numbers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPE = Literal["fp32", "fp16", "bf16"]
CLOCK = Literal["wall", "process"]
CLOCK_HELP = "wall, or process: CPU time, for a busy machine; with --threads 1, on a CPU."
COLUMNS = (
    ("pass", "pass", ""),
    ("length", "length", "d"),
    ("backend", "backend", ""),
    ("ms", "milliseconds", ".2f"),
    ("± (IQR)", "spread", ".2f"),
    ("× SDPA", "ratio_to_sdpa", ".2f"),
    ("faster than listing", "speedup_over_listing", ".1f"),
)


@dataclass(frozen=True)
class CallOptions:
    """Options of one call of attention, and of its measurement."""

    lengths: str = setting("512,1024,2048", help="Tokens, separated by commas.", listed=int, **TOKENS)
    backends: str = setting(
        "all",
        help="Candidates, separated by commas: listing, sdpa and the op's backends; all: those that can run here.",
        listed=str,
    )
    batch: int = setting(1, help="Batch size.", low=1, high=2**20)
    heads: int = setting(12, help="Number of heads.", low=1, high=4096)
    head_dim: int = setting(64, help="Width of a head.", low=1, high=2**16)
    width: int = setting(32, help="Hidden channels between the two convolutions.", low=1, high=4096)
    kernel: int = setting(3, help="Kernel size of the convolutions; odd for the listing.", low=1, high=1023)
    processor: str = setting(
        "",
        help="Score processor instead of the two convolutions, as in method names: plain, talking, mta, dape3x3, "
        "dape1x3[groups=3,width=24]. With plain, SDPA with the same bias is timed as well.",
    )
    bias: BIAS = setting(
        "distance",
        help="Form of the bias, with gradients: by distance (Kerple), separable (numbers per token), by tiles (FIRE).",
    )
    device: str = setting("cpu", help="Device: cpu, or a GPU such as cuda or cuda:1.", test=device_name)
    dtype: DTYPE = setting("fp32", help="Dtype of all tensors.")
    threads: int = setting(0, help="Threads of PyTorch; 0 for its default.", low=0, high=4096)
    rounds: int = setting(5, help="Rounds; the median is reported.", low=1, high=10**6)
    clock: CLOCK = setting("wall", help=CLOCK_HELP)
    json: Path | None = setting(None, help="Write one record per case.", writes="file")

    @property
    def title(self) -> str:
        processor = self.processor or f"kernel {self.kernel}"
        sizes = f"batch {self.batch}, {self.heads} heads × {self.head_dim}, {processor}"
        return f"{sizes}, {self.dtype}, {hardware(self.device)}"


@dataclass(frozen=True)
class Options(CallOptions):
    """Time attention with convolved scores (Kerple bias, causal), forward and with backward.

    Candidates take turns in one process; a time is the median over the rounds. Every candidate is checked against
    the reference in float64 before it is timed.
    """

    passes: str = setting(f"{FORWARD},{BOTH}", help="Passes to time, separated by commas.", listed=str)


def run(options: Options) -> list[Record]:
    """One record per case, in the order of passes, lengths and backends."""
    if options.kernel % 2 == 0:
        raise ValueError(f"kernel={options.kernel}: the listing is defined for odd kernels")
    passes = options.passes.split(",")
    if wrong := [name for name in passes if name not in (FORWARD, BOTH)]:
        raise ValueError(f'unknown pass "{wrong[0]}": choose {FORWARD} or {BOTH}')
    square = [LISTING, *([SDPA_BIAS] if options.processor == "plain" else [])]
    sizes = [Sizes.of(options, n, n) for n in split_numbers("lengths", options.lengths)]
    return time_cases(options, sizes, passes, square)


def hardware(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"


def candidates(text: str, sizes: Sizes, further: list[str], dtype: torch.dtype, device: str) -> list[str]:
    """The given backends, or with "all" every one that can run."""
    short = replace(sizes, keys=min(sizes.keys, 8), queries=min(sizes.queries, 8), batch=1)
    call = Workload(short, dtype, device)
    known = [*further, *(name for name in BACKENDS if name != SDPA), SDPA]
    chosen = []
    for name in known if text == "all" else text.split(","):
        if name not in known:
            raise ValueError(f'unknown backend "{name}": choose from {", ".join(known)}')
        reason = call.unsupported(name)
        if reason is None:
            chosen.append(name)
        elif text == "all":
            print(f"left out: {reason}")
        else:
            raise ValueError(reason)
    return chosen


def time_cases(
    options: CallOptions, sizes: list[Sizes], passes: list[str], further: list[str], *, label: str = ""
) -> list[Record]:
    """One record per case; `label` replaces the pass's name in the records.

    further: candidates beside the op's backends.
    """
    device, dtype, threads = options.device, DTYPES[options.dtype], options.threads
    find_device(device)
    if threads:
        torch.set_num_threads(threads)
    backends, records = candidates(options.backends, sizes[0], further, dtype, device), []
    for name, size in itertools.product(passes, sizes):
        reasons = {backend: _too_large(size, backend, device) for backend in backends}
        call = Workload(size, dtype, device)
        able = [backend for backend in backends if reasons[backend] is None]
        for backend in able if name == passes[0] else ():
            workload.compare_with_reference(backend, size, dtype, device)
        calls = {backend: functools.partial(call.run, backend, name) for backend in able}
        timings = interleave(calls, options.rounds, device, options.clock)
        for backend in backends:
            timing = timings.get(backend)
            records.append({
                "backend": backend, "pass": label or name, "length": size.keys,
                "milliseconds": timing and timing.milliseconds, "spread": timing and timing.spread,
                "ratio_to_sdpa": _ratio(timing, timings.get(SDPA)),
                "speedup_over_listing": _ratio(timings.get(LISTING), timing),
                "skipped": reasons[backend],
                "threads": torch.get_num_threads(), "torch": torch.__version__, "device": device,
                "hardware": hardware(device), "dtype": str(dtype), "clock": options.clock,
                **{key: value for key, value in asdict(size).items() if key not in ("keys", "queries")},
            })  # fmt: skip
    return records


def _ratio(above: Timing | None, below: Timing | None) -> float | None:
    return above.milliseconds / below.milliseconds if above and below else None


def _too_large(sizes: Sizes, backend: str, device: str) -> str | None:
    needed, free = workload.required_bytes(sizes, backend), free_memory(torch.device(device))
    if free is None or needed <= 0.9 * free:
        return None
    return f"skipped: it needs about {gigabytes(needed)} of memory, {gigabytes(free)} are free"
