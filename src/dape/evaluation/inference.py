"""Inference from few documents and few seeds: Student's t, seeds crossed with documents, pooled variances, pooled
estimates over settings.

Every function takes numbers and returns an `Estimate`: a value, its standard error, and the degrees of freedom of
that error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error; (value − truth) / error follows Student's t with `dof` degrees of freedom.

    The error is NaN if unknown.
    """

    value: float
    error: float = math.nan
    dof: float = math.inf

    @property
    def known(self) -> bool:
        """Whether the value is known."""
        return math.isfinite(self.value)

    @property
    def weight(self) -> float:
        """The equivalent z-score: the normal deviate with the same p-value.

        0 if the error is unknown.
        """
        if not (self.known and math.isfinite(self.error) and self.dof > 0):
            return 0.0
        if self.error == 0:
            return math.copysign(math.inf, self.value) if self.value else 0.0
        tail = student_cdf(-abs(self.value / self.error), self.dof)
        size = -NormalDist().inv_cdf(tail) if tail > 1e-300 else math.inf
        return math.copysign(size, self.value)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The confidence interval; NaN if the error is unknown."""
        if not self.dof > 0:
            return math.nan, math.nan
        reach = student_quantile((1 + level) / 2, self.dof) * self.error
        return self.value - reach, self.value + reach

    def sign(self, level: float = LEVEL) -> int:
        """Sign of the value if the confidence interval excludes zero, else 0."""
        low, high = self.interval(level)
        return 1 if low > 0 else -1 if high < 0 else 0

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the value is zero."""
        if not self.dof > 0 or math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * student_cdf(-abs(self.value / self.error), self.dof)


# Student's t


def student_cdf(t: float, dof: float) -> float:
    """P(T ≤ t), by the regularised incomplete beta function: P(|T| > t) = I_x(dof / 2, 1 / 2), x = dof / (dof + t²)."""
    if math.isinf(dof):
        return 0.5 * math.erfc(-t / math.sqrt(2))
    tail = 0.5 * _incomplete_beta(dof / 2, 0.5, dof / (dof + t * t))
    return tail if t < 0 else 1 - tail


def student_quantile(probability: float, dof: float) -> float:
    """The t with P(T ≤ t) = probability."""
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability} is not between 0 and 1")
    if probability < 0.5:
        return -student_quantile(1 - probability, dof)
    high = 1.0
    while student_cdf(high, dof) < probability:
        high *= 2
    return _bisect(lambda t: student_cdf(t, dof) - probability, 0.0, high)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b), by its continued fraction on the side where that converges fast."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    # Lentz's method; the coefficients are those of the even and odd terms of the fraction.
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = fraction
        for coefficient in (even, odd):
            d = 1 / (1 + coefficient * d or tiny)
            c = 1 + coefficient / c or tiny
            fraction *= c * d
        if abs(fraction - before) <= 1e-16 * abs(fraction):
            break
    return math.exp(log_front) * fraction / a


def _bisect(rises: Callable[[float], float], low: float, high: float) -> float:
    """Root of an increasing function, to machine precision."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return middle


# Seed variance


@dataclass(frozen=True)
class VariancePrior:
    """Prior of variances from many small samples, with scale `variance` and the weight of `dof` observations.

    True variances are distributed as dof · variance / χ²(dof). Infinite dof: they are all equal.
    """

    variance: float
    dof: float

    def posterior(self, variance: float = math.nan, dof: float = 0.0) -> tuple[float, float]:
        """Posterior variance of one sample and its degrees of freedom; without a sample, the prior's."""
        if dof == 0:
            return self.variance, self.dof
        if math.isinf(self.dof):
            return self.variance, math.inf
        total = self.dof + dof
        return (self.dof * self.variance + dof * variance) / total, total


def variance_prior(variances: Sequence[float], dofs: Sequence[float]) -> VariancePrior:
    """Prior shared by the sample variances of one kind of comparison, estimated on a logarithmic scale.

    On that scale a sample variance scatters around the true one by a known amount, independent of its size, so that one
    large variance does not dominate. Scatter beyond it is attributed to differences of the true variances (Smyth, 2004).
    With n seeds, dof = n − 1. A variance of zero means that two runs were the same one, and raises.
    """
    if not len(variances) == len(dofs) > 0:
        raise ValueError(
            f"{len(variances)} variances have {len(dofs)} degrees of freedom: give as many, at least one"
        )
    if min(variances) <= 0 or min(dofs) <= 0:
        raise ValueError("variances and their degrees of freedom must be positive")
    half = torch.as_tensor(dofs, dtype=torch.float64) / 2
    logs = torch.as_tensor(variances, dtype=torch.float64).log() - torch.digamma(half) + half.log()
    mean = logs.mean().item()
    excess = logs.var().item() - _trigamma(half).mean().item() if len(logs) > 1 else 0.0
    if excess <= 0:
        return VariancePrior(math.exp(mean), math.inf)
    prior = _inverse_trigamma(excess)
    shift = torch.digamma(torch.tensor(prior, dtype=torch.float64)).item() - math.log(prior)
    return VariancePrior(math.exp(mean + shift), 2 * prior)


def _trigamma(x: torch.Tensor) -> torch.Tensor:
    return torch.special.polygamma(1, x)


def _inverse_trigamma(value: float) -> float:
    """The x with trigamma(x) = value. As trigamma(x) < 1/x + 1/x², x is less than 1 + 2 / min(value, 1)."""
    return _bisect(
        lambda x: value - _trigamma(torch.tensor(x, dtype=torch.float64)).item(), 0.0, 1 + 2 / min(value, 1.0)
    )


