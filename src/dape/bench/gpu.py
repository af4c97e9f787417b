"""The GPU report of `dape doctor --gpu`: device, self-test of the kernels, and a benchmark of about two minutes."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dape.bench.workload import BOTH, FORWARD, LISTING, SDPA, Sizes, Workload
from dape.ops.score_attention.triton import launch, selftest

LENGTHS = (2048, 8192)
CANDIDATES = ("triton", "tiled", LISTING, SDPA)
# Seconds for a candidate's pass at a length.
BUDGET = 4.0

Report = Callable[[str], None]


def examine_gpu(device: torch.device, report: Report) -> dict[str, Any]:
    """Everything in the report; `passes` says whether all calls of the self-test do."""
    findings: dict[str, Any] = {"device": device_facts(device)}
    # Triton's interpreter, on a CPU, runs the kernels too, but a thousand times slower.
    with compiling(report):
        findings["self_test"] = selftest.run_suite(device, report)
    findings["passes"] = all(result["passes"] for result in findings["self_test"])
    findings["benchmark"] = benchmark(device, report) if device.type == "cuda" else []
    return findings


@contextmanager
def compiling(report: Report) -> Iterator[None]:
    """Report the kernels that are compiled in the block: most of the time of a self-test."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report(f"  {record.getMessage()}")

    logger, handler = logging.getLogger(launch.__name__), Handler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": str(device), "interpreted": launch.interpreting()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """Version of NVIDIA's driver, by nvidia-smi; None if that cannot tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0]


def benchmark(device: torch.device, report: Report) -> list[dict[str, Any]]:
    """Milliseconds of 12 heads of 64 in float16, by events, on the host, and replayed as a CUDA graph."""
    records = []
    for length in LENGTHS:
        work = Workload(Sizes(length, length), torch.float16, device)
        for candidate in CANDIDATES:
            for name in (FORWARD, BOTH):
                report(f"benchmark: {candidate}, {name}, {length} tokens")
                record: dict[str, Any] = {"backend": candidate, "pass": name, "length": length}
                try:
                    record |= timed(lambda: work.run(candidate, name), graph=name == FORWARD)  # noqa: B023
                # The listing needs more memory than many cards have; one candidate must not end the report.
                except Exception as error:
                    record["reason"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                records.append(record)
    return records


def timed(run: Callable[[], None], *, graph: bool) -> dict[str, float]:
    """Least milliseconds of a call on the device and on the host, and of its replay."""
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    events: list[float] = []
    host: list[float] = []
    while time.perf_counter() - begun < BUDGET / 2 and len(events) < 50:
        one, two = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        one.record()
        called = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - called))
        two.record()
        torch.cuda.synchronize()
        events.append(one.elapsed_time(two))
    found = {"device_ms": min(events), "host_ms": min(host)}
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        found["graph_ms"] = timed(captured.replay, graph=False)["device_ms"]
    return found


def gpu_text(findings: dict[str, Any]) -> str:
    """The findings as text."""
    lines = ["GPU", *(f"  {name:<16}{value}" for name, value in findings["device"].items()), "self-test"]
    for result in findings["self_test"]:
        if result["passes"]:
            worst = max(result["errors"], key=result["errors"].get)
            lines.append(f"  pass  {result['call']}: largest error {result['errors'][worst]:.1e}, of {worst}")
        else:
            lines.append(f"  FAIL  {result['call']}: {result['reason']}")
    if findings["benchmark"]:
        lines.append("milliseconds, 12 heads of 64 in float16: device, host, as a CUDA graph")
    for x in findings["benchmark"]:
        numbers = "  ".join(f"{x[key]:9.3f}" for key in ("device_ms", "host_ms", "graph_ms") if key in x)
        lines.append(f"  {x['length']:>6} {x['backend']:<10}{x['pass']:<18}{x.get('reason', numbers)}")
    return "\n".join(lines)
