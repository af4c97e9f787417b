"""The spread between seeds: measured where there are several, borrowed by comparisons of the same kind."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import made_up
import pytest
from judging import losses
from numpy.testing import assert_allclose

from dape.evaluation.inference import Estimate, VariancePrior, crossed_mean, variance_prior
from dape.lab.claims import HOLDS, UNDECIDED, ledger
from dape.lab.figures import COLOUR_ORDER, canvas, styles
from dape.lab.folders import load_folder, load_folders
from dape.lab.kinds.panels import Line, Panel, bars_of, draw_panel, frame_of, our_panels, panel_table
from dape.lab.records import Results
from dape.lab.report.papers import borrowed
from dape.lab.selection import Data, Where
from dape.lab.stats import (
    ONE_POSITION,
    TWO_POSITIONS,
    Losses,
    SeedVariance,
    of_lengths,
    of_losses,
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


def deviation(spread: SeedVariance, *kinds: tuple[str, ...], multiple: float = 1) -> float:
    prior = spread.prior(kinds, multiple)
    assert prior is not None
    return math.sqrt(prior.variance)


def typical(*variances: float) -> float:
    """What samples of two seeds each say of the deviation, on a logarithmic scale."""
    return math.sqrt(variance_prior(variances, [1.0] * len(variances)).variance)


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
    # Differences of −1.0 and −0.8 have a variance of 0.02.
    assert_allclose(deviation(spread, kerples), typical(0.02))
    assert_allclose(deviation(spread, others), typical(0.005, 0.045))
    # Other lengths borrow from the nearest known.
    assert deviation(spread, kerples, multiple=3) == deviation(spread, kerples, multiple=4)
    # Two that share an encoding are more like Kerple's two, others like those with ALiBi.
    alike, unlike = ("positions", "rope", "rope", "works"), ("positions", "rope", "t5", "works")
    assert of_methods("rope", "dape-rope")[1:] == [alike, (*kerples, "works"), kerples]
    assert of_methods("rope", "t5")[1:] == [unlike, (*others, "works"), others]
    assert of_methods("kerple", "alibi") == of_methods("alibi", "kerple")
    assert_allclose(deviation(spread, ("lengths", "kerple", "failed"), multiple=4), typical(0.045))
    assert_allclose(deviation(spread, ("losses", "kerple", "failed"), multiple=4), typical(0.08))
    for name, scores in (("dape3x3-kerple", "processed"), ("kerple", "plain")):
        general = ("lengths", scores)
        narrow = ("lengths", "kerple", scores, "works")
        assert of_lengths(name)[1:] == [narrow, (*general, "works"), general]


def test_a_model_that_has_failed_does_not_speak_for_those_that_work() -> None:
    """Seeds differ by 1 where perplexities have doubled; FoX, with one seed, is expected to differ as ALiBi's."""
    spread = seed_variance(
        [
            results(
                {
                    "kerple": {64: (3.0, 3.1), 1024: (3.0, 3.1)},
                    "alibi": {64: (3.0, 3.08), 1024: (3.0, 3.07)},
                    "t5": {64: (3.0, 3.04), 1024: (3.1, 3.15)},
                    "rope": {64: (3.0, 3.06), 1024: (5.0, 6.0)},
                    "nope": {64: (3.0, 3.03), 1024: (6.0, 4.8)},
                    "sinusoidal": {64: (3.0, 3.02), 1024: (5.0, 6.3)},
                }
            )
        ]
    )
    for kinds, most in ((partial(of_methods, "fox", "kerple"), 0.1), (partial(of_lengths, "fox"), 0.05)):
        works, failed = (spread.prior(kinds(failed=lost), 16) for lost in (False, True))
        assert works is not None
        assert failed is not None
        assert math.sqrt(works.variance) < most
        assert math.sqrt(failed.variance) > 0.5


