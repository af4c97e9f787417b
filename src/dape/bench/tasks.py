"""`dape bench tasks`: cost of sampling a batch of a generated task, against a training step on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.progress import track

from dape.bench.report import Column, Record, print_table, write_json
from dape.bench.timing import interleave
from dape.cli.parsing import parse
from dape.lab.solving import GeneratedTask, build_model
from dape.settings import setting
from dape.tasks import TASKS, build_task, generator_for

COLUMNS: list[Column] = [
    ("task", "task", ""),
    ("sample, ms", "sample", ".2f"),
    ("step, ms", "step", ".0f"),
    ("sample / step", "ratio", ".2%"),
    ("long sample, ms", "long_sample", ".1f"),
]


@dataclass(frozen=True)
class BenchOptions:
    """Time sampling a batch of each task at a training and a test length, and a training step, taking turns."""

    names: tyro.conf.Positional[tuple[str, ...]] = setting(tuple(TASKS), help="Tasks; all by default.")
    batch_size: int = setting(128, help="Samples a batch.", low=1, high=2**24)
    length: int = setting(40, help="Length of the training batch.", low=1, high=2**24)
    long_length: int = setting(500, help="Length of the test batch.", low=1, high=2**24)
    method: str = setting("kerple", help="Method of the model: a cheap one makes the strictest comparison.")
    rounds: int = setting(5, help="Rounds; the median is reported.", low=1, high=10**6)
    json: Path | None = setting(None, help="Write the records to this file.", writes="file")


def main(arguments: list[str]) -> int:
    options: BenchOptions = parse(BenchOptions, arguments, prog="dape bench tasks")
    records = [measure(name, options) for name in track(options.names, "measuring", transient=True)]
    settings = f"lengths {options.length} and {options.long_length}, {torch.get_num_threads()} threads"
    print_table(f"batch {options.batch_size}, {settings}", COLUMNS, records)
    if options.json:
        write_json(options.json, records)
    return 0


def measure(name: str, options: BenchOptions) -> Record:
    """Median milliseconds of each."""
    # Associative recall has at most as many pairs as keys; fixed pairs allow any length.
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
    training = GeneratedTask(task, model, options.batch_size, (options.length,))
    optimizer = torch.optim.Adam(model.parameters())
    batch = training.batch(0)

    def step() -> None:
        training.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def sample(length: int) -> Callable[[], object]:
        return lambda: task.examples(options.batch_size, length, generator_for(0, length))

    timings = interleave(
        {"sample": sample(options.length), "long_sample": sample(options.long_length), "step": step},
        options.rounds,
    )
    milliseconds = {key: timing.milliseconds for key, timing in timings.items()}
    return {"task": name, **milliseconds, "ratio": milliseconds["sample"] / milliseconds["step"]}
