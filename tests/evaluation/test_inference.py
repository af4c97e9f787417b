"""Inference against published numbers, other people's special functions, sums by hand, and simulated truth."""

import math

import mpmath
import numpy as np
import pytest

from dape.evaluation.inference import (
    Estimate,
    VariancePrior,
    crossed_mean,
    pool,
    student_cdf,
    student_quantile,
    variance_prior,
)
from dape.evaluation.statistics import clustered_mean


@pytest.mark.parametrize("dof", [0.5, 1, 2, 3.7, 5, 12, 30, 400, 1e5])
@pytest.mark.parametrize("t", [-40.0, -3.0, -0.5, 0.0, 1e-9, 0.1, 2.0, 7.5])
def test_student_is_the_incomplete_beta_function(t: float, dof: float) -> None:
    tail = mpmath.betainc(dof / 2, 0.5, 0, mpmath.mpf(dof) / (dof + mpmath.mpf(t) ** 2), regularized=True) / 2
    expected = float(tail if t < 0 else 1 - tail)
    assert student_cdf(t, dof) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("probability", "dof", "printed"),
    # From any table of Student's t.
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 5, 2.571), (0.975, 12, 2.179), (0.95, 5, 2.015),
     (0.995, 10, 3.169), (0.975, math.inf, 1.960)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability: float, dof: float, printed: float) -> None:
    assert student_quantile(probability, dof) == pytest.approx(printed, abs=5e-4)
    assert student_quantile(1 - probability, dof) == pytest.approx(-printed, abs=5e-4)
    assert student_cdf(student_quantile(probability, dof), dof) == pytest.approx(probability, abs=1e-12)


def test_two_errors_of_six_documents_miss_one_time_in_ten() -> None:
    assert Estimate(2.0, 1.0, 5).p_value == pytest.approx(0.1019, abs=1e-4)
    assert Estimate(2.0, 1.0).p_value == pytest.approx(0.0455, abs=1e-4)
    assert Estimate(2.0, 1.0).sign() == 1
    assert Estimate(-2.0, 1.0).sign() == -1
    assert Estimate(2.0, 1.0, 5).sign() == 0
    assert Estimate(2.0, math.nan, 0).sign() == 0
    assert Estimate(2.0, 1.0, 5).interval() == pytest.approx((2 - 2.5706, 2 + 2.5706), abs=1e-4)


@pytest.mark.parametrize("probability", [0.0, 1.0, -1.0])
def test_impossible_probabilities(probability: float) -> None:
    with pytest.raises(ValueError, match="not between 0 and 1"):
        student_quantile(probability, 3)


def test_one_seed_is_the_clustered_mean() -> None:
    generator = np.random.default_rng(0)
    sums, counts = generator.normal(size=9) * 5, generator.integers(1, 20, 9)
    found = crossed_mean(sums, counts)
    assert (found.value, found.error) == pytest.approx(clustered_mean(sums, counts, np.arange(9)))
    assert found.dof == pytest.approx(8)


def test_seeds_that_agree_add_nothing() -> None:
    sums, counts = np.array([3.0, 1.0, 4.0, 1.5]), np.array([2, 1, 3, 1])
    one, three = crossed_mean(sums, counts), crossed_mean(np.stack([sums] * 3), counts)
    assert (three.value, three.error) == pytest.approx((one.value, one.error))


def test_mean_squares_by_hand() -> None:
    # Rows 1 2 6 and 3 6 6: seeds' means 3 and 5, documents' 2, 4, 6; MS_s = 6, MS_d = 8, MS_rest = 2.
    values = np.array([[1.0, 2.0, 6.0], [3.0, 6.0, 6.0]])
    found = crossed_mean(values, np.ones(3))
    assert found.value == pytest.approx(4)
    assert found.error**2 == pytest.approx((8 + 6 - 2) / 6)
    # Parts 8/6 with 2 degrees of freedom and 1 with 1.
    assert found.dof == pytest.approx(2**2 / ((8 / 6) ** 2 / 2 + 1))


def test_a_prior_gives_one_seed_an_error_between_seeds() -> None:
    sums, counts = np.array([3.0, 1.0, 4.0, 1.5]), np.ones(4)
    alone, joined = crossed_mean(sums, counts), crossed_mean(sums, counts, seeds=VariancePrior(0.25, 6))
    assert joined.value == alone.value
    assert joined.error == pytest.approx(math.hypot(alone.error, 0.5))
    assert joined.dof < 9


