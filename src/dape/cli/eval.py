"""`dape eval`: perplexity by length of trained runs and of any causal language model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from dape.cli.compare import show_comparison, terminal
from dape.cli.parsing import parse
from dape.devices import device_name
from dape.evaluation.recall import DEFAULT_NGRAM
from dape.evaluation.windows import EvaluationSettings
from dape.files import distinct_names
from dape.lab.comparison import Comparison
from dape.lab.tables import spread
from dape.settings import TOKENS, setting, split_numbers
from dape.training.run import CONFIG, add_to_card

# Options that are those of `dape.evaluate`.
SAME = (
    *("last", "windows", "context", "split", "corpus", "data", "by_position"),
    *("sliding", "stride", "sliding_tokens", "device"),
)


@dataclass(frozen=True, kw_only=True)
class Evaluate(EvaluationSettings):
    """Perplexity of the same target tokens at every length, with growing left context.

    The first model is the reference with which the others are compared, token by token.
    """

    models: list[str] = setting(
        help="Run folders, model folders, GGUF files, or hf:NAME for a causal language model of Hugging Face.",
        positional=True,
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
    recall: int | None = setting(
        None,
        help="Also the loss of tokens whose n-gram of this length occurred earlier in the input, by how far back.",
        low=1,
        high=1024,
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
    out: Path | None = setting(
        None,
        help="Write the table of results, figures and a report to this folder, as `dape compare` does.",
        writes="folder",
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

    from dape.lab.api import evaluate

    if options.stride is not None and options.sliding is None:
        raise ValueError("--stride needs --sliding LENGTH")
    if options.card and (others := [name for name in options.models if not (Path(name) / CONFIG).exists()]):
        raise ValueError(f"--card writes into run folders: {others[0]} is not a run folder")
    transformers.logging.disable_progress_bar()
    console = terminal()
    with console.status("evaluating") as status:
        found = evaluate(
            *options.models,
            lengths=None if options.lengths is None else split_numbers("lengths", options.lengths),
            names=distinct_names([name.removeprefix("hf:") for name in options.models]),
            recall=options.recall or DEFAULT_NGRAM,
            progress=lambda length, count: status.update(f"evaluating {length} tokens"),
            **{name: getattr(options, name) for name in SAME},
        )
    command = shlex.join(["dape", "eval", *arguments])
    comparison = Comparison(found.tables, replace(found.about, command=command), options.out)
    if options.out is not None:
        comparison.save(options.out)
    show_comparison(comparison, console)
    show_slices(comparison, options, console)
    if options.card:
        write_cards(comparison, options)
    return 0


def show_slices(comparison: Comparison, options: Evaluate, console: Console) -> None:
    """Print what a model makes of its window, and its loss by slices."""
    if (gaps := comparison.difference_table()) is not None:
        console.print(gaps.rich(spread(len(gaps.heads), 4)))
        console.print()
    wanted = {"recall": options.recall, "input": options.by_position, "sliding": options.sliding}
    for method in comparison.about.methods:
        if sentence := comparison.use_of_window(method):
            console.print(sentence, markup=False)
        for prefix in (prefix for prefix, value in wanted.items() if value is not None):
            console.print()
            console.print(comparison.slice_table(method, prefix).rich())


def write_cards(comparison: Comparison, options: Evaluate) -> None:
    of = f"`{options.corpus or options.data}`" if options.corpus or options.data else "held-out documents"
    about = (
        f"the last {comparison.about.settings['last']} tokens of at most {options.windows} windows of {of}, the same tokens "
        "at every length, with standard errors over documents"
    )
    for name, curve in zip(options.models, comparison.curves(), strict=True):
        # The error of exp(x) is that of x times exp(x).
        values = [(point.length, point.ppl, point.ppl * point.loss.error) for point in curve.points]
        add_to_card(Path(name), values, about)
