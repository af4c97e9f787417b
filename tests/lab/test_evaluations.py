"""Evaluations of a run: nothing that was measured is lost, whatever is asked for later."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dape.lab.evaluations import evaluate
from dape.training import Run, TrainConfig, train

ASKED = {"last": 16, "windows": 8, "room": 256}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, draw = tmp_path_factory.mktemp("evaluated"), random.Random(0)
    (folder / "text").mkdir()
    for number in range(12):
        words = (draw.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(400))
        (folder / "text" / f"{number}.txt").write_text(" ".join(words))
    sizes = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "batch_size": 2, "train_length": 32}
    text = {"corpus": str(folder / "text"), "validation": "0,1,2,3", "out": str(folder / "run")}
    return train(TrainConfig(method="kerple", steps=2, **sizes, **text), progress=False)


def asked(run: Run, file: Path, *lengths: int, recall: bool = False, **changes: int) -> dict:
    evaluate(run, {**ASKED, **changes, "lengths": list(map(str, lengths)), "recall": recall}, file, 1)
    return json.loads(file.read_text())


def test_lengths_asked_for_later_keep_the_slices_of_earlier_ones(run: Run, tmp_path: Path) -> None:
    """96 and 160 divide the bins of the slices further, which dropped those of all earlier lengths."""
    whole = asked(run, tmp_path / "whole.json", 32, 96, 160)
    assert set(whole["recall"]["sums"]) == {"32", "96", "160"}
    file = tmp_path / "parts.json"
    assert set(asked(run, file, 32, 96)["recall"]["sums"]) == {"32", "96"}
    parts = asked(run, file, 32, 96, 160)
    assert parts["recall"] == whole["recall"]
    assert parts["windows"] == whole["windows"]
    assert asked(run, file, 32, 96, 160, recall=True) == parts
    # In another order as well: methods that were evaluated at other times are paired.
    other = tmp_path / "other.json"
    asked(run, other, 160)
    assert asked(run, other, 32, 96, 160)["recall"] == whole["recall"]


def test_slices_stay_until_new_ones_are_there(run: Run, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "parts.json"
    before = asked(run, file, 32, 96)["recall"]

    def killed(*arguments: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr("dape.lab.evaluations.token_losses", killed)
    with pytest.raises(RuntimeError, match="killed"):
        asked(run, file, 32, 96, 160)
    assert json.loads(file.read_text())["recall"] == before


def test_evaluations_on_other_windows_are_put_aside(run: Run, tmp_path: Path) -> None:
    """They replaced what had been measured."""
    file = tmp_path / "run.json"
    before = asked(run, file, 32, 64, 128)
    fewer = asked(run, file, 32, windows=6)
    assert (list(fewer["windows"]), len(fewer["ends"])) == (["32"], 6)
    assert asked(run, file, 32, 64, 128) == before
    assert asked(run, file, 32, windows=6) == fewer
