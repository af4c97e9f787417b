"""`python -m dev.memory`: peak memory of a pass beyond its inputs, each measured in a fresh process (Linux).

The process builds the inputs, runs the pass once on a short call (so that libraries are loaded and threads started),
resets the peak in /proc, runs the pass and reads the peak again. Counted are scratch, saved tensors, the output and the
gradients.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch

from dape.bench import attention, report
from dape.bench.workload import LISTING, Sizes, Workload
from dape.cli.parsing import parse
from dape.settings import split_numbers

# One measurement: backend, pass, sizes.
Request = tuple[str, str, Sizes]
COLUMNS = (
    ("pass", "pass", ""),
    ("length", "length", "d"),
    ("backend", "backend", ""),
    ("extra MB", "peak_extra_mb", ".0f"),
)


@dataclass(frozen=True)
class Options(attention.Options):
    """Measure what the passes of `dape bench attention` allocate beyond their inputs, on a CPU."""


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dev.memory")
    records = run(options)
    report.show(options.title, COLUMNS, records, options.json)
    return 0


def run(options: Options) -> list[report.Record]:
    """One record per case, in the order of passes, lengths and backends."""
    dtype, threads = attention.DTYPES[options.dtype], options.threads or torch.get_num_threads()
    sizes = [Sizes.of(options, n, n) for n in split_numbers("lengths", options.lengths)]
    backends = attention.candidates(options.backends, sizes[0], [LISTING], dtype, options.device)
    cases = itertools.product(options.passes.split(","), sizes, backends)
    requests = [(backend, name, size) for name, size, backend in cases]
    peaks = peak_extra_mb(requests, threads, dtype)
    return [
        {"backend": backend, "pass": name, "length": size.keys, "peak_extra_mb": peak, "threads": threads}
        | {"dtype": str(dtype), "hardware": attention.hardware(options.device), **asdict(size)}
        for (backend, name, size), peak in zip(requests, peaks, strict=True)
    ]


def peak_extra_mb(
    requests: Sequence[Request], threads: int, dtype: torch.dtype = torch.float32
) -> list[float | None]:
    """Megabytes (10⁶ bytes) for every request; None, with the reason printed, for one that failed."""
    # Forked from a process that has imported torch and run nothing, so there are no threads for a fork to lose.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    peaks: list[float | None] = []
    for backend, name, sizes in requests:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                peaks.append(pool.submit(_measure, backend, name, sizes, threads, dtype).result())
            # A pass may fail in any way, and be killed for lack of memory.
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                print(f"{backend}, {name}, {sizes.keys}: its memory could not be measured: {reason}")
                peaks.append(None)
    return peaks


def _measure(backend: str, name: str, sizes: Sizes, threads: int, dtype: torch.dtype) -> float:
    torch.set_num_threads(threads)
    keys = min(sizes.keys, 64)
    Workload(replace(sizes, keys=keys, queries=min(sizes.queries, keys)), dtype).run(backend, name)
    workload = Workload(sizes, dtype)
    _give_back_freed_memory()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    workload.run(backend, name)
    return (_status("VmHWM") - before) * 1024 / 1e6


def _give_back_freed_memory() -> None:
    """Return freed memory to the system: the pass would reuse it, and it would not be counted."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it
        trim(0)


def _status(field: str) -> int:
    """A field of /proc/self/status, in units of 1024 bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
