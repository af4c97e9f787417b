"""Two processes are one: the same losses, and each continues the other's checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dape.training import fit
from dape.training.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
import toy

STEPS = 20
# Two processes sum in another order than one.
TOLERANCE = 1e-5


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def settings(**changes: object):
    return toy.settings(steps=STEPS, checkpoint_every=8, **changes)


def command(folder: Path, *options: object) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    fixed = ["--model", "decoder", "--steps", STEPS, "--checkpoint-every", 8]
    return [*torchrun, str(Path(toy.__file__)), str(folder), *map(str, [*fixed, *options])]


def two_processes(folder: Path, *options: object) -> str:
    ran = subprocess.run(command(folder, *options), capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def one_process(folder: Path, **changes: object) -> None:
    fit(toy.task(toy.decoder()), settings(**changes), folder, progress=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    one_process(folder)
    return losses(folder)


@pytest.mark.parametrize(
    "options",
    [
        ["--distributed", "ddp", "--accumulate", 2, "--log-every", 5],
        ["--distributed", "fsdp"],
        ["--distributed", "fsdp", "--checkpoint-format", "sharded"],
    ],
    ids=["ddp", "fsdp", "fsdp-sharded"],
)
def test_two_processes_give_the_losses_of_one_and_either_continues_the_other(tmp_path, alone, options):
    # Two processes to the end, then one from their checkpoint of step 16.
    two_processes(tmp_path / "two", *options)
    assert losses(tmp_path / "two") == pytest.approx(alone, abs=TOLERANCE)
    drop_last_checkpoint(tmp_path / "two")
    state = json.loads((tmp_path / "two" / "checkpoints" / "step-00000016" / "state.json").read_text())
    assert state["processes"] == 2
    one_process(tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(alone, abs=TOLERANCE)

    # One process to step 8, then two.
    stop = lambda record: record["step"] == 8  # noqa: E731
    form = {"checkpoint_format": "sharded"} if "sharded" in options else {}
    fit(toy.task(toy.decoder()), settings(**form), tmp_path / "one", on_step=stop, progress=False)
    assert "continuing from step 8" in two_processes(tmp_path / "one", *options)
    assert losses(tmp_path / "one") == pytest.approx(alone, abs=TOLERANCE)


def drop_last_checkpoint(folder: Path) -> None:
    last = max((folder / "checkpoints").glob("step-*"))
    assert last.name == "step-00000020"
    (last / "manifest.json").write_text("")


def test_a_signal_to_torchrun_saves_once_and_every_process_returns(tmp_path, alone):
    options = ["--distributed", "ddp", "--say-steps"]
    with subprocess.Popen(command(tmp_path, *options), stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout:
            if line == "step 3\n":
                running.send_signal(signal.SIGTERM)
                break
        running.stdout.read()
    assert [path.name[:5] for path in (tmp_path / "checkpoints").iterdir()] == ["step-"]
    one_process(tmp_path)
    assert losses(tmp_path) == pytest.approx(alone, abs=TOLERANCE)


def test_gradients_in_pieces_are_those_of_the_whole(tmp_path, alone):
    one_process(tmp_path, accumulate=3)  # pieces of 3, 3 and 2 windows
    assert losses(tmp_path) == pytest.approx(alone, abs=TOLERANCE)


def test_more_pieces_than_windows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a batch of 128 targets cannot be cut into 1 processes × 9 pieces"):
        one_process(tmp_path, accumulate=9)


def test_processes_without_a_way_to_share_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started: pass --distributed ddp"):
        one_process(tmp_path)


def test_sharing_without_processes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--distributed ddp needs processes to share the work"):
        one_process(tmp_path, distributed="ddp")