def test_one_document_says_nothing() -> None:
    found = crossed_mean(np.array([[1.0], [2.0]]), np.array([4]))
    assert found.value == pytest.approx(3 / 8)
    assert math.isnan(found.error)
    assert found.sign() == 0


def coverage(num_seeds: int, seeds: float, documents: float, prior: VariancePrior | None = None) -> float:
    """The share of 95 % intervals that hold the truth, for these standard deviations between seeds and documents."""
    generator = np.random.default_rng(1)
    counts = generator.integers(5, 15, 8)
    held = 0
    for _ in range(trials := 2000):
        own = seeds * math.sqrt(prior.dof / generator.chisquare(prior.dof)) if prior else seeds
        effects = documents * generator.normal(size=8) + own * generator.normal(size=(num_seeds, 1))
        means = effects + 0.2 * generator.normal(size=(num_seeds, 8))
        held += crossed_mean(means * counts, counts, seeds=prior).p_value >= 0.05
    return held / trials


# Of 2000 trials a share of 95 % scatters by half a point; documents of unequal sizes cost another one.
VARYING = [(1.0, 1.0), (0.2, 1.0), (1.0, 0.1), (0.0, 0.0)]


@pytest.mark.parametrize(("seeds", "documents"), VARYING)
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_intervals_cover_the_truth_whichever_varies_more(
    num_seeds: int, seeds: float, documents: float
) -> None:
    assert 0.925 <= coverage(num_seeds, seeds, documents) <= 0.995


@pytest.mark.parametrize(("seeds", "documents"), VARYING[:3])
def test_two_seeds_alone_are_few_and_a_prior_makes_up_for_it(seeds: float, documents: float) -> None:
    assert coverage(2, seeds, documents) >= 0.90
    for num_seeds in (1, 2):
        assert 0.925 <= coverage(num_seeds, seeds, documents, VariancePrior(seeds**2, 6)) <= 0.995


def test_the_prior_is_found_again() -> None:
    """Sample variances drawn as the model says: 3 seeds each, true variances 0.04 · 10 / χ²(10)."""
    generator = np.random.default_rng(2)
    true = 0.04 * 10 / generator.chisquare(10, 20_000)
    prior = variance_prior(true * generator.chisquare(2, 20_000) / 2, [2] * 20_000)
    assert prior.variance == pytest.approx(0.04, rel=0.03)
    assert prior.dof == pytest.approx(10, rel=0.15)


def test_equal_true_variances_have_a_certain_prior() -> None:
    generator = np.random.default_rng(7)
    prior = variance_prior(0.5 * generator.chisquare(4, 4000) / 4, [4] * 4000)
    assert prior.variance == pytest.approx(0.5, rel=0.05)
    assert prior.dof > 50
    # They differ by less than chance alone would make them.
    assert variance_prior([0.3, 0.31, 0.29], [1, 1, 1]).dof == math.inf
    assert variance_prior([0.3], [2]).dof == math.inf


def test_moments_on_the_logarithmic_scale() -> None:
    """The estimate puts the mean and the variance of log s² where theory has them, by another library's functions."""
    variances, dofs = [1e-4, 4e-3, 2e-2, 9e-4, 0.3], [1, 2, 1, 2, 1]
    prior = variance_prior(variances, dofs)
    psi = [float(mpmath.digamma(dof / 2)) - math.log(dof / 2) for dof in dofs]
    logs = np.log(variances) - psi
    half = prior.dof / 2
    assert float(mpmath.polygamma(1, half)) == pytest.approx(
        logs.var(ddof=1) - np.mean([float(mpmath.polygamma(1, dof / 2)) for dof in dofs])
    )
    assert math.log(prior.variance) == pytest.approx(
        logs.mean() + float(mpmath.digamma(half)) - math.log(half)
    )


def test_one_large_variance_does_not_rule_the_others() -> None:
    usual = [1e-4] * 9
    plain = np.mean([*usual, 1.0])
    assert variance_prior([*usual, 1.0], [1] * 10).variance < plain / 100


def test_the_posterior_lies_between_sample_and_prior() -> None:
    prior = VariancePrior(0.04, 6)
    assert prior.posterior(0.16, 2) == pytest.approx(((6 * 0.04 + 2 * 0.16) / 8, 8))
    assert prior.posterior() == (0.04, 6)
    assert VariancePrior(0.04, math.inf).posterior(0.16, 2) == (0.04, math.inf)


