"""`python -m dev.steps`: what the training loop costs beside a bare step, and the forward pass that evaluates last tokens.

python -m dev.steps --rounds 40                        the loop's step as a ratio to the bare one, by method
python -m dev.steps --length 8192 --last 64 --methods dape1x3-kerple    ratios to kerple's pass over all of them
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dape.bench import report, train
from dape.bench.timing import interleave
from dape.cli.parsing import parse
from dape.devices import find_device
from dape.lab.equal_time import STEPS_A_ROUND, loop_steps
from dape.settings import setting
from dape.training import LoopSettings
from dape.training.loop import move

COLUMNS = (
    ("method", "method", ""),
    ("ms", "milliseconds", ".1f"),
    ("ratio", "ratio", ".3f"),
)


@dataclass(frozen=True)
class Options(train.StepOptions):
    """Time steps of `dape train` (data, loss, clipping, optimizer, metrics) as ratios to bare ones on a fixed batch; or,
    with --last, the forward pass for the last tokens of a window as a ratio to kerple's for all of it."""

    last: int = setting(0, help="Evaluate this many last tokens; 0: train.", low=0, high=2**24)


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dev.steps")
    records = run(options)
    report.show(options.title, COLUMNS, records, options.json)
    return 0


def run(options: Options) -> list[report.Record]:
    """One record per method."""
    device, methods = options.prepare(), options.methods.split(",")
    candidates: dict[str, Callable[[], object]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        for method in methods:
            if options.last:
                candidates[f"{method} base"] = evaluation(train.BASELINE, None, options)
                candidates[method] = evaluation(method, options.last, options)
                continue
            candidates[f"{method} base"] = train.repeated(train.training_step(method, options), STEPS_A_ROUND)
            task, folder = train.language_task(method, options), Path(name) / method
            settings = LoopSettings(
                steps=10**6, log_every=STEPS_A_ROUND, precision=options.dtype, device=options.device
            )
            candidates[method] = loop_steps(task, folder, stack, settings)
        timings = interleave(candidates, options.rounds, str(device), options.clock)
    count = 1 if options.last else STEPS_A_ROUND
    return [
        {"method": method, "milliseconds": timings[method].milliseconds / count, **options.record()}
        | {"ratio": timings[method].milliseconds / timings[f"{method} base"].milliseconds}
        for method in methods
    ]


def evaluation(method: str, rows: int | None, options: Options) -> Callable[[], None]:
    """A forward pass for the last `rows` tokens, or for all."""
    device, task = find_device(options.device), train.language_task(method, options)
    tokens, model = move(task.batch(0), device)[:, :-1], torch.nn.Module.to(task.model, device)
    train.check_step(model, method, tokens[:1, :64])
    base: Any = model.model

    @torch.no_grad()
    def forward() -> None:
        base(input_ids=tokens, last_rows=rows, use_cache=False)

    return forward


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
