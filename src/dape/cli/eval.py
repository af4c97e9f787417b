"""`dape eval`: perplexity by length of trained runs and of any causal language model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dape.cli.parsing import parse
from dape.devices import device_name
from dape.evaluation.report import Evaluation, evaluate_model, print_evaluation, save_evaluations
from dape.evaluation.statistics import perplexity
from dape.files import distinct_names
from dape.settings import COUNT, PICTURES, TOKENS, fixed, setting, split_numbers


@dataclass
class Evaluate:
    """Perplexity of the same target tokens at every length, with growing left context.

    The first model is the reference with which the others are compared, token by token.
    """

    models: list[str] = setting(
        help="Run folders, model folders, GGUF files, or hf:NAME for a causal language model of Hugging Face.",
        positional=True,
    )
    lengths: str | None = setting(
        None,
        help="Tokens of input, separated by commas; by default 1, 2, 4, 8 and 16 times the training length.",
        listed=int,
        **TOKENS,
    )
    last: int | None = setting(
        None,
        help="Tokens predicted at the end of each window; by default a quarter of the shortest length, at most 256.",
        **TOKENS,
    )
    windows: int = setting(128, help="Maximum number of windows.", **COUNT)
    protocol: Literal["same-targets", "paper"] = setting(
        "same-targets",
        help='"paper": each length has its own consecutive windows, and so its own target tokens.',
    )
    context: Literal["document", "stream"] = setting(
        "document",
        help='"stream" lets the context continue into earlier documents (for corpora of short ones).',
    )
    split: Literal["train", "validation"] = setting("validation", help="Which documents.")
    data: Path | None = setting(
        None, help="Token data (`dape data prepare`) instead of a run's own.", reads="folder"
    )
    corpus: str | None = setting(
        None,
        help="Text to evaluate on instead, packed with the model's tokenizer; for hf:PATH by default stdlib.",
    )
    by_position: int | None = setting(
        None, help="Also the loss by position, in windows of this length.", **TOKENS
    )
    slices: Literal["none", "recall"] = setting(
        "none",
        help='"recall": also the loss of tokens that repeat an earlier n-gram of the input, against all others.',
    )
    ngram: int | None = setting(
        None,
        help="Length of the n-gram that must have occurred before for a token to count as recall; 3 by default.",
        low=1,
        high=1024,
    )
    max_training_count: int | None = setting(
        None,
        help="Count as recall only n-grams with at most this many occurrences in the training split; by default all.",
        low=0,
        high=10**12,
    )
    sliding: int | None = setting(
        None, help="Also the sliding-window perplexity with windows of this length.", **TOKENS
    )
    stride: int | None = setting(
        None, help="Stride of the sliding window; half of its length by default.", **TOKENS
    )
    sliding_tokens: int = setting(
        100_000,
        help="Approximate number of tokens for the sliding window, at the beginnings of all documents.",
        low=1,
        high=10**12,
    )
    json: Path | None = setting(
        None, help="Write everything to this file as JSON.", writes="file", fixes_run=False
    )
    csv: Path | None = setting(
        None, help="Write the losses to this file as CSV.", writes="file", fixes_run=False
    )
    plot: Path | None = setting(
        None,
        help="Draw perplexity against length (.svg, .pdf or .png).",
        writes="file",
        suffixes=PICTURES,
        fixes_run=False,
    )
    card: bool = setting(
        False, help="Write the perplexities into the model cards of the runs.", fixes_run=False
    )
    device: str = setting("auto", help='Device: "auto", "cpu", "cuda", …', test=device_name, fixes_run=False)


def main(arguments: list[str]) -> int:
    options: Evaluate = parse(Evaluate, arguments, prog="dape eval")
    # It takes seconds to import, and --help does not need it.
    import transformers

    from dape.loading import open_for_evaluation
    from dape.training.run import CONFIG, add_to_card

    if not options.models:
        raise ValueError("name at least one model: a run folder, or hf:NAME")
    if options.stride is not None and options.sliding is None:
        raise ValueError("--stride needs --sliding LENGTH")
    for name in ("ngram", "max_training_count"):
        if getattr(options, name) is not None and options.slices != "recall":
            raise ValueError(f"--{name.replace('_', '-')} needs --slices recall")
    if options.slices != "none" and options.protocol != "same-targets":
        raise ValueError(
            f"--slices {options.slices} compares the same tokens at every length: it needs --protocol same-targets"
        )
    if options.card and (others := [name for name in options.models if not (Path(name) / CONFIG).exists()]):
        raise ValueError(f"--card writes into run folders: {others[0]} is not a run folder")
    transformers.logging.disable_progress_bar()
    console = Console(width=80, highlight=False)
    evaluations: list[Evaluation] = []
    lengths = None if options.lengths is None else split_numbers("lengths", options.lengths)
    names = ("last", "windows", "protocol", "context", "split", "by_position", "ngram", "max_training_count")
    evaluated: dict[str, Any] = {
        name: getattr(options, name) for name in (*names, "sliding", "stride", "sliding_tokens")
    }
    evaluated["recall"] = options.slices == "recall"
    labels = distinct_names([name.removeprefix("hf:") for name in options.models])
    for name, label in zip(options.models, labels, strict=True):
        with open_for_evaluation(
            name, data=options.data, corpus=options.corpus, device=options.device, label=label
        ) as subject:
            lengths = lengths or [(subject.train_length or 64) * times for times in (1, 2, 4, 8, 16)]
            columns = (TextColumn("{task.description:<24}"), BarColumn(bar_width=24), TimeRemainingColumn())
            with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bar:
                # The cost of a window grows with its length.
                task = bar.add_task(label[:24], total=sum(lengths) * options.windows)
                evaluation = evaluate_model(
                    subject,
                    lengths,
                    **evaluated,
                    progress=lambda n, count, bar=bar, task=task: bar.advance(task, n * count),
                )
        first = evaluations[0] if evaluations else None
        if first is not None and first.subject.same_tokens(subject, options.split):
            evaluation.reference = first
        evaluations.append(evaluation)
        print_evaluation(evaluation, console)
    for name, evaluation in zip(options.models if options.card else [], evaluations, strict=False):
        # The error of exp(x) is that of x times exp(x).
        values = [(loss.eval_length, loss.ppl, loss.ppl * loss.nll_se) for loss in evaluation.losses]
        of = f"`{options.corpus or options.data}`" if options.corpus or options.data else "held-out documents"
        predicted = (
            f"the last {evaluation.losses[0].last} tokens of at most {options.windows} windows of {of}"
        )
        same = ", the same tokens at every length" if options.protocol == "same-targets" else ""
        add_to_card(Path(name), values, f"{predicted}{same}, with standard errors over documents")
    save_evaluations(evaluations, settings(options), json_file=options.json, csv_file=options.csv)
    if options.plot is not None:
        save_plot(evaluations, options.plot)
    return 0


def save_plot(evaluations: list[Evaluation], path: Path) -> None:
    """Plot perplexity by length; bars are one standard error over documents."""
    from dape.lab.figures import length_figure, save

    series = {
        one.subject.label: [
            (at.eval_length, at.ppl, perplexity(at.nll - at.nll_se), perplexity(at.nll + at.nll_se))
            for at in sorted(one.losses, key=lambda loss: loss.eval_length)
        ]
        for one in evaluations
    }
    unit = evaluations[0].subject.train_length or evaluations[0].losses[0].eval_length
    path.parent.mkdir(parents=True, exist_ok=True)
    save(length_figure(series, "perplexity", unit=unit, note="bars: one standard error"), path)


def settings(options: Evaluate) -> dict[str, Any]:
    """The options that determine the results."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in fixed(options).items()}
