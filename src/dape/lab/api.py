"""Python API: `dape.train` and `dape.evaluate`, with the settings of the commands of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dape.evaluation.by_length import LengthLoss, evaluate_by_length
from dape.evaluation.models import EvaluatedModel
from dape.lab.compare import MULTIPLES, Comparison
from dape.lab.curves import derive
from dape.lab.records import STEP, Results, digits
from dape.loading import open_for_evaluation
from dape.training import Run, recipe
from dape.training import train as train_config


def train(
    method: str = "dape1x3-kerple", *, preset: str = "tiny", progress: bool = False, **options: Any
) -> Run:
    """Train a language model, or continue an existing run; returns the run.

    options: any of `dape train`: corpus, steps, train_length, batch_size, out, seed … The same options give the same
    run as the command.
    """
    return train_config(recipe(preset, method=method, **options), progress=progress)


def evaluate(
    *models: str | Path | Run,
    lengths: Sequence[int] | None = None,
    last: int | None = None,
    windows: int = 128,
    names: Iterable[str] | None = None,
    corpus: str | None = None,
    data: str | Path | None = None,
    device: str = "auto",
) -> Comparison:
    """Perplexity by length of trained runs, or of any model of Hugging Face ("hf:NAME"), on the same target tokens.

    lengths: 1, 2, 4, 8 and 16 times the first model's training length by default. The first model is the baseline.
    corpus, data: text or packed tokens to evaluate on, instead of a run's own held-out documents.
    """
    if not models:
        raise ValueError("name at least one run, or hf:MODEL")
    evaluated: list[Evaluated] = []
    labels = list(names or ())
    for index, model in enumerate(models):
        name = str(model.folder if isinstance(model, Run) else model)
        label = labels[index] if index < len(labels) else None
        with open_for_evaluation(
            name, data=Path(data) if data else None, corpus=corpus, device=device, label=label
        ) as subject:
            unit = subject.train_length or (evaluated[0].train_length if evaluated else 64)
            lengths = list(lengths or [multiple * unit for multiple in MULTIPLES])
            losses = evaluate_by_length(
                subject.model, subject.data.validation, lengths, last=last, windows=windows
            )
            evaluated.append(Evaluated(subject, unit, losses, label or ""))
    return Comparison(results_of(evaluated))


class Evaluated(NamedTuple):
    """A model with its losses by length. name: of the variant, if a method occurs more than once."""

    subject: EvaluatedModel
    train_length: int
    losses: Sequence[LengthLoss]
    name: str = ""


def results_of(evaluated: Sequence[Evaluated], split: str = "validation") -> Results:
    """Losses of trained models as the rows of a comparison; the first model is the baseline.

    Differences are of models that have the same target tokens as the first: the same tokenizer and the same text.
    """
    results = Results({})
    first_of_all = evaluated[0].subject
    for subject, unit, losses, name in evaluated:
        paired = subject.same_tokens(first_of_all, split)
        method = subject.method or subject.label
        taken = {(run["method"], run.get("variant", "")) for run in results["runs"]}
        variant = name or (subject.label if (method, "") in taken else "")
        run = {"method": method, "variant": variant, "seed": subject.seed or 0, "corpus": "validation"}
        rows = [
            {
                "metric": "loss",
                "eval_length": loss.eval_length,
                "value": digits(loss.nll),
                "error": digits(loss.nll_se),
                "count": len(loss.windows),
                "windows": [round(one, 6) for one in loss.windows.tolist()] if paired else None,
            }
            for loss in losses
        ]
        results.content["documents"].setdefault("validation", losses[0].documents.tolist())
        results.add({**run, "train_length": unit, "view": STEP, "steps": 0}, rows)
    first = results["runs"][0]
    baseline = f"{first['method']} ({first['variant']})" if first["variant"] else first["method"]
    results.content["settings"] = {
        "baseline": baseline,
        "last": evaluated[0].losses[0].last,
        "train_length": first["train_length"],
    }
    derive(results, baseline)
    return results
