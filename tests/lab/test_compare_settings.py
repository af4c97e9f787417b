"""Options of a comparison: checked before anything runs, and written down so that they can be given again."""

import shlex
import sys
from typing import Any

import pytest

from dape import cli
from dape.cli.compare import parse_comparison
from dape.lab.compare import CompareConfig
from dape.lab.runs import job_of, spec_of
from dape.training import recipe

COMMANDS = [
    [],
    ["--steps", "300", "--jobs", "2"],
    ["--steps", "300", "--warmup-steps", "7", "--no-equal-time", "--betas", "0.8", "0.9"],
    ["--preset", "125m", "--steps", "1000", "--tokenizer", "bytes", "--out", "a folder"],
    [
        "--methods", "rope,dape1x5-fire", "--seeds", "3,4", "--lengths", "512,64", "--last", "9",
        "--baseline", "rope"
    ],
    ["--methods", "dape-kerple[depth=3],rope[scaling=ntk,factor=4.0]"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS)
def test_the_reported_command_gives_the_same_comparison(arguments: list[str]) -> None:
    settings = parse_comparison(arguments)
    dape, compare, *again = shlex.split(settings.command())
    assert (dape, compare) == ("dape", "compare")
    assert parse_comparison(again) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": "rope,dapper"}, 'unknown method "dapper"'),
        ({"methods": "rope,rope"}, "contains a duplicate"),
        ({"methods": "rope[factor=2,scaling=ntk],rope[scaling=ntk,factor=2]"}, "contains a duplicate"),
        ({"methods": ","}, 'methods=",": pass at least one method'),
        ({"methods": ""}, 'methods="": pass at least one method'),
        ({"seeds": str(2**64)}, "seeds=.* must be at most"),
        ({"baseline": "nosuch"}, 'baseline="nosuch": unknown method'),
        ({"lengths": "64,128", "last": 65}, "last=65"),
        ({"baseline": "fire"}, 'baseline="fire" is not one of the methods'),
        ({"metrics": "loss,perplexity"}, 'unknown metric "perplexity"'),
        ({"metrics": "accuracy"}, "the loss is always one of them"),
    ],
)
def test_wrong_options_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("tiny", CompareConfig, **changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["sweep", "--methods", "kerple", "--over", "learning_rate=1e-3,-1"], "learning-rate"),
        (["compare", "--methods", "kerple,rope[scaling=yran]"], 'unknown scaling "yran"'),
        (
            ["compare", "--methods", "kerple", "--track", "tensorboard"],
            "--track tensorboard needs the package tensorboard: pip install tensorboard",
        ),
    ],
)
def test_a_run_that_cannot_start_is_refused_before_packing(tmp_path, monkeypatch, capsys, given, message):
    monkeypatch.setattr("dape.lab.compare.prepare_data", lambda *a, **b: pytest.fail("packs"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert cli.main([*given, "--out", str(tmp_path / "out")]) == 2
    assert message in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_run_gets_the_training_that_was_asked_for() -> None:
    words = "--batch-size 3 --steps 100 --warmup-steps 10 --data there"
    config = parse_comparison(words.split())
    run = job_of(spec_of(config.runs()[0]))
    train = run.config
    assert (train.batch_size, train.steps, train.warmup_steps, train.data) == (3, 100, 10, "there")
    assert run.with_steps(50).config.warmup_steps == 5


def test_names_with_options_hold_commas() -> None:
    given = ["--methods", "rope[scaling=yarn,factor=8],kerple, rope/nope", "--train-length", "32"]
    config = parse_comparison([*given, "--baseline", "rope[scaling=yarn,factor=8]"])
    assert config.method_list == ["rope[factor=8,scaling=yarn]", "kerple", "rope/nope"]
    assert config.baseline_method == config.method_list[0]
    assert [run.config.method for run in config.runs()] == config.method_list
