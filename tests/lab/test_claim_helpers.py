"""Every helper of claims on made-up results in which its verdict must come out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
from judging import AB, BAD, GOOD, SAME, A, B, C, judged, losses

from dape.lab.accuracies import has_learned
from dape.lab.evidence import FAILS, HOLDS, NOT_RUN, UNDECIDED, Evidence, Finding
from dape.lab.kinds.timing import Times
from dape.lab.records import Results
from dape.lab.stats import ERRORS, Estimate, searched
from dape.tasks import build_task

LANGUAGE = [
    # every comparison for; one against; within two errors
    ("lower", {A: GOOD, B: SAME}, AB, HOLDS),
    ("lower", {A: SAME, B: GOOD}, AB, FAILS),
    ("lower", {A: (2.0, 1.9, 2.3), B: SAME}, AB, FAILS),
    ("lower", {A: (2.0, 1.9, 2.3), B: SAME}, {**AB, "at": "longest"}, FAILS),
    ("lower", {A: (2.0, 1.9, 2.3), B: SAME}, {**AB, "at": [1, 2]}, HOLDS),
    ("lower", {A: (2.0, 1.9, 2.3), B: SAME}, {**AB, "need": "some"}, HOLDS),
    ("lower", {A: (2.2, 1.9, 1.8), B: SAME}, AB, UNDECIDED),
    ("lower", {A: SAME, B: SAME}, AB, UNDECIDED),
    # by a factor: e^0.2 = 1.22 at the training length
    ("lower", {A: GOOD, B: SAME}, {**AB, "at": "train", "factor": 1.2}, HOLDS),
    ("lower", {A: GOOD, B: SAME}, {**AB, "at": "train", "factor": 1.25}, FAILS),
    ("lower", {A: (2.23,), B: (2.2,)}, {**AB, "factor": 0.95}, HOLDS),
    ("lower", {A: (2.28,), B: (2.2,)}, {**AB, "factor": 0.95}, FAILS),
    # several others, one of them missing, which a counterexample does not need
    ("lower", {A: GOOD, B: SAME, C: BAD}, {"a": A, "b": [B, C]}, HOLDS),
    ("lower", {A: GOOD, B: SAME}, {"a": A, "b": [B, C]}, NOT_RUN),
    ("lower", {A: BAD, B: SAME}, {"a": A, "b": [B, C]}, FAILS),
    ("lower", {B: SAME}, AB, NOT_RUN),
    ("lower", {A: GOOD, B: SAME}, {**AB, "corpus": ["arxiv", "books3"]}, NOT_RUN),
    ("lower", {A: GOOD, B: SAME}, {**AB, "corpus": "arxiv"}, HOLDS),
    ("lower", {A: GOOD, B: SAME}, {**AB, "view": "equal-time"}, NOT_RUN),
    ("lower", {A: GOOD, B: SAME, f"{C}/leak": SAME, C: BAD}, {"pairs": [[A, B], [A, C]]}, HOLDS),
    ("lower", {f"{A}/width 10": GOOD, f"{A}/width 21": BAD, f"{B}/width 64": SAME},
     {"a": {"method": A, "variant": "width 10"}, "b": {"method": B, "variant": "width 64"}}, HOLDS),
    ("lower", {f"{A}/small": GOOD, f"{A}/big": GOOD, f"{B}/small": SAME, f"{B}/big": SAME}, AB, HOLDS),
    ("lower", {f"{A}/small": GOOD, f"{A}/big": BAD, f"{B}/small": SAME, f"{B}/big": SAME}, AB, FAILS),
    ("near", {A: (2.2, 2.2, 2.2), B: SAME}, {**AB, "within": 1.05}, HOLDS),
    ("near", {A: GOOD, B: SAME}, {**AB, "within": 1.05}, FAILS),
    ("near", {A: (2.2 + math.log(1.05),) * 3, B: SAME}, {**AB, "within": 1.05}, UNDECIDED),
    ("falls", {A: GOOD}, {"a": A}, HOLDS),
    ("falls", {A: BAD}, {"a": A}, FAILS),
    ("falls", {A: SAME}, {"a": A}, UNDECIDED),
    ("falls", {A: BAD, f"{A}/leak": GOOD}, {"a": A}, FAILS),
    ("falls", {B: GOOD}, {"a": A}, NOT_RUN),
    ("rises", {A: BAD}, {"a": A}, HOLDS),
    ("rises", {A: BAD}, {"a": A, "factor": 2.0}, FAILS),
    ("rises", {A: BAD, B: GOOD}, {"a": [A, B]}, FAILS),
    ("at_most", {f"{A}/leak": (0.01, 0.02, 0.9)}, {"a": {"method": A, "variant": "leak"}, "perplexity": 2.0, "at": [1, 2]}, HOLDS),
    ("at_most", {f"{A}/leak": (0.01, 0.02, 1.9)}, {"a": {"method": A, "variant": "leak"}, "perplexity": 2.0}, FAILS),
    ("at_most", {A: (0.01, 0.02, 1.9)}, {"a": {"method": A, "variant": "leak"}, "perplexity": 2.0}, NOT_RUN),
    ("ordered", {C: BAD, B: SAME, A: GOOD}, {"methods": [C, B, A]}, HOLDS),
    ("ordered", {C: BAD, B: SAME, A: GOOD}, {"methods": [C, A, B]}, FAILS),
    ("some_lower", {A: GOOD, B: SAME, C: BAD}, {"methods": [A, C], "b": B}, HOLDS),
    ("some_lower", {A: SAME, B: GOOD, C: BAD}, {"methods": [A, C], "b": B}, FAILS),
    ("some_lower", {A: GOOD, B: SAME}, {"methods": [A, C], "b": B}, NOT_RUN),
    ("some_lower", {A: GOOD, B: SAME, C: BAD}, {"methods": [A, B], "b": C, "unit": "settings"}, HOLDS),
    ("some_lower", {A: GOOD, B: SAME, C: BAD}, {"methods": [C, B], "b": A, "unit": "settings"}, FAILS),
    ("gain_grows", {A: GOOD, B: BAD}, AB, HOLDS),
    ("gain_grows", {A: BAD, B: GOOD}, AB, FAILS),
    ("gain_grows", {A: SAME, B: (2.6, 2.6, 2.6)}, AB, UNDECIDED),
    ("gain_grows", {A: (2.0,), B: (2.5,)}, AB, NOT_RUN),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "values", "arguments", "verdict"), LANGUAGE)
def test_rules_on_language_models(
    tmp_path: Path, rule: str, values: dict, arguments: dict, verdict: str
) -> None:
    found = judged(tmp_path, made_up.language(losses(values)), rule, **arguments)
    assert found.verdict == verdict, found.sentence
    assert found.sentence.endswith(".")


def two_settings(first: dict[str, float], second: dict[str, float]) -> dict:
    rows = {name: (loss,) for name, loss in first.items()}
    others = {name: (loss,) for name, loss in second.items()}
    return made_up.language({**losses(rows), **losses(others, corpus="books")})


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ({A: 2.0, B: 2.2}, {A: 2.2, B: 2.0}, HOLDS),
        ({A: 2.0, B: 2.2}, {A: 2.0, B: 2.2}, FAILS),
        ({A: 2.0, B: 2.2}, {A: 2.0, B: 2.0}, UNDECIDED),
        ({A: 2.0, B: 2.2}, {A: 2.0}, NOT_RUN),
    ],
)
def test_best_varies(tmp_path: Path, first: dict, second: dict, verdict: str) -> None:
    found = judged(tmp_path, two_settings(first, second), "best_varies", methods=[A, B])
    assert found.verdict == verdict, found.sentence


def by_training_length(rows: dict[tuple[str, int], dict[int, float]]) -> made_up.Losses:
    return {("latex", train_length, method, ""): row for (method, train_length), row in rows.items()}


OWN = {
    (A, 64): {64: 2.0, 256: 1.9},
    (A, 256): {64: 2.1, 256: 1.8},
    (C, 64): {64: 2.1, 256: 4.0},
    (C, 256): {64: 2.3, 256: 2.0},
}
SHORT = {"method": A, "train": "shortest"}


@pytest.mark.parametrize(
    ("rule", "arguments", "verdict"),
    [
        ("best_train_length", {"a": A}, HOLDS),
        ("best_train_length", {"a": C}, HOLDS),
        ("best_train_length", {"a": B}, NOT_RUN),
        ("lower", {"a": SHORT, "b": {"method": C, "train": "longest"}, "train": "shortest"}, HOLDS),
        ("lower", {"a": SHORT, "b": {"method": A, "train": "4x"}, "train": "shortest"}, FAILS),
        ("lower", {"a": SHORT, "b": {"method": A, "train": "8x"}, "train": "shortest"}, NOT_RUN),
        ("lower", {"a": {"method": C, "train": "shortest"}, "b": {"method": C, "train": "longest"}, "train": "shortest", "at": "train"}, HOLDS),
    ],
)  # fmt: skip
def test_rules_across_training_lengths(tmp_path: Path, rule: str, arguments: dict, verdict: str) -> None:
    found = judged(tmp_path, made_up.language(by_training_length(OWN)), rule, **arguments)
    assert found.verdict == verdict, found.sentence


def test_a_model_that_is_best_at_no_length_of_its_own_is_against(tmp_path: Path) -> None:
    rows = {(A, 64): {64: 2.0, 256: 1.7}, (A, 256): {64: 2.1, 256: 1.8}}
    found = judged(tmp_path, made_up.language(by_training_length(rows)), "best_train_length", a=A)
    assert found.verdict == FAILS
    assert "trained at 256" in found.sentence


def test_the_error_is_paired_and_clustered_by_document(tmp_path: Path) -> None:
    """Windows of a document that move together count once: the same difference is then undecided."""
    base = made_up.language(losses({A: (2.0,), B: (2.02,)}), noise=0.0)
    together = json.loads(json.dumps(base))
    documents = base["documents"]["latex"]
    swing = [0.05 if document % 2 else -0.05 for document in documents]
    apart = [0.05 if window % 2 else -0.05 for window in range(len(documents))]
    for found, moves in ((together, swing), (base, apart)):
        (row,) = made_up.rows_of(found, method=A)
        row["windows"] = [loss + move for loss, move in zip(row["windows"], moves, strict=True)]
    assert judged(tmp_path, together, "lower", **AB).verdict == UNDECIDED
    assert judged(tmp_path, base, "lower", **AB).verdict == HOLDS


def test_seeds_that_disagree_leave_it_undecided(tmp_path: Path) -> None:
    """One seed has the documents' error alone; with several, their spread counts as well."""
    values = losses({A: (2.0,), B: (2.02,)})
    for seeds, spread, verdict in (
        ((0,), 0.05, HOLDS),
        ((0, 1), 0.0005, HOLDS),
        ((0, 1), 0.05, UNDECIDED),
        ((0, 1, 2, 3), 0.05, UNDECIDED),
    ):
        found = judged(tmp_path, made_up.language(values, seeds=seeds, spread=spread), "lower", **AB)
        assert found.verdict == verdict, found.sentence
        assert f"{len(seeds)} seed" in found.sentence


