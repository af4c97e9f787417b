"""Reports of an evaluation: tables in 80 columns, JSON, CSV, a figure."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dape.evaluation.by_length import (
    ContextUse,
    LengthLoss,
    Protocol,
    context_lengths,
    evaluate_by_length,
    losses_by_length,
    paired_difference,
)  # fmt: skip
from dape.evaluation.by_position import PositionLoss, loss_by_position, position_records
from dape.evaluation.models import EvaluatedModel
from dape.evaluation.recall import DEFAULT_NGRAM, RecallSlices, recall_slices
from dape.evaluation.sliding import SlidingLoss, sliding_window
from dape.evaluation.windows import Context
from dape.files import plain, write_atomically

PLOT_ENDINGS = (".svg", ".pdf", ".png")


@dataclass
class Evaluation:
    """Results of one model; `reference` is another evaluation on the same targets, or None."""

    subject: EvaluatedModel
    protocol: str
    losses: list[LengthLoss]
    reference: Evaluation | None = None
    by_position: PositionLoss | None = None
    recall: RecallSlices | None = None
    sliding: list[SlidingLoss] = field(default_factory=list)
    # Of a model with a known window: its use, and the change of key tokens from it to the longest input.
    context: ContextUse | None = None
    key_change: tuple[float, float] = (math.nan, math.nan)

    def changes(self) -> list[tuple[float, float] | None]:
        """Paired change of the loss from the shortest length to each; None if not paired."""
        if self.protocol != "same-targets":
            return [None for _ in self.losses]
        shortest = min(self.losses, key=lambda loss: loss.eval_length)
        return [None if loss is shortest else paired_difference(loss, shortest) for loss in self.losses]

    def against_reference(self) -> list[tuple[float, float] | None]:
        if self.reference is None:
            return [None for _ in self.losses]
        return [paired_difference(a, b) for a, b in zip(self.losses, self.reference.losses, strict=True)]

    def recall_records(self) -> list[dict[str, Any]]:
        """A record for each length and slice, in the terms of `records`; `contribution`: the slice's part of the
        difference over all tokens."""
        if self.recall is None:
            return []
        reference = None if self.reference is None else self.reference.recall
        settings = {"ngram": self.recall.ngram, "base": self.recall.base}
        return [{**self.subject.identity, **settings, **r} for r in self.recall.records(reference)]

    def records(self) -> list[dict[str, Any]]:
        """One record per length; `change` is against the shortest length, `difference` against the first model."""
        return [
            {**self.subject.identity, **loss.record(), "protocol": self.protocol}
            | _pair("change", change)
            | _pair("difference", difference)
            for loss, change, difference in zip(
                self.losses, self.changes(), self.against_reference(), strict=True
            )
        ]


def evaluate_model(
    subject: EvaluatedModel,
    lengths: Sequence[int],
    *,
    protocol: Protocol = "same-targets",
    split: str = "validation",
    windows: int = 128,
    context: Context = "document",
    recall: bool = False,
    ngram: int | None = None,
    max_training_count: int | None = None,
    by_position: int | None = None,
    sliding: int | None = None,
    stride: int | None = None,
    sliding_tokens: int = 100_000,
    **options: Any,
) -> Evaluation:
    """Losses by length and, if requested, of recall slices (one pass over the windows), by position, and sliding.

    by_position, sliding: lengths of their windows. options: of `losses_by_length`.
    """
    tokens, options = subject.data.split(split), {"windows": windows, "context": context, **options}
    if protocol != "same-targets":
        means = evaluate_by_length(subject.model, tokens, lengths, protocol=protocol, **options)
        evaluation = Evaluation(subject, protocol, means)
    else:
        window = subject.train_length or 0
        own = context_lengths(window) if window >= 8 else ()
        losses = losses_by_length(subject.model, tokens, lengths, also=own, **options)
        evaluation = Evaluation(subject, protocol, [losses.at(n) for n in lengths])
        if own and {*own} <= losses.losses.keys():
            evaluation.context = ContextUse.of(losses, window)
            evaluation.key_change = evaluation.context.key_change(losses, max(lengths))
        if recall:
            rare: dict[str, Any] = {}
            if max_training_count is not None:
                rare = {"train": subject.training_tokens(), "max_training_count": max_training_count}
            base = subject.train_length if subject.train_length in lengths else min(lengths)
            evaluation.recall = recall_slices(
                tokens, losses.only(lengths), base=base, ngram=ngram or DEFAULT_NGRAM, **rare
            )
    if by_position is not None:
        evaluation.by_position = loss_by_position(
            subject.model, tokens, by_position, windows=windows, context=context
        )
    if sliding is not None:
        evaluation.sliding.append(
            sliding_window(subject.model, tokens, sliding, stride=stride, max_tokens=sliding_tokens)
        )
    return evaluation


def _pair(name: str, value: tuple[float, float] | None) -> dict[str, float | None]:
    first, second = (None, None) if value is None else value
    return {name: first, f"{name}_se": second}


def as_json(evaluations: Sequence[Evaluation], settings: dict[str, Any]) -> str:
    content = {
        "settings": settings,
        "losses": [record for evaluation in evaluations for record in evaluation.records()],
        "by_position": [
            {**e.subject.identity, **record}
            for e in evaluations
            if e.by_position is not None
            for record in position_records(e.by_position)
        ],
        "recall": [record for e in evaluations for record in e.recall_records()],
        # Sufficient for every slice, and for differences to models evaluated elsewhere.
        "recall_sums": [
            {**e.subject.identity, **e.recall.as_json()} for e in evaluations if e.recall is not None
        ],
        "context": [
            {
                **e.subject.identity,
                "key_share": float(e.context.key.mean()),
                "losses": [at.record() for at in parts],
            }
            for e in evaluations
            if e.context is not None
            for parts in [(e.context.quarter, e.context.half, e.context.whole)]
        ],
        "sliding": [{**e.subject.identity, **s.record()} for e in evaluations for s in e.sliding],
    }
    return json.dumps(plain(content), indent=2, allow_nan=False) + "\n"


def as_csv(evaluations: Sequence[Evaluation]) -> str:
    records = [record for evaluation in evaluations for record in evaluation.records()]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def print_evaluation(evaluation: Evaluation, console: Console) -> None:
    subject, losses = evaluation.subject, evaluation.losses
    documents = len(set(losses[0].documents.tolist()))
    what = f"{losses[0].last} tokens" if evaluation.protocol == "same-targets" else "tokens"
    title = f"{escape(subject.label)}: last {what} of {len(losses[0].windows)} windows, {documents} documents"
    console.print(f"[italic]{title}[/italic]")
    table = Table(box=None, pad_edge=False)
    for name in ("length", "× training", "perplexity", "loss", "change", "vs first"):
        table.add_column(name, justify="right")
    rows = zip(losses, evaluation.changes(), evaluation.against_reference(), strict=True)
    for at, change, difference in rows:
        times = f"{at.eval_length / subject.train_length:g}" if subject.train_length else "–"
        loss = plus_minus(at.nll, at.nll_se)
        table.add_row(
            f"{at.eval_length}",
            times,
            f"{at.ppl:.2f}",
            loss,
            "–" if change is None else plus_minus(*change, sign="+"),
            "–" if difference is None else plus_minus(*difference, sign="+"),
        )
    console.print(table)
    if documents == 1:
        console.print("(no ±: standard errors need two documents or more)")
    if evaluation.context is not None:
        console.print(context_sentences(evaluation, evaluation.context), markup=False)
    if evaluation.by_position is not None:
        _print_positions(evaluation.by_position, console)
    if evaluation.recall is not None:
        _print_recall(evaluation, evaluation.recall, console)
    for sliding in evaluation.sliding:
        console.print(
            f"sliding window of {sliding.length}, stride {sliding.stride}: perplexity {sliding.ppl:.2f}, loss "
            f"{plus_minus(sliding.nll, sliding.nll_se)} over {sliding.tokens:,} tokens of "
            f"{sliding.documents:,} documents"
        )
    console.print()


def context_sentences(evaluation: Evaluation, context: ContextUse) -> str:
    """What an input cut to the model's window has at any length, and what the model makes of that window."""
    longest = max(evaluation.losses, key=lambda loss: loss.eval_length)
    said = f"Cut to its window of {context.window} tokens, any input has perplexity {context.whole.ppl:.2f}"
    if longest.eval_length > context.window:
        change = plus_minus(*paired_difference(longest, context.whole), sign="+")
        said += f"; with all {longest.eval_length} tokens the loss is {change} against that"
        if context.key.any():
            said += (
                f", {plus_minus(*evaluation.key_change, sign='+')} on the {context.key.mean():.0%} of tokens that the "
                "later half of the window predicts"
            )
    parts = (context.quarter, context.half, context.whole)
    used, error = context.used()
    said += f". Use of the window: loss {', '.join(f'{at.nll:.3f} with {at.eval_length}' for at in parts)}"
    if not used > 2 * error:
        said += "; its later half is not used measurably, so a flat curve shows nothing"
    return said + "."


