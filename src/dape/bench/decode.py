"""`dape bench decode`: one query against a cache of keys, compared with PyTorch's own attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dape.bench import report
from dape.bench.attention import (
    BIAS_HELP,
    CLOCK_HELP,
    COLUMNS,
    Placement,
    candidates,
    time_cases,
    write_records,
)
from dape.bench.timing import check_clock
from dape.bench.workload import FORWARD, Sizes, check_bias
from dape.devices import device_name
from dape.settings import PICTURES, setting, split_numbers


@dataclass(frozen=True)
class Options:
    """Time one decoding step (a single query, no gradients) against caches of several lengths."""

    lengths: str = setting(
        "1024,4096,8192", help="Keys in the cache, separated by commas.", listed=int, low=1, high=2**24
    )
    backends: str = setting(
        "all",
        help="Candidates, separated by commas: sdpa and the op's backends; all: those that can run here.",
        listed=str,
    )
    batch: int = setting(1, help="Batch size.", low=1, high=2**20)
    heads: int = setting(12, help="Heads of attention.", low=1, high=4096)
    head_dim: int = setting(64, help="Dimension of a head.", low=1, high=2**16)
    width: int = setting(32, help="Hidden channels between the two convolutions.", low=1, high=4096)
    kernel: int = setting(3, help="Kernel size of the convolutions.", low=1, high=1023)
    processor: str = setting(
        "", help="Score processor instead of the two convolutions, as in method names: plain, talking, mta."
    )
    bias: str = setting("distance", help=BIAS_HELP)
    device: str = setting("cpu", help="Device: cpu, or a GPU such as cuda or cuda:1.", test=device_name)
    dtype: str = setting("fp32", help="Dtype of all tensors: fp32, fp16 or bf16.")
    threads: int = setting(0, help="Threads of PyTorch; 0 for its default.", low=0, high=4096)
    rounds: int = setting(50, help="Rounds; the median is reported.", low=1, high=10**6)
    clock: str = setting("wall", help=CLOCK_HELP)
    memory: bool = setting(True, help="Also measure the peak memory of every case (Linux).")
    json: Path | None = setting(None, help="Write one record per case.", writes="file")
    plot: Path | None = setting(None, help="Plot milliseconds over length.", writes="file", suffixes=PICTURES)


def show(options: Options, records: list[report.Record]) -> None:
    """Print the table and write the files."""
    title = f"one query, batch {options.batch}, {options.heads} heads × {options.head_dim}, "
    title += options.processor or f"kernel {options.kernel}"
    columns = [column for column in COLUMNS if column[1] not in ("speedup_over_listing", "pass")]
    report.print_table(title, columns, records)
    write_records(records, options.json, options.plot)


def run(options: Options) -> list[report.Record]:
    check_clock(options.clock)
    check_bias(options.bias)
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = [Sizes.of(options, n, 1) for n in split_numbers("lengths", options.lengths)]
    placement = Placement.of(options.device, options.dtype)
    backends = candidates(options.backends, sizes[0], [], placement)
    rounds, memory, clock = options.rounds, options.memory, options.clock
    return time_cases(
        sizes,
        backends,
        [FORWARD],
        rounds=rounds,
        memory_too=memory,
        label="decode",
        placement=placement,
        clock=clock,
    )
