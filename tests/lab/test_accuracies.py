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
from dape.lab.stats import seed_variance, share_error

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


def solver(method: str, task: str = "associative_recall") -> Solver:
    return Solver(task, 1, method)


def over_tasks(accuracies: dict[tuple[str, str], list[float]], *, trained: bool = True) -> Accuracies:
    """Accuracies by task and method, one for each seed, with the seed variance of all of them."""
    results = Results({"kind": "tasks"})
    protocol = {"settings": {"protocol": {"train_lengths": [24], "test_lengths": [48]}}} if trained else {}
    for (task, method), by_seed in accuracies.items():
        for seed, share in enumerate(by_seed):
            row = {"metric": "accuracy", "eval_length": 48, "value": share, "count": SAMPLES}
            mean = {"metric": "mean_accuracy", "value": share}
            run = {"corpus": task, "method": method, "seed": seed, "layers": 1, **protocol}
            results.add(run, [row, mean])
    return Accuracies(results, seed_variance([results]))


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


# Tasks that some seeds learn, that none learns (each answer is right half of the time), and that all solve.
PARTIAL = {("reverse_string", "kerple"): [0.6, 0.8, 0.7], ("reverse_string", "alibi"): [0.9, 0.6, 0.7]}
GUESSING = {("even_pairs", "kerple"): [0.5, 0.501, 0.499], ("parity_check", "kerple"): [0.5, 0.499, 0.501]}
SOLVED = {("bucket_sort", "kerple"): [1.0, 0.999, 1.0], ("bucket_sort", "alibi"): [0.999, 1.0, 1.0]}
KNOWN = {**PARTIAL, **GUESSING, **SOLVED}


def test_one_seed_has_the_variance_of_tasks_that_some_seeds_learn() -> None:
    """It was pooled over all tasks, and next to zero where several of them are solved: one seed decided alone."""
    tasks = {("missing_duplicate_string", "kerple"): [0.5], ("missing_duplicate_string", "alibi"): [0.7]}
    data = over_tasks({**KNOWN, **tasks})
    one, other = (solver(method, "missing_duplicate_string") for method in ("alibi", "kerple"))
    assert data.accuracy(one).error > 0.1
    gap = data.difference(one, other)
    assert gap.error == pytest.approx(math.hypot(data.accuracy(one).error, data.accuracy(other).error))
    assert gap.value / gap.error < 2
    alone = Accuracies(data.results).difference(one, other)
    assert alone.value / alone.error > 3, "by the samples alone it would be decided"


def test_seeds_that_agree_are_judged_by_others_that_agree() -> None:
    data = over_tasks(
        {**KNOWN, ("cycle_navigation", "kerple"): [0.2] * 3, ("odds_first", "kerple"): [1.0] * 3}
    )
    for task in ("cycle_navigation", "odds_first"):
        alone = Accuracies(data.results).accuracy(solver("kerple", task))
        assert data.accuracy(solver("kerple", task)).error == pytest.approx(alone.error, rel=0.01)


def test_methods_of_one_task_share_its_seed_variance() -> None:
    """Two seeds say little by themselves; the other methods of the task were trained with theirs."""
    seeds = {("reverse_string", "kerple"): [0.60, 0.61], ("reverse_string", "alibi"): [0.55, 0.85]}
    data = over_tasks(seeds)
    lucky = data.accuracy(solver("kerple", "reverse_string"))
    assert lucky.error > Accuracies(data.results).accuracy(solver("kerple", "reverse_string")).error * 1.5
    # It does not count for itself: with no other method nothing is borrowed.
    data = over_tasks({("reverse_string", "kerple"): [0.60, 0.61]})
    assert data.known.samples
    one = solver("kerple", "reverse_string")
    assert data.accuracy(one) == Accuracies(data.results).accuracy(one)


def test_what_is_not_trained_has_no_seed_variance() -> None:
    constructed = over_tasks({("construction", "dape1x2-nope"): [1.0]}, trained=False)
    data = Accuracies(constructed.results, over_tasks(KNOWN).known)
    one = solver("dape1x2-nope", "construction")
    assert data.accuracy(one).error == pytest.approx(share_error(1.0, SAMPLES))
