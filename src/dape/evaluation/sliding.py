"""Sliding-window perplexity: every token of a text, predicted from at most `length` tokens before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from torch import nn

from dape.data import Tokens
from dape.evaluation.evaluator import BATCH_TOKENS, Evaluator, evaluating


def sliding_window(
    model: nn.Module,
    tokens: Tokens,
    length: int,
    *,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> pd.DataFrame:
    """Rows of the loss of every token, with windows of `length` inputs that advance by `stride` (half of it by default).

    Each token is predicted once, from at least length − stride tokens if the document has them.
    max_tokens: approximate number of tokens to evaluate, from the beginnings of all documents or, where these would be
    too short for a window, of documents spread evenly; None for all.
    """
    stride = max(1, length // 2) if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride={stride} is not between 1 and the length {length}")
    share = len(tokens) if max_tokens is None else max_tokens // max(1, tokens.num_documents)
    # A shorter beginning would never see a full window.
    longest = max(share, length + stride) + 1
    some = np.arange(tokens.num_documents)
    if max_tokens is not None:
        most = max(1, max_tokens // (longest - 1))
        some = np.unique(np.linspace(0, len(some) - 1, min(most, len(some))).round().astype(int))
    rows = []
    with evaluating(model, batch_tokens=batch_tokens) as evaluator:
        for index in some.tolist():
            ids = tokens.document(index)[:longest].astype(np.int64)
            if len(ids) < 2:
                continue
            loss = _document_loss(evaluator, ids, length, stride)
            rows.append({"document": index, "sum": loss, "count": len(ids) - 1})
    if not rows:
        raise ValueError("no document has two tokens, so there is nothing to predict")
    return pd.DataFrame(rows).assign(length=length, slice=f"sliding by {stride}", metric="loss")


def _document_loss(evaluator: Evaluator, ids: np.ndarray, length: int, stride: int) -> float:
    """Summed loss of a document's tokens 1, 2, …"""
    first = min(length, len(ids) - 1)
    total = evaluator.values(ids[None, : first + 1], first).sum(dtype=np.float64)
    for batch in _steps(len(ids), length, stride, evaluator.batch_size(length, stride)):
        windows = np.stack([ids[end - length - 1 : end] for _, end in batch])
        for losses, (new, _) in zip(evaluator.values(windows, stride), batch, strict=True):
            total += losses[-new:].sum(dtype=np.float64)
    return float(total)


def _steps(num_ids: int, length: int, stride: int, batch_size: int) -> Iterator[list[tuple[int, int]]]:
    """(new tokens, end) of the windows after a document's first, in batches; the last one may have fewer."""
    ends = list(range(length + 1 + stride, num_ids + 1, stride))
    steps = [(stride, end) for end in ends]
    if rest := max(0, num_ids - (ends[-1] if ends else length + 1)):
        steps.append((rest, num_ids))
    for start in range(0, len(steps), batch_size):
        yield steps[start : start + batch_size]
