"""`dape bench attention`: every backend against the paper's listing and PyTorch's own attention."""

from __future__ import annotations

import functools
import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dape.bench import memory, report, workload
from dape.bench.report import Record
from dape.bench.timing import Timing, check_clock, growth_exponent, interleave, spinning
from dape.bench.workload import (
    BOTH,
    COMPILED,
    FLEX,
    FORWARD,
    LISTING,
    SDPA,
    SDPA_BIAS,
    Sizes,
    Workload,
)
from dape.devices import device_name
from dape.ops.score_attention.api import BACKENDS
from dape.settings import PICTURES, setting, split_numbers

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

BIAS_HELP = "Form of the bias, all with gradients: by distance (Kerple), separable (numbers per token), by tiles (FIRE)."
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
BUSY = (("busy ms", "busy_milliseconds", ".2f"), ("busy ÷ quiet", "busy_ratio", ".2f"))


@dataclass(frozen=True)
class Options:
    """Time attention with convolved scores (Kerple bias, causal), forward and with backward.

    Candidates take turns in one process; a time is the median over the rounds. Every candidate is checked against
    the reference in float64 before it is timed.
    """

    lengths: str = setting(
        "512,1024,2048",
        help="Tokens, separated by commas. With three or more, the growth of the time with the length is printed.",
        listed=int,
        low=1,
        high=2**24,
    )
    backends: str = setting(
        "all",
        help="Candidates, separated by commas: listing, sdpa, flex and the op's backends; all: those that can run here.",
        listed=str,
    )
    passes: str = setting(f"{FORWARD},{BOTH}", help="Passes to time, separated by commas.", listed=str)
    batch: int = setting(1, help="Batch size.", low=1, high=2**20)
    heads: int = setting(12, help="Heads of attention.", low=1, high=4096)
    head_dim: int = setting(64, help="Dimension of a head.", low=1, high=2**16)
    width: int = setting(32, help="Hidden channels between the two convolutions.", low=1, high=4096)
    kernel: int = setting(
        3, help="Kernel size of the convolutions; odd, as in the listing.", low=1, high=1023
    )
    processor: str = setting(
        "",
        help="Score processor instead of the two convolutions, as in method names: plain, talking, mta, dape3x3, "
        "dape1x3[groups=3,width=24]. With plain, SDPA with the same bias is timed as well.",
    )
    bias: str = setting("distance", help=BIAS_HELP)
    device: str = setting("cpu", help="Device: cpu, or a GPU such as cuda or cuda:1.", test=device_name)
    dtype: str = setting("fp32", help="Dtype of all tensors: fp32, fp16 or bf16.")
    threads: int = setting(0, help="Threads of PyTorch; 0 for its default.", low=0, high=4096)
    rounds: int = setting(5, help="Rounds; the median is reported.", low=1, high=10**6)
    compile: bool = setting(
        False, help="Also time torch.compile of the listing (compiling takes a minute per length)."
    )
    memory: bool = setting(
        True, help="Also measure the peak memory of every case, each in its own process (Linux)."
    )
    times: bool = setting(True, help="--no-times: measure memory alone.")
    clock: str = setting("wall", help=CLOCK_HELP)
    busy: int = setting(0, help="Also time with this many busy processes running.", low=0, high=4096)
    json: Path | None = setting(None, help="Write one record per case.", writes="file")
    plot: Path | None = setting(None, help="Plot milliseconds over length.", writes="file", suffixes=PICTURES)


def show(options: Options, records: list[Record]) -> None:
    """Print the table and write the files."""
    processor = options.processor or f"kernel {options.kernel}"
    title = f"batch {options.batch}, {options.heads} heads × {options.head_dim}, {processor}, "
    columns = (*COLUMNS[:6], *BUSY) if options.busy else COLUMNS
    report.print_table(title + f"{options.dtype}, {hardware(options.device)}", columns, records)
    write_records(records, options.json, options.plot)


def write_records(records: list[Record], json: Path | None, plot: Path | None) -> None:
    """Print skipped cases and the growth of times; write the files."""
    for record in records:
        if record["skipped"]:
            print(f"{record['backend']}, {record['pass']}, {record['length']}: {record['skipped']}")
    for line in growth_lines(records):
        print(line)
    if json is not None:
        report.write_json(json, records)
    if plot is not None:
        report.write_plot(plot, records)


def run(options: Options) -> list[Record]:
    """One record per case, in the order of passes, lengths and backends."""
    if options.kernel % 2 == 0:
        raise ValueError(f"kernel={options.kernel}: the listing is defined for odd kernels")
    lengths, passes = split_numbers("lengths", options.lengths), options.passes.split(",")
    if wrong := [name for name in passes if name not in (FORWARD, BOTH)]:
        raise ValueError(f'unknown pass "{wrong[0]}": choose {FORWARD} or {BOTH}')
    workload.check_bias(options.bias)
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = [Sizes.of(options, n, n) for n in lengths]
    square = [LISTING, *([COMPILED] if options.compile else [])]
    square += [SDPA_BIAS] if options.processor == "plain" else []
    square.append(FLEX)
    placement = Placement.of(options.device, options.dtype)
    backends = candidates(options.backends, sizes[0], square, placement)
    if not (options.times or options.memory):
        raise ValueError("--no-times and --no-memory leave nothing to measure")
    rounds = options.rounds if options.times else 0
    check_clock(options.clock)
    memory, clock, busy = options.memory, options.clock, options.busy
    return time_cases(
        sizes, backends, passes, rounds=rounds, memory_too=memory, placement=placement, clock=clock, busy=busy
    )