def test_a_setting_where_a_method_fails_does_not_speak_for_those_where_it_works() -> None:
    """RoPE's seeds differ by 0.7 where its loss has risen by 1.7, and by 0.01 where it has risen by 0.1."""
    calm = [
        results(
            {"kerple": {64: (3.0, 3.01), 128: (3.0, 3.01)}, "rope": {64: (3.0, 3.01), 128: (3.1, 3.12)}},
            corpus=name,
        )
        for name in ("latex", "books")
    ]
    wild = results(
        {"kerple": {64: (3.0, 3.01), 128: (3.0, 3.01)}, "rope": {64: (3.0, 3.01), 128: (4.5, 5.2)}},
        corpus="code",
    )
    for of_kind in (
        partial(of_lengths, "rope"),
        partial(of_methods, "rope", "kerple"),
        partial(of_losses, "rope"),
    ):
        works, failed = (
            seed_variance([*calm, wild]).prior(of_kind(failed=lost), 2) for lost in (False, True)
        )
        assert works is not None
        assert failed is not None
        assert math.sqrt(works.variance) < 0.03
        assert math.sqrt(failed.variance) > 0.3


def test_a_kind_with_samples_of_its_own_does_not_inherit_from_others() -> None:
    """ALiBi's seeds agree, RoPE's do not: what is expected of ALiBi's is not RoPE's."""
    spread = SeedVariance()
    for setting in range(4):
        shift = 0.01 * (1 + setting / 10)
        for method, size in (("alibi", 1), ("rope", 50)):
            spread.add(of_methods("kerple", method), 1, setting, (0.0, shift * size))
    calm, wild = (spread.prior(of_methods("kerple", name), 1) for name in ("alibi", "rope"))
    assert calm is not None
    assert wild is not None
    assert math.sqrt(wild.variance / calm.variance) == pytest.approx(50)
    # A pair that nobody trained with several seeds has what all pairs say, and less surely.
    other = spread.prior(of_methods("t5", "fire"), 1)
    assert other is not None
    assert calm.variance < other.variance < wild.variance
    assert other.dof < calm.dof


def test_one_large_variance_does_not_dominate_and_nobody_counts_for_himself() -> None:
    spread = SeedVariance()
    for setting, gap in enumerate((0.1, 0.1, 0.1, 10.0)):
        spread.add([("general",)], 1, setting, (0.0, gap))
    without = spread.prior([("general",)], 1, 3)
    assert without is not None
    # Three samples that agree are worth three degrees of freedom, not infinitely many.
    assert without.dof == 3
    assert deviation(spread, ("general",)) < 1.0
    spread.add([("particular",)], 1, "four", (0.0, 0.6))
    both = [("particular",), ("general",)]
    assert spread.prior(both, 1, "four") == spread.prior([("general",)], 1)
    moved = spread.prior(both, 1)
    assert moved == VariancePrior(*spread.prior([("general",)], 1).posterior(0.18, 1))
    # Equal to the last digit: the same run twice.
    spread.add([("twice",)], 1, "five", (0.5, 0.5))
    assert spread.prior([("twice",)], 1) is None


def test_a_length_that_only_this_setting_has_borrows_from_the_nearest_of_others() -> None:
    spread, kind = SeedVariance(), [("lengths",)]
    for setting in range(3):
        spread.add(kind, 4, setting, (0.0, 0.5))
        spread.add(kind, 16, setting, (0.0, 0.1))
    spread.add(kind, 32, "mine", (0.0, 9.0))
    assert spread.prior(kind, 32, "mine") == spread.prior(kind, 16)
    assert spread.prior(kind, 32, 0) == spread.prior(kind, 32) != spread.prior(kind, 16)


def test_one_seed_tells_nothing_and_a_training_counts_once() -> None:
    def counted(*many: Results) -> int:
        return sum(map(len, seed_variance(many).samples[("methods", TWO_POSITIONS)].values()))

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
    assert counted(once) == 2


def test_an_expected_variance_gives_one_seed_an_error() -> None:
    sure = VariancePrior(0.16, 1e9)
    assert over_seeds([1.0], [0.3], prior=sure).error == pytest.approx(0.5)
    assert over_seeds([1.0], [0.3]).error == pytest.approx(0.3)
    # Two seeds that agree by chance, and a prior worth one degree of freedom: half of its variance is left.
    found = over_seeds([1.0, 1.0], [0.0, 0.0], prior=VariancePrior(0.16, 1.0))
    assert (found.error, found.dof) == (pytest.approx(0.2), 2)
    # Seeds of their own outweigh it.
    found = over_seeds([1.0, 3.0] * 2, [0.0] * 4, prior=VariancePrior(0.0, 1.0))
    assert (found.error, found.dof) == (pytest.approx(0.5), 4)


