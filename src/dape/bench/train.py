"""`dape bench train`: cost of a method in a training step, and of the training loop beyond the model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dape.bench import report, steps
from dape.bench.attention import Placement
from dape.bench.steps import BASELINE
from dape.bench.timing import interleave
from dape.devices import find_device
from dape.models import DapeForCausalLM
from dape.training import LoopSettings, initialise
from dape.training.loop import Loop, StopRequest, move
from dape.training.parallel import Parallel, autocast
from dape.training.run import LanguageModelling

STEPS_A_ROUND = 10
COLUMNS = (
    ("method", "method", ""),
    ("ms a step, loop", "loop_milliseconds", ".1f"),
    ("ms, bare", "bare_milliseconds", ".1f"),
    ("loop / bare", "loop_to_bare", ".3f"),
    ("× kerple, bare", "ratio_to_kerple", ".2f"),
)


@dataclass(frozen=True)
class Options(steps.StepOptions):
    """Time a step of `dape train` (data, loss, clipping, optimizer, metrics) against a bare loop of the same model
    and fused AdamW on a fixed batch, and each method against kerple. Ten steps of every candidate in turn."""


def show(options: Options, records: list[report.Record]) -> None:
    steps.print_records(options, records, COLUMNS)


def run(options: Options) -> list[report.Record]:
    """One record per method."""
    options.prepare()
    placement = Placement.of(options.device, options.dtype)
    methods = list(dict.fromkeys([BASELINE, *options.methods.split(",")]))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ids = np.memmap(folder / "ids", np.uint16, "w+", shape=(1 << 20,))
        ids[:] = np.random.default_rng(0).integers(0, 256, ids.shape)
        candidates: dict[str, Callable[[], None]] = {}
        for method in methods:
            settings = LoopSettings(
                steps=1_000_000,
                log_every=STEPS_A_ROUND,
                precision=options.dtype,  # type: ignore[arg-type]  # Placement.of has checked it
                device=options.device,
            )
            candidates[f"{method} loop"] = loop_steps(
                language_task(method, ids, options), folder / method, stack, settings
            )
            candidates[f"{method} bare"] = bare_steps(
                language_task(method, ids, options), placement.device, options.dtype
            )
        timings = interleave(candidates, options.rounds, placement.device, options.clock)
    milliseconds = {name: timing.milliseconds / STEPS_A_ROUND for name, timing in timings.items()}
    return [
        {
            "method": method,
            **options.record(),
            "loop_milliseconds": milliseconds[f"{method} loop"],
            "bare_milliseconds": milliseconds[f"{method} bare"],
            "loop_to_bare": milliseconds[f"{method} loop"] / milliseconds[f"{method} bare"],
            "ratio_to_kerple": milliseconds[f"{method} bare"] / milliseconds[f"{BASELINE} bare"],
        }
        for method in methods
    ]


def language_task(method: str, ids: np.ndarray, options: Options) -> LanguageModelling:
    model = DapeForCausalLM(options.config(method, vocab_size=256))
    initialise(model, 0)
    return LanguageModelling(model, ids, train_length=options.length, batch_size=options.batch)


def loop_steps(
    task: LanguageModelling, folder: Path, stack: contextlib.ExitStack, settings: LoopSettings
) -> Callable[[], None]:
    """Ten steps of the training loop including metrics, without checkpoints, on the device of the settings."""
    folder.mkdir()
    parallel = Parallel("none", 0, 1, find_device(settings.device))
    loop = Loop(task, settings, folder, parallel, StopRequest())
    loop.open_logs(stack, progress=False)

    def steps() -> None:
        for _ in range(STEPS_A_ROUND):
            loop.take_step()
        loop.flush()

    return steps


def bare_steps(task: LanguageModelling, device_name: str, precision: str) -> Callable[[], None]:
    """Ten times forward, backward and fused AdamW on one batch, without the loss scaling of float16."""
    device = torch.device(device_name)
    batch, model = move(task.batch(0), device), torch.nn.Module.to(task.model, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def steps() -> None:
        for _ in range(STEPS_A_ROUND):
            with autocast(precision, device):
                loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps
