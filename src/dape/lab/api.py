"""Python API: `dape.train` and `dape.evaluate`, with the settings of `dape train` and `dape eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dape.evaluation.metrics import measure, recall_bounds
from dape.evaluation.table import join, make_table
from dape.files import distinct_names
from dape.lab.comparison import STEP, About, Comparison
from dape.lab.runs import MULTIPLES
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
    metrics: Sequence[str] = ("loss",),
    names: Sequence[str] | None = None,
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
    paths = [str(model.folder if isinstance(model, Run) else model) for model in models]
    tables: list[pd.DataFrame] = []
    labels: list[str] = []
    unit = 64
    for index, (path, label) in enumerate(zip(paths, names or distinct_names(paths), strict=True)):
        with open_for_evaluation(
            path, data=Path(data) if data else None, corpus=corpus, device=device, label=label
        ) as subject:
            unit = subject.train_length or unit
            lengths = list(lengths or [multiple * unit for multiple in MULTIPLES])
            found = measure(
                subject.model, subject.data.validation, lengths, last=last, windows=windows, metrics=metrics,
                recall=recall_bounds(lengths, max(lengths)),
            )  # fmt: skip
            name = subject.method if names is None and subject.method not in (None, *labels) else label
            about = {"run": f"{index}-{label}", "method": name, "seed": subject.seed or 0}
            rows = pd.concat(list(found)).assign(**about, corpus=corpus or "validation", train_length=unit)
        labels.append(str(name))
        tables.append(make_table(rows.to_dict("records")))
    settings = {"corpus": corpus or "validation", "windows": windows, "lengths": lengths}
    return Comparison({STEP: join(tables)}, About(tuple(labels), labels[0], settings=settings))