def test_only_seeds_in_common_are_paired(tmp_path: Path) -> None:
    results = made_up.language(losses({A: (2.0,), B: (2.2,)}), seeds=(0, 1))
    results = made_up.kept(results, lambda run: (run["method"], run["seed"]) not in ((A, 0), (B, 1)))
    assert judged(tmp_path, results, "lower", **AB).verdict == UNDECIDED


def test_one_document_says_nothing_of_the_error(tmp_path: Path) -> None:
    results = made_up.language(losses({A: (2.0,), B: (2.2,)}), documents=[0] * 16)
    assert judged(tmp_path, results, "lower", **AB).verdict == UNDECIDED


def test_windows_that_do_not_fit_the_documents_are_an_error(tmp_path: Path) -> None:
    results = made_up.language(losses({A: (2.0,), B: (2.2,)}))
    results["documents"]["latex"].pop()
    with pytest.raises(ValueError, match="cannot be paired"):
        judged(tmp_path, results, "lower", **AB)


def test_diverged_runs_are_missing(tmp_path: Path) -> None:
    results = made_up.language(losses({A: GOOD, B: SAME}))
    for row in made_up.rows_of(results, method=B):
        row["value"] = None
    assert judged(tmp_path, results, "lower", **AB).verdict == NOT_RUN


