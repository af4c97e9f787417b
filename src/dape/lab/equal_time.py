"""Equal training time: steps of each method in the time of the fastest, by the time of a step, measured interleaved."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dape.bench.timing import interleave
from dape.data import open_data
from dape.devices import find_device
from dape.files import read_json, write_atomically
from dape.lab.environment import threads_of
from dape.lab.runs import Run, digest, spec_of
from dape.training import LoopSettings, TrainConfig
from dape.training.loop import Loop, StopRequest, TrainingTask
from dape.training.parallel import Parallel
from dape.training.run import LanguageModelling, build_model

ROUNDS, STEPS_A_ROUND = 12, 10
# A method whose step time is this close to the fastest keeps all its steps.
CLOSE = 0.05


def at_equal_time(runs: Sequence[Run], folder: Path, *, jobs: int = 1) -> list[Run]:
    """The runs with the steps that each takes in the time of the fastest of the same corpus, length and seed.

    A pace does not depend on text and seed: it is measured once and kept, so that a resumed comparison takes the same
    numbers of steps. jobs: concurrent trainings, which share the cores.
    """
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        key = (run.about["corpus"], run.config.train_length, run.config.seed)
        groups.setdefault(key, []).append(run)
    steps: dict[str, int] = {}
    for group in groups.values():
        pace = pace_of(group, folder, jobs=jobs)
        shared = share_time(pace, [run.steps for run in group])
        steps |= {run.id: count for run, count in zip(group, shared, strict=True)}
    return [run.with_steps(steps[run.id]) for run in runs]


def share_time(pace: Sequence[float], steps: Sequence[int]) -> list[int]:
    """Steps of each in the time of the fastest, from seconds a step and steps wanted."""
    budget = min(seconds * count for seconds, count in zip(pace, steps, strict=True))
    return [
        count if seconds * count <= budget * (1 + CLOSE) else max(1, round(budget / seconds))
        for seconds, count in zip(pace, steps, strict=True)
    ]


def pace_of(group: Sequence[Run], folder: Path, *, jobs: int) -> list[float]:
    """Seconds of a training step of each run, measured once for all seeds."""
    specs = [spec_of(replace(run, config=replace(run.config, seed=0, out=None))) for run in group]
    path = folder / "pace" / f"{group[0].config.train_length}-{digest(specs)}.json"
    if not path.exists():
        data = Path(group[0].data(folder))
        size = open_data(data).tokenizer.vocab_size if data.exists() else 256
        threads = torch.get_num_threads()
        torch.set_num_threads(threads_of(jobs))
        try:
            pace = measure_pace(
                [run.config for run in group], size, min(ROUNDS, max(3, group[0].steps // 40))
            )
        finally:
            torch.set_num_threads(threads)
        write_atomically(path, json.dumps(pace))
    return read_json(path, list)


def measure_pace(configs: Sequence[TrainConfig], vocab_size: int, rounds: int) -> list[float]:
    """Seconds of a training step of each, as its training takes it, on random tokens."""
    ids = np.random.default_rng(0).integers(0, min(256, vocab_size), 1 << 20).astype(np.uint16)
    candidates: dict[str, Callable[[], None]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        for index, config in enumerate(configs):
            # Enough steps for any number of rounds, too small to diverge on noise.
            config = replace(config, steps=10**6, warmup_steps=1, learning_rate=1e-6, final_learning_rate=0.0)
            config = replace(config, log_every=STEPS_A_ROUND, track=None)
            task = LanguageModelling(
                build_model(config, vocab_size),
                ids,
                train_length=config.train_length,
                batch_size=config.batch_size,
            )
            candidates[str(index)] = loop_steps(task, Path(name) / str(index), stack, config)
        timings = interleave(candidates, rounds, find_device(configs[0].device).type)
    return [timing.milliseconds / 1e3 / STEPS_A_ROUND for timing in timings.values()]


def loop_steps(
    task: TrainingTask, folder: Path, stack: contextlib.ExitStack, settings: LoopSettings
) -> Callable[[], None]:
    """Steps of the training loop including metrics, without checkpoints, on the device of the settings."""
    folder.mkdir()
    parallel = Parallel("none", 0, 1, find_device(settings.device))
    loop = Loop(task, settings, folder, parallel, StopRequest())
    loop.open_logs(stack, progress=False)

    def steps() -> None:
        for _ in range(STEPS_A_ROUND):
            loop.take_step()
        loop.flush()

    return steps
