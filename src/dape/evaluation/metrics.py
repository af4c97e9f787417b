"""Metrics of language models, and their measurement: rows of the table for one model at several lengths.

A new metric is one entry of METRICS: a function of the logits [B, T, vocabulary] and the target tokens [B, T] that
returns a value for every target [B, T]. Sums over documents and slices, tables, figures and pages follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dape.data import Tokens
from dape.evaluation.by_length import Progress, num_targets
from dape.evaluation.evaluator import BATCH_TOKENS, Measure, evaluating, token_losses
from dape.evaluation.recall import DEFAULT_NGRAM, RecallBins
from dape.evaluation.table import ALL
from dape.evaluation.windows import Context, Windows, same_targets

METRICS: dict[str, Measure] = {
    "loss": token_losses,
    "accuracy": lambda logits, targets: (logits.argmax(-1) == targets).float(),
    "entropy": lambda logits, targets: torch.distributions.Categorical(logits=logits.float()).entropy(),
}
# Positions of an input of so many tokens.
Draw = Callable[[int], Tensor]


def measure(
    model: nn.Module,
    tokens: Tokens,
    lengths: Sequence[int],
    *,
    last: int | None = None,
    windows: int = 128,
    context: Context = "document",
    longest: int | None = None,
    metrics: Sequence[str] = ("loss",),
    recall: Sequence[int] = (),
    positions: Draw | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Iterator[pd.DataFrame]:
    """Rows (length, document, slice, metric, sum, count): checksums of the target tokens, then a frame a length.

    longest: input for which every window must have room, which decides the windows; the longest length by default.
    recall:  bounds of the recall slices (see `recall_bounds`); none without.
    """
    longest = longest or max(lengths)
    last = num_targets(lengths, last, windows, "same-targets", context)
    chosen = same_targets(tokens, longest, last, windows, context=context)
    bins = None
    if recall:
        bins = RecallBins.of(tokens, chosen, recall, last, ngram=min(DEFAULT_NGRAM, max(recall)))
    yield target_checksums(tokens, chosen, last)
    with evaluating(model, batch_tokens=batch_tokens, positions=positions) as evaluator:
        for length in lengths:
            parts, size = [], evaluator.batch_size(length, last)
            for start in range(0, len(chosen), size):
                ids = chosen.ids(tokens, length, slice(start, start + size))
                parts.append(evaluator.values(ids, last, [METRICS[name] for name in metrics]))
                if progress is not None:
                    progress(length, len(ids))
            values = np.concatenate(parts).astype(np.float64)
            yield pd.concat(
                [
                    rows_of(values[..., index], chosen, bins).assign(length=length, metric=name)
                    for index, name in enumerate(metrics)
                ],
                ignore_index=True,
            )


def rows_of(values: np.ndarray, windows: Windows, bins: RecallBins | None) -> pd.DataFrame:
    """Values of targets [windows, last] summed by document and slice."""
    known, document = np.unique(windows.documents, return_inverse=True)
    sums = np.bincount(document, values.sum(1))
    frames = [
        pd.DataFrame(
            {"document": known, "slice": ALL, "sum": sums, "count": np.bincount(document) * values.shape[1]}
        )
    ]
    if bins is not None:
        names = [*(f"recall<={bound}" for bound in bins.bounds), f"recall>{bins.bounds[-1]}"]
        for name, of_bin, count in zip(names, bins.sums(values).T, bins.counts.T, strict=True):
            some = count > 0
            frames.append(
                pd.DataFrame(
                    {"document": known[some], "slice": name, "sum": of_bin[some], "count": count[some]}
                )
            )
    return pd.concat(frames, ignore_index=True)


def recall_bounds(lengths: Sequence[int], longest: int) -> list[int]:
    """The evaluated lengths, and the powers of two between them, so that evaluations at other lengths pair."""
    powers = {1 << power for power in range(longest.bit_length()) if 1 << power >= min(lengths)}
    return sorted({*powers, *lengths, longest})


def target_checksums(tokens: Tokens, windows: Windows, last: int) -> pd.DataFrame:
    """Rows of the metric "targets": a checksum of the target tokens of each document, and their number."""
    targets = windows.ids(tokens, last)[:, 1:]
    known = np.unique(windows.documents)
    return pd.DataFrame(
        [
            {
                "length": 0,
                "document": document,
                "slice": ALL,
                "metric": "targets",
                "sum": zlib.crc32(np.ascontiguousarray(own).tobytes()),
                "count": own.size,
            }
            for document in known
            for own in [targets[windows.documents == document]]
        ]
    )