# Seeds crossed with documents


def crossed_mean(sums: np.ndarray, counts: np.ndarray, *, seeds: VariancePrior | None = None) -> Estimate:
    """Mean over the tokens of all documents and over seeds, with seeds and documents as crossed random effects.

    sums:   of (differences of) losses [seeds, documents]; counts: tokens [documents].
    seeds:  prior of the seed variance of the mean. Without it a single seed has the error over documents alone, which
            excludes the variance between seeds.

    All seeds use the same documents, so the factors are crossed: with mean squares of documents, of seeds and of the
    residual, Var = (MS_d + MS_s − MS_rest) / (D · S), and degrees of freedom by Satterthwaite. For one seed it is
    `clustered_mean`. Two seeds alone estimate their variance poorly, and 95 % intervals cover the truth 91 % of the
    time: pass a prior.
    """
    sums, counts = np.atleast_2d(np.asarray(sums, np.float64)), np.asarray(counts, np.float64)
    num_seeds, num_documents = sums.shape
    mean = float(sums.sum() / (num_seeds * counts.sum()))
    if num_documents < 2:
        return Estimate(mean, math.nan, 0)
    # Scaled so that the mean over documents is that over tokens.
    scatter = (sums - mean * counts) * num_documents / counts.sum()
    by_seed, by_document = scatter.mean(1), scatter.mean(0)
    # Variance of the mean due to each source of variation, and its degrees of freedom.
    documents = (float(np.var(by_document, ddof=1)) / num_documents, num_documents - 1.0)
    sources = [documents]
    rest = 0.0
    if num_seeds > 1:
        dof = (num_seeds - 1.0) * (num_documents - 1)
        left = scatter - by_seed[:, None] - by_document
        rest = float(np.square(left).sum()) / dof / (num_seeds * num_documents)
    sample = (float(np.var(by_seed, ddof=1)), num_seeds - 1.0) if num_seeds > 1 else None
    if seeds is not None:
        sample = seeds.posterior(*sample) if sample else seeds.posterior()
    if sample is not None:
        sources.append((sample[0] / num_seeds, sample[1]))
    # Each source contains the residual once; one smaller than the residual has no variance of its own.
    total = sum(max(part, rest) for part, _ in sources) - rest * (len(sources) - 1)
    return Estimate(mean, math.sqrt(total), satterthwaite(total, sources))


def satterthwaite(total: float, sources: Sequence[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum of variances, by Satterthwaite; sources: (variance, degrees of freedom)."""
    scatter = sum(part**2 / dof for part, dof in sources)
    return total**2 / scatter if scatter else math.inf


# Settings


@dataclass(frozen=True)
class Pooled:
    """Random-effects mean over settings.

    estimate:    mean of the population of settings.
    between:     standard deviation of true values between settings (τ).
    prediction:  of one further setting: the error includes `between`.
    """

    estimate: Estimate
    between: float
    prediction: Estimate


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Unweighted mean over these independent settings (fixed effects); no inference about other settings."""
    parts = [((one.error / len(estimates)) ** 2, one.dof) for one in estimates]
    total = sum(part for part, _ in parts)
    value = sum(one.value for one in estimates) / len(estimates)
    return Estimate(value, math.sqrt(total), satterthwaite(total, parts))


def pool(estimates: Sequence[Estimate]) -> Pooled:
    """Random-effects meta-analysis of one comparison in several settings.

    τ² by restricted maximum likelihood; error and degrees of freedom (settings − 1) after Hartung and Knapp, never
    below the error that follows from the settings' own errors. Settings must be independent: separate trainings on
    separate documents; seeds of one setting belong in its estimate (`crossed_mean`), not here.
    """
    if not estimates:
        raise ValueError("there is nothing to pool")
    values = np.array([one.value for one in estimates])
    variances = np.array([one.error for one in estimates]) ** 2
    if not np.isfinite(values).all() or not (np.isfinite(variances) & (variances > 0)).all():
        raise ValueError("to be pooled, every estimate needs a value and a positive standard error")
    if len(estimates) == 1:
        only = estimates[0]
        return Pooled(only, math.nan, Estimate(only.value, math.nan, 0))
    tau2 = _between(values, variances)
    weights = 1 / (variances + tau2)
    mean = float((weights * values).sum() / weights.sum())
    dof = len(values) - 1
    stretch = max(1.0, float((weights * (values - mean) ** 2).sum()) / dof)
    error2 = stretch / float(weights.sum())
    return Pooled(
        Estimate(mean, math.sqrt(error2), dof),
        math.sqrt(tau2),
        Estimate(mean, math.sqrt(error2 + tau2), max(1, dof - 1)),
    )


def _between(values: np.ndarray, variances: np.ndarray) -> float:
    """τ² that maximises the restricted likelihood: the zero of its derivative, or 0 if it decreases from 0 on."""

    def falls(tau2: float) -> float:
        """Minus twice the derivative."""
        weights = 1 / (variances + tau2)
        mean = (weights * values).sum() / weights.sum()
        fit = (weights**2 * (values - mean) ** 2).sum()
        return float(weights.sum() - (weights**2).sum() / weights.sum() - fit)

    if falls(0.0) >= 0:
        return 0.0
    high = float(np.var(values, ddof=1))
    while falls(high) < 0:
        high *= 2
    return _bisect(falls, 0.0, high)
