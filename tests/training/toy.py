"""A language model small enough to train in a second, on text that has something to learn; also a script.

python toy.py FOLDER [--steps N] [--distributed …] …   trains it, for tests that kill or multiply processes
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import numpy as np

from dape.models import DapeConfig, DapeForCausalLM
from dape.training import FitResult, LoopSettings, fit, initialise
from dape.training.language import LanguageModelling

STEPS = 12


def model(seed: int = 0, method: str = "dape1x3-kerple", **changes: object) -> DapeForCausalLM:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    built = DapeForCausalLM(DapeConfig(method=method, score_width=8, **{**sizes, **changes}))
    initialise(built, seed)
    return built


def task(**changes: object) -> LanguageModelling:
    """Sixteen sums modulo 32: every token is the sum of the two before it, with some noise."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 32, 4000).astype(np.uint16)
    for index in range(2, len(ids)):
        if draw.random() < 0.9:
            ids[index] = (ids[index - 1] + ids[index - 2]) % 32
    built = model(hidden_dropout=0.1, **changes)
    return LanguageModelling(built, ids, train_length=16, batch_size=8)


def settings(**changes: object) -> LoopSettings:
    small = {"steps": STEPS, "warmup_steps": 2, "checkpoint_every": 4, "log_every": 1}
    return LoopSettings(**{**small, **changes})


def train(folder: Path, **changes: object) -> FitResult:
    return fit(task(), settings(**changes), folder, progress=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--say-steps", action="store_true")
    for field in fields(LoopSettings):
        kind = type(field.default)
        if kind in (int, float, str):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind)
    options = vars(parser.parse_args())
    kill_at, say_steps = options.pop("kill_at"), options.pop("say_steps")
    trained = task()
    for module in trained.model.modules():
        if hasattr(module, "p"):
            module.p = options["dropout"]
    del options["dropout"]
    folder = options.pop("folder")

    def on_step(record: dict[str, float]) -> None:
        if say_steps:
            print(f"step {record['step']}", flush=True)
        if record["step"] == kill_at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

    chosen = {name: value for name, value in options.items() if value is not None}
    result = fit(trained, settings(**chosen), folder, on_step=on_step, progress=False)
    print(result)
