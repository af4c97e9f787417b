"""Nothing is lost: kills, signals, damage and full disks, each injected."""

import builtins
import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import toy
from processes import script, start
from torch import Tensor, nn

import dape.training.checkpoint as checkpoint_module
from dape import checksums
from dape.training import DiskFull, Diverged, fit
from dape.training.display import read_metrics
from dape.training.loop import StopRequest


def losses(folder: Path) -> list[float]:
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert toy.train(folder).steps == toy.STEPS
    return losses(folder)


def stop_at(step: int):
    return lambda record: record["step"] == step


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("kill_at", [4, 7])
def test_resumed_after_kill_9_the_losses_are_the_same_bits(tmp_path, uninterrupted, kill_at):
    killed = start(script, toy.__file__, (str(tmp_path), "--kill-at", str(kill_at)), output=tmp_path / "said")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    result = toy.train(tmp_path)
    assert result.steps == toy.STEPS
    assert losses(tmp_path) == uninterrupted


def test_killed_while_writing_a_checkpoint_the_one_before_counts(tmp_path, uninterrupted, monkeypatch):
    real = checkpoint_module.write_tensors

    def die_in_the_second(path: Path, tensors: dict[str, Tensor]) -> None:
        if "00000008" in str(path):
            path.write_bytes(b"half a file")
            raise SystemError("as if killed")
        real(path, tensors)

    # The clean-up after an error would not run in a killed process either.
    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(checkpoint_module, "write_tensors", die_in_the_second)
    with pytest.raises(SystemError):
        toy.train(tmp_path)
    assert checkpoints(tmp_path) == [".writing-00000008", "step-00000004"]
    monkeypatch.undo()
    assert "continuing from step 4" in toy.train(tmp_path).notes
    assert losses(tmp_path) == uninterrupted
    assert checkpoints(tmp_path) == ["step-00000008", "step-00000012"]


def test_a_process_stopped_by_another_awaits_its_own_signal():
    with StopRequest() as stop:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        stop.await_signal(600)
        assert stop.reason == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_returns(tmp_path, uninterrupted, number):
    words, said = (str(tmp_path), "--say-steps", "--checkpoint-every", "1000"), tmp_path / "said"
    said.touch()
    running = start(script, toy.__file__, words, output=said)
    while running.is_alive() and "step 3\n" not in said.read_text():
        time.sleep(0.01)
    os.kill(running.pid, number)
    running.join()
    assert running.exitcode == 0
    assert f"stopped_early='{number.name}'" in said.read_text()
    assert len(checkpoints(tmp_path)) == 1
    toy.train(tmp_path)
    assert losses(tmp_path) == uninterrupted


