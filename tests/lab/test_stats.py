"""The spread between seeds: measured where there are several, borrowed by comparisons of the same kind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
from judging import losses
from numpy.testing import assert_allclose

from dape.lab.claims import HOLDS, UNDECIDED, ledger
from dape.lab.figures import PLACES, canvas, styles
from dape.lab.folders import load_folders
from dape.lab.kinds.panels import Line, Panel, bars_of, draw_panel, our_panels
from dape.lab.records import Results
from dape.lab.report.papers import borrowed
from dape.lab.stats import (
    ONE_POSITION,
    PRIOR,
    TWO_POSITIONS,
    Estimate,
    SeedVariance,
    of_lengths,
    of_methods,
    over_seeds,
    seed_variance,
)


def results(values: dict[str, dict[int, tuple[float, ...]]], settings=None, **about) -> Results:
    """method → length → loss by seed, all trained at 64."""
    found = Results({"settings": settings or {}})
    for method, by_length in values.items():
        for seed in range(max(map(len, by_length.values()))):
            rows = [
                {"metric": "loss", "eval_length": n, "value": by_seed[seed]}
                for n, by_seed in by_length.items()
            ]
            run = {"method": method, "train_length": 64, "seed": seed, "corpus": "c", **about}
            if "train_loss" in about:
                run["train_loss"] = (method, seed)
            found.add(run, rows)
    return found


def drawn(*lines: Line):
    """The axes of a panel of these lines."""
    _, ((axes,),) = canvas(4, 3)
    labels, methods = [line.label for line in lines], [line.method for line in lines]
    draw_panel(axes, Panel("p", (), 64, lines), styles(labels, methods))
    return axes


def test_the_nearest_of_its_kind_speaks_for_a_comparison() -> None:
    spread = seed_variance(
        [
            results(
                {
                    "kerple": {64: (3.0, 3.1), 256: (4.0, 4.4)},
                    "dape-kerple": {64: (2.0, 2.3), 256: (3.0, 3.2)},
                    "alibi": {64: (2.0, 2.0)},
                }
            )
        ]
    )
    kerples, others = ("methods", ONE_POSITION), ("methods", TWO_POSITIONS)
    # Differences of −1.0 and −0.8 have a standard deviation of 0.2 / √2.
    assert_allclose(spread.expected([kerples], 1), 0.2 / math.sqrt(2))
    assert_allclose(spread.expected([others], 1), math.sqrt((0.1**2 + 0.3**2) / 2 / 2))
    # Other lengths borrow from the nearest known.
    assert spread.expected([kerples], 3) == spread.expected([kerples], 4)
    # Two that share an encoding are more like Kerple's two, others like those with ALiBi.
    assert of_methods("rope", "dape-rope")[1:] == [kerples, ("methods",)]
    assert of_methods("rope", "t5")[1:] == [others, ("methods",)]
    assert of_methods("kerple", "alibi") == of_methods("alibi", "kerple")
    assert_allclose(spread.expected([("lengths", "kerple")], 4), 0.3 / math.sqrt(2))
    assert_allclose(spread.expected([("losses", "kerple")], 4), 0.4 / math.sqrt(2))
    assert of_lengths("dape3x3-kerple")[1:3] == [("lengths", "kerple", "processed"), ("lengths", "processed")]
    assert of_lengths("kerple")[1:3] == [("lengths", "kerple", "plain"), ("lengths", "plain")]


def test_the_general_counts_beside_the_particular_and_nobody_for_himself() -> None:
    spread = SeedVariance()
    for setting, by_seed in (("one", (0.0, 0.0)), ("two", (0.0, 0.2)), ("three", (0.0, 0.4))):
        spread.add([("general",)], 1, setting, by_seed)
    spread.add([("particular",)], 1, "four", (0.0, 0.6))
    general = (0.0 + 0.02 + 0.08) / 3
    assert_allclose(spread.expected([("general",)], 1), math.sqrt(general))
    both = (0.18 + PRIOR * general) / (1 + PRIOR)
    assert_allclose(spread.expected([("particular",), ("general",)], 1), math.sqrt(both))
    assert spread.expected([("particular",), ("general",)], 1, "four") == spread.expected([("general",)], 1)
    assert_allclose(spread.expected([("general",)], 1, "three"), math.sqrt(0.01))
    assert spread.expected([("particular",)], 1, "four") is None


def test_one_seed_tells_nothing_and_a_training_counts_once() -> None:
    def counted(*many: Results) -> int:
        return sum(map(len, seed_variance(many).variances[("methods",)].values()))

    one = results({"kerple": {64: (3.0,)}, "alibi": {64: (2.0,)}})
    assert counted(one) == 0
    two = results({"kerple": {64: (3.0, 3.1)}, "alibi": {64: (2.0, 2.0)}})
    assert counted(two, two) == 1
    # Trained for other steps, or in another size, it is another training.
    both = {"kerple": {64: (3.0, 3.1)}, "alibi": {64: (2.0, 2.0)}}
    assert counted(two, results(both, steps=9)) == 2
    assert counted(two, results(both, settings={"train": {"hidden_size": 9}})) == 2
    # Two evaluations of one model are not two trainings.
    once = results(both, train_loss=True)
    for run, rows in list(zip(once["runs"], ([row] for row in once["rows"]), strict=True)):
        again = [{key: value for key, value in row.items() if key != "run"} | {"value": 9.0} for row in rows]
        once.add({**run, "variant": "stretched"}, again)
    assert counted(once) == 4


def test_an_expected_spread_counts_as_one_degree_of_freedom() -> None:
    assert over_seeds([1.0], [0.3], expected=0.4).error == pytest.approx(0.5)
    assert over_seeds([1.0], [0.3]).error == pytest.approx(0.3)
    # Two seeds that agree by chance: half of the expected variance is left, of a mean of two.
    assert over_seeds([1.0, 1.0], [0.0, 0.0], expected=0.4).error == pytest.approx(0.2)
    # Seeds of their own outweigh it.
    assert over_seeds([1.0, 3.0, 1.0, 3.0], [0.0] * 4, expected=0.0).error == pytest.approx(
        math.sqrt(4 / 4 / 4)
    )


A, B = "dape1x3-kerple", "kerple"


def claims_of_one_seed(folder: Path, spread: float | None, variant: str = "", **fields) -> list:
    """Verdicts on kernel 3 against plain scores by one seed, 0.1 better, where another experiment has two."""
    other = f"Pick({A!r}, {variant!r})" if variant else repr(B)
    claim = {"id": "it", "text": "It does.", "experiment": "trial", "returns": f"lower(data, {A!r}, {other})"}
    made_up.write_claims(folder, "made_up", [claim])
    better, worse = {64: 3.0, 128: 3.0}, {64: 3.1, 128: 3.1}
    other = ("latex", 64, A, variant) if variant else ("latex", 64, B, "")
    trial = made_up.language({("latex", 64, A, ""): better, other: worse})
    for run in trial["runs"]:
        run.update({"steps": 500, **fields})
    made_up.write(folder, "made_up", "trial", trial)
    if spread is not None:
        seeds = made_up.language(losses({A: (3.0, 3.0), B: (3.1, 3.1)}), seeds=(0, 1), spread=spread)
        made_up.write(folder, "beyond", "seeds", seeds)
    return ledger(folder)


def test_one_seed_decides_as_far_as_others_of_its_kind_allow(tmp_path: Path) -> None:
    for place, (spread, verdict) in enumerate([(None, HOLDS), (0.005, HOLDS), (0.2, UNDECIDED)]):
        (found, *_) = claims_of_one_seed(tmp_path / str(place), spread)
        assert (found.verdict, "1 seed" in found.sentence) == (verdict, True), found.sentence


def test_two_readings_by_one_training_do_not_borrow_the_spread_of_two_trainings(tmp_path: Path) -> None:
    (found, *_) = claims_of_one_seed(tmp_path / "two", 0.2, "wide")
    assert found.verdict == UNDECIDED
    (found, *_) = claims_of_one_seed(tmp_path / "one", 0.2, "stretched", train_loss=2.5)
    assert found.verdict == HOLDS


def test_the_reader_is_told_how_large_it_is(tmp_path: Path) -> None:
    claims_of_one_seed(tmp_path, 0.2)
    (folder,) = load_folders(tmp_path / "beyond", ["seeds"])
    # Shifts of ±0.2 in opposite directions: differences of ±0.4, whose standard deviation is 0.8 / √2.
    assert borrowed([folder]).endswith("between methods sharing a position encoding 0.566).")
    assert borrowed([]).endswith("another training might decide otherwise.")


def test_bars_of_a_figure_are_errors_of_the_difference_to_kerple(tmp_path: Path) -> None:
    trial = made_up.language(losses({A: (3.0, 3.0), B: (3.1, 3.1)}), noise=0.02)
    made_up.write(tmp_path, "made_up", "trial", trial)
    (folder,) = load_folders(tmp_path / "made_up", ["trial"])
    (panel,) = our_panels(folder)
    other, base = panel.lines
    assert (panel.reference, base.label) == (B, B)
    assert base.bars == {}
    data = folder.losses
    a, b = data.rows
    assert other.bars == {n: data.difference((1, a, n), (-1, b, n)).error for n in (64, 128)}
    # Documents differ by far more than methods do.
    assert other.bars[64] < other.losses[64].error / 3
    assert other.curve().points[0].difference.error == other.bars[64]
    assert bars_of([panel]).endswith("of the difference to\nkerple")
    assert bars_of([replace(panel, lines=(base,))]) == ""


def test_an_axis_within_part_of_a_decade_is_labelled() -> None:
    axes = drawn(Line("a", "rope", {64: Estimate(math.log(11.1)), 128: Estimate(math.log(12.4))}))
    low, high = axes.get_ylim()
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 3


def test_curves_of_one_colour_differ_by_their_dashes() -> None:
    names = [*PLACES, "dape-rope", "dape1x3-alibi", "transformer-xl"]
    looks = styles(names, names)
    assert len({(look.colour, look.dashed) for look in looks.values()}) == len(names)


def test_two_points_far_apart_are_not_joined() -> None:
    line = Line("a", "rope", {64: Estimate(1.0, math.nan), 1024: Estimate(2.0, math.nan)})
    near = Line("b", "kerple", {64: Estimate(1.0, math.nan), 128: Estimate(2.0, math.nan)})
    pair, joined = (container[0] for container in drawn(line, near).containers)
    assert (pair.get_linestyle(), joined.get_linestyle()) == ("None", "--")