TASKS = [
    ("more_accurate", {("x", A): 0.9, ("x", B): 0.5}, {"a": A, "b": B}, HOLDS),
    ("more_accurate", {("x", A): 0.5, ("x", B): 0.9}, {"a": A, "b": B}, FAILS),
    ("more_accurate", {("x", A): 0.5, ("x", B): 0.51}, {"a": A, "b": B}, UNDECIDED),
    ("more_accurate", {("x", A): 0.9}, {"a": A, "b": B}, NOT_RUN),
    ("more_accurate", {("x", A): 0.9, ("x", B): 0.5}, {"a": A, "b": B, "tasks": ["x", "y"]}, NOT_RUN),
    ("more_accurate", {("x", A): 0.9, ("x", B): 0.5, ("y", A): 0.5, ("y", B): 0.9}, {"a": A, "b": B, "need": 1}, HOLDS),
    ("more_accurate", {("x", A): 0.9, ("x", B): 0.5, ("y", A): 0.5, ("y", B): 0.9}, {"a": A, "b": B, "need": 2}, FAILS),
    ("more_accurate", {("x", A): 0.9, ("x", B): 0.5, ("y", A): 0.5, ("y", B): 0.5}, {"a": A, "b": B, "need": 2}, UNDECIDED),
    ("more_accurate", {("x", A): 0.5, ("x", B): 0.9}, {"a": A, "b": B, "need": 1, "tasks": ["x", "y"]}, NOT_RUN),
    ("more_accurate", {("x", A): 0.9, ("x", B): 0.5}, {"a": A, "b": B, "layers": 2}, NOT_RUN),
    ("accuracy_bound", {("x", A): 1.0}, {"a": A, "least": 0.95}, HOLDS),
    ("accuracy_bound", {("x", A): 0.8}, {"a": A, "least": 0.95}, FAILS),
    ("accuracy_bound", {("x", A): 0.95}, {"a": A, "least": 0.95}, UNDECIDED),
    ("accuracy_bound", {("x", B): 0.95}, {"a": A, "least": 0.95}, NOT_RUN),
    ("best_varies_by_task", {("x", A): 0.9, ("x", B): 0.5, ("y", A): 0.5, ("y", B): 0.9}, {"methods": [A, B]}, HOLDS),
    ("best_varies_by_task", {("x", A): 0.9, ("x", B): 0.5, ("y", A): 0.9, ("y", B): 0.5}, {"methods": [A, B]}, FAILS),
    ("best_varies_by_task", {("x", A): 0.9, ("x", B): 0.5}, {"methods": [A, B]}, NOT_RUN),
    ("best_is_among", {("x", A): 0.9, ("x", B): 0.5, ("x", C): 0.7}, {"methods": [A, B], "others": [C]}, HOLDS),
    ("best_is_among", {("x", A): 0.6, ("x", B): 0.5, ("x", C): 0.7}, {"methods": [A, B], "others": [C]}, FAILS),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "accuracy", "arguments", "verdict"), TASKS)
