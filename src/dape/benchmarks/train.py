"""`dape bench train`: what a method costs a training step, and what the training loop costs beside the model."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from dape.benchmarks import report
from dape.benchmarks.timing import interleave
from dape.commands.parsing import parse
from dape.models import DapeForCausalLM, preset
from dape.settings import setting
from dape.training import LoopSettings, initialise
from dape.training.loop import Loop, StopRequest
from dape.training.parallel import Parallel
from dape.training.run import LanguageModelling

BASELINE = "kerple"
STEPS_A_ROUND = 10
COLUMNS = (
    ("method", "method", ""),
    ("ms a step, loop", "loop_milliseconds", ".1f"),
    ("ms, bare", "bare_milliseconds", ".1f"),
    ("loop / bare", "loop_to_bare", ".3f"),
    ("× kerple, bare", "ratio_to_kerple", ".2f"),
)


@dataclass(frozen=True)
class Options:
    """Time a step of `dape train` (data, loss, clipping, optimizer, metrics) beside a bare loop of the same model
    and fused AdamW on a batch at hand, and each method beside kerple. Ten steps of every candidate in turn."""

    preset: str = setting("tiny", help="tiny, 125m, 350m, 2.7b or 6.7b.")
    methods: str = setting(
        "kerple,dape1x3-kerple", help="Separated by commas; kerple is always among them.", listed=str
    )
    length: int = setting(64, help="Tokens of an input.", low=1, high=2**24)
    batch: int = setting(16, help="Inputs at a time.", low=1, high=2**20)
    backend: str = setting("auto", help="Of the attention op.")
    threads: int = setting(0, help="Threads of PyTorch; 0 leaves its own choice.", low=0, high=4096)
    rounds: int = setting(9, help="Rounds; the median counts.", low=1, high=10**6)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = setting(
        None, help="Write one record a method.", writes="file"
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape bench train")
    records = run(options)
    title = f"{options.preset}, batch {options.batch} × {options.length} tokens, {torch.get_num_threads()} threads"
    report.print_table(title, COLUMNS, records)
    if options.json is not None:
        report.write_json(options.json, records)
    return 0


def run(options: Options) -> list[report.Record]:
    """One record a method."""
    if options.threads:
        torch.set_num_threads(options.threads)
    methods = list(dict.fromkeys([BASELINE, *options.methods.split(",")]))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ids = np.memmap(folder / "ids", np.uint16, "w+", shape=(1 << 20,))
        ids[:] = np.random.default_rng(0).integers(0, 256, ids.shape)
        candidates: dict[str, Callable[[], None]] = {}
        for method in methods:
            candidates[f"{method} loop"] = loop_steps(
                build_task(method, ids, options), folder / method, stack
            )
            candidates[f"{method} bare"] = bare_steps(build_task(method, ids, options))
        timings = interleave(candidates, options.rounds)
    milliseconds = {name: timing.milliseconds / STEPS_A_ROUND for name, timing in timings.items()}
    return [
        {
            "method": method,
            "preset": options.preset,
            "length": options.length,
            "batch": options.batch,
            "backend": options.backend,
            "loop_milliseconds": milliseconds[f"{method} loop"],
            "bare_milliseconds": milliseconds[f"{method} bare"],
            "loop_to_bare": milliseconds[f"{method} loop"] / milliseconds[f"{method} bare"],
            "ratio_to_kerple": milliseconds[f"{method} bare"] / milliseconds[f"{BASELINE} bare"],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        for method in methods
    ]


def build_task(method: str, ids: np.ndarray, options: Options) -> LanguageModelling:
    model = DapeForCausalLM(preset(options.preset, method, vocab_size=256, backend=options.backend))
    initialise(model, 0)
    return LanguageModelling(model, ids, train_length=options.length, batch_size=options.batch)


def loop_steps(task: LanguageModelling, folder: Path, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Ten steps of the training loop with their metrics written; no checkpoint falls among them."""
    folder.mkdir()
    settings = LoopSettings(steps=1_000_000, log_every=STEPS_A_ROUND)
    loop = Loop(task, settings, folder, Parallel("none", 0, 1, torch.device("cpu")), StopRequest())
    loop.open_logs(stack, progress=False)

    def steps() -> None:
        for _ in range(STEPS_A_ROUND):
            loop.take_step()
        loop.flush()

    return steps


def bare_steps(task: LanguageModelling) -> Callable[[], None]:
    """Ten times forward, backward and fused AdamW on one batch."""
    batch, model = task.batch(0), task.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def steps() -> None:
        for _ in range(STEPS_A_ROUND):
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps
