"""Means with standard errors clustered by document, as windows of one document are not independent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


def clustered_mean(sums: np.ndarray, counts: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Mean m = Σ sums / Σ counts, and its standard error over clusters.

    With r_g the sum over cluster g of (sums − m · counts), the error is √(G/(G−1) · Σ r_g²) / Σ counts:
    for clusters of one window each, the textbook s/√n. NaN for a single cluster.
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    total = counts.sum()
    mean = sums.sum() / total
    _, group = np.unique(clusters, return_inverse=True)
    residuals = np.bincount(group, weights=sums - mean * counts)
    num_clusters = len(residuals)
    if num_clusters < 2:
        return float(mean), math.nan
    variance = num_clusters / (num_clusters - 1) * np.square(residuals).sum()
    return float(mean), float(math.sqrt(variance) / total)


@dataclass(frozen=True)
class LengthLoss:
    """Loss of the last tokens of windows, given `eval_length` tokens of input.

    tokens:    total number of target tokens.
    windows:   mean loss of each window [n]; documents: the document each belongs to [n];
    ends:      end of each window's targets, as an index into the split's ids [n]; last: targets per window.
    """

    eval_length: int
    nll: float
    nll_se: float
    ppl: float
    tokens: int
    windows: np.ndarray
    documents: np.ndarray
    ends: np.ndarray
    last: int

    @staticmethod
    def of(
        eval_length: int, windows: np.ndarray, documents: np.ndarray, ends: np.ndarray, last: int
    ) -> LengthLoss:
        nll, error = clustered_mean(windows, np.ones(len(windows)), documents)
        return LengthLoss(
            eval_length, nll, error, perplexity(nll), last * len(windows), windows, documents, ends, last
        )

    def record(self) -> dict[str, Any]:
        return {
            "eval_length": self.eval_length,
            "nll": self.nll,
            "nll_se": self.nll_se,
            "ppl": self.ppl,
            "tokens": self.tokens,
            "windows": len(self.windows),
            "documents": len(np.unique(self.documents)),
            "last": self.last,
        }


def perplexity(nll: float) -> float:
    """exp(nll), infinite on overflow."""
    return math.exp(nll) if nll < 700 else math.inf


def paired_difference(a: LengthLoss, b: LengthLoss) -> tuple[float, float]:
    """Loss of a minus loss of b on the same target tokens, and its standard error over documents.

    a and b: two methods at one length, or one method at two lengths.
    """
    if a.last != b.last or not np.array_equal(a.ends, b.ends):
        raise ValueError(
            f"the losses at lengths {a.eval_length} and {b.eval_length} have different target tokens, "
            f"so their differences are not paired"
        )
    return clustered_mean(a.windows - b.windows, np.ones(len(a.windows)), a.documents)