def test_rules_on_tasks(tmp_path: Path, rule: str, accuracy: dict, arguments: dict, verdict: str) -> None:
    found = judged(tmp_path, made_up.tasks(accuracy), rule, **arguments)
    assert found.verdict == verdict, found.sentence


def test_accuracies_of_few_samples_or_disagreeing_seeds_are_undecided(tmp_path: Path) -> None:
    accuracy = {("x", A): 0.8, ("x", B): 0.6}
    assert judged(tmp_path, made_up.tasks(accuracy, samples=10), "more_accurate", **AB).verdict == UNDECIDED
    results = made_up.tasks(accuracy, seeds=(0, 1))
    for seed, share in enumerate((0.65, 0.95)):
        for row in made_up.rows_of(results, method=A, seed=seed):
            row["value"] = share
    assert judged(tmp_path, results, "more_accurate", **AB).verdict == UNDECIDED


def test_a_change_counts_from_where_all_scored_tokens_have_text_before_them(tmp_path: Path) -> None:
    # Trained at 64 it gains until 128 alone, where the 64 scored tokens have 64 before them; then it loses.
    results = made_up.language(losses({A: (2.2, 2.0, 2.1)}))
    assert judged(tmp_path, results, "falls", a=A).verdict == HOLDS
    results["settings"]["last"] = 64
    found = judged(tmp_path, results, "falls", a=A)
    assert found.verdict == FAILS
    assert "at 128 and" in found.sentence
    found = judged(tmp_path, results, "rises", a=A, at=[2])
    assert (found.verdict, found.sentence) == (NOT_RUN, f"Not run: {A} beyond 128 tokens.")
    results["settings"]["last"] = 32
    assert judged(tmp_path, results, "falls", a=A).verdict == HOLDS


