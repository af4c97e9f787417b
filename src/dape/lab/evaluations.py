"""Evaluations of a run by length: measured once, kept in one file, and made into rows of the results.

The file has the losses of all windows, sums by recall slice, and a sample of text. A new metric is measured in
`evaluate` and gets its rows beside `loss_rows`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dape.devices import find_device
from dape.evaluation.by_length import LengthLoss, losses_of_windows
from dape.evaluation.evaluator import evaluating
from dape.evaluation.recall import DEFAULT_NGRAM, SLICES, RecallBins, RecallSlices
from dape.evaluation.windows import Windows, same_targets
from dape.files import read_json, write_atomically
from dape.lab.environment import environment
from dape.lab.records import digits
from dape.methods import parse_layers
from dape.positions import POSITIONS, randomized_positions
from dape.positions.rope import SCALINGS, RoPE
from dape.training import Run


@dataclass(frozen=True)
class EvalOverrides:
    """Settings of the evaluation that differ from those of the training, given in a block of the grid:

    at_evaluation = { rope_scaling = "linear" | "ntk" | "yarn" }   RoPE, stretched by input length / training length
    at_evaluation = { randomized_positions = N }                   positions drawn anew for every batch, below N
    """

    rope_scaling: str = "none"
    randomized_positions: int | None = None

    def key(self, length: int) -> str:
        """JSON key of the losses at a length, such as "256" and "256 rope_scaling=ntk"."""
        usual = asdict(EvalOverrides())
        changed = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return f"{length} {','.join(f'{name}={value}' for name, value in changed.items())}".strip()

    def position_options(self, length: int, train_length: int) -> dict[str, Any]:
        """Options of the position encoding for inputs of `length` tokens."""
        if self.rope_scaling == "none":
            return {}
        original = {"original_length": train_length} if self.rope_scaling == "yarn" else {}
        return {"scaling": self.rope_scaling, "factor": max(1.0, length / train_length), **original}

    def positions(self, length: int) -> Callable[[int], Tensor] | None:
        """Function that draws the positions of an input, the same ones in every run; None for 0, 1, 2, …"""
        if self.randomized_positions is None:
            return None
        maximum, generator = self.randomized_positions, torch.Generator().manual_seed(length)
        return lambda num_tokens: randomized_positions(num_tokens, maximum, generator=generator)


def parse_key(key: str) -> tuple[int, EvalOverrides]:
    """Length and overrides of a JSON key of losses."""
    length, _, name = key.partition(" ")
    options: dict[str, Any] = dict(entry.split("=") for entry in name.split(",") if entry)
    if "randomized_positions" in options:
        options["randomized_positions"] = int(options["randomized_positions"])
    return int(length), EvalOverrides(**options)


def checked_overrides(options: dict[str, Any], method: str, lengths: tuple[int, ...]) -> EvalOverrides:
    """Overrides of a block of the grid; raises for an invalid one."""
    for name in options:
        if name not in asdict(EvalOverrides()):
            raise ValueError(
                f'at_evaluation has no key "{name}": it takes {", ".join(asdict(EvalOverrides()))}'
            )
    overrides = EvalOverrides(**options)
    if overrides.rope_scaling not in SCALINGS:
        raise ValueError(f'rope_scaling="{overrides.rope_scaling}": choose one of {", ".join(SCALINGS)}')
    if "rope_scaling" in options and not all(
        issubclass(POSITIONS[layer.position], RoPE) for layer in parse_layers(method)
    ):
        raise ValueError(f"{method} has no RoPE that could be scaled at the evaluation")
    maximum = overrides.randomized_positions
    if maximum is not None and maximum < max(lengths, default=1):
        raise ValueError(
            f"randomized_positions={maximum} at the evaluation, but inputs have {max(lengths)} tokens"
        )
    return overrides


def evaluate(run: Run, evaluation: dict[str, Any], path: Path, jobs: int) -> None:
    """Evaluate the lengths that are missing in the file, saving each when it is done."""
    content = known_of(run, evaluation, path, jobs)
    keys = [key for key in map(str, evaluation["lengths"]) if key not in content["windows"]]
    if evaluation.get("recall"):
        keys = lacks_recall(content, list(map(str, evaluation["lengths"])))
    if not keys and path.exists():
        return
    tokens, last = run.data().validation, evaluation.get("last", 1)
    recall: dict[str, Any] = {}
    if keys:
        options = {"context": evaluation["context"]} if "context" in evaluation else {}
        windows = same_targets(tokens, evaluation["room"], last, evaluation["windows"], **options)
        content |= {"documents": windows.documents.tolist(), "ends": windows.ends.tolist()}
        # Bins are of all lengths, those measured before included: where a new one divides them further, all are measured
        # again, and the slices so far stay until then.
        everything = dict.fromkeys([*content["windows"], *map(str, evaluation["lengths"])])
        bins = recall_bins(run, windows, list(everything), evaluation)
        recall = recall_of(content.get("recall"), bins)
        if content.get("recall") not in (None, recall):
            keys = list(everything)
        else:
            content["recall"] = recall
    write_atomically(path, json.dumps(content))
    device = find_device(run.config.device)
    model, loaded = None, None
    for key in keys:
        length, overrides = parse_key(key)
        changed = overrides.position_options(length, run.config.train_length)
        if model is None or changed != loaded:
            model, loaded = run.model(**changed), changed
            torch.nn.Module.to(model, device)
        with evaluating(model, positions=overrides.positions(length)) as evaluator:
            losses = losses_of_windows(evaluator, tokens, windows, length, last, None)
        means = losses.astype(np.float64).mean(1).tolist()
        content["windows"].setdefault(key, [round(loss, 6) for loss in means])
        recall["sums"][key] = bins.sums(losses).round(4).tolist()
        if set(recall["sums"]) >= set(content["recall"]["sums"] if content.get("recall") else ()):
            content["recall"] = recall
        write_atomically(path, json.dumps(content))


def recall_bins(run: Run, windows: Windows, keys: list[str], evaluation: dict[str, Any]) -> RecallBins:
    """Bins bounded by the powers of two, so that evaluations at other lengths pair, and by all other lengths."""
    room = evaluation["room"]
    bounds = {1 << power for power in range(room.bit_length())} | {parse_key(key)[0] for key in keys}
    bounds |= {room, min(room, run.config.train_length)}
    ngram = min(DEFAULT_NGRAM, room)
    return RecallBins.of(run.data().validation, windows, sorted(bounds), evaluation["last"], ngram=ngram)


def recall_of(before: dict[str, Any] | None, bins: RecallBins) -> dict[str, Any]:
    """Entry of the recall slices: the previous one, if it has the same bins."""
    if before is not None and before["digest"] == bins.digest:
        return before
    identity = {"ngram": bins.ngram, "bounds": list(bins.bounds), "digest": bins.digest}
    return {**identity, "counts": bins.counts.tolist(), "sums": {}}


def lacks_recall(content: dict[str, Any], keys: list[str]) -> list[str]:
    """Keys of losses that were evaluated without slices."""
    return [key for key in keys if key not in content.get("recall", {"sums": ()})["sums"]]


def loss_rows(content: dict[str, Any], keys: dict[int, str], *, paired: bool = True) -> list[dict[str, Any]]:
    """A row of the metric loss for each length; without windows if its documents differ from those of the others.

    keys: JSON keys of the losses by length.
    """
    documents, ends = np.array(content["documents"]), np.array(content["ends"])
    rows = []
    for length, key in keys.items():
        windows = np.array(content["windows"][key])
        loss = LengthLoss.of(length, windows, documents, ends, content["evaluation"]["last"])
        row = {
            "metric": "loss",
            "eval_length": length,
            "value": digits(loss.nll),
            "error": digits(loss.nll_se),
        }
        own = [round(one, 4) for one in windows.tolist()] if paired else None
        rows.append({**row, "count": len(windows), "windows": own})
    return rows


def slice_rows(
    recall: dict[str, Any], keys: dict[int, str], train_length: int, *, paired: bool
) -> list[dict[str, Any]]:
    """Rows of the metrics loss and change (from the training length) for every slice of tokens, summed by document."""
    sums = {length: np.array(recall["sums"][key]) for length, key in keys.items() if key in recall["sums"]}
    base = train_length if train_length in sums else min(sums, default=0)
    counts = np.array(recall["counts"])
    slices = RecallSlices(tuple(recall["bounds"]), base, recall["ngram"], counts, sums, recall["digest"])
    rows = []
    for length in sums:
        for name in (name for name in SLICES if name != "all"):
            bins = slices.bins(name, length)
            tokens = counts[:, bins].sum(1)
            common = {"eval_length": length, "slice": name, "count": int(tokens.sum())}
            common |= {"tokens": tokens.tolist()} if paired else {}
            measured: dict[str, tuple[Callable[..., tuple[float, float]], np.ndarray, str | None]]
            measured = {"loss": (slices.loss, sums[length], None)}
            if length != base:
                measured["change"] = (slices.change, sums[length] - sums[base], str(base))
            for metric, (mean, by_bin, against) in measured.items() if tokens.any() else ():
                value, error = mean(length, name)
                row = {"metric": metric, **common, "value": digits(value), "error": digits(error)}
                row |= {"against": against} if against else {}
                own = by_bin[:, bins].sum(1).round(3).tolist() if paired else None
                rows.append({**row, "windows": own})
    return rows


def add_sample(run: Run, path: Path, tokens: int) -> None:
    """Add a sample of text generated after the beginning of a held-out document, once."""
    from dape.generation import generate_text

    content = read_json(path)
    if "sample" in content:
        return
    data = run.data()
    beginning = data.validation.document(0)[: max(8, run.config.train_length // 2)].tolist()
    prompt = data.tokenizer.decode(beginning)
    model = run.model()
    torch.nn.Module.to(model, find_device(run.config.device))
    text = generate_text(model, data.tokenizer, prompt, tokens=tokens, seed=0) if prompt.strip() else ""
    write_atomically(path, json.dumps({**content, "sample": {"prompt": prompt, "text": text}}))


def _aside(path: Path, evaluation: dict[str, Any]) -> Path:
    """File of the evaluations of a training on other windows than those asked for last."""
    digest = hashlib.sha256(json.dumps(evaluation, sort_keys=True).encode()).hexdigest()[:8]
    return path.with_suffix(f".{digest}.json")


def known_of(run: Run, evaluation: dict[str, Any], path: Path, jobs: int) -> dict[str, Any]:
    """Contents of the file: earlier lengths on the same windows, training statistics and environment."""
    asked = {name: value for name, value in evaluation.items() if name not in ("lengths", "recall")}
    aside = _aside(path, asked)
    if path.exists():
        content = read_json(path)
        if content["evaluation"] == asked:
            return content
        # Evaluations on other windows are put aside, and come back when they are asked for again.
        path.replace(_aside(path, content["evaluation"]))
    if aside.exists():
        aside.replace(path)
        return read_json(path)
    metrics = run.metrics()
    times = [0.0, *(record["seconds"] for record in metrics)]
    # The median is robust against pauses and a busy machine.
    step = median(after - before for before, after in pairwise(times))
    every = max(1, len(metrics) // 200)
    training = {
        "steps": metrics[-1]["step"],
        "seconds_per_step": step,
        "loss": float(np.mean([record["loss"] for record in metrics[-50:]])),
        "curve": [[record["step"], round(record["loss"], 4)] for record in metrics[::every]],
        "validation": [
            [record["step"], round(record["validation_loss"], 4)]
            for record in metrics
            if "validation_loss" in record
        ],
        "parameters": sum(parameter.numel() for parameter in run.model().parameters()),
        "text": run.data().manifest["sources"]["sha256"],
    }
    return {"evaluation": asked, "training": training, "environment": environment(jobs), "windows": {}}
