"""Peak memory of a pass beyond its inputs, measured in a separate process.

A fresh process is forked for every measurement; it builds the inputs, runs the pass once on a short call (so that
libraries are loaded and threads started), resets the peak in /proc, runs the pass and reads the peak again. Counted
are scratch, saved tensors, the output and the gradients.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from dape.bench.workload import Sizes, Workload

# One measurement: backend, pass, sizes.
Request = tuple[str, str, Sizes]


def peak_extra_mb(
    requests: Sequence[Request], threads: int, dtype: torch.dtype = torch.float32
) -> list[float | None]:
    """Megabytes (10⁶ bytes) for every request; None if not supported here. Prints the reason if a request failed."""
    if not hasattr(os, "fork") or not os.path.exists("/proc/self/clear_refs"):
        return [None] * len(requests)
    number = str(dtype).removeprefix("torch.")
    written = json.dumps(
        [(backend, name, asdict(sizes), threads, number) for backend, name, sizes in requests]
    )
    done = subprocess.run(
        [sys.executable, "-m", "dape.bench.memory"], input=written, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"measuring memory failed: {done.stderr.strip().splitlines()[-1:]}")
    peaks = json.loads(done.stdout)
    for (backend, name, sizes), peak in zip(requests, peaks, strict=True):
        if isinstance(peak, str):
            print(f"{backend}, {name}, {sizes.keys}: its memory could not be measured: {peak}")
    return [None if isinstance(peak, str) else peak for peak in peaks]


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


def _in_a_fork(request: Sequence) -> float | str:
    """The measurement, or the reason why there is none."""
    backend, name, sizes, threads, dtype = request
    reader, writer = os.pipe()
    # Nothing has run in this process yet, so there are no threads for a fork to lose.
    if (child := os.fork()) == 0:
        try:
            peak: float | str = _measure(backend, name, Sizes(**sizes), threads, getattr(torch, dtype))
        except BaseException as error:
            peak = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(peak).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    # A killed process, such as by lack of memory, writes nothing.
    return json.loads(text) if text else f"its process ended with status {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    print(json.dumps([_in_a_fork(request) for request in json.load(sys.stdin)]))
