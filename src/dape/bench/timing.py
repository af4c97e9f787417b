"""Interleaved timing: candidates take turns, so that disturbances of the machine affect all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Median and interquartile range, in milliseconds."""

    milliseconds: float
    spread: float


# Wall-clock time, or CPU time of this process: the second hardly changes on a busy machine, but counts all threads,
# waiting ones included.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "process": time.process_time}


def interleave(
    candidates: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", clock: str = "wall"
) -> dict[str, Timing]:
    """Timing of every candidate over `rounds` rounds, each of which runs every candidate once."""
    return {name: timing_of(taken) for name, taken in take_turns(candidates, rounds, device, clock).items()}


def take_turns(
    candidates: Mapping[str, Callable[[], object]], rounds: int, device: str = "cpu", clock: str = "wall"
) -> dict[str, list[float]]:
    """Milliseconds of every candidate in each round, after a warm-up round."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    for run in candidates.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            taken[name].append(milliseconds(run, device, clock))
    return taken


def milliseconds(run: Callable[[], object], device: str = "cpu", clock: str = "wall") -> float:
    """Duration of a call; on a GPU between two events of its stream."""
    if torch.device(device).type == "cuda":
        with torch.cuda.device(torch.device(device)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end)
    now = CLOCKS[clock]
    start = now()
    run()
    return (now() - start) * 1e3


def timing_of(milliseconds: list[float]) -> Timing:
    """The median, and the interquartile range, 0 for a single value."""
    if len(milliseconds) == 1:
        return Timing(milliseconds[0], 0.0)
    low, middle, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return Timing(middle, high - low)
