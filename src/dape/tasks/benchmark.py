"""`dape tasks bench`: what sampling a batch costs, beside a training step of the paper's encoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dape.tasks.base import generator_for
from dape.tasks.registry import TASKS, build_task
from dape.tasks.training import GeneratedTask, build_model


@dataclass(frozen=True)
class BenchOptions:
    """Time sampling a batch of each task at two lengths, and a training step at the shorter one."""

    batch_size: int = 128
    """Samples a batch."""
    lengths: tuple[int, int] = (40, 500)
    """A training length and a test length."""
    method: str = "kerple"
    """The model's method in the training step: a cheap one makes the strictest comparison."""
    repeats: int = 5
    """The median of so many is shown."""


def main(arguments: list[str]) -> int:
    options = tyro.cli(BenchOptions, args=arguments, prog="dape tasks bench")
    short, long = options.lengths
    title = f"batch {options.batch_size}, medians of {options.repeats}, {torch.get_num_threads()} threads"
    head = ("task", f"sample {short}", f"sample {long}", f"step {short}", "sample / step")
    table = Table(*head, title=title)
    for name in track(TASKS, "measuring", transient=True):
        sampled, stepped = measure(name, options)
        milliseconds = [f"{1000 * seconds:.2f} ms" for seconds in (*sampled, stepped)]
        table.add_row(name, *milliseconds, f"{100 * sampled[0] / stepped:.2f} %")
    Console().print(table)
    return 0


def measure(name: str, options: BenchOptions) -> tuple[list[float], float]:
    """Seconds to sample a batch at each length, and seconds of a training step at the first."""
    # Associative recall has as many pairs as keys at most; fixed pairs allow any length.
    task = build_task(name, **({"pairs": 12} if name == "associative_recall" else {}))
    protocol = task.protocol
    model = build_model(
        task,
        options.method,
        num_layers=protocol.num_layers,
        hidden_size=protocol.hidden_size,
        num_heads=protocol.num_heads,
        seed=0,
    )
    training = GeneratedTask(task, model, options.batch_size, options.lengths[:1])
    optimizer = torch.optim.Adam(model.parameters())
    batch = training.batch(0)

    def step() -> None:
        training.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def draw(length: int) -> Callable[[], object]:
        return lambda: task.examples(options.batch_size, length, generator_for(0, length))

    sampled = [median_seconds(draw(length), options.repeats) for length in options.lengths]
    return sampled, median_seconds(step, options.repeats)


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
