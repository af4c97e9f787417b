"""`dape bench decode`: one query against a cache of keys, beside PyTorch's own attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from dape.benchmarks import report
from dape.benchmarks.attention import COLUMNS, candidates, finish, measure, numbers
from dape.benchmarks.workload import FORWARD, Sizes


@dataclass(frozen=True)
class Options:
    """Time one decoding step (a single query, no gradients) against caches of several lengths."""

    lengths: str = "1024,4096,8192"
    """Keys in the cache, separated by commas."""
    backends: str = "all"
    """Candidates, separated by commas: sdpa and the op's own backends; all: those that can run here."""
    batch: int = 1
    heads: int = 12
    head_width: int = 64
    width: int = 32
    """Channels between the two convolutions."""
    kernel: int = 3
    threads: int = 0
    """Threads of PyTorch; 0 leaves its own choice."""
    rounds: int = 50
    memory: bool = True
    """Also measure the peak memory of every cell (Linux)."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write one record a cell."""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw milliseconds over length."""


def main(arguments: list[str]) -> int:
    options = tyro.cli(Options, args=arguments, prog="dape bench decode")
    records = run(options)
    title = f"one query, batch {options.batch}, {options.heads} heads × {options.head_width}, kernel {options.kernel}"
    columns = [column for column in COLUMNS if column[1] not in ("speedup_over_listing", "pass")]
    report.print_table(title, columns, records)
    finish(records, options.json, options.plot)
    return 0


def run(options: Options) -> list[report.Record]:
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = [
        Sizes(n, 1, options.batch, options.heads, options.head_width, options.width, options.kernel)
        for n in numbers("lengths", options.lengths)
    ]
    backends = candidates(options.backends, sizes[0], [])
    return measure(
        sizes, backends, [FORWARD], rounds=options.rounds, memory_too=options.memory, label="decode"
    )