def test_what_nobody_has_learned_is_said(tmp_path: Path) -> None:
    even, stack = "even_pairs", "stack_manipulation"
    accuracy = {(even, A): 0.99, (even, B): 0.5, (stack, A): 0.505, (stack, B): 0.5}
    results = made_up.tasks(accuracy, samples=200)
    found = judged(tmp_path, results, "more_accurate", **AB, tasks=stack)
    assert "(stack_manipulation, neither learned)" in found.sentence
    assert "neither" not in judged(tmp_path, results, "more_accurate", **AB, tasks=even).sentence
    assert has_learned(even, Estimate(0.6, 0.04))
    assert not has_learned(even, Estimate(0.6, 0.06))
    # Always the same answer is right more often than a guess there.
    brackets = "modular_arithmetic_brackets"
    assert build_task(brackets).constant_accuracy > build_task(brackets).random_accuracy
    assert not has_learned(brackets, Estimate(build_task(brackets).constant_accuracy, 0.01))


SIZES = {("small", A): 1.5, ("small", B): 1.0, ("big", A): 11.0, ("big", B): 10.0}


@pytest.mark.parametrize(
    ("rule", "times", "spread", "arguments", "verdict"),
    [
        ("slower", SIZES, 0.01, {"a": A, "b": B}, HOLDS),
        ("slower", SIZES, 0.01, {"a": B, "b": A}, FAILS),
        ("slower", SIZES, 0.2, {"a": A, "b": B}, UNDECIDED),
        ("slower", SIZES, None, {"a": A, "b": B}, UNDECIDED),
        ("slower", SIZES, 0.01, {"a": A, "b": C}, NOT_RUN),
        ("slower", SIZES, 0.01, {"a": A, "b": B, "sizes": ["small", "huge"]}, NOT_RUN),
        ("slower", SIZES, 0.01, {"a": A, "b": B, "factor": 1.3}, FAILS),
        ("overhead_falls", SIZES, 0.01, {"a": A, "b": B}, HOLDS),
        ("overhead_falls", {**SIZES, ("big", A): 18.0}, 0.01, {"a": A, "b": B}, FAILS),
        ("overhead_falls", {**SIZES, ("big", A): 15.0}, 0.01, {"a": A, "b": B}, UNDECIDED),
        ("overhead_falls", {("small", A): 1.5, ("small", B): 1.0}, 0.01, {"a": A, "b": B}, NOT_RUN),
    ],
)
def test_rules_on_times(
    tmp_path: Path, rule: str, times: dict, spread: float | None, arguments: dict, verdict: str
) -> None:
    found = judged(tmp_path, made_up.timing(times, spread=spread), rule, **arguments)
    assert found.verdict == verdict, found.sentence


@pytest.mark.parametrize(
    ("spread", "arguments", "verdict"),
    [
        (0.01, {"a": A, "times": 16, "factor": 2.0}, HOLDS),
        (0.01, {"a": A, "times": 4, "factor": 2.0}, FAILS),
        (0.5, {"a": A, "times": 16, "factor": 2.0}, UNDECIDED),
        (0.01, {"a": A, "times": 8, "factor": 2.0}, NOT_RUN),
        (0.01, {"a": B, "times": 4}, NOT_RUN),
    ],
)
def test_steps_that_take_longer_when_the_window_is(
    tmp_path: Path, spread: float, arguments: dict, verdict: str
) -> None:
    times = {("small", A, 64): 1.0, ("small", A, 256): 1.5, ("small", A, 1024): 2.5}
    results = made_up.timing(times, spread=spread, base=A, base_length=64)
    found = judged(tmp_path, results, "slower_when_longer", **arguments)
    assert found.verdict == verdict, found.sentence
    if verdict == HOLDS:
        assert "1.0 ms for a step at length 64 and 2.5 ms at 1024" in found.sentence


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({(A, 512): (0.5, 0.55, 0.6), (B, 512): (0.1, 0.15, 0.2)}, HOLDS),
        ({(A, 512): (0.1, 0.15, 0.2), (B, 512): (0.5, 0.55, 0.6)}, FAILS),
        ({(A, 512): (0.1, 0.5, 0.9), (B, 512): (0.1, 0.4, 0.7)}, UNDECIDED),
        ({(A, 512): (0.5,), (B, 512): (0.1,)}, UNDECIDED),
        ({(A, 512): (0.5, 0.6)}, NOT_RUN),
    ],
)
def test_rules_on_maps(tmp_path: Path, shares: dict, verdict: str) -> None:
    found = judged(tmp_path, made_up.maps(shares), "sink_higher", a=A, b=B)
    assert found.verdict == verdict, found.sentence


