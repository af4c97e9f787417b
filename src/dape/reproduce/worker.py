"""One cell, as a process or several under torchrun: train what is not yet trained, evaluate what is missing."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import traceback
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dape.compare.environment import environment
from dape.compare.worker import end_with_parent, sentence
from dape.evaluate.by_length import score
from dape.evaluate.scoring import scoring
from dape.evaluate.windows import same_targets
from dape.files import exclusive, write_atomically
from dape.reproduce.reading import parse_key
from dape.training import Run, TrainConfig, TrainingStopped, load_run, train


def main(arguments: list[str]) -> int:
    """Carry out the order in a file; 0 if all is there now, 1 with a note of why if not."""
    parser = argparse.ArgumentParser(prog="python -m dape.reproduce.worker", description=__doc__)
    parser.add_argument("order", type=Path)
    parser.add_argument(
        "--alone", action="store_true", help="not started by `dape reproduce`, so end with nobody"
    )
    options = parser.parse_args(arguments)
    order = json.loads(options.order.read_text("utf-8"))
    if not options.alone:
        threading.Thread(target=end_with_parent, daemon=True).start()
        torch.set_num_threads(order["threads"])
    try:
        config = TrainConfig(**order["train"])
        if config.distributed != "none":
            work(config, order["evaluation"], Path(order["scores"]), order["jobs"])
        else:
            with exclusive(f"{options.order}.lock"):
                work(config, order["evaluation"], Path(order["scores"]), order["jobs"])
    except Exception as error:
        traceback.print_exc()
        write_atomically(order["failure"], sentence(error))
        return 1
    return 0


def work(config: TrainConfig, evaluation: dict[str, Any], scores: Path, jobs: int = 1) -> None:
    run = trained(config)
    if int(os.environ.get("RANK", "0")):
        return
    # Checkpoints are three times the model, of which there are many.
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    content = begin(scores, evaluation, run, jobs)
    left = [key for key in map(str, evaluation["lengths"]) if key not in content["windows"]]
    if left or not scores.exists():
        evaluate(run, evaluation, left, content, scores)


def trained(config: TrainConfig) -> Run:
    """The run, trained to its end."""
    assert config.out is not None
    if (Path(config.out) / "model").is_dir():
        return load_run(config.out)
    run = train(config, progress=False)
    assert run.result is not None
    if run.result.stopped_early:
        raise TrainingStopped(f"{run.result.stopped_early} after step {run.result.steps} of {config.steps}")
    return run


def begin(scores: Path, evaluation: dict[str, Any], run: Run, jobs: int) -> dict[str, Any]:
    """What is known of the cell: lengths evaluated before on the same windows, how its training went and where."""
    asked = {name: value for name, value in evaluation.items() if name != "lengths"}
    if scores.exists():
        content = json.loads(scores.read_text("utf-8"))
        if content["evaluation"] == asked:
            return content
    metrics = run.metrics()
    times = [0.0, *(record["seconds"] for record in metrics)]
    training = {
        "steps": metrics[-1]["step"],
        "seconds": metrics[-1]["seconds"],
        # The median, which the pauses of a busy machine do not move.
        "seconds_per_step": median(after - before for before, after in pairwise(times)),
        "loss": float(np.mean([record["loss"] for record in metrics[-50:]])),
        "parameters": sum(parameter.numel() for parameter in run.model().parameters()),
        "text": run.data().manifest["sources"]["sha256"],
    }
    return {"evaluation": asked, "training": training, "environment": environment(jobs), "windows": {}}


def evaluate(
    run: Run, evaluation: dict[str, Any], keys: list[str], content: dict[str, Any], scores: Path
) -> None:
    """Add the lengths, each in the reading its key tells, saved as soon as it is there."""
    tokens = run.data().validation
    if evaluation["lengths"]:
        windows = same_targets(tokens, evaluation["room"], evaluation["last"], evaluation["windows"])
        content |= {"documents": windows.documents.tolist(), "ends": windows.ends.tolist()}
    write_atomically(scores, json.dumps(content))
    device = "cuda" if torch.cuda.is_available() and run.config.device == "auto" else run.config.device
    model, loaded = None, None
    for key in keys:
        length, reading = parse_key(key)
        options = reading.position_options(length, run.config.train_length)
        if model is None or options != loaded:
            model, loaded = run.model(**options), options
            torch.nn.Module.to(model, "cpu" if device == "auto" else device)
        with scoring(model, positions=reading.positions(length)) as scorer:
            result = score(scorer, tokens, windows, length, evaluation["last"], None)
        content["windows"][key] = [round(loss, 6) for loss in result.windows.tolist()]
        write_atomically(scores, json.dumps(content))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
