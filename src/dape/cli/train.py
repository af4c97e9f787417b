"""`dape train`: train a model on a text, by a recipe, a file or options."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from dape.cli.options import read_training
from dape.settings import setting
from dape.training.config import TrainConfig
from dape.training.display import clock
from dape.training.run import Run, check_options, train

DESCRIPTION = """Train a language model with any method, on your own text.

  dape train                                   a minute or two on a laptop
  dape train --method rope --train-length 128 --corpus my_texts/
  dape train --preset 125m --config mine.toml  the paper's recipe, with changes
  torchrun --nproc-per-node 8 -m dape train --distributed fsdp --preset 350m

The defaults below are the preset's recipe (add --preset to see another's). The same command resumes an interrupted
run. The folder then holds run.json, metrics.jsonl and model/; once trained, it can be loaded by
AutoModelForCausalLM.from_pretrained after `import dape.models`."""


@dataclass(frozen=True, kw_only=True)
class CommandLine(TrainConfig):
    config: Path | None = setting(
        None,
        help="A TOML, YAML or JSON file of these options (underscores for dashes); the command line takes precedence.",
        reads="file",
    )


def main(arguments: list[str]) -> int:
    config = parse_training(arguments)
    run = train(config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(run_summary(run))
    stopped = run.result.stopped_early if run.result else None
    return 128 + signal.Signals[stopped] if stopped and stopped in signal.Signals.__members__ else 0


def parse_training(arguments: list[str]) -> TrainConfig:
    """Parse the configuration: the preset's recipe, overridden by the file, overridden by the command line."""
    config = read_training(CommandLine, TrainConfig, arguments, prog="dape train", description=DESCRIPTION)
    check_options(config, [config.method])
    return config


def run_summary(run: Run) -> str:
    assert run.result is not None
    result, folder = run.result, os.path.relpath(run.folder)
    if result.stopped_early:
        return (
            f"stopped by {result.stopped_early} at step {result.steps} of {run.config.steps}, saved in {folder}: "
            f"the same command continues"
        )
    return "\n".join(
        [
            f"{run.config.method}: loss {result.final_loss:.3f} after {result.steps} steps, {clock(result.seconds)}",
            f"  dape eval {folder}                     perplexity by length",
            f"  dape generate {folder} --prompt '…'    text from it",
        ]
    )