def _print_positions(loss: PositionLoss, console: Console) -> None:
    console.print(f"loss by tokens of input before, windows of {loss.length}")
    table = Table(box=None, pad_edge=False)
    table.add_column("input", justify="right")
    table.add_column("loss", justify="right")
    for start, stop, nll, error in loss.doublings():
        label = f"{start}" if stop == start + 1 else f"{start}–{stop - 1}"
        table.add_row(label, plus_minus(nll, error))
    console.print(table)


def _print_recall(evaluation: Evaluation, recall: RecallSlices, console: Console) -> None:
    console.print(
        f"recall: hits are tokens whose {recall.ngram}-gram occurred before in the input, new ones not yet in "
        f"{recall.base} tokens; change from {recall.base} tokens of input"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("length", "tokens", "share", "loss", "change", "vs first"):
        table.add_column(name, justify="left" if name == "tokens" else "right")
    paired = evaluation.reference is not None
    for record in evaluation.recall_records():
        if record["slice"] == "all" or not record["tokens"]:
            continue
        length, base = record["eval_length"], record["eval_length"] == recall.base
        table.add_row(
            f"{length}" if record["slice"] == "hit" else "",
            record["slice"],
            f"{record['share']:.1%}",
            plus_minus(record["nll"], record["nll_se"]),
            "–" if base else plus_minus(record["change"], record["change_se"], sign="+"),
            plus_minus(record["difference"], record["difference_se"], sign="+") if paired else "–",
        )
    console.print(table)


def plus_minus(value: float, error: float, *, sign: str = "") -> str:
    known = "" if math.isnan(error) else f" ± {error:.3f}"
    return f"{value:{sign}.3f}{known}"


def check_plot(path: Path) -> None:
    """Raise if the suffix is not that of an image."""
    if path.suffix.lower() not in PLOT_ENDINGS:
        raise ValueError(f"{path}: the suffix of a figure must be one of {', '.join(PLOT_ENDINGS)}")


def save_evaluations(
    evaluations: Sequence[Evaluation],
    settings: dict[str, Any],
    *,
    json_file: Path | None,
    csv_file: Path | None,
) -> None:
    for path in (json_file, csv_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json_file is not None:
        write_atomically(json_file, as_json(evaluations, settings))
    if csv_file is not None:
        write_atomically(csv_file, as_csv(evaluations))
