"""`dape retrofit-demo`: a small Llama trained at a short length, retrofitted, tuned at that length, tested at longer ones.

Three models, the same target bytes at every length:
  base                 the Llama as trained
  base, trained on     the same further steps without convolutions: what tuning alone brings
  retrofitted          the same further steps with convolutions
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dape
from dape.retrofitting.attach import adapter_parameters

LENGTHS = (1, 2, 4, 8, 16)
HELD_OUT = 0.1
ADAPTER_RATE = 5.0


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.train_length < 2 * options.targets:
        raise ValueError(
            f"--train-length {options.train_length} is shorter than twice the {options.targets} target tokens"
        )
    report = run(options)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "README.md").write_text(readme(report))
    print(table(report))
    return 0


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, the description's lines as they are."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dape retrofit-demo",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=Formatter,
    )
    parser.add_argument("--out", default="results/retrofit", help="where results.json and README.md go")
    parser.add_argument("--method", default="dape1x3", help="of the convolution")
    parser.add_argument("--steps", type=int, default=500, help="of training the base")
    parser.add_argument("--tune-steps", type=int, default=200, help="of training on, with and without")
    parser.add_argument("--train-length", type=int, default=64, help="bytes in a training window")
    parser.add_argument("--batch-size", type=int, default=16, help="windows in a step")
    parser.add_argument("--targets", type=int, default=32, help="scored bytes at the end of each window")
    parser.add_argument("--windows", type=int, default=64, help="scored at each length")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every figure of the demonstration, with what it was made by."""
    start = time.monotonic()
    train, test = corpus(options.seed)
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        bos_token_id=None,
        eos_token_id=None,
    )
    base = LlamaForCausalLM(config)
    fit(base, train, options, steps=options.steps, rate=2e-3, seed=options.seed)
    onward = copy.deepcopy(base)
    retrofitted = dape.retrofit(copy.deepcopy(base), options.method)
    untouched = scores(retrofitted, test, options)
    for model in (onward, retrofitted):
        fit(model, train, options, steps=options.tune_steps, rate=1e-3, seed=options.seed + 1)
    models = {"base": base, "base, trained on": onward, "retrofitted, trained on": retrofitted}
    rows = {name: scores(model, test, options) for name, model in models.items()}
    difference = max(abs(a - b) for a, b in zip(untouched["loss"], rows["base"]["loss"], strict=True))
    return {
        "settings": {
            **{key: value for key, value in vars(options).items() if key != "out"},
            "adapter_rate": ADAPTER_RATE,
        },
        "lengths": [factor * options.train_length for factor in LENGTHS],
        "parameters": {
            "base": sum(p.numel() for p in base.parameters()),
            "added": sum(p.numel() for p in adapter_parameters(retrofitted).values()),
        },
        "largest change of loss by retrofitting before training": difference,
        "models": rows,
        "seconds": round(time.monotonic() - start),
        "versions": {
            "dape": dape.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, no GPU",
    }


def corpus(seed: int) -> tuple[Tensor, list[Tensor]]:
    """Bytes of Python's own standard library: training files end to end, and held-out files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path for path in sorted(root.rglob("*.py")) if not {"site-packages", "test", "tests"} & {*path.parts}
    ]
    random.Random(seed).shuffle(files)
    split = math.ceil(len(files) * HELD_OUT)
    held_out = [_tokens(path) for path in files[:split]]
    return torch.cat([_tokens(path) for path in files[split:]]), held_out


def _tokens(path: Path) -> Tensor:
    data = path.read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def fit(
    model: PreTrainedModel, train: Tensor, options: argparse.Namespace, *, steps: int, rate: float, seed: int
) -> None:
    """Train in place; the same seed gives every model the same batches."""
    generator = torch.Generator().manual_seed(seed)
    added = list(adapter_parameters(model).values())
    own = [p for p in model.parameters() if all(p is not other for other in added)]
    # What starts at zero beside trained weights takes a higher rate, as adapters do.
    groups: list[dict[str, Any]] = [
        {"params": own},
        {"params": added, "lr": ADAPTER_RATE * rate, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    model.train()
    for _ in range(steps):
        starts = torch.randint(
            len(train) - options.train_length, (options.batch_size, 1), generator=generator
        )
        ids = train[starts + torch.arange(options.train_length)].long()
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def scores(model: PreTrainedModel, test: list[Tensor], options: argparse.Namespace) -> dict[str, list[float]]:
    """Loss of the same last bytes of the same windows at every length, and its change from the shortest (paired)."""
    longest = max(LENGTHS) * options.train_length
    long_enough = [document for document in test if len(document) > longest]
    generator = torch.Generator().manual_seed(options.seed)
    windows = []
    for index in range(options.windows):
        document = long_enough[index % len(long_enough)]
        start = int(torch.randint(len(document) - longest, (), generator=generator))
        windows.append(document[start : start + longest].long())
    losses = []
    for factor in LENGTHS:
        length = factor * options.train_length
        per_window = []
        for window in torch.stack(windows)[:, -length:].split(max(1, 8192 // length)):
            logits = model(window, use_cache=False, logits_to_keep=options.targets + 1).logits[:, :-1]
            per_window.append(
                torch.nn.functional.cross_entropy(
                    logits.transpose(1, 2), window[:, -options.targets :], reduction="none"
                ).mean(1)
            )
        losses.append(torch.cat(per_window).double())
    changes = [loss - losses[0] for loss in losses]
    return {
        "loss": [loss.mean().item() for loss in losses],
        "perplexity": [math.exp(loss.mean().item()) for loss in losses],
        "change": [change.mean().item() for change in changes],
        "change_se": [change.std().item() / math.sqrt(len(change)) for change in changes],
    }


def table(report: dict[str, Any]) -> str:
    """Perplexity by length, one model a line, as Markdown."""
    lines = [
        "| perplexity at length | " + " | ".join(map(str, report["lengths"])) + " | change of loss |",
        "|---" * (len(report["lengths"]) + 2) + "|",
    ]
    for name, row in report["models"].items():
        values = " | ".join(f"{value:.2f}" for value in row["perplexity"])
        lines.append(f"| {name} | {values} | {row['change'][-1]:+.3f} ± {row['change_se'][-1]:.3f} |")
    return "\n".join(lines)


def readme(report: dict[str, Any]) -> str:
    settings, counts = report["settings"], report["parameters"]
    return f"""# Retrofitting a small Llama

Written by `dape retrofit-demo` from results.json beside it: do not edit.

A Llama (3 layers, width 128, 4 heads in 2 groups, rotary positions, {counts["base"]:,} parameters) is trained for {settings["steps"]} steps on bytes of Python's standard library in windows of {settings["train_length"]}. Then it is trained on for {settings["tune_steps"]} steps at the same length, once as it is and once retrofitted with `{settings["method"]}` ({counts["added"]:,} parameters more), on the same batches (learning rate of the convolutions: {settings["adapter_rate"]:g} times that of the rest). Scored: the last {settings["targets"]} bytes of {settings["windows"]} windows of held-out files, the same bytes at every length. The last column is the change of the loss from the shortest to the longest length, with its paired standard error.

{table(report)}

Before any training the retrofitted model's losses differ from the base's by at most {report["largest change of loss by retrofitting before training"]:.1e}.

Seed {settings["seed"]}, {report["seconds"]} seconds on {report["machine"]}; {", ".join(f"{name} {version}" for name, version in report["versions"].items())}.
"""
