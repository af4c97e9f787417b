"""Trackers: one interface, imported only when chosen, and never the reason why a training ends."""

import sys
from types import ModuleType
from typing import ClassVar
from unittest.mock import MagicMock, call

import pytest
import toy

from dape.training import LoopSettings
from dape.training.trackers import TRACKERS, Trackers, find_trackers

RECORDS = [{"step": 3, "loss": 2.5}, {"step": 4, "loss": 2.25}]


class Own:
    """A tracker as a user writes one."""

    made: ClassVar[list] = []

    def __init__(self, folder, project, config):
        self.told, self.lines, self.closed = (folder.name, project, config), [], False
        Own.made.append(self)

    def log(self, metrics, step):
        self.lines.append((step, metrics))

    def close(self):
        self.closed = True


class Broken(Own):
    def log(self, metrics, step):
        raise ConnectionError("the server\nis gone")


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins for the four packages."""
    found = {name: MagicMock() for name in TRACKERS}
    found["mlflow"].start_run.return_value.info.run_id = "abc"
    for name, (_, module, _) in TRACKERS.items():
        monkeypatch.setitem(sys.modules, module, found[name])
    return found


BY_VALUE = [call("loss", 2.5, 3), call("loss", 2.25, 4)]
BY_STEP = [call({"loss": 2.5}, step=3), call({"loss": 2.25}, step=4)]
# What logs and what closes, from the package.
USED = {
    "tensorboard": lambda package: (package.SummaryWriter().add_scalar, package.SummaryWriter().close),
    **dict.fromkeys(["wandb", "trackio"], lambda package: (package.init().log, package.init().finish)),
    "mlflow": lambda package: (package.log_metrics, package.end_run),
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_settings_then_metrics_by_step(name, packages, tmp_path):
    trackers = Trackers(LoopSettings(track=name, track_project="mine"), tmp_path / "run")
    opened = str(packages[name].mock_calls)
    trackers.log(RECORDS)
    trackers.close()
    log, close = USED[name](packages[name])
    assert log.mock_calls == (BY_VALUE if name == "tensorboard" else BY_STEP)
    close.assert_called_once_with()
    assert "learning_rate" in opened
    assert name == "tensorboard" or ("'mine'" in opened and "'run'" in opened)


def test_a_resumed_run_continues_in_mlflow(packages, tmp_path):
    for _ in range(2):
        Trackers(LoopSettings(track="mlflow"), tmp_path).close()
    starts = [one.kwargs for one in packages["mlflow"].start_run.mock_calls]
    assert starts[0]["run_name"] == tmp_path.name
    assert starts[1]["run_id"] == "abc"
    packages["mlflow"].log_params.assert_called_once()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_is_named(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, TRACKERS[name][1], None)
    with pytest.raises(ValueError, match=f"--track {name} needs the package {name}: pip install {name}"):
        toy.train(tmp_path, track=name)
    assert not list(tmp_path.glob("**/metrics.jsonl"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aim", "choose among tensorboard, wandb, trackio, mlflow, or name a class as module:Class"),
        ("nowhere:Class", "No module named 'nowhere'; --import FILE loads a file of yours"),
        ("json:Class", "module 'json' has no attribute 'Class'"),
    ],
)
def test_an_unknown_tracker_is_a_sentence(name, message):
    with pytest.raises(ValueError, match=f"--track {name}: .*{message}"):
        find_trackers(name)


def test_one_that_does_not_open_is_a_sentence(packages, tmp_path):
    packages["wandb"].init.side_effect = RuntimeError("api_key not configured (no-tty).\ncall wandb.login()")
    with pytest.raises(ValueError, match=r"--track wandb: RuntimeError: api_key not .* \(no-tty\)\. call"):
        toy.train(tmp_path, track="wandb")


def test_a_class_of_ones_own_gets_every_step_and_another_may_fail(tmp_path, monkeypatch, capsys):
    module = ModuleType("my_trackers")
    module.Own, module.Broken = Own, Broken
    monkeypatch.setitem(sys.modules, "my_trackers", module)
    monkeypatch.setattr(Own, "made", [])
    toy.train(tmp_path, log_every=5, track="my_trackers:Broken,my_trackers:Own")
    _, own = Own.made
    assert own.told[1:] == ("dape", {**own.told[2], "steps": toy.STEPS})
    assert [step for step, _ in own.lines] == list(range(1, toy.STEPS + 1))
    assert {"loss", "validation_loss"} <= own.lines[-1][1].keys()
    assert own.closed
    said = capsys.readouterr().err
    assert said.count("my_trackers:Broken stopped at step 1: the server is gone") == 1


def test_real_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(LoopSettings(track="tensorboard"), tmp_path)
    trackers.log(RECORDS)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 2.5), (4, 2.25)]