def changed(name: str, change):
    """A function of a checkpoint's folder that changes the bytes of one of its files."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


FLIP = changed("optimizer.safetensors", lambda x: x[:-9] + bytes([x[-9] ^ 1]) + x[-8:])
DAMAGES = {
    "truncated": (changed("model.safetensors", lambda content: content[:99]), "model.safetensors is damaged"),
    "flipped": (FLIP, "optimizer.safetensors is damaged"),
    "state": (
        changed("state.json", lambda x: x.replace(b'"tokens": 1', b'"tokens": 2')),
        "state.json is damaged",
    ),
    "checksums": (changed("checksums.json", lambda content: b"{"), "checksums.json is damaged"),
    "missing": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_saying_so(tmp_path, uninterrupted, damage, reason):
    fit(toy.task(), toy.settings(), tmp_path, on_step=stop_at(10), progress=False)
    assert checkpoints(tmp_path) == ["step-00000008", "step-00000010"]
    damage(tmp_path / "checkpoints" / "step-00000010")
    said, continued = toy.train(tmp_path).notes
    assert said.startswith("checkpoint step-00000010 is damaged")
    assert reason in said
    assert continued == "continuing from step 8"
    assert losses(tmp_path) == uninterrupted


def test_with_every_checkpoint_damaged_training_starts_again_saying_so(tmp_path, uninterrupted):
    fit(toy.task(), toy.settings(), tmp_path, on_step=stop_at(5), progress=False)
    for folder in (tmp_path / "checkpoints").iterdir():
        FLIP(folder)
    assert toy.train(tmp_path).notes[-1] == "no intact checkpoint is left: starting from step 0"
    assert losses(tmp_path) == uninterrupted


@pytest.mark.parametrize("file", ["optimizer.safetensors", "checksums", "metrics.jsonl"])
def test_a_full_disk_ends_the_run_after_its_last_checkpoint(tmp_path, uninterrupted, monkeypatch, file):
    fit(toy.task(), toy.settings(), tmp_path, on_step=stop_at(6), progress=False)
    real = builtins.open

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def open_on_a_full_disk(path, mode="r", *rest, **named):
        opened = real(path, mode, *rest, **named)
        # Checksums are written to a temporary file.
        if file not in Path(path).name or mode in ("r", "rb"):
            return opened
        disk = MagicMock(wraps=opened, write=full)
        disk.__enter__.return_value, disk.__exit__.side_effect = disk, lambda *_: opened.close()
        return disk

    monkeypatch.setattr(builtins, "open", open_on_a_full_disk)
    with pytest.raises(DiskFull, match=r"the disk is full at step \d+; the checkpoint of step 6 is intact"):
        toy.train(tmp_path)
    monkeypatch.undo()
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000006"]
    assert "continuing from step 6" in toy.train(tmp_path).notes
    assert losses(tmp_path) == uninterrupted


class Failing:
    """The toy task, except that the loss of a step is multiplied by a factor."""

    def __init__(self, from_step: int, factor: float) -> None:
        self.inner, self.from_step, self.factor, self.now = toy.task(), from_step, factor, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def batch(self, step: int) -> Tensor:
        self.now = step + 1
        return self.inner.batch(step)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = self.inner.loss(model, batch)
        return loss * self.factor if self.now >= self.from_step else loss


@pytest.mark.parametrize(
    ("factor", "log_every", "message"),
    [
        (float("nan"), 1, r"loss became nan at step 6 .* lower --learning-rate than 0\.002"),
        (float("nan"), 5, r"loss became nan at step 6 .* lower --learning-rate than 0\.002"),
        (1e38, 1, "at step 6"),
        (40.0, 1, r"smoothed loss grew to .* from 3\.\d+ at the first step, at step 6"),
    ],
)
def test_divergence_stops_with_step_and_advice(tmp_path, factor, log_every, message):
    with pytest.raises(Diverged, match=f"{message}.*the checkpoint of step 4 is intact"):
        fit(Failing(6, factor), toy.settings(log_every=log_every), tmp_path, progress=False)
    assert checkpoints(tmp_path) == ["step-00000004"]


def test_only_the_last_checkpoints_are_kept(tmp_path):
    toy.train(tmp_path, checkpoint_every=2, keep_checkpoints=3)
    assert checkpoints(tmp_path) == ["step-00000008", "step-00000010", "step-00000012"]
    # No pickle, which could run code when it is read.
    assert {path.suffix for path in tmp_path.rglob("step-*/*")} == {".json", ".safetensors"}


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    checkpoints = checkpoint_module.Checkpoints(tmp_path, keep=1)
    for step in (99_999_999, 100_000_000):
        checkpoints.write({}, {"step": step})
    assert checkpoints.all() == [checkpoints.path(100_000_000)]


def test_a_finished_run_is_neither_trained_again_nor_continued_by_another(tmp_path):
    first, again = toy.train(tmp_path), toy.train(tmp_path)
    assert again.notes == ("already trained",)
    assert (again.steps, again.final_loss) == (first.steps, first.final_loss)
    with pytest.raises(ValueError, match=r"holds a run with learning_rate=0\.002, now learning_rate=0\.001"):
        toy.train(tmp_path, learning_rate=1e-3)
    with pytest.raises(ValueError, match="the checkpoint belongs to another model"):
        fit(toy.task(toy.PlainModel(kernel_size=1)), toy.settings(), tmp_path, progress=False)


def test_a_folder_is_trained_in_by_one_process_at_a_time(tmp_path):
    with pytest.raises(ValueError, match="another process is training in"):
        fit(toy.task(), toy.settings(), tmp_path, progress=False, on_step=lambda _: bool(toy.train(tmp_path)))


def test_the_callers_generator_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    built = toy.task()
    torch.manual_seed(5)
    fit(built, toy.settings(steps=2), tmp_path, progress=False)
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_that_is_not_for_us_is_neither_damaged_nor_lost(tmp_path, monkeypatch):
    """Of a later version; or one that may not be read."""
    fit(toy.task(), toy.settings(), tmp_path, on_step=stop_at(10), progress=False)
    file = tmp_path / "checkpoints" / "step-00000010" / "checksums.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"checksums.json has format 2, .* use the version that wrote it"):
        toy.train(tmp_path)
    assert checkpoints(tmp_path) == ["step-00000008", "step-00000010"]
    file.write_text(file.read_text().replace('"format": 2', '"format": 1'))

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checksums, "file_digest", denied)
    with pytest.raises(PermissionError):
        toy.train(tmp_path)
    assert checkpoints(tmp_path) == ["step-00000008", "step-00000010"]


@pytest.mark.parametrize("kind", ["not UTF-8", "edited"])
def test_a_bad_line_of_metrics_costs_one_record(tmp_path, uninterrupted, kind):
    fit(toy.task(), toy.settings(), tmp_path, on_step=stop_at(10), progress=False)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_text().splitlines()
    loss = str(json.loads(lines[3])["loss"])
    lines[3] = lines[3][:5] + "\udcff" if kind == "not UTF-8" else lines[3].replace(loss, f"1{loss}")
    file.write_bytes(("\n".join([*lines, "null", "[]"]) + "\n").encode(errors="surrogateescape"))
    assert [record["step"] for record in read_metrics(file)] == [1, 2, 3, *range(5, 11)]
    toy.train(tmp_path)
    assert [record["loss"] for record in read_metrics(file)] == uninterrupted[:3] + uninterrupted[4:]
