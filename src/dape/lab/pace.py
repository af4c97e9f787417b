"""Equal training time: time of a training step of each method, measured interleaved in one process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dape.bench.timing import interleave
from dape.bench.train import STEPS_A_ROUND, loop_steps
from dape.data import open_data
from dape.devices import find_device
from dape.files import read_json, write_atomically
from dape.lab.experiments import Workspace
from dape.lab.kinds.language import LanguageRun, data_folder
from dape.plugins import load_plugins
from dape.training import TrainConfig
from dape.training.run import LanguageModelling, build_model

ROUNDS = 12
# A method whose step time is this close to the fastest keeps all its steps, unless `exact`.
CLOSE = 0.05


def equal_time_steps(
    group: Sequence[LanguageRun], workspace: Workspace, *, exact: bool = False
) -> dict[str, int]:
    """Steps of each method in the time that the fastest needs for all its steps.

    The pace does not depend on text and seed: it is measured once and kept, so that a resumed comparison uses the same
    numbers.
    """
    path = pace_file(group, workspace)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        trains, size = trains_of(group), vocabulary(group[0], workspace)
        if workspace.scale == "smoke":
            write_atomically(path, json.dumps(measure(trains, size, rounds=1)))
        else:
            rounds = min(ROUNDS, max(3, group[0].steps // 40))
            measure_apart({"trains": trains, "vocabulary": size, "rounds": rounds}, path, workspace.threads)
    return share_time(read_json(path), group[0].steps, close=0.0 if exact else CLOSE)


def share_time(pace: dict[str, float], steps: int, *, close: float = CLOSE) -> dict[str, int]:
    """Steps of each method in the time that the fastest needs for `steps`, from seconds per step."""
    budget = steps * min(pace.values())
    return {
        method: steps if seconds * steps <= budget * (1 + close) else max(1, round(budget / seconds))
        for method, seconds in pace.items()
    }


def pace_file(group: Sequence[LanguageRun], workspace: Workspace) -> Path:
    """File of the group's pace, which exists once it was measured."""
    text = json.dumps(trains_of(group), sort_keys=True, default=list)
    name = f"{group[0].train_length}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    return workspace.evaluations / "pace" / name


def trains_of(group: Sequence[LanguageRun]) -> list[dict[str, Any]]:
    return [{**item.train, "seed": 0} for item in group]


def vocabulary(item: LanguageRun, workspace: Workspace) -> int:
    """Vocabulary size: that of the packed data, or by the tokenizer's name."""
    folder = Path(dict(item.corpus.given).get("data") or data_folder(item, workspace))
    if folder.exists():
        return open_data(folder).tokenizer.vocab_size
    _, _, size = str(item.train.get("tokenizer", "bytes")).partition(":")
    return int(size) if size.isdecimal() else 256


def measure_apart(order: dict[str, Any], path: Path, threads: int) -> None:
    """Measure in a subprocess with as many threads as a training has."""
    file = path.with_suffix(".order.json")
    write_atomically(file, json.dumps(order, default=list))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([sys.executable, "-m", "dape.lab.pace", str(file), str(path)], env=environment, check=True)
    file.unlink()


def measure(trains: list[dict[str, Any]], vocab_size: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of a training step of each method, as its training takes it, on random tokens."""
    ids = np.random.default_rng(0).integers(0, min(256, vocab_size), 1 << 20).astype(np.uint16)
    candidates: dict[str, Callable[[], None]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        for train in trains:
            # Enough steps for any number of rounds, too small to diverge on noise.
            config = replace(
                TrainConfig(**train), steps=10**6, warmup_steps=1, learning_rate=1e-6, final_learning_rate=0.0
            )
            config = replace(config, log_every=STEPS_A_ROUND, tensorboard=False, wandb=None)
            task = LanguageModelling(
                build_model(config, vocab_size),
                ids,
                train_length=config.train_length,
                batch_size=config.batch_size,
            )
            candidates[config.method] = loop_steps(task, Path(name) / str(len(candidates)), stack, config)
        timings = interleave(candidates, rounds, find_device(config.device).type)
    return {method: timing.milliseconds / 1e3 / STEPS_A_ROUND for method, timing in timings.items()}


if __name__ == "__main__":
    load_plugins()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    order = read_json(sys.argv[1])
    write_atomically(sys.argv[2], json.dumps(measure(order["trains"], order["vocabulary"], order["rounds"])))