def test_layers_that_differ_are_no_error_of_the_mean_but_seeds_that_do_are(tmp_path: Path) -> None:
    shares = {(A, 64): (0.10, 0.12, 0.11, 0.11), (B, 64): (0.06, 0.08, 0.07, 0.07)}
    results = made_up.maps(shares)
    upper = [{**row, "layer": 1, "value": row["value"] + 0.6} for row in results["rows"]]
    results["rows"] += upper
    assert judged(tmp_path, results, "sink_higher", a=A, b=B).verdict == HOLDS
    runs = results["runs"]
    results["runs"] = [*runs, *({**run, "seed": 1} for run in runs)]
    results["rows"] += [
        {
            **row,
            "run": row["run"] + len(runs),
            "value": row["value"] + (0.3 if runs[row["run"]]["method"] == A else -0.05),
        }
        for row in results["rows"]
    ]
    assert judged(tmp_path, results, "sink_higher", a=A, b=B).verdict == UNDECIDED


def test_ratios_of_each_round_decide_whatever_disturbed_a_round_as_a_whole(tmp_path: Path) -> None:
    results = made_up.timing(SIZES, spread=0.01)
    for row in made_up.rows_of(results, metric="milliseconds"):
        row["error"] = 0.5 * row["value"]
    assert judged(tmp_path, results, "slower", a=A, b=B).verdict == HOLDS
    for row in made_up.rows_of(results, metric="ratio"):
        row["error"] = 0.5 * row["value"]
    assert judged(tmp_path, results, "slower", a=A, b=B).verdict == UNDECIDED


def test_places_are_told_by_what_sets_them_apart() -> None:
    one = Times(Results(made_up.timing(SIZES)))
    assert [one.name_of(place) for place in one.times] == ["small", "big"]
    times = {("small", A, 64): 1.0, ("small", A, 128): 2.0}
    many = Times(Results(made_up.timing(times, base=A, base_length=64)))
    assert [many.name_of(place) for place in many.times] == ["length 64", "length 128"]
    assert many.base == f"{A} at 64"


def test_seeds_that_both_have_are_counted(tmp_path: Path) -> None:
    results = made_up.language(losses({A: GOOD, B: SAME}), seeds=(0, 1, 2))
    results = made_up.kept(results, lambda run: run["method"] == A or run["seed"] < 2)
    assert "2 seeds)" in judged(tmp_path, results, "lower", **AB).sentence


def test_a_time_measured_once_decides_nothing(tmp_path: Path) -> None:
    results = made_up.timing(SIZES, spread=0.0, rounds=1)
    assert judged(tmp_path, results, "slower", a=A, b=B).verdict == UNDECIDED


def test_most() -> None:
    findings = [Finding(value, 1.0, "") for value in (9.0, 9.0, -9.0)]
    assert Evidence(findings, need="most").verdict()[0] == HOLDS
    assert Evidence(findings, ["one"], need="most").verdict()[0] == NOT_RUN
    assert Evidence(findings[1:], need="most").verdict()[0] == FAILS


def test_searching_many_comparisons_raises_the_bound() -> None:
    assert searched(1) == pytest.approx(ERRORS)
    assert 3.0 < searched(24) < 3.3
    chance = [Finding(value, 1.0, "") for value in (2.5, *[0.0] * 39)]
    assert Evidence(chance, need="some").verdict()[0] == UNDECIDED
    against = [Finding(value, 1.0, "") for value in (-2.5, *[9.0] * 39)]
    assert Evidence(against).verdict()[0] == UNDECIDED


POOLED = [Finding(0.5, 1.0, "", setting=place) for place in range(16)]


