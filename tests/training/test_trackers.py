"""Trackers: one interface, imported only when chosen, and never the reason why a training ends."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import toy

from dape.training import LoopSettings
from dape.training.trackers import TRACKERS, Trackers, find_trackers

RECORDS = [{"step": 3, "loss": 2.5}, {"step": 4, "loss": 2.25}]


class Own:
    """A tracker as a user writes one."""

    made: ClassVar[list[Own]] = []

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
def calls(monkeypatch):
    """Stand-ins for the four packages; their calls as (name, arguments)."""
    found = []

    def record(name, **returned):
        def call(*args, **kwargs):
            found.append((name, *args, kwargs))
            return SimpleNamespace(**returned)

        return call

    def run(name):
        return {"log": record(f"{name}.log"), "finish": record(f"{name}.finish")}

    writer = SimpleNamespace(**{name: record(name) for name in ("add_text", "add_scalar", "close")})
    modules = {
        "torch.utils.tensorboard": {"SummaryWriter": lambda *args: writer},
        "wandb": {"init": record("wandb.init", **run("wandb"))},
        "trackio": {"init": record("trackio.init", **run("trackio"))},
        "mlflow": {
            "set_experiment": record("set_experiment", experiment_id="7"),
            "start_run": record("start_run", info=SimpleNamespace(run_id="abc")),
            **{name: record(name) for name in ("log_params", "log_metrics", "end_run")},
        },
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    return found


LOGGED = {
    "tensorboard": [("add_scalar", "loss", 2.5, 3, {}), ("add_scalar", "loss", 2.25, 4, {}), ("close", {})],
    **{
        name: [
            (f"{name}.log", {"loss": 2.5}, {"step": 3}),
            (f"{name}.log", {"loss": 2.25}, {"step": 4}),
            (f"{name}.finish", {}),
        ]
        for name in ("wandb", "trackio")
    },
    "mlflow": [
        ("log_metrics", {"loss": 2.5}, {"step": 3}),
        ("log_metrics", {"loss": 2.25}, {"step": 4}),
        ("end_run", {}),
    ],
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_gets_settings_then_metrics_by_step(name, calls, tmp_path):
    trackers = Trackers(LoopSettings(track=name, track_project="mine"), tmp_path / "run")
    opened = str(calls)
    trackers.log(RECORDS)
    trackers.close()
    assert calls[-len(LOGGED[name]) :] == LOGGED[name]
    assert "learning_rate" in opened
    if name != "tensorboard":
        assert "'mine'" in opened
        assert "'run'" in opened


def test_a_resumed_run_continues_in_mlflow(calls, tmp_path):
    for _ in range(2):
        Trackers(LoopSettings(track="mlflow"), tmp_path).close()
    starts = [kwargs for name, *_, kwargs in calls if name == "start_run"]
    assert starts[0]["run_name"] == tmp_path.name
    assert starts[1]["run_id"] == "abc"
    assert sum(name == "log_params" for name, *_ in calls) == 1


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


def test_one_that_does_not_open_is_a_sentence(monkeypatch, tmp_path):
    def init(**options):
        raise RuntimeError("api_key not configured (no-tty).\ncall wandb.login(key=[your_api_key])")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(
        ValueError, match=r"--track wandb: RuntimeError: api_key not configured \(no-tty\)\. call wandb"
    ):
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