def test_few_documents_ask_for_more_errors() -> None:
    """Six documents at two errors are not 95 %: a difference must be further out the fewer there are."""
    weights = []
    for count in (3, 6, 30, 300):
        data = Losses(Results({"documents": {"c": list(range(count))}}))
        # Differences with mean 1 and standard error 0.5, whatever their number.
        scatter = [1 + (-1) ** n * 0.5 * math.sqrt(count - 1) for n in range(count - count % 2)]
        rows = [{"windows": scatter + [1.0] * (count % 2)}, {"windows": [0.0] * count}]
        sums, counts = data.by_document((1, -1), rows, "c")
        weights.append(crossed_mean(sums, counts).weight)
    assert weights == sorted(weights)
    assert weights[1] < 1.75
    assert weights[-1] == pytest.approx(2, abs=0.02)


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
        for place in range(4):
            seeds = made_up.language(losses({A: (3.0, 3.0), B: (3.1, 3.1)}), seeds=(0, 1), spread=spread)
            for run in seeds["runs"]:
                run["steps"] += place
            made_up.write(folder, "beyond", f"seeds-{place}" if place else "seeds", seeds)
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
    folder = load_folders(tmp_path / "beyond", ["seeds"])[0]
    # Shifts of ±0.2 in opposite directions: differences of ±0.4, whose standard deviation is 0.8 / √2. Two seeds mostly
    # show less than the truth, which the logarithmic scale makes up for.
    assert borrowed([folder]).endswith("between methods sharing a position encoding 1.068).")
    assert borrowed([]).endswith("another training might decide otherwise.")


def test_bars_of_a_figure_are_errors_of_the_difference_to_kerple(tmp_path: Path) -> None:
    trial = made_up.language(losses({A: (3.0, 3.0), B: (3.1, 3.1)}), noise=0.02)
    made_up.write(tmp_path, "made_up", "trial", trial)
    (folder,) = load_folders(tmp_path / "made_up", ["trial"])
    (panel,) = our_panels(folder)
    other, base = panel.lines
    assert (panel.reference, base.label) == (B, B)
    assert base.gaps == {}
    data = folder.losses
    a, b = data.rows
    assert other.gaps == {n: data.difference((1, a, n), (-1, b, n)) for n in (64, 128)}
    # Documents differ by far more than methods do.
    assert other.gaps[64].error < other.losses[64].error / 3
    assert other.curve().points[0].difference == other.gaps[64]
    assert bars_of([panel]).endswith("of the difference to\nkerple")
    assert bars_of([replace(panel, lines=(base,))]) == ""


def test_curves_of_methods_with_other_seeds_are_drawn_at_their_paired_differences(tmp_path: Path) -> None:
    """The seeds differ by 0.4; the method with the first seed alone would seem better than the other, and is worse."""
    trial = made_up.language(losses({A: (3.05, 3.05), B: (3.0, 3.0)}), seeds=(0, 1), noise=0.02)
    shifts = [0.2 if run["seed"] else -0.2 for run in trial["runs"]]
    for row in trial["rows"]:
        row["value"] += shifts[row["run"]]
        row["windows"] = [value + shifts[row["run"]] for value in row["windows"]]
    trial["rows"] = [row for row in trial["rows"] if row["run"] != 1]
    made_up.write(tmp_path, "made_up", "trial", trial)
    (panel,) = our_panels(load_folders(tmp_path / "made_up", ["trial"])[0])
    assert [(line.label, line.seeds) for line in panel.lines] == [(A, 1), (B, 2)]
    assert panel.lines[0].losses[64].value < panel.lines[1].losses[64].value
    other, base = panel.curves()
    assert other.points[0].loss.value - base.points[0].loss.value == pytest.approx(0.05, abs=1e-6)
    assert "common seeds" in bars_of([panel])