@pytest.mark.parametrize(
    ("findings", "strict", "pooled"),
    [
        # Each within its error, all together beyond: 0.5 ± 1/4.
        (POOLED, UNDECIDED, UNDECIDED),
        (POOLED + POOLED[:0] + [replace(f, setting=f.setting + 16) for f in POOLED], UNDECIDED, HOLDS),
        ([replace(f, value=-1.0) for f in POOLED], UNDECIDED, FAILS),
        # Of one setting they have one cause, however many they are.
        ([replace(f, setting=0) for f in POOLED * 9], UNDECIDED, UNDECIDED),
        # One exception far out does not make the mean.
        ([Finding(-4.0, 1.0, "", setting=99), *([Finding(5.0, 1.0, "", setting=n) for n in range(9)])], FAILS, HOLDS),
        # An error that is known from two documents alone counts for less.
        ([replace(f, value=3.0, dof=1, setting=0) for f in POOLED], UNDECIDED, UNDECIDED),
        # One comparison is its own mean, and errors that nobody knows have none.
        (POOLED[:1], UNDECIDED, ""),
        ([Finding(1.0, math.nan, ""), Finding(1.0, 1.0, "")], UNDECIDED, ""),
    ],
)  # fmt: skip
def test_all_comparisons_together(findings: list, strict: str, pooled: str) -> None:
    evidence = Evidence(findings)
    assert (evidence.verdict()[0], evidence.pooled()[0]) == (strict, pooled)
    # Of claims that are not of every comparison, and of those that miss some, there is no mean.
    assert Evidence(findings, need="some").pooled() == Evidence(findings, ["one"]).pooled() == ("", "")


def test_a_large_lead_over_one_method_does_not_stand_for_another() -> None:
    """Pairs of methods are pooled separately: the claim is about each of them."""
    weak = [Finding(9.0, 0.1, "", setting=n, methods=("a", "weak")) for n in range(4)]
    strong = [replace(f, value=0.0, methods=("a", "strong")) for f in weak]
    assert Evidence(weak).pooled() == (HOLDS, "+9.000 ± 0.050 for it, over 4 settings")
    verdict, text = Evidence(weak + strong).pooled()
    assert (verdict, text) == (
        UNDECIDED,
        "+0.000 ± 0.050 for it, over 4 settings; the weakest of 2: a against strong",
    )
    # One of many pairs that is against it by chance decides nothing: the bound is that of a search.
    against = [replace(f, value=-0.11, methods=("a", "strong")) for f in weak]
    others = [replace(f, methods=("a", str(n))) for n in range(9) for f in weak]
    assert (Evidence(against + weak).pooled()[0], Evidence(against).pooled()[0]) == (UNDECIDED, FAILS)
    assert Evidence(against + others).pooled()[0] == UNDECIDED


def test_how_far_settings_differ_is_said() -> None:
    apart = [Finding(value, 0.01, "", setting=value) for value in (0.1, 0.5, 0.9)]
    verdict, text = Evidence(apart).pooled()
    assert (verdict, text) == (HOLDS, "+0.500 ± 0.006 for it, over 3 settings, which differ by 0.400")


def recall_results(gain_hit: float, gain_other: float, seeds=(0, 1)) -> dict:
    """A has that much less loss a token than B, on the 30 hits and on the 70 other tokens of each of eight documents."""
    results = made_up.language(losses({A: (2.0,), B: (2.2,)}), seeds=seeds)
    for number, run in enumerate(results["runs"]):
        for name, tokens, loss, gain in (("hit", 30, 1.0, gain_hit), ("other", 70, 3.0, gain_other)):
            mean = loss - gain * (run["method"] == A)
            own = 0.01 * (run["method"] == A)
            sums = [tokens * (mean + own * (-1) ** document) for document in range(8)]
            row = {"run": number, "metric": "loss", "slice": name, "eval_length": 64, "value": mean}
            results["rows"].append({**row, "error": 0.01, "windows": sums, "tokens": [tokens] * 8})
    return results


@pytest.mark.parametrize(
    ("gains", "verdict", "share"),
    [((0.5, 0.1), HOLDS, "68 %"), ((0.1, 0.1), FAILS, "30 %"), ((0.7, 0.3), UNDECIDED, "50 %")],
)
def test_a_gain_that_is_recall(tmp_path: Path, gains: tuple, verdict: str, share: str) -> None:
    found = judged(tmp_path, recall_results(*gains), "gain_is_recall", a=A, b=B)
    assert found.verdict == verdict, found.sentence
    assert f"{share} of it on the 30 % of tokens" in found.sentence
    # Rows of slices are not losses of all tokens.
    assert "perplexity 7.39" in judged(tmp_path, recall_results(*gains), "lower", **AB).sentence


