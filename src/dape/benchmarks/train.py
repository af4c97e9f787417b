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
from dape.benchmarks.attention import Where, hardware
from dape.benchmarks.timing import interleave
from dape.commands.parsing import parse
from dape.models import DapeForCausalLM, preset
from dape.settings import setting
from dape.training import LoopSettings, initialise
from dape.training.loop import Loop, StopRequest, move
from dape.training.parallel import Parallel, autocast
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
    device: str = setting("cpu", help="Where to run: cpu, or a GPU such as cuda or cuda:1.")
    dtype: str = setting("fp32", help="Of the autocast: fp32 (none), fp16 or bf16.")
    threads: int = setting(0, help="Threads of PyTorch; 0 leaves its own choice.", low=0, high=4096)
    rounds: int = setting(9, help="Rounds; the median counts.", low=1, high=10**6)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = setting(
        None, help="Write one record a method.", writes="file"
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape bench train")
    records = run(options)
    title = f"{options.preset}, batch {options.batch} × {options.length} tokens, {options.dtype}, {hardware(options.device)}"
    report.print_table(title, COLUMNS, records)
    if options.json is not None:
        report.write_json(options.json, records)
    return 0


def run(options: Options) -> list[report.Record]:
    """One record a method."""
    if options.threads:
        torch.set_num_threads(options.threads)
    where = Where.of(options.device, options.dtype)
    methods = list(dict.fromkeys([BASELINE, *options.methods.split(",")]))
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        ids = np.memmap(folder / "ids", np.uint16, "w+", shape=(1 << 20,))
        ids[:] = np.random.default_rng(0).integers(0, 256, ids.shape)
        candidates: dict[str, Callable[[], None]] = {}
        for method in methods:
            candidates[f"{method} loop"] = loop_steps(
                build_task(method, ids, options), folder / method, stack, options
            )
            candidates[f"{method} bare"] = bare_steps(
                build_task(method, ids, options), where.device, options.dtype
            )
        timings = interleave(candidates, options.rounds, where.device)
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
            "device": options.device,
            "hardware": hardware(options.device),
            "dtype": str(where.dtype),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        for method in methods
    ]


def build_task(method: str, ids: np.ndarray, options: Options) -> LanguageModelling:
    model = DapeForCausalLM(preset(options.preset, method, vocab_size=256, backend=options.backend))
    initialise(model, 0)
    return LanguageModelling(model, ids, train_length=options.length, batch_size=options.batch)


def loop_steps(
    task: LanguageModelling, folder: Path, stack: contextlib.ExitStack, options: Options
) -> Callable[[], None]:
    """Ten steps of the training loop with their metrics written; no checkpoint falls among them."""
    folder.mkdir()
    settings = LoopSettings(steps=1_000_000, log_every=STEPS_A_ROUND, precision=options.dtype)  # type: ignore[arg-type]  # Where.of has checked it
    place = Parallel("none", 0, 1, torch.device(options.device))
    loop = Loop(task, settings, folder, place, StopRequest())
    loop.open_logs(stack, progress=False)

    def steps() -> None:
        for _ in range(STEPS_A_ROUND):
            loop.take_step()
        loop.flush()

    return steps


def bare_steps(task: LanguageModelling, place: str = "cpu", precision: str = "fp32") -> Callable[[], None]:
    """Ten times forward, backward and fused AdamW on one batch; without the scaling of losses that float16 wants."""
    device = torch.device(place)
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
