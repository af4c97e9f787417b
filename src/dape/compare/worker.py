"""One run of a comparison, as a process: train what is not yet trained, evaluate, leave scores in the folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dape.compare.scores import evaluated, save_scores
from dape.evaluate import evaluate_by_length
from dape.files import exclusive, write_atomically
from dape.training import TrainConfig, TrainingStopped, train


def main(path: str) -> int:
    """Carry out the order in the file; 0 if the scores are there now, 1 with a note of why if not."""
    order = json.loads(Path(path).read_text("utf-8"))
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(order["threads"])
    try:
        # A worker whose comparison was killed may still be saving here.
        with exclusive(f"{path}.lock"):
            work(TrainConfig(**order["train"]), order["evaluation"], Path(order["scores"]))
    except Exception as error:
        traceback.print_exc()
        write_atomically(order["failure"], sentence(error))
        return 1
    return 0


def work(config: TrainConfig, evaluation: dict[str, Any], scores: Path) -> None:
    run = train(config, progress=False)
    assert run.result is not None
    if run.result.stopped_early:
        raise TrainingStopped(f"{run.result.stopped_early} after step {run.result.steps} of {config.steps}")
    if not evaluated(scores, evaluation):
        device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
        model: nn.Module = run.model()
        model.to("cpu" if device == "auto" else device)
        save_scores(scores, evaluation, evaluate_by_length(model, run.data().validation, **evaluation))


def sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


def end_with_parent() -> None:
    """Ask this process to save and end as soon as nobody holds its standard input."""
    # Not sys.stdin, whose lock a thread must not hold when Python shuts down.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