@pytest.mark.parametrize(("variances", "dofs"), [([], []), ([1.0], []), ([0.0, 1.0], [1, 1]), ([1.0], [0])])
def test_variances_that_say_nothing_are_refused(variances: list[float], dofs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"degrees of freedom"):
        variance_prior(variances, dofs)


# The thirteen trials of the BCG vaccine (Colditz et al., 1994): ill and well with it, ill and well without.
TRIALS = [
    (4, 119, 11, 128), (6, 300, 29, 274), (3, 228, 11, 209), (62, 13536, 248, 12619), (33, 5036, 47, 5761),
    (180, 1361, 372, 1079), (8, 2537, 10, 619), (505, 87886, 499, 87892), (29, 7470, 45, 7232), (17, 1699, 65, 1600),
    (186, 50448, 141, 27197), (5, 2493, 3, 2338), (27, 16886, 29, 17825),
]  # fmt: skip


def risk_ratio(ill: int, well: int, ill_without: int, well_without: int) -> Estimate:
    treated, control = ill + well, ill_without + well_without
    value = math.log(ill / treated / (ill_without / control))
    return Estimate(value, math.sqrt(1 / ill - 1 / treated + 1 / ill_without - 1 / control))


def test_pooling_gives_the_published_numbers_of_the_bcg_trials() -> None:
    """metafor's rma: −0.7145 with τ² = 0.3132, standard error 0.1798, after Hartung and Knapp 0.1808 (12 dof)."""
    found = pool([risk_ratio(*trial) for trial in TRIALS])
    assert found.estimate.value == pytest.approx(-0.7145, abs=5e-5)
    assert found.between**2 == pytest.approx(0.3132, abs=5e-5)
    weights = [1 / (risk_ratio(*trial).error ** 2 + found.between**2) for trial in TRIALS]
    assert sum(weights) ** -0.5 == pytest.approx(0.1798, abs=5e-5)
    assert found.estimate.error == pytest.approx(0.1808, abs=5e-5)
    assert found.estimate.dof == 12


def test_the_restricted_likelihood_is_largest_there() -> None:
    """Against the density itself, on a grid."""
    generator = np.random.default_rng(4)
    values, variances = generator.normal(0.3, 0.5, 7), generator.uniform(0.01, 0.2, 7)
    found = pool([Estimate(v, s**0.5) for v, s in zip(values, variances, strict=True)]).between ** 2

    def likelihood(tau2: float) -> float:
        weights = 1 / (variances + tau2)
        mean = (weights * values).sum() / weights.sum()
        return (
            0.5 * np.log(weights).sum()
            - 0.5 * np.log(weights.sum())
            - 0.5 * (weights * (values - mean) ** 2).sum()
        )

    grid = np.linspace(0, 1, 20_001)
    assert found == pytest.approx(grid[np.argmax([likelihood(tau2) for tau2 in grid])], abs=1e-4)


def test_settings_that_agree_are_averaged_by_precision() -> None:
    found = pool([Estimate(1.0, 0.1), Estimate(1.0, 0.1), Estimate(1.0, 0.2)])
    assert found.between == 0
    assert found.estimate.value == pytest.approx(1.0)
    # Never below what the settings' own errors give, although these agree better than by chance.
    assert found.estimate.error == pytest.approx((100 + 100 + 25) ** -0.5)
    assert found.prediction.error == pytest.approx(found.estimate.error)


def test_one_setting_says_nothing_of_others() -> None:
    only = Estimate(1.0, 0.1, 4)
    found = pool([only])
    assert found.estimate == only
    assert math.isnan(found.between)
    assert found.prediction.sign() == 0


@pytest.mark.parametrize(
    "estimates", [[], [Estimate(1.0, math.nan, 0)], [Estimate(1.0, 0.0)], [Estimate(math.nan, 0.1)]]
)
def test_what_cannot_be_pooled_is_refused(estimates: list[Estimate]) -> None:
    with pytest.raises(ValueError, match="pool"):
        pool(estimates)


@pytest.mark.parametrize("between", [0.0, 0.3, 2.0])
def test_pooled_intervals_cover_the_truth(between: float) -> None:
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(trials := 1000):
        errors = generator.uniform(0.1, 0.5, 4)
        values = 1 + between * generator.normal(size=4) + errors * generator.normal(size=4)
        found = pool([Estimate(v - 1, e) for v, e in zip(values, errors, strict=True)]).estimate
        held += found.p_value >= 0.05
    assert held / trials >= 0.93