def test_the_best_of_a_column_is_so_by_the_seeds_that_all_methods_have(tmp_path: Path) -> None:
    """With its third seed, which the other lacks, the best of both common seeds seems to be the worse."""
    other = "dape-kerple"
    by_seed = {A: (3.0, 3.0, 3.6), other: (3.1, 3.1), B: (3.5, 3.5, 3.5)}
    trial = made_up.language(losses(dict.fromkeys(by_seed, (3.0, 3.0))), seeds=(0, 1, 2))
    for row in trial["rows"]:
        run = trial["runs"][row["run"]]
        own = by_seed[run["method"]]
        row["value"] = own[run["seed"]] if run["seed"] < len(own) else None
        row["windows"] = [row["value"]] * len(row["windows"])
    trial["rows"] = [row for row in trial["rows"] if row["value"] is not None]
    made_up.write(tmp_path, "made_up", "trial", trial)
    (folder,) = load_folders(tmp_path / "made_up", ["trial"])
    (panel,) = our_panels(folder)
    first, second, _ = panel_table(panel, None, {}).rows
    assert (first.label, first.cells[0].best, first.cells[0].text) == (A, True, f"{math.exp(3.0):.2f}")
    assert (second.label, second.cells[0].best) == (other, False)


def test_seeds_that_suggested_a_claim_can_be_left_out(tmp_path: Path) -> None:
    trial = made_up.language(losses({A: (3.0, 3.0), B: (3.1, 3.1)}), seeds=(0, 1, 2), spread=0.1)
    trial["rows"] = [
        row for row in trial["rows"] if (trial["runs"][row["run"]]["seed"], row["run"] < 3) != (2, True)
    ]
    made_up.write(tmp_path, "made_up", "trial", trial)
    (folder,) = load_folders(tmp_path / "made_up", ["trial"])
    data = Data(folder)
    a, b = data.losses.rows
    later = data.since(1)
    assert later.losses.seeds(a) == [1]
    assert later.losses.seeds(b) == [1, 2]
    every = data.losses.differences((1, a, 64), (-1, b, 64))
    assert later.losses.differences((1, a, 64), (-1, b, 64)) == {1: every[1]}
    assert set(every) == {0, 1}
    assert a not in data.since(2).losses.rows
    assert not list(data.since(2).gaps(A, B, Where()))


def test_differences_by_seed_have_the_mean_of_all(tmp_path: Path) -> None:
    trial = made_up.language(losses({A: (3.0, 3.0), B: (3.1, 3.1)}), seeds=(0, 1, 2), spread=0.02)
    made_up.write(tmp_path, "made_up", "trial", trial)
    data = load_folder(tmp_path / "made_up" / "trial").losses
    a, b = data.rows
    terms = (1, a, 64), (-1, b, 64)
    by_seed = data.differences(*terms)
    assert by_seed == pytest.approx({0: -0.06, 1: -0.14, 2: -0.06}, abs=1e-5)
    assert data.difference(*terms).value == pytest.approx(sum(by_seed.values()) / 3)


def test_a_curve_far_above_leaves_the_frame_to_the_others() -> None:
    near = [
        Line(name, "kerple", {64: Estimate(math.log(p)), 128: Estimate(math.log(p))})
        for name, p in (("a", 5.0), ("b", 6.0))
    ]
    far = Line("c", "rope", {64: Estimate(math.log(7.0)), 128: Estimate(math.log(900.0))})
    assert frame_of(Panel("", (), 64, (*near, far))) == pytest.approx((0.93 * 5.0, 1.2 * 7.0))
    assert frame_of(Panel("", (), 64, tuple(near))) is None


def test_an_axis_within_part_of_a_decade_is_labelled() -> None:
    axes = drawn(Line("a", "rope", {64: Estimate(math.log(11.1)), 128: Estimate(math.log(12.4))}))
    low, high = axes.get_ylim()
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 3


def test_curves_of_one_colour_differ_by_their_dashes() -> None:
    names = [*COLOUR_ORDER, "dape-rope", "dape1x3-alibi", "transformer-xl"]
    looks = styles(names, names)
    assert len({(look.colour, look.dashed) for look in looks.values()}) == len(names)


def test_two_points_far_apart_are_not_joined() -> None:
    line = Line("a", "rope", {64: Estimate(1.0, math.nan), 1024: Estimate(2.0, math.nan)})
    near = Line("b", "kerple", {64: Estimate(1.0, math.nan), 128: Estimate(2.0, math.nan)})
    pair, joined = (container[0] for container in drawn(line, near).containers)
    assert (pair.get_linestyle(), joined.get_linestyle()) == ("None", "--")
