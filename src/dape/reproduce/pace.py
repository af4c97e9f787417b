"""How long a step takes: methods take turns in one process, so that a busy machine disturbs all of them alike."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dape.benchmarks.timing import interleave
from dape.benchmarks.train import STEPS_A_ROUND, bare_steps
from dape.compare.comparing import share_time
from dape.files import write_atomically
from dape.reproduce.grid import Cell
from dape.reproduce.place import Place
from dape.training import TrainConfig
from dape.training.language import LanguageModelling
from dape.training.run import build_model

ROUNDS = 12


def equal_time_steps(group: list[Cell], place: Place) -> dict[str, int]:
    """Steps of each method in the time that the fastest of them needs for all its steps.

    The pace does not depend on text and seed: it is measured once and kept, so that the same question has the
    same answer when an interrupted reproduction goes on.
    """
    path = kept(group, place)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if place.scale == "smoke":
            write_atomically(path, json.dumps(measure(trains_of(group), rounds=1)))
        else:
            measure_apart(json.dumps(trains_of(group), default=list), path, place.threads)
    pace = json.loads(path.read_text("utf-8"))
    return share_time(pace, group[0].steps)


def kept(group: list[Cell], place: Place) -> Path:
    """The file of the group's pace; there once it was measured."""
    text = json.dumps(trains_of(group), sort_keys=True, default=list)
    name = f"{group[0].train_length}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    return place.scores / "pace" / name


def trains_of(group: list[Cell]) -> list[dict[str, Any]]:
    return [{**cell.train, "seed": 0} for cell in group]


def measure_apart(trains: str, path: Path, threads: int) -> None:
    """In a process with as many threads as a training has."""
    order = path.with_suffix(".order.json")
    write_atomically(order, trains)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "dape.reproduce.pace", str(order), str(path)]
    subprocess.run(command, env=environment, check=True)
    order.unlink()


def measure(trains: list[dict[str, Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of a training step of each method, on random tokens."""
    ids = np.random.default_rng(0).integers(0, 256, 1 << 20).astype(np.uint16)
    candidates = {}
    for train in trains:
        config = TrainConfig(**train)
        task = LanguageModelling(
            build_model(config, vocabulary(config)),
            ids,
            train_length=config.train_length,
            batch_size=config.batch_size,
        )
        candidates[config.method] = bare_steps(task)
    timings = interleave(candidates, rounds)
    return {method: timing.milliseconds / 1e3 / STEPS_A_ROUND for method, timing in timings.items()}


def vocabulary(config: TrainConfig) -> int:
    """The size of the output layer: that of the tokenizer as far as its name tells."""
    _, _, size = config.tokenizer.partition(":")
    return int(size) if size.isdecimal() else 256


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    trains = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    write_atomically(sys.argv[2], json.dumps(measure(trains)))
