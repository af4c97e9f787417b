"""Two processes are one: the same losses, and each continues the other's checkpoints."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import toy
import two_processes
from processes import copies
from two_processes import STEPS, WAYS

from dape.training import fit
from dape.training.display import read_metrics

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Two processes sum in another order than one.
TOLERANCE = 1e-5


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def one_process(folder: Path, way: str = "fsdp", stop_at: int | None = None, **changes: object):
    settings = two_processes.settings(way, **{"distributed": "none", "accumulate": 1, **changes})
    stop = lambda record: record["step"] == stop_at  # noqa: E731 (a name for a line)
    return fit(toy.task(toy.decoder()), settings, folder, on_step=stop, progress=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    one_process(folder)
    return losses(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every way: two/, trained by two processes, and one-then-two/, begun by one."""
    folder = tmp_path_factory.mktemp("runs")
    for way in WAYS:
        one_process(folder / way / "one-then-two", way, stop_at=10)
    copies(Path(two_processes.__file__), folder, world=2)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_give_the_losses_of_one(runs, alone, way):
    assert losses(runs / way / "two") == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_continue_what_one_began(runs, alone, way):
    assert losses(runs / way / "one-then-two") == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize("way", WAYS)
def test_one_process_continues_what_two_began(runs, alone, way):
    checkpoints = runs / way / "two" / "checkpoints"
    assert json.loads((checkpoints / "step-00000016" / "state.json").read_text())["processes"] == 2
    (checkpoints / f"step-{STEPS:08d}" / "checksums.json").write_text("")
    assert one_process(runs / way / "two", way).notes[-1] == "continuing from step 16"
    assert losses(runs / way / "two") == pytest.approx(alone, abs=TOLERANCE)


def test_parameters_of_one_number_are_shared_out(runs, tmp_path):
    alone = two_processes.settings("fsdp", distributed="none")
    fit(toy.task(toy.decoder("dape1x3-fire")), alone, tmp_path, progress=False)
    assert losses(runs / "fire") == pytest.approx(losses(tmp_path), abs=TOLERANCE)


def test_a_signal_to_torchrun_saves_once_and_every_process_returns(tmp_path):
    command = [*TORCHRUN, str(Path(toy.__file__)), str(tmp_path), "--distributed", "ddp", "--say-steps"]
    command += ["--steps", "2000", "--checkpoint-every", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        for line in running.stdout:
            if line == "step 3\n":
                running.send_signal(signal.SIGTERM)
                break
        assert running.stdout.read().count("stopped_early='") == 2
    assert [path.name[:5] for path in (tmp_path / "checkpoints").iterdir()] == ["step-"]


def test_gradients_in_pieces_are_those_of_the_whole(tmp_path, alone):
    one_process(tmp_path, accumulate=3)  # pieces of 3, 3 and 2 windows
    assert losses(tmp_path) == pytest.approx(alone, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        ("1", {"accumulate": 9}, "a batch of 128 targets cannot be split into 1 processes × 9 micro-batches"),
        ("2", {}, "2 processes were started: pass --distributed ddp"),
        ("1", {"distributed": "ddp"}, "--distributed ddp needs processes to share the work"),
    ],
)
def test_work_that_cannot_be_shared_is_refused(world, changes, message, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", world)
    with pytest.raises(ValueError, match=message):
        one_process(tmp_path, **changes)
