"""`dape bench attention`: every backend against the paper's listing and PyTorch's own attention."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from dape.bench import memory, report, workload
from dape.bench.report import Record
from dape.bench.timing import Timing, growth_exponent, interleave
from dape.bench.workload import (
    BIAS,
    BOTH,
    COMPILED,
    FLEX,
    FORWARD,
    LISTING,
    SDPA,
    SDPA_BIAS,
    Sizes,
    Workload,
)  # fmt: skip
from dape.devices import cpu_name, device_name, find_device, free_memory, gigabytes
from dape.ops.score_attention.api import BACKENDS
from dape.settings import PICTURES, TOKENS, setting, split_numbers

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
    ("extra MB", "peak_extra_mb", ".0f"),
)


@dataclass(frozen=True)
class CallOptions:
    """Options of one call of attention, and of its measurement."""

    lengths: str = setting(
        "512,1024,2048",
        help="Tokens, separated by commas. With three or more, the growth of the time with the length is printed.",
        listed=int, **TOKENS,
    )  # fmt: skip
    backends: str = setting(
        "all",
        help="Candidates, separated by commas: listing, sdpa, flex and the op's backends; all: those that can run here.",
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
    memory: bool = setting(
        True, help="Also measure the peak memory of every case, each in its own process (Linux)."
    )
    clock: CLOCK = setting("wall", help=CLOCK_HELP)
    json: Path | None = setting(None, help="Write one record per case.", writes="file")
    plot: Path | None = setting(None, help="Plot milliseconds over length.", writes="file", suffixes=PICTURES)

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
    compile: bool = setting(
        False, help="Also time torch.compile of the listing (compiling takes a minute per length)."
    )
    times: bool = setting(True, help="--no-times: measure memory alone.")


def show(options: CallOptions, records: list[Record], columns: Sequence[report.Column] = COLUMNS) -> None:
    """Print the table, skipped cases and the growth of times; write the files."""
    report.print_table(options.title, columns, records)
    for record in records:
        if record["skipped"]:
            print(f"{record['backend']}, {record['pass']}, {record['length']}: {record['skipped']}")
    for line in growth_lines(records):
        print(line)
    if options.json is not None:
        report.write_json(options.json, records)
    if options.plot is not None:
        report.write_plot(options.plot, records)


def run(options: Options) -> list[Record]:
    """One record per case, in the order of passes, lengths and backends."""
    if options.kernel % 2 == 0:
        raise ValueError(f"kernel={options.kernel}: the listing is defined for odd kernels")
    passes = options.passes.split(",")
    if wrong := [name for name in passes if name not in (FORWARD, BOTH)]:
        raise ValueError(f'unknown pass "{wrong[0]}": choose {FORWARD} or {BOTH}')
    if not (options.times or options.memory):
        raise ValueError("--no-times and --no-memory leave nothing to measure")
    square = [LISTING, *([COMPILED] if options.compile else [])]
    square += [SDPA_BIAS, FLEX] if options.processor == "plain" else [FLEX]
    sizes = [Sizes.of(options, n, n) for n in split_numbers("lengths", options.lengths)]
    return time_cases(options, sizes, passes, square, rounds=options.rounds if options.times else 0)


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
    options: CallOptions,
    sizes: list[Sizes],
    passes: list[str],
    further: list[str],
    *,
    rounds: int,
    label: str = "",
) -> list[Record]:
    """One record per case; `label` replaces the pass's name in the records. No rounds: nothing is timed.

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
        able = [backend for backend in backends if reasons[backend] is None and rounds]
        for backend in able if name == passes[0] else ():
            workload.compare_with_reference(backend, size, dtype, device)
        calls = {backend: functools.partial(call.run, backend, name) for backend in able}
        timings = interleave(calls, max(rounds, 1), device, options.clock)
        for backend in backends:
            timing = timings.get(backend)
            records.append({
                "backend": backend, "pass": label or name, "length": size.keys,
                "milliseconds": timing and timing.milliseconds, "spread": timing and timing.spread,
                "ratio_to_sdpa": _ratio(timing, timings.get(SDPA)),
                "speedup_over_listing": _ratio(timings.get(LISTING), timing),
                "peak_extra_mb": None, "skipped": reasons[backend],
                "threads": torch.get_num_threads(), "torch": torch.__version__, "device": device,
                "hardware": hardware(device), "dtype": str(dtype), "clock": options.clock,
                **{key: value for key, value in asdict(size).items() if key not in ("keys", "queries")},
            })  # fmt: skip
    if options.memory:
        cells = itertools.product(passes, sizes, backends)
        kept = [(r, (b, n, size)) for r, (n, size, b) in zip(records, cells, strict=True) if not r["skipped"]]
        requests = [request for _, request in kept]
        peaks: list[float | None]
        if torch.device(device).type == "cuda":
            peaks = [_peak_on_gpu(request, dtype, device) for request in requests]
        else:
            peaks = memory.peak_extra_mb(requests, torch.get_num_threads(), dtype)
        for (record, _), peak in zip(kept, peaks, strict=True):
            record["peak_extra_mb"] = peak
    return records


def _peak_on_gpu(request: memory.Request, dtype: torch.dtype, device: str) -> float:
    """Megabytes that a pass allocates beyond its inputs."""
    backend, name, sizes = request
    call = Workload(sizes, dtype, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call.run(backend, name)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def _ratio(above: Timing | None, below: Timing | None) -> float | None:
    return above.milliseconds / below.milliseconds if above and below else None


def _too_large(sizes: Sizes, backend: str, device: str) -> str | None:
    needed, free = workload.required_bytes(sizes, backend), free_memory(torch.device(device))
    if free is None or needed <= 0.9 * free:
        return None
    return f"skipped: it needs about {gigabytes(needed)} of memory, {gigabytes(free)} are free"


def growth_lines(records: list[Record]) -> list[str]:
    """Growth of the time, a line for every backend and pass timed at three lengths or more."""
    lines = []
    for backend, name in dict.fromkeys((r["backend"], r["pass"]) for r in records):
        cells = [r for r in records if (r["backend"], r["pass"]) == (backend, name) and r["milliseconds"]]
        lengths = [r["length"] for r in cells]
        if len(set(lengths)) >= 3:
            exponent = growth_exponent(lengths, [r["milliseconds"] for r in cells])
            lines.append(f"{backend}, {name}: time grows as T^{exponent:.2f}")
    return lines
