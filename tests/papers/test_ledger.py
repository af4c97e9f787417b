"""Verdicts: the word follows from the numbers, and the recomputed ones are what an independent count found."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from dape.evaluation.statistics import Estimate
from papers.ledger import Claim, Comparison, Data, Ledger, changes, lower
from papers.pages import ledger


def made_up(gap: float, *, seeds: int = 3, spread: float = 0.002, corpus: str = "latex13") -> pd.DataFrame:
    """Results of methods a and b, whose losses differ by `gap`, at 64 and 1024 tokens."""
    generator = np.random.default_rng(0)
    rows = [
        {"run": f"{method}{seed}", "method": method, "seed": seed, "corpus": corpus, "train_length": 64, "length": length,
         "document": document, "slice": "all", "metric": "loss", "count": 100,
         "sum": 100 * (2 + document + (gap + generator.normal(0, spread) if method == "a" else 0))}
        for method in "ab" for seed in range(seeds) for length in (64, 1024) for document in range(12)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def word(table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, **changed: object) -> str:
    claim = dataclasses.replace(Claim("one", "1", "a is better than b", "x", lower("a", "b")), **changed)
    monkeypatch.setattr(Ledger, "table", lambda self, name: made_up(-0.9) if name == "longer" else table)
    monkeypatch.setattr(Ledger, "printed", lambda self: made_up(0.0).query("seed > 9"))
    return Ledger(ledger("dape_v2").folder, [claim]).judge(claim).word


@pytest.mark.parametrize(
    ("gap", "seeds", "spread", "expected"),
    [(-0.1, 3, 0.002, "reproduced"), (0.1, 3, 0.002, "contradicted"), (0.0, 3, 0.1, "unclear"), (-0.1, 1, 0.002, "one seed"),
     (0.1, 1, 0.002, "one seed"), (0.0, 2, 0.1, "unclear")],
)  # fmt: skip
def test_the_word_follows_from_the_numbers(gap, seeds, spread, expected, monkeypatch) -> None:
    assert word(made_up(gap, seeds=seeds, spread=spread), monkeypatch) == expected


def test_too_small_only_if_longer_training_moves_towards_the_claim(monkeypatch) -> None:
    far = lower("a", "b", factor=2.0)
    assert word(made_up(-0.1), monkeypatch, test=far, longer="longer") == "too small"
    assert word(made_up(-0.95), monkeypatch, test=far, longer="longer") == "reproduced"
    other = lower("b", "a", factor=2.0)
    assert word(made_up(0.1), monkeypatch, test=other, longer="longer") == "contradicted"


def test_out_of_reach_needs_the_papers_difference_below_ours(monkeypatch) -> None:
    printed = made_up(-0.001, seeds=1, spread=0.0, corpus="arxiv").query("document == 0")
    claim = Claim("one", "1", "a is better than b", "x", lower("a", "b"))
    monkeypatch.setattr(Ledger, "table", lambda self, name: made_up(0.0, spread=0.2))
    for difference, expected in (
        (printed, "out of reach"),
        (made_up(-3.0, seeds=1, corpus="arxiv"), "unclear"),
    ):
        monkeypatch.setattr(Ledger, "printed", lambda self, found=difference: found)
        assert Ledger(ledger("dape_v2").folder, [claim]).judge(claim).word == expected


def test_a_text_without_results_is_said_to_be_missing(monkeypatch) -> None:
    monkeypatch.setattr(Ledger, "table", lambda self, name: made_up(-0.1))
    claim = Claim("one", "1", "a is better than b", "x", lower("a", "b"), ("LaTeX", "books"))
    judgements = Ledger(ledger("dape_v2").folder, [claim]).judge(claim).judgements
    assert {one.corpus: one.word for one in judgements} == {"LaTeX": "reproduced", "books": "not run"}


def test_many_comparisons_need_a_smaller_p_value() -> None:
    one = Comparison("", Estimate(0.03, 0.01, 0.005, 0.055, 5.0, 3), -1)
    assert one.against(1)
    assert not one.against(10)


def test_a_growth_has_its_own_error() -> None:
    """The gap differs between seeds, its growth does not."""
    table = made_up(-0.1, spread=0.0)
    shift = {0: -0.2, 1: 0.0, 2: 0.2}
    a = table["method"] == "a"
    table.loc[a, "sum"] += 100 * table.loc[a, "seed"].map(shift)
    table.loc[a & (table["length"] == 1024), "sum"] -= 1
    data = Data(table)
    assert data.gap("a", "b", 1024).error > 0.1
    growth = data.growth("a", "b", 64, 1024)
    assert growth.value == pytest.approx(-0.01)
    assert growth.error < 1e-6
    # A change leaves out the training length itself.
    [one] = changes("a", 1, at=("train", "longest"))(Data(made_up(0.0)))
    assert one.points == (("a", 64, 64), ("a", 64, 1024))


# Recomputed independently from the runs' own seeds.
RECOMPUTED = [
    ("beats-dape-far", "books", "reproduced", -0.019, 0.006),
    ("beats-dape-far", "LaTeX", "reproduced", -0.124, 0.030),
    ("gain-grows", "LaTeX", "reproduced", -0.056, 0.011),
    ("improves-with-length", "LaTeX", "unclear", -0.044, 0.015),
    ("improves-with-length", "books", "unclear", 0.000, 0.001),
    ("kernel-1", "LaTeX", "reproduced", -0.048, 0.012),
    ("kernel-1", "books", "out of reach", -0.019, 0.009),
    ("best", "books", "unclear", -0.054, 0.010),
]


@pytest.mark.parametrize(("name", "corpus", "expected", "value", "error"), RECOMPUTED)
def test_recomputed_verdicts(name: str, corpus: str, expected: str, value: float, error: float) -> None:
    [verdict] = [v for v in ledger("dape_v2").verdicts() if v.claim.name == name]
    [own] = [one for one in verdict.judgements if one.corpus == corpus]
    assert own.comparison is not None
    assert own.word == expected
    assert own.comparison.estimate.value == pytest.approx(value, abs=6e-4)
    assert round(own.comparison.estimate.error, 3) <= error


def test_every_claim_has_a_word_or_a_reason() -> None:
    for paper in ("dape_v2", "beyond"):
        for verdict in ledger(paper).verdicts():
            assert verdict.judgements, verdict.claim.name
            for one in verdict.judgements:
                if one.comparison is None:
                    assert one.word in ("not run", "out of reach"), verdict.claim.name
                else:
                    assert math.isfinite(one.comparison.estimate.value)
