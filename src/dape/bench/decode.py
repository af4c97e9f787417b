"""`dape bench decode`: one query against a cache of keys, compared with PyTorch's own attention."""

from __future__ import annotations

from dataclasses import dataclass

from dape.bench import attention
from dape.bench.report import Record
from dape.bench.workload import FORWARD, Sizes
from dape.settings import TOKENS, setting, split_numbers

COLUMNS = tuple(column for column in attention.COLUMNS if column[1] not in ("speedup_over_listing", "pass"))


@dataclass(frozen=True)
class Options(attention.CallOptions):
    """Time one decoding step (a single query, no gradients) against caches of several lengths."""

    lengths: str = setting(
        "1024,4096,8192", help="Keys in the cache, separated by commas.", listed=int, **TOKENS
    )
    rounds: int = setting(50, help="Rounds; the median is reported.", low=1, high=10**6)


def run(options: Options) -> list[Record]:
    sizes = [Sizes.of(options, n, 1) for n in split_numbers("lengths", options.lengths)]
    return attention.time_cases(options, sizes, [FORWARD], [], label="decode")
