"""Runs: a task, a method and a seed, trained and tested; many of them in one folder, resumable."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from dape.methods import parse_method
from dape.positions import POSITIONS
from dape.tasks.base import Protocol, Task, generator_for
from dape.tasks.registry import build_task
from dape.tasks.results import Result, Results


@dataclass(frozen=True)
class TaskRun:
    """One training and its test. `protocol` is the task's own with what the user changed."""

    task: str
    method: str
    seed: int
    protocol: Protocol
    options: dict[str, Any] = field(default_factory=dict)
    position_range: int | None = None

    def __post_init__(self) -> None:
        task, protocol = self.build(), self.protocol
        encoding = POSITIONS[parse_method(self.method).position]
        if task.model == "encoder" and encoding.direction == "causal":
            raise ValueError(
                f'"{self.method}" has no meaning where the future is visible, as in "{self.task}"'
            )
        if not protocol.train_lengths or not protocol.test_lengths:
            raise ValueError("there must be at least one length to train and one to test")
        # Whatever is wrong with a length is said before hours of training.
        lengths = {*protocol.train_lengths, *protocol.test_lengths}
        places = max(task.examples(1, length, generator_for(0)).ids.shape[1] for length in sorted(lengths))
        if self.position_range is not None and self.position_range < places:
            raise ValueError(
                f'--randomized-positions {self.position_range} is too few for "{self.task}": at its longest length '
                f"input and output take {places} places, so give at least {places}"
            )

    def build(self) -> Task:
        return build_task(self.task, **self.options)

    @property
    def name(self) -> str:
        """Different for runs that a folder holds side by side."""
        options = "".join(f"-{name}={value}" for name, value in sorted(self.options.items()))
        positions = f"-range{self.position_range}" if self.position_range else ""
        layers = self.protocol.num_layers
        return f"{self.task}{options}-{self.method}{positions}-layers{layers}-seed{self.seed}"

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON has it."""
        return json.loads(json.dumps({**asdict(self), "protocol": asdict(self.protocol)}))


def execute(run: TaskRun, folder: Path, *, progress: bool = False, threads: int | None = None) -> Result:
    """Train (or go on training) in the folder, test, and return the result; the folder keeps no model after."""
    from dape.tasks.training import GeneratedTask, accuracy_by_length, build_model
    from dape.training import LoopSettings, fit

    if threads:
        torch.set_num_threads(threads)
    task, protocol = run.build(), run.protocol
    model = build_model(
        task,
        run.method,
        num_layers=protocol.num_layers,
        hidden_size=protocol.hidden_size,
        num_heads=protocol.num_heads,
        seed=run.seed,
    )
    settings = LoopSettings(
        steps=protocol.steps,
        learning_rate=protocol.learning_rate,
        final_learning_rate=protocol.learning_rate,
        warmup_steps=0,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip=protocol.clip,
        seed=run.seed,
        checkpoint_every=max(100, min(5000, protocol.steps // 10)),
        keep_checkpoints=1,
        # Lengths differ from step to step, and with them the loss: only the enormous is a failure.
        explosion=1000.0,
    )
    training = GeneratedTask(
        task, model, protocol.batch_size, protocol.train_lengths, run.seed, run.position_range
    )
    fitted = fit(training, settings, folder, progress=progress)
    if fitted.stopped_early:
        raise KeyboardInterrupt(fitted.stopped_early)
    start = time.perf_counter()
    shown, silent = Console(stderr=True), not (progress and sys.stderr.isatty())
    accuracy = accuracy_by_length(
        task,
        model,
        track(protocol.test_lengths, "testing", console=shown, transient=True, disable=silent),
        protocol.samples,
        position_range=run.position_range,
    )
    longest = max(protocol.train_lengths)
    beyond = [value for length, value in accuracy.items() if length > longest]
    return {
        "name": run.name,
        "task": run.task,
        "method": run.method,
        "seed": run.seed,
        "num_layers": protocol.num_layers,
        "score": sum(beyond) / len(beyond) if beyond else None,
        "train_seconds": round(fitted.seconds, 2),
        "test_seconds": round(time.perf_counter() - start, 2),
        "final_loss": fitted.final_loss,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "settings": run.settings(),
        "accuracy": [{"length": length, "accuracy": value} for length, value in accuracy.items()],
    }


def execute_all(
    runs: Sequence[TaskRun],
    results: Results,
    *,
    jobs: int = 1,
    progress: bool = True,
    on_done: Callable[[TaskRun, Result], None] = lambda run, result: None,
) -> None:
    """Every run that the folder does not have yet; several at once in processes of their own."""
    waiting = [run for run in runs if not results.has(run.name, run.settings())]
    scratch = results.folder / "unfinished"

    def finish(run: TaskRun, result: Result) -> None:
        results.add(result)
        shutil.rmtree(scratch / run.name, ignore_errors=True)
        if scratch.exists() and not any(scratch.iterdir()):
            scratch.rmdir()
        on_done(run, result)

    if jobs == 1:
        for run in waiting:
            finish(run, execute(run, scratch / run.name, progress=progress))
        return
    threads = max(1, torch.get_num_threads() // jobs)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(execute, run, scratch / run.name, progress=False, threads=threads): run
            for run in waiting
        }
        try:
            for future in finished(futures):
                finish(futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def finished(futures: Iterable[Future[Result]]) -> Iterable[Future[Result]]:
    """The futures, each as soon as it is done."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        yield from done