@dataclass(frozen=True)
class Placement:
    """Device and dtype of all tensors."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(device: str, dtype: str) -> Placement:
        if dtype not in DTYPES:
            raise ValueError(f'dtype="{dtype}": choose {", ".join(DTYPES)}')
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            raise ValueError(f'device="{device}": choose cpu or a CUDA device')
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f'device="{device}", but PyTorch finds no GPU here')
        return Placement(device, DTYPES[dtype])


def hardware(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' if threads != 1 else ''}"


def candidates(text: str, sizes: Sizes, further: list[str], placement: Placement) -> list[str]:
    """The given backends, or with "all" every one that can run."""
    short = replace(sizes, keys=min(sizes.keys, 8), queries=min(sizes.queries, 8), batch=1)
    call = Workload(short, placement.dtype, placement.device)
    known = [*further, *(name for name in BACKENDS if name != SDPA), SDPA]
    names = known if text == "all" else text.split(",")
    chosen = []
    for name in names:
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
    sizes: list[Sizes],
    backends: list[str],
    passes: list[str],
    *,
    rounds: int,
    memory_too: bool,
    label: str = "",
    placement: Placement,
    clock: str = "wall",
    busy: int = 0,
) -> list[Record]:
    """One record per case; `label` replaces the pass's name in the records. No rounds: nothing is timed.

    busy: number of busy processes during a second timing.
    """
    records: list[Record] = []
    for name in passes:
        for size in sizes:
            reasons = {backend: _too_large(size, backend, placement.device) for backend in backends}
            call = Workload(size, placement.dtype, placement.device)
            able = [backend for backend in backends if reasons[backend] is None and rounds]
            for backend in able if name == passes[0] else ():
                workload.compare_with_reference(backend, size, placement.dtype, placement.device)
            calls = {b: functools.partial(call.run, b, name) for b in able}
            timings = interleave(calls, max(rounds, 1), placement.device, clock)
            loaded: dict[str, Timing] = {}
            if busy and rounds:
                with spinning(busy):
                    loaded = interleave(calls, rounds, placement.device, clock)
            for backend in backends:
                timing, busy_timing = timings.get(backend), loaded.get(backend)
                records.append({
                    "backend": backend, "pass": label or name, "length": size.keys, "batch": size.batch,
                    "milliseconds": timing and timing.milliseconds, "spread": timing and timing.spread,
                    "ratio_to_sdpa": _ratio(timing, timings.get(SDPA)),
                    "speedup_over_listing": _ratio(timings.get(LISTING), timing),
                    "peak_extra_mb": None, "skipped": reasons[backend],
                    "busy": busy, "busy_milliseconds": busy_timing and busy_timing.milliseconds,
                    "busy_ratio": _ratio(busy_timing, timing),
                    "threads": torch.get_num_threads(), "torch": torch.__version__,
                    "device": placement.device, "hardware": hardware(placement.device), "dtype": str(placement.dtype),
                    "heads": size.heads, "head_dim": size.head_dim, "width": size.width, "kernel": size.kernel,
                    "processor": size.processor, "bias": size.bias, "clock": clock,
                })  # fmt: skip
    if memory_too:
        cells = itertools.product(passes, sizes, backends)
        asked = [
            (r, (b, name, size))
            for r, (name, size, b) in zip(records, cells, strict=True)
            if not r["skipped"]
        ]
        requests = [request for _, request in asked]
        if torch.device(placement.device).type == "cuda":
            peaks: list[float | None] = [_peak_on_gpu(request, placement) for request in requests]
        else:
            peaks = memory.peak_extra_mb(requests, torch.get_num_threads(), placement.dtype)
        for (record, _), peak in zip(asked, peaks, strict=True):
            record["peak_extra_mb"] = peak
    return records


def _peak_on_gpu(request: memory.Request, placement: Placement) -> float:
    """Megabytes that a pass allocates beyond its inputs."""
    backend, name, sizes = request
    call = Workload(sizes, placement.dtype, placement.device)
    torch.cuda.synchronize(placement.device)
    torch.cuda.reset_peak_memory_stats(placement.device)
    before = torch.cuda.memory_allocated(placement.device)
    call.run(backend, name)
    torch.cuda.synchronize(placement.device)
    return (torch.cuda.max_memory_allocated(placement.device) - before) / 1e6


def _ratio(above: Timing | None, below: Timing | None) -> float | None:
    return above.milliseconds / below.milliseconds if above and below else None


def _too_large(sizes: Sizes, backend: str, device: str) -> str | None:
    needed, free = workload.required_bytes(sizes, backend), available_bytes(device)
    if needed <= 0.9 * free:
        return None
    return f"skipped: it needs about {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def available_bytes(device: str = "cpu") -> int:
    """Free memory in bytes."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (FileNotFoundError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
