"""`python -m dev.stages`: each stage of the C++ kernel separately, as a share of one core's multiply-add peak."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dape.bench import report
from dape.bench.report import Record
from dape.bench.workload import Sizes, Workload
from dape.cli.parsing import parse
from dape.ops.score_attention import cpu, native, op
from dape.ops.score_attention.api import make_problem
from dape.settings import setting

# As numbered in csrc/stages.h: the pass of a stage, its name, and its number of executions per chunk.
PEAK = 0
STAGES = {
    1: ("forward", "dots", "q · k"),
    2: ("forward", "expand", "first convolution, table, LeakyReLU"),
    3: ("forward", "project", "second convolution, bias, mask"),
    4: ("forward", "softmax", "exponentials and their sums"),
    5: ("forward", "values", "weights · v"),
    6: ("a tile", "rows", "q in, output out, transposed"),
    7: ("backward", "weights", "gradient of the output · v"),
    8: ("backward", "project, weights", "gradient of the second convolution's weights"),
    9: ("backward", "hidden", "through the second convolution"),
    10: ("backward", "expand, weights", "gradient of the first convolution's weights and table"),
    11: ("backward", "image", "through the first convolution"),
    12: ("backward", "q", "gradient of q"),
    13: ("backward", "keys, values", "gradients of k and v"),
}

COLUMNS = (
    ("pass", "pass", ""),
    ("stage", "stage", ""),
    ("µs a chunk", "microseconds", ".1f"),
    ("GMAC/s", "gmacs", ".1f"),
    ("% of peak", "percent_of_peak", ".0f"),
    ("% of the pass", "percent_of_pass", ".0f"),
)
# Long enough that the overhead of clock and call is negligible.
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Options:
    """Time the stages of the C++ kernel one by one, on one core, with their data in its caches.

    A chunk is the kernel's unit of work: a tile of query rows by some keys, all heads. Multiply-accumulates are those
    actually computed (Winograd's convolutions take two thirds); the peak is that of independent multiply-adds in
    registers, measured in turn with the stages.
    """

    length: int = setting(2048, help="Tokens of the call that the chunk is taken from.", low=64, high=2**20)
    heads: int = setting(12, help="Heads of attention.", low=1, high=4096)
    head_dim: int = setting(64, help="Width of a head.", low=1, high=2**16)
    width: int = setting(32, help="Hidden channels between the two convolutions.", low=1, high=4096)
    kernel: int = setting(3, help="Kernel size of the convolutions; odd.", low=1, high=1023)
    build: str = setting(
        "", help="avx512, avx512_short, avx2 or portable; empty: the fastest that runs here."
    )
    rounds: int = setting(5, help="Rounds; the median is reported.", low=1, high=10**6)
    json: Path | None = setting(None, help="Write one record per stage.", writes="file")


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dev.stages")
    records = run(options)
    peak = records[0]["peak_gmacs"]
    title = (
        f"{options.heads} heads × {options.head_dim}, width {options.width}, kernel {options.kernel}, "
        f"{records[0]['build']}, one core, peak {peak:.1f} GMAC/s"
    )
    report.show(title, COLUMNS, records, options.json)
    return 0


def run(options: Options) -> list[Record]:
    """One record per stage, and one for all stages of each pass together."""
    if native.PROBLEM is not None:
        raise ValueError(f"there is no kernel to time: {native.PROBLEM}")
    build = options.build or native.builds()[0]
    call, _alive = _backward_call(options)
    with native.use_build(build):
        measured = _measure(call, options.rounds)
    peak = measured[PEAK][1] / measured[PEAK][0]
    records: list[Record] = []
    for name in ("forward", "backward", "a tile"):
        members = [number for number, (step, *_) in STAGES.items() if step == name]
        seconds, macs = (sum(measured[number][part] for number in members) for part in (0, 1))
        for number in members:
            records.append(
                _record(name, STAGES[number][1], STAGES[number][2], *measured[number], seconds, peak, build)
            )
        if len(members) > 1:
            records.append(
                _record(name, "all", "the stages above together", seconds, macs, seconds, peak, build)
            )
    return records


def _record(
    step: str, stage: str, what: str, seconds: float, macs: float, whole: float, peak: float, build: str
) -> Record:
    rate = macs / seconds if macs else None
    return {
        "pass": step, "stage": stage, "what": what, "microseconds": seconds * 1e6,
        "gmacs": rate and rate / 1e9, "percent_of_peak": rate and 100 * rate / peak,
        "percent_of_pass": 100 * seconds / whole, "peak_gmacs": peak / 1e9, "build": build,
        "torch": torch.__version__,
    }  # fmt: skip


def _backward_call(options: Options) -> tuple[native.Call, list[object]]:
    """A causal call of the kernel with a bias by distance, and the tensors that it points to."""
    sizes = Sizes(
        options.length, options.length, 1, options.heads, options.head_dim, options.width, options.kernel
    )
    work = Workload(sizes)
    with torch.no_grad():
        problem = make_problem(work.q, work.k, work.v, work.program, bias=work.bias())
        tensors, plan, lowest = cpu.describe(problem)
        present = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        arguments = op.Arguments(present, plan, lowest)
        out, lse = cpu.forward(arguments)
        view = cpu.View(arguments, out, lse)
        grads = view.point_gradients(work.grad_out)
    return view.call, [grads, view]


def _measure(call: native.Call, rounds: int) -> dict[int, tuple[float, float]]:
    """Median seconds and multiply-accumulates of one run of each stage, all of them in turn."""
    numbers = [PEAK, *STAGES]
    repeats = {number: _enough_repeats(number, call) for number in numbers}
    taken: dict[int, list[float]] = {number: [] for number in numbers}
    macs = {}
    for _ in range(rounds):
        for number in numbers:
            macs[number] = native.run_stage(number, call, 1)
            alone = _seconds(number, call, 1)
            more = _seconds(number, call, 1 + repeats[number])
            taken[number].append(max(more - alone, 1e-12) / repeats[number])
    return {number: (statistics.median(taken[number]), macs[number]) for number in numbers}


def _enough_repeats(number: int, call: native.Call) -> int:
    repeats = 1
    while _seconds(number, call, repeats) < LEAST_SECONDS:
        repeats *= 2
    return repeats


def _seconds(number: int, call: native.Call, repeats: int) -> float:
    """CPU time of this thread alone."""
    start = time.thread_time()
    macs = native.run_stage(number, call, repeats)
    assert macs >= 0, (number, macs)
    return time.thread_time() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
