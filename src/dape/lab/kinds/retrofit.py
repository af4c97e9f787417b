"""A small Llama trained at a short length, retrofitted, tuned at that length, tested at longer ones.

Three models, the same target bytes at every length:
  base                     the Llama as trained
  base, trained on         the same further steps without convolutions: the effect of tuning alone
  retrofitted, trained on  the same further steps with convolutions
"""

from __future__ import annotations

import copy
import math
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dape
from dape.evaluate.inference import Estimate
from dape.lab.folders import Folder
from dape.lab.kinds import Kind, Plan
from dape.lab.paper import Paper
from dape.lab.records import Results
from dape.lab.tables import OURS, Cell, Row, Table, change, exp
from dape.retrofitting.attach import adapter_parameters

MULTIPLES = (1, 2, 4, 8, 16)
HELD_OUT = 0.1
ADAPTER_RATE = 5.0


class Retrofit(Kind):
    """One seed of the three models, trained in this process."""

    scale_keys = frozenset(
        {"method", "steps", "tune_steps", "train_length", "batch_size", "targets", "windows", "seed"}
    )

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Loss at every length, and its paired change from the shortest, for each model."""
        settings, start = plan.settings, time.monotonic()
        train, test = corpus(settings["seed"])
        torch.manual_seed(settings["seed"])
        base = LlamaForCausalLM(small_llama())
        fit(base, train, settings, steps=settings["steps"], rate=2e-3, seed=settings["seed"])
        onward = copy.deepcopy(base)
        retrofitted = dape.retrofit(copy.deepcopy(base), settings["method"])
        untouched = window_losses(retrofitted, test, settings).mean(1)
        for model in (onward, retrofitted):
            fit(model, train, settings, steps=settings["tune_steps"], rate=1e-3, seed=settings["seed"] + 1)
        models = {"base": base, "base, trained on": onward, "retrofitted, trained on": retrofitted}
        results = Results({"kind": "retrofit"})
        lengths = [multiple * settings["train_length"] for multiple in MULTIPLES]
        for name, model in models.items():
            losses = window_losses(model, test, settings)
            if name == "base":
                difference = (untouched - losses.mean(1)).abs().max().item()
            run = {
                "method": settings["method"],
                "variant": name,
                "seed": settings["seed"],
                "corpus": "stdlib",
            }
            results.add({**run, "train_length": settings["train_length"]}, loss_rows(lengths, losses))
        return {
            "settings": {**settings, "adapter_rate": ADAPTER_RATE},
            "parameters": {
                "base": sum(p.numel() for p in base.parameters()),
                "added": sum(p.numel() for p in adapter_parameters(retrofitted).values()),
            },
            "largest change of loss by retrofitting before training": difference,
            "seconds": round(time.monotonic() - start),
            "runs": results["runs"],
            "rows": results["rows"],
        }

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        return [table(folder.best)] if folder.best else []


def table(results: Results) -> Table:
    """Table of perplexity by length, one row per model."""
    losses, changes = results.lines("loss"), results.lines("change")
    lengths = sorted({line["eval_length"] for line in losses})
    rows = []
    for name in dict.fromkeys(line["variant"] for line in losses):
        mine = {line["eval_length"]: line["value"] for line in losses if line["variant"] == name}
        last = [line for line in changes if (line["variant"], line["eval_length"]) == (name, lengths[-1])]
        cells = [Cell(f"{exp(mine[length]):.2f}", exp(mine[length])) for length in lengths]
        rows.append(Row(name, OURS, (*cells, change(Estimate(last[0]["value"], last[0]["error"])))))
    heads = (*map(str, lengths), "change of loss")
    return Table("", heads, tuple(rows), corner="perplexity at length")


def loss_rows(lengths: list[int], losses: Tensor) -> list[dict[str, Any]]:
    """Losses [lengths, windows] as rows, with their changes from the first length."""
    rows: list[dict[str, Any]] = []
    for length, own in zip(lengths, losses, strict=True):
        gap = own - losses[0]
        mean, error = own.mean().item(), own.std().item() / math.sqrt(len(own))
        shared = {"eval_length": length, "count": len(own)}
        rows.append({"metric": "loss", **shared, "value": mean, "error": error})
        error = gap.std().item() / math.sqrt(len(gap))
        rows.append(
            {
                "metric": "change",
                **shared,
                "against": str(lengths[0]),
                "value": gap.mean().item(),
                "error": error,
            }
        )
    return rows


def small_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        bos_token_id=None,
        eos_token_id=None,
    )


def corpus(seed: int) -> tuple[Tensor, list[Tensor]]:
    """Bytes of Python's own standard library: concatenated training files, and held-out files."""
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
    model: PreTrainedModel, train: Tensor, settings: dict[str, Any], *, steps: int, rate: float, seed: int
) -> None:
    """Train in place; the same seed gives every model the same batches."""
    generator = torch.Generator().manual_seed(seed)
    added = list(adapter_parameters(model).values())
    own = [p for p in model.parameters() if all(p is not other for other in added)]
    # New parameters take a higher rate than trained ones, as in adapters.
    groups: list[dict[str, Any]] = [
        {"params": own},
        {"params": added, "lr": ADAPTER_RATE * rate, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    length = settings["train_length"]
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(train) - length, (settings["batch_size"], 1), generator=generator)
        ids = train[starts + torch.arange(length)].long()
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def window_losses(model: PreTrainedModel, test: list[Tensor], settings: dict[str, Any]) -> Tensor:
    """Mean loss [lengths, windows] of the same last bytes of the same windows at every length."""
    longest = max(MULTIPLES) * settings["train_length"]
    long_enough = [document for document in test if len(document) > longest]
    generator = torch.Generator().manual_seed(settings["seed"])
    windows = []
    for index in range(settings["windows"]):
        document = long_enough[index % len(long_enough)]
        start = int(torch.randint(len(document) - longest, (), generator=generator))
        windows.append(document[start : start + longest].long())
    losses = []
    for multiple in MULTIPLES:
        length, targets = multiple * settings["train_length"], settings["targets"]
        per_window = []
        for window in torch.stack(windows)[:, -length:].split(max(1, 8192 // length)):
            logits = model(window, use_cache=False, logits_to_keep=targets + 1).logits[:, :-1]
            per_window.append(
                torch.nn.functional.cross_entropy(
                    logits.transpose(1, 2), window[:, -targets:], reduction="none"
                ).mean(1)
            )
        losses.append(torch.cat(per_window).double())
    return torch.stack(losses)