def test_a_share_of_one_seed_borrows_the_variance_between_seeds(tmp_path: Path) -> None:
    """The same share that documents alone decide is undecided where seeds elsewhere differ by more than the gain."""
    results = recall_results(0.5, 0.1, seeds=(0,))
    assert judged(tmp_path, results, "gain_is_recall", **AB).verdict == HOLDS
    for number in range(4):
        other = made_up.language(losses({A: (2.0,), B: (2.2,)}, 32 << number), seeds=(0, 1))
        for row in made_up.rows_of(other, method=A, seed=1, metric="loss"):
            row["value"] += 3.0
        made_up.write(tmp_path, "made_up", f"other-{number}", other)
    assert judged(tmp_path, results, "gain_is_recall", **AB).verdict == UNDECIDED


@pytest.mark.parametrize(
    ("gains", "verdict"), [((0.5, 0.1), HOLDS), ((0.1, 0.5), FAILS), ((0.3, 0.3), UNDECIDED)]
)
def test_a_gain_per_token_on_recall_hits(tmp_path: Path, gains: tuple, verdict: str) -> None:
    found = judged(tmp_path, recall_results(*gains), "gains_more_on_hits", **AB)
    assert found.verdict == verdict, found.sentence
    assert f"gains +{gains[0]:.3f}" in found.sentence


@pytest.mark.parametrize(
    ("falls", "verdict"), [((0.4, 0.1), HOLDS), ((0.1, 0.4), FAILS), ((0.2, 0.2), UNDECIDED)]
)
def test_what_can_be_copied_only_from_beyond_the_training_length(tmp_path, falls, verdict) -> None:
    """The change on the same tokens counts, not a loss that was lower before they could be copied."""
    results = made_up.language(losses({A: (2.0, 1.0), B: (2.2, 2.2)}), seeds=(0, 1))
    for number, run in enumerate(results["runs"]):
        change = -falls[run["method"] != A]
        sums = [10 * (change + 0.01 * (-1) ** document * (run["method"] == A)) for document in range(8)]
        row = {"run": number, "metric": "change", "slice": "new", "eval_length": 128, "value": change}
        results["rows"].append({**row, "error": 0.01, "windows": sums, "tokens": [10] * 8, "against": "64"})
    found = judged(tmp_path, results, "recalls_more", **AB)
    assert found.verdict == verdict, found.sentence
    assert f"changes by −{falls[0]:.3f}, that of {B} by −{falls[1]:.3f}" in found.sentence


def test_without_slices_recall_is_not_run(tmp_path: Path) -> None:
    assert (
        judged(tmp_path, made_up.language(losses({A: GOOD, B: SAME})), "gain_is_recall", a=A, b=B).verdict
        == NOT_RUN
    )


def test_tasks_are_paired_on_their_samples_and_borrow_the_variance_between_seeds(tmp_path: Path) -> None:
    """The same difference, undecided between other samples, is sure on the same ones; seeds elsewhere count as well."""
    accuracy = {("x", A): 0.55, ("x", B): 0.5}
    results = made_up.tasks(accuracy, samples=100, lengths=(50,))
    assert judged(tmp_path, results, "more_accurate", **AB).verdict == UNDECIDED
    for method, right in ((A, 55), (B, 50)):
        for row in made_up.rows_of(results, method=method, metric="accuracy"):
            row |= {"windows": [1] * right + [0] * (100 - right), "tokens": [1] * 100}
    assert judged(tmp_path, results, "more_accurate", **AB).verdict == HOLDS
    for number in range(4):
        other = made_up.tasks({("y", A): 0.5, ("y", B): 0.5}, seeds=(0, 1), layers=2 + number)
        for row in made_up.rows_of(other, method=A, seed=1):
            row["value"] = 0.9
        made_up.write(tmp_path, "made_up", f"other-{number}", other)
    found = judged(tmp_path, results, "more_accurate", **AB)
    assert found.verdict == UNDECIDED
