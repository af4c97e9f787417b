"""Statistics of results: paired means over documents and seeds, accuracies.

Documents and seeds are crossed: all seeds are scored on the same documents. With x[s, d] the sum over the tokens of
document d (a loss, or a difference of losses on the same tokens) and c[d] their number, the estimate is

    m = Σ x[s, d] / (S · Σ c[d])

and its 95 % interval comes from one of two methods, which `Estimate.how` names:

- "bootstrap": percentiles of m with documents and seeds drawn with replacement, each on its own (two-way), by a
  generator with a fixed seed. It is too narrow for few units (20 documents cover 91 %), so both need at least 40.
- "t": the variances between per-seed means and between per-document means, less the residual that both contain,
  with Student's t; the degrees of freedom after Satterthwaite.

One seed is one seed: its interval is over documents alone and says nothing about training again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
# Units from which a percentile bootstrap covers its level.
ENOUGH = 40
DRAWS = 4000


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and 95 % interval; NaN where they are unknown.

    dof: degrees of freedom of the error; how: "t", "bootstrap", "binomial", or "" without an interval.
    """

    value: float = math.nan
    error: float = math.nan
    low: float = math.nan
    high: float = math.nan
    dof: float = 0.0
    seeds: int = 0
    documents: int = 0
    how: str = ""

    @property
    def known(self) -> bool:
        return math.isfinite(self.value)

    @property
    def sign(self) -> int:
        """Sign of the value if the interval excludes zero, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    @property
    def p_value(self) -> float:
        """Two-sided p-value of zero by Student's t; NaN without an error."""
        from scipy.stats import t

        if not (self.known and self.error > 0 and self.dof > 0):
            return math.nan
        return float(2 * t.sf(abs(self.value / self.error), self.dof))

    def __str__(self) -> str:
        if not math.isfinite(self.low):
            return f"{self.value:.4g}"
        seeds = "one seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}], {seeds}, by {self.how}"


def quantile(dof: float, level: float = LEVEL) -> float:
    """The t with P(|T| ≤ t) = level."""
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, dof))


def by_t(value: float, variance: float, dof: float, seeds: int = 0, documents: int = 0) -> Estimate:
    """Estimate with a Student's t interval."""
    error = math.sqrt(variance)
    reach = quantile(dof) * error
    return Estimate(value, error, value - reach, value + reach, dof, seeds, documents, "t")


def paired_mean(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """Mean per token of sums [seeds, documents] over counts [documents], over documents and seeds."""
    sums, counts = np.atleast_2d(np.asarray(sums, np.float64)), np.asarray(counts, np.float64)
    sums, counts = sums[:, counts > 0], counts[counts > 0]
    num_seeds, num_documents = sums.shape
    if not num_documents:
        return Estimate(seeds=num_seeds)
    value, variance, dof = _crossed(sums, counts)
    if not math.isfinite(variance):
        return Estimate(value, seeds=num_seeds, documents=num_documents)
    if num_documents < ENOUGH or 1 < num_seeds < ENOUGH:
        return by_t(value, variance, dof, num_seeds, num_documents)
    low, high = np.quantile(_bootstrap(sums, counts), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return Estimate(value, math.sqrt(variance), low, high, dof, num_seeds, num_documents, "bootstrap")


def _crossed(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """Mean, its variance and degrees of freedom, with seeds and documents as crossed random effects."""
    num_seeds, num_documents = sums.shape
    total = counts.sum()
    value = float(sums.sum() / (num_seeds * total))
    if not math.isfinite(value) or num_documents < 2:
        return value, math.nan, 0.0
    # Contributions to the mean, linearised: they add up to zero.
    parts = (sums - value * counts) / total
    by_document, by_seed = parts.mean(0), parts.sum(1)
    spread = num_documents / (num_documents - 1)
    documents = float(spread * np.square(by_document).sum())
    if num_seeds == 1:
        return value, documents, num_documents - 1
    pairs = num_seeds * (num_seeds - 1)
    seeds = float(np.square(by_seed).sum() / pairs)
    rest = parts - by_document - by_seed[:, None] * counts / total
    residual = float(spread * np.square(rest).sum() / pairs)
    # Both variances contain the residual once.
    variance = max(documents + seeds - residual, documents, seeds)
    return value, variance, satterthwaite(variance, [(documents, num_documents - 1), (seeds, num_seeds - 1)])


def _bootstrap(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means with seeds and documents drawn with replacement [DRAWS]."""
    generator = np.random.default_rng(0)
    num_seeds, num_documents = sums.shape
    means: list[float] = []
    while len(means) < DRAWS:
        draws = min(DRAWS - len(means), max(1, 1_000_000 // num_documents))
        documents = generator.multinomial(num_documents, np.full(num_documents, 1 / num_documents), draws)
        seeds = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), draws) / num_seeds
        means += (((documents @ sums.T) * seeds).sum(1) / (documents @ counts)).tolist()
    return np.array(means)


def satterthwaite(variance: float, parts: list[tuple[float, float]]) -> float:
    """Degrees of freedom of a variance that is a sum of independent (variance, degrees of freedom)."""
    scatter = sum(part**2 / dof for part, dof in parts)
    return variance**2 / scatter if scatter else min(dof for _, dof in parts)


def mean_over_seeds(values: np.ndarray) -> Estimate:
    """Mean of one value per seed, by Student's t; without an interval for one seed."""
    values = np.asarray(values, np.float64)
    count = len(values)
    if count < 2:
        return Estimate(float(values[0]) if count else math.nan, seeds=count)
    return by_t(float(values.mean()), float(values.var(ddof=1)) / count, count - 1, count)


def accuracy(right: float, count: float) -> Estimate:
    """Share of right answers of one model, with Wilson's interval."""
    if not count:
        return Estimate()
    share, z = right / count, quantile(math.inf)
    middle, scale = (share + z**2 / (2 * count)) / (1 + z**2 / count), 1 + z**2 / count
    reach = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / scale
    error = math.sqrt(share * (1 - share) / count)
    return Estimate(share, error, middle - reach, middle + reach, count - 1, 1, 0, "binomial")


def mean_over_documents(sums: np.ndarray, counts: np.ndarray, documents: np.ndarray) -> Estimate:
    """Mean of one model's sums over counts, of windows in the given documents, with an interval over documents."""
    _, group = np.unique(documents, return_inverse=True)
    return paired_mean(np.bincount(group, sums), np.bincount(group, counts))


def perplexity(nll: float) -> float:
    """exp(nll), infinite on overflow."""
    return math.exp(nll) if nll < 700 else math.inf
