"""Accuracies of generated tasks: a mean and its error are of the same lengths, and so are both sides of a difference."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dape.lab.accuracies import Accuracies, Solver, leads
from dape.lab.folders import Folder
from dape.lab.records import Results
from dape.lab.rules import more_accurate
from dape.lab.selection import Data
from dape.lab.stats import share_error

SAMPLES = 128


def made(
    *methods: tuple[str, dict[int, float]], answers: bool = False, steps: dict[str, int] | None = None
) -> Accuracies:
    """Methods with their accuracies by length, trained at 24."""
    results = Results({"kind": "tasks"})
    for method, by_length in methods:
        rows = []
        for length, share in by_length.items():
            row = {"metric": "accuracy", "eval_length": length, "value": share, "count": SAMPLES}
            right = [int(index < share * SAMPLES) for index in range(SAMPLES)]
            rows.append({**row, "windows": right, "tokens": [1] * SAMPLES} if answers else row)
        run = {"corpus": "associative_recall", "method": method, "seed": 0, "layers": 1}
        protocol = {"train_lengths": [24], "test_lengths": list(by_length)}
        if steps:
            protocol["steps"] = steps[method]
        results.add({**run, "settings": {"protocol": protocol}}, rows)
    return Accuracies(results)


def solver(method: str) -> Solver:
    return Solver("associative_recall", 1, method)


def test_the_error_of_a_mean_beyond_training_is_of_the_lengths_beyond_training() -> None:
    """Easy lengths within training, whose errors are near zero, made it half as large."""
    accuracy = made(("rope", {12: 1.0, 24: 1.0, 48: 0.6, 96: 0.5})).accuracy(solver("rope"))
    assert accuracy.value == pytest.approx(0.55)
    squares = [share_error(share, SAMPLES) ** 2 for share in (0.6, 0.5)]
    assert accuracy.error == pytest.approx(math.sqrt(sum(squares)) / 2)
    drawn = np.random.default_rng(0).binomial(SAMPLES, [0.6, 0.5], (4000, 2)).mean(1) / SAMPLES
    assert accuracy.error == pytest.approx(drawn.std(), rel=0.1)


@pytest.mark.parametrize("answers", [False, True])
def test_a_difference_is_over_the_lengths_that_both_have(answers: bool) -> None:
    data = made(("rope", {48: 0.75}), ("kerple", {48: 0.5, 96: 0.25, 192: 0.25}), answers=answers)
    assert data.difference(solver("rope"), solver("kerple")).value == pytest.approx(0.25)
    data = made(("rope", {12: 1.0, 96: 0.5}), ("kerple", {48: 0.75, 96: 0.25}), answers=answers)
    assert data.difference(solver("rope"), solver("kerple")).value == pytest.approx(0.25)


def test_trainings_by_different_protocols_are_not_compared() -> None:
    """While longer trainings replace shorter ones, both are in the results of a task."""
    steps = {"rope": 300, "kerple": 5000, "alibi": 5000}
    data = made(("rope", {48: 0.75}), ("kerple", {48: 1.0}), ("alibi", {48: 0.5}), steps=steps)
    assert [one.label for one in data.rows] == [
        "rope (300 steps)",
        "kerple (5000 steps)",
        "alibi (5000 steps)",
    ]
    folder = Folder(Path("papers/paper/tasks"), "Tasks", results={"laptop": data.results})
    found = more_accurate(Data(folder), "kerple", ["rope", "alibi"])
    (finding,) = found.findings
    assert finding.value == pytest.approx(0.5)
    assert found.missing == ["rope (5000 steps) on associative_recall"]


def test_more_test_lengths_are_the_same_training() -> None:
    data = made(("rope", {48: 0.75}), ("kerple", {48: 1.0, 96: 0.5}), steps={"rope": 300, "kerple": 300})
    assert [one.label for one in data.rows] == ["rope", "kerple"]


def test_the_lead_of_a_method_is_said_where_it_is_decided() -> None:
    steady = made(("rope", {48: 0.5}), ("kerple", {48: 0.25}), ("alibi", {48: 0.4921875}), answers=True)
    said = leads(steady, "associative_recall")
    assert said.startswith(
        "on associative recall rope is better than kerple by 25.0 ± 3.8, not clearly alibi (one seed"
    )
    guessing = made(("rope", {48: 0.0}), ("kerple", {48: 0.0}), answers=True)
    assert leads(guessing, "associative_recall").endswith("no method is better than the best constant answer")
