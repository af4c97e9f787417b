"""Statistics: intervals cover the truth, the same data gives the same numbers, one seed is one seed."""

import math

import numpy as np
import pytest

from dape.evaluation import statistics
from dape.evaluation.statistics import (
    accuracy,
    mean_over_documents,
    mean_over_seeds,
    paired_mean,
)

TRUTH = 0.3


def made_up(seeds: int, documents: int, scale: tuple[float, float, float], generator: np.random.Generator):
    """Sums [seeds, documents] and counts of a population with that scatter of seeds, documents, and both."""
    of_seed, of_document, rest = scale
    counts = 32 * generator.integers(1, 9, documents)
    values = TRUTH + generator.normal(0, of_seed, (seeds, 1)) + generator.normal(0, of_document, documents)
    return (values + generator.normal(0, rest, (seeds, documents))) * counts, counts


@pytest.mark.parametrize("documents", [13, 60])
@pytest.mark.parametrize("seeds", [3, 10])
@pytest.mark.parametrize("scale", [(1, 1, 1), (1, 0.1, 0.3), (0.1, 1, 0.3), (0.3, 1, 1)])
def test_intervals_cover_the_truth(seeds, documents, scale):
    generator = np.random.default_rng(1)
    found = [paired_mean(*made_up(seeds, documents, scale, generator)) for _ in range(1500)]
    assert {one.how for one in found} == {"t"}
    assert 0.92 <= np.mean([one.low <= TRUTH <= one.high for one in found]) <= 0.98


def test_one_seed_has_an_interval_over_documents_alone(monkeypatch):
    generator = np.random.default_rng(2)
    monkeypatch.setattr(statistics, "DRAWS", 600)
    found = [paired_mean(*made_up(1, 60, (0, 1, 0), generator)) for _ in range(500)]
    assert {(one.seeds, one.how) for one in found} == {(1, "bootstrap")}
    assert 0.92 <= np.mean([one.low <= TRUTH <= one.high for one in found]) <= 0.98
    assert "one seed" in str(found[0])


def test_many_seeds_and_documents_are_drawn_in_two_ways():
    sums, counts = made_up(50, 50, (1, 1, 0.2), np.random.default_rng(3))
    found = paired_mean(sums, counts)
    assert found.how == "bootstrap"
    assert found == paired_mean(sums, counts)
    # Twice √(1/50 + 1/50), within the scatter of a variance of 50 values.
    assert found.high - found.low == pytest.approx(4 * 0.2, rel=0.35)


def test_agrees_with_the_textbook():
    values = np.array([0.1, 0.4, 0.2, 0.5])
    found = mean_over_seeds(values)
    assert (found.value, found.error, found.dof) == pytest.approx((0.3, values.std(ddof=1) / 2, 3))
    assert found.high - found.value == pytest.approx(3.182446 * found.error, rel=1e-5)
    assert found.p_value == pytest.approx(0.0462, abs=1e-4)
    # Documents of one window each: s / √n.
    one = mean_over_documents(values, np.ones(4), np.arange(4))
    assert (one.value, one.error) == pytest.approx((0.3, found.error))
    # Windows of the same document are one observation.
    twice = mean_over_documents(np.repeat(values, 2), np.ones(8), np.repeat(np.arange(4), 2))
    assert (twice.value, twice.error) == pytest.approx((0.3, found.error))
    assert (accuracy(8, 10).low, accuracy(8, 10).high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_a_constant_difference_is_certain_and_an_unknown_one_is_unknown():
    found = paired_mean(np.full((3, 5), 2.0), np.full(5, 2))
    assert (found.value, found.low, found.high, found.sign) == (1.0, 1.0, 1.0, 1)
    assert math.isnan(paired_mean(np.ones((3, 1)), np.ones(1)).low)
    assert paired_mean(np.full((1, 3), math.nan), np.ones(3)).sign == 0
    assert math.isnan(mean_over_seeds(np.array([1.0])).error)
    assert not paired_mean(np.ones((1, 2)), np.zeros(2)).known
