"""Python API: `dape.train` and `dape.evaluate`, with the settings of `dape train` and `dape eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dape.evaluation.by_length import Progress, num_targets
from dape.evaluation.metrics import measure, rows_by_position
from dape.evaluation.recall import DEFAULT_NGRAM, recall_bounds, targets_by_recall
from dape.evaluation.sliding import sliding_window
from dape.evaluation.table import join, make_table
from dape.evaluation.windows import Context, same_targets
from dape.files import distinct_names
from dape.lab.comparison import STEP, About, Comparison
from dape.lab.environment import environment
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
    context: Context = "document",
    split: str = "validation",
    metrics: Sequence[str] = ("loss",),
    names: Sequence[str] | None = None,
    corpus: str | None = None,
    data: str | Path | None = None,
    recall: int = DEFAULT_NGRAM,
    by_position: int | None = None,
    sliding: int | None = None,
    stride: int | None = None,
    sliding_tokens: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """Perplexity by length of trained runs, or of any model of Hugging Face ("hf:NAME"), on the same target tokens.

    lengths: 1, 2, 4, 8 and 16 times the first model's training length by default. The first model is the baseline.
    last, windows, context: see `losses_by_length`. split: "validation" or "train".
    corpus, data: text or packed tokens to evaluate on, instead of a run's own held-out documents.
    recall: length of the n-grams of the recall slices.
    by_position: also the loss by position in windows of this length.
    sliding, stride, sliding_tokens: also a sliding window of this length (see `sliding_window`).
    """
    if not models:
        raise ValueError("name at least one run, or hf:MODEL")
    paths = [str(model.folder if isinstance(model, Run) else model) for model in models]
    tables: list[pd.DataFrame] = []
    labels: list[str] = []
    folder = Path(data) if data else None
    labelled = zip(paths, names or distinct_names([p.removeprefix("hf:") for p in paths]), strict=True)
    for index, (path, label) in enumerate(labelled):
        with open_for_evaluation(path, data=folder, corpus=corpus, device=device) as subject:
            model, tokens, unit = subject.model, subject.data.split(split), subject.train_length or 0
            lengths = sorted(lengths or [multiple * (unit or 64) for multiple in MULTIPLES])
            num_last = num_targets(lengths, last)
            chosen = same_targets(tokens, lengths[-1], num_last, windows, context=context)
            bounds = recall_bounds(lengths, lengths[-1])
            slices = targets_by_recall(tokens, chosen, bounds, num_last, ngram=min(recall, lengths[-1]))
            frames = list(
                measure(
                    model, tokens, chosen, lengths, last=num_last, metrics=metrics, slices=slices, window=unit,
                    progress=progress,
                )
            )  # fmt: skip
            if by_position is not None:
                whole = same_targets(tokens, by_position, by_position, windows, context=context)
                frames.append(rows_by_position(model, tokens, whole, by_position))
            if sliding is not None:
                frames.append(
                    sliding_window(model, tokens, sliding, stride=stride, max_tokens=sliding_tokens)
                )
            name = subject.method if names is None and subject.method not in (None, *labels) else label
            seed = 0 if subject.run is None else subject.run.config.seed
            about = {"run": f"{index}-{label}", "method": name, "corpus": corpus or split}
            rows = pd.concat(frames).assign(**about, seed=seed, train_length=unit)
        labels.append(str(name))
        tables.append(make_table(rows.to_dict("records")))
    settings = {"corpus": corpus or split, "windows": windows, "lengths": lengths, "last": num_last}
    about_all = About(tuple(labels), labels[0], settings=settings, environment=environment(1))
    return Comparison({STEP: join(tables)}, about_all)
