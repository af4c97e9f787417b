"""Language models small enough to train in a second, on text that has something to learn; also a script.

python toy.py FOLDER [--model plain|decoder] [--kill-at STEP] [--steps N] …   for tests that kill or multiply
processes. The plain model needs no transformers, so such a process starts fast.
"""

import argparse
import os
import signal
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from dape import attention
from dape.positions import Kerple, Positions
from dape.scores import ScoreConv
from dape.training import FitResult, LoopSettings, fit, initialise
from dape.training.run import LanguageModelling

STEPS, VOCABULARY, WIDTH, HEADS = 12, 32, 32, 2


class PlainModel(nn.Module):
    """One layer of score convolution attention, with dropout to need random numbers."""

    def __init__(self, kernel_size: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)
        self.encoding, self.scores = Kerple(HEADS), ScoreConv(HEADS, 8, kernel_size=kernel_size)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.embed(input_ids)
        q, k, v = self.inputs(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        bias = self.encoding.bias(q, k, Positions.of(x.shape[1]), scale=1.0)
        attended = attention(q, k, v, self.scores, bias=bias).transpose(1, 2).flatten(2)
        return SimpleNamespace(logits=self.head(x + self.dropout(F.gelu(attended))))


def decoder(method: str = "dape1x3-kerple") -> nn.Module:
    from dape.models import DapeConfig, DapeForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    return DapeForCausalLM(DapeConfig(method=method, num_hidden_layers=2, score_width=8, **sizes))


def task(model: nn.Module | None = None) -> LanguageModelling:
    """Next token = sum of the two before it, modulo 32, nine times out of ten."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCABULARY, 4000).astype(np.uint16)
    for index in range(2, len(ids)):
        if draw.random() < 0.9:
            ids[index] = (ids[index - 1] + ids[index - 2]) % VOCABULARY
    model = PlainModel() if model is None else model
    initialise(model, 0)
    return LanguageModelling(model, ids, train_length=16, batch_size=8, validation=ids[:500])


def settings(**changes: object) -> LoopSettings:
    small = {"steps": STEPS, "warmup_steps": 2, "checkpoint_every": 4, "log_every": 1}
    return LoopSettings(**{**small, **changes})


def train(folder: Path, **changes: object) -> FitResult:
    return fit(task(), settings(**changes), folder, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="plain")
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--say-steps", action="store_true")
    for field in fields(LoopSettings):
        if type(field.default) in (int, float, str):
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    options = vars(parser.parse_args())
    folder, kind, kill_at, say = (options.pop(name) for name in ("folder", "model", "kill_at", "say_steps"))

    def on_step(record: dict[str, float]) -> None:
        if say and os.environ.get("RANK", "0") == "0":  # two processes would write into each other's lines
            print(f"step {record['step']}", flush=True)
        if record["step"] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    chosen = {name: value for name, value in options.items() if value is not None}
    model = {"plain": PlainModel, "decoder": decoder}[kind]()
    print(fit(task(model), settings(**chosen), folder, on_step=on_step, progress=False), flush=True)


if __name__ == "__main__":
    main()
