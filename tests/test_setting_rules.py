"""Settings: types, ranges, not-a-number, lists, what fixes a run, and one place where defaults are derived."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

from dape.cli.train import parse_training
from dape.settings import SettingError, changed_setting, check, fixed, free_names, setting
from dape.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int = setting(3, help="Of things.", low=1, high=10)
    share: float = setting(0.5, help="Of them.", low=0, below=1)
    rate: float | None = setting(None, help="Of change.", above=0, high=9, fixes_run=False)
    pair: tuple[float, float] = setting((0.1, 0.2), help="Two.", low=0, high=1)
    kind: Literal["a", "b"] = setting("a", help="Which.")
    lengths: str = setting("1,2", help="Several.", listed=int, low=1, high=99, words=("all",))
    picture: Path | None = setting(None, help="Drawn.", writes="file", suffixes=(".svg", ".png"))
    odd: int = setting(1, help="Not even.", low=0, high=99, test=lambda n: _odd(n))

    def __post_init__(self) -> None:
        check(self)


def _odd(number: int) -> None:
    if number % 2 == 0:
        raise ValueError("must be odd")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count=0 must be at least 1"),
        ({"count": 11}, "count=11 must be at most 10"),
        ({"count": "many"}, 'count="many": expected a whole number'),
        ({"count": True}, "count=True: expected a whole number"),
        ({"count": 2.5}, "count=2.5: expected a whole number"),
        ({"count": None}, "count=None: expected a whole number"),
        ({"share": 1.0}, "share=1.0 must be less than 1"),
        ({"share": math.nan}, "share=nan must be a finite number"),
        ({"rate": 0}, "rate=0 must be greater than 0"),
        ({"rate": math.inf}, "rate=inf must be a finite number"),
        ({"pair": (0.5, math.nan)}, r"pair=\(0.5, nan\) must be a finite number"),
        ({"pair": (0.5,)}, r"pair=\(0.5,\): expected"),
        ({"kind": "c"}, 'kind="c": choose one of a, b'),
        ({"lengths": "1,x"}, 'lengths="1,x": expected whole numbers, separated by commas'),
        ({"lengths": "1,1"}, 'lengths="1,1" contains a duplicate'),
        ({"lengths": ","}, 'lengths="," is empty'),
        ({"lengths": "5,0"}, 'lengths="5,0" must be at least 1'),
        ({"picture": Path("a.bmp")}, 'picture="a.bmp" must end in .svg, .png'),
        ({"odd": 2}, "odd=2: must be odd"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_setting(changes, message):
    with pytest.raises(SettingError, match=message) as caught:
        Example(**changes)
    assert caught.value.name == next(iter(changes))


def test_right_values_are_taken():
    Example(count=10, share=0, rate=9, lengths="all", picture=Path("x.svg"), odd=3)


def test_a_number_without_a_range_cannot_be_declared():
    @dataclass
    class Forgot:
        count: int = setting(3, help="Of things.", low=1)

    with pytest.raises(TypeError, match=r"Forgot.count is a number and declares no range"):
        check(Forgot())


def test_what_fixes_a_run_is_said_by_the_field():
    assert "rate" not in fixed(Example())
    assert free_names(Example) == {"rate"}
    assert changed_setting({"count": 3}, Example(rate=2)) is None
    assert changed_setting({"count": 4, "pair": [0.1, 0.2]}, Example()) == ("count", 4, 3)
    assert changed_setting({}, Example(count=4)) == ("count", 3, 4)


def test_every_setting_of_a_training_has_help_and_says_its_role():
    for member in fields(TrainConfig):
        assert member.metadata["help"], member.name
    free = {"out", "data", "device", "backend", "accumulate", "log_every", "track"}
    assert free <= free_names(TrainConfig)
    assert not free_names(TrainConfig) & {
        "steps", "seed", "method", "corpus", "learning_rate", "train_length"
    }  # fmt: skip


def test_the_warm_up_and_the_last_rate_follow_what_is_given():
    assert TrainConfig(steps=60).warmup_steps == 4
    assert TrainConfig(steps=60) == parse_training(["--steps", "60"])
    assert TrainConfig(learning_rate=1e-5) == parse_training(["--learning-rate", "1e-5"])
    assert TrainConfig(learning_rate=1e-5).final_learning_rate == 1e-5
    with pytest.raises(SettingError, match=r"final_learning_rate=0.01 exceeds learning_rate=0.001"):
        TrainConfig(learning_rate=1e-3, final_learning_rate=1e-2)
    with pytest.raises(SettingError, match="warmup_steps=11 exceeds steps=10"):
        TrainConfig(steps=10, warmup_steps=11)
