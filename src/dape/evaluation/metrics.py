"""Metrics of language models, and their measurement: rows of the table of results.

A new metric is one entry of METRICS: a function of the logits [B, T, vocabulary] and the target tokens [B, T] that
returns a value for every target [B, T]. Sums over documents and slices, tables, figures and pages follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from dape.data import Tokens
from dape.evaluation.by_length import KEY_GAIN, Progress, context_lengths, values_of_windows
from dape.evaluation.evaluator import Measure, evaluating, token_losses
from dape.evaluation.table import ALL
from dape.evaluation.windows import Windows

METRICS: dict[str, Measure] = {
    "loss": token_losses,
    "accuracy": lambda logits, targets: (logits.argmax(-1) == targets).float(),
    "entropy": lambda logits, targets: torch.distributions.Categorical(logits=logits.float()).entropy(),
}
# Slices of an evaluation that knows the model's window: all tokens at the lengths that show its use, and the key tokens.
WINDOW, KEY = "window", "key"
NO_SLICES: Mapping[str, np.ndarray] = MappingProxyType({})


def measure(
    model: nn.Module,
    tokens: Tokens,
    windows: Windows,
    lengths: Sequence[int],
    *,
    last: int,
    metrics: Sequence[str] = ("loss",),
    slices: Mapping[str, np.ndarray] = NO_SLICES,
    window: int = 0,
    positions: Callable[[int], Tensor] | None = None,
    progress: Progress | None = None,
) -> Iterator[pd.DataFrame]:
    """Rows (length, document, slice, metric, sum, count): checksums of the target tokens, then a frame per length.

    windows:   of `same_targets`, with room for the longest input and for `last` targets.
    slices:    by name, the targets [windows, last] that belong to it (see `targets_by_recall`), beside all of them.
    window:    the model's own, if known: then also rows of the slices WINDOW and KEY, which show what it makes of it.
    positions: position_ids [1, T] for inputs of T tokens; by default the model counts from 0.
    """
    yield target_checksums(tokens, windows, last)
    everything = np.ones((len(windows), last), bool)
    with evaluating(model, positions=positions) as evaluator:

        def values(length: int, names: Sequence[str]) -> np.ndarray:
            measures = [METRICS[name] for name in names]
            return values_of_windows(evaluator, tokens, windows, length, last, measures, progress)

        of_window: dict[str, np.ndarray] = {}
        if 4 * last <= window <= max(lengths):
            parts = {n: values(n, ["loss"]) for n in context_lengths(window)}
            gain = parts[window // 2] - parts[window]
            of_window = {WINDOW: everything, KEY: gain[..., 0] > KEY_GAIN}
            for length, part in parts.items():
                yield rows_of(part, ["loss"], windows, of_window).assign(length=length)
        for length in lengths:
            chosen = {ALL: everything, **slices, **(of_window if length == max(lengths) else {})}
            yield rows_of(values(length, metrics), metrics, windows, chosen).assign(length=length)


def rows_of(
    values: np.ndarray, metrics: Sequence[str], windows: Windows, slices: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Values of targets [windows, last, metrics] summed by document and slice."""
    frames = []
    known, document = np.unique(windows.documents, return_inverse=True)
    for name, chosen in slices.items():
        count = np.bincount(document, chosen.sum(1)).astype(np.int64)
        for index, metric in enumerate(metrics):
            sums = np.bincount(document, np.where(chosen, values[..., index], 0.0).sum(1, dtype=np.float64))
            frame = pd.DataFrame({"document": known, "slice": name, "sum": sums, "count": count})
            frames.append(frame[count > 0].assign(metric=metric))
    return pd.concat(frames, ignore_index=True)


def rows_by_position(
    model: nn.Module, tokens: Tokens, windows: Windows, length: int, progress: Progress | None = None
) -> pd.DataFrame:
    """Rows of the loss with 1, 2–3, 4–7, … tokens of input; windows: with `length` targets each."""
    with evaluating(model) as evaluator:
        values = values_of_windows(evaluator, tokens, windows, length, length, [token_losses], progress)
    before = np.broadcast_to(np.arange(1, length + 1), values.shape[:2])
    starts = [1 << power for power in range(length.bit_length())]
    stops = [min(2 * start, length + 1) for start in starts]
    slices = {
        f"input {start}–{stop - 1}" if stop - start > 1 else f"input {start}": (start <= before)
        & (before < stop)
        for start, stop in zip(starts, stops, strict=True)
    }
    return rows_of(values, ["loss"], windows, slices).assign(length=length)


def target_checksums(tokens: Tokens, windows: Windows, last: int) -> pd.DataFrame:
    """Rows of the metric "targets": a checksum of the target tokens of each document, and their number."""
    targets = windows.ids(tokens, last)[:, 1:]
    of = {document: targets[windows.documents == document] for document in np.unique(windows.documents)}
    rows = [
        {"document": document, "sum": zlib.crc32(np.ascontiguousarray(own).tobytes()), "count": own.size}
        for document, own in of.items()
    ]
    return pd.DataFrame(rows).assign(length=0, slice=ALL, metric="targets")
