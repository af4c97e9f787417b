"""`dape eval`: perplexity by length of trained runs and of any causal language model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import transformers
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dape.data import Tokens
from dape.evaluate import (
    evaluate_by_length,
    loss_by_position,
    losses_by_length,
    recall_slices,
    sliding_window,
)
from dape.evaluate.recall import DEFAULT_NGRAM
from dape.evaluate.report import Evaluation, check_plot, print_evaluation, save
from dape.evaluate.subjects import Subject, open_subject
from dape.files import distinct_names


@dataclass
class Evaluate:
    """Perplexity of the same target tokens at every length, with growing left context.

    The first model is the one that the others are compared with, token by token.
    """

    models: tyro.conf.Positional[list[str]]
    """Run folders, or hf:PATH for any causal language model of Hugging Face."""
    lengths: str | None = None
    """Tokens of input, separated by commas; by default 1, 2, 4, 8 and 16 times the training length."""
    last: int | None = None
    """Tokens predicted at the end of each window; by default 256, or the shortest length if that is less."""
    windows: int = 128
    """Windows, at most."""
    protocol: Literal["same-targets", "paper"] = "same-targets"
    """"paper": each length has its own windows, one after the other, so its own target tokens."""
    context: Literal["document", "stream"] = "document"
    """"stream" lets the context run on into earlier documents (for corpora of short ones)."""
    split: Literal["train", "validation"] = "validation"
    """Which documents."""
    data: Path | None = None
    """Token data (`dape data prepare`) instead of a run's own."""
    corpus: str | None = None
    """Text to evaluate on instead, packed with the model's tokenizer; for hf:PATH by default stdlib."""
    by_position: int | None = None
    """Also the loss by position, in windows of this length."""
    slices: Literal["none", "recall"] = "none"
    """"recall": also the loss of tokens that repeat what the input said before, against all others."""
    ngram: int | None = None
    """How many tokens must have occurred before for a token to count as recall, itself included; 3 by default."""
    max_training_count: int | None = None
    """Count as recall only n-grams that the training split has at most so often; by default all of them."""
    sliding: int | None = None
    """Also the sliding-window perplexity with windows of this length."""
    stride: int | None = None
    """How far the sliding window advances; half of its length by default."""
    sliding_tokens: int = 100_000
    """About how many tokens the sliding window goes over, at the beginnings of all documents."""
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """Write everything to this file as JSON."""
    csv_file: Annotated[Path | None, tyro.conf.arg(name="csv")] = None
    """Write the scores to this file as CSV."""
    plot: Path | None = None
    """Draw perplexity against length (.svg, .pdf or .png)."""
    device: str = "auto"
    """Where to run: "auto", "cpu", "cuda", …"""


def main(arguments: list[str]) -> int:
    options = tyro.cli(Evaluate, prog="dape eval", args=arguments)
    if not options.models:
        raise ValueError("give a run folder, or hf:PATH")
    if options.stride is not None and options.sliding is None:
        raise ValueError("--stride needs --sliding LENGTH")
    for name in ("ngram", "max_training_count"):
        if getattr(options, name) is not None and options.slices != "recall":
            raise ValueError(f"--{name.replace('_', '-')} needs --slices recall")
    if options.slices != "none" and options.protocol != "same-targets":
        raise ValueError(
            f"--slices {options.slices} compares the same tokens at every length: it needs --protocol same-targets"
        )
    if options.plot is not None:
        check_plot(options.plot)
    transformers.logging.disable_progress_bar()
    console = Console(width=80, highlight=False)
    evaluations: list[Evaluation] = []
    lengths = None if options.lengths is None else parse_lengths(options.lengths)
    labels = distinct_names([name.removeprefix("hf:") for name in options.models])
    for name, label in zip(options.models, labels, strict=True):
        with open_subject(
            name, data=options.data, corpus=options.corpus, device=options.device, label=label
        ) as subject:
            lengths = default_lengths(subject) if lengths is None else lengths
            evaluation = evaluate(subject, lengths, options)
        first = evaluations[0] if evaluations else None
        if first is not None and first.subject.same_tokens(subject, options.split):
            evaluation.reference = first
        evaluations.append(evaluation)
        print_evaluation(evaluation, console)
    if options.last is None and lengths and min(lengths) < 256 and options.protocol == "same-targets":
        console.print(f"(the shortest length is {min(lengths)}, so that many tokens are predicted, not 256)")
    save(
        evaluations,
        settings(options),
        json_file=options.json_file,
        csv_file=options.csv_file,
        plot=options.plot,
    )
    return 0


def evaluate(subject: Subject, lengths: list[int], options: Evaluate) -> Evaluation:
    tokens = subject.data.split(options.split)
    evaluation = by_length(subject, tokens, lengths, options)
    if options.by_position is not None:
        evaluation.by_position = loss_by_position(
            subject.model, tokens, options.by_position, windows=options.windows, context=options.context
        )
    if options.sliding is not None:
        evaluation.sliding.append(
            sliding_window(
                subject.model,
                tokens,
                options.sliding,
                stride=options.stride,
                max_tokens=options.sliding_tokens,
            )
        )
    return evaluation


def by_length(subject: Subject, tokens: Tokens, lengths: list[int], options: Evaluate) -> Evaluation:
    """Scores by length, and the slices that are asked for, from the same pass over the windows."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bar:
        # The cost of a window grows with its length.
        task = bar.add_task(subject.label[:24], total=sum(lengths) * options.windows)
        asked: dict[str, Any] = {
            "last": options.last,
            "windows": options.windows,
            "context": options.context,
            "progress": lambda length, count: bar.advance(task, length * count),
        }
        if options.slices == "none":
            scores = evaluate_by_length(subject.model, tokens, lengths, protocol=options.protocol, **asked)
            return Evaluation(subject, options.protocol, scores)
        losses = losses_by_length(subject.model, tokens, lengths, **asked)
    base = subject.train_length if subject.train_length in lengths else min(lengths)
    recall = recall_slices(
        tokens,
        losses,
        base=base,
        ngram=DEFAULT_NGRAM if options.ngram is None else options.ngram,
        train=subject.data.train,
        max_training_count=options.max_training_count,
    )
    scores = [losses.score(length) for length in lengths]
    return Evaluation(subject, options.protocol, scores, recall=recall)


def parse_lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f'--lengths "{text}" is not a list of numbers such as 64,128,256') from None
    if len(set(lengths)) < len(lengths):
        raise ValueError(f'--lengths "{text}" names a length twice')
    return lengths


def default_lengths(subject: Subject) -> list[int]:
    """Up to 16 times the training length, where it is known."""
    return [(subject.train_length or 64) * times for times in (1, 2, 4, 8, 16)]


def settings(options: Evaluate) -> dict[str, Any]:
    """The options that decide the numbers."""
    left_out = {"json_file", "csv_file", "plot", "device"}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name not in left_out
    }
