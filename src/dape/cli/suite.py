"""`dape suite`: evaluate models on questions about longer and longer texts, task by task."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from dape.cli.parsing import parse
from dape.data import load_tokenizer
from dape.devices import device_name, find_device
from dape.evaluation.probes import GROUPS, NOISE, PROBES
from dape.evaluation.statistics import accuracy
from dape.evaluation.suite import evaluate_suite
from dape.lab.figures import canvas, draw_heat_map, save
from dape.settings import check, check_choice, setting, split_names, split_numbers

DESCRIPTION = """Ask models questions about texts of growing length: RULER's needles, chains of variables and
frequent words, BABILong's facts in a book, phone books, state tracking, copying, sorting, addition. Texts are generated; the same seed gives the same questions.

  dape suite hf:MODEL runs/a --lengths 256,512,1024 --tasks niah_single_2,phonebook --haystack book.txt

An answer is right if greedy decoding gives all of it. Zero-shot: a model that was not trained on such text fails at
every length, and its loss is more informative. OUT/results.csv.gz has every answer; finished results are not computed
again."""


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = setting(
        help="Run folders, model folders, GGUF files, or hf:NAME of the Hugging Face hub.", positional=True
    )
    lengths: str = setting(
        "256,512,1024",
        help="Lengths in tokens, prompt and answer together, separated by commas.",
        listed=int,
        low=8,
        high=2**24,
    )
    tasks: str = setting("all", help=f"By commas: {', '.join(GROUPS)} (groups), {', '.join(PROBES)}.")
    examples: int = setting(32, help="Examples per task and length.", low=2, high=10**9)
    seed: int = setting(0, help="Seed of the questions.", low=0, high=2**62)
    haystack: Path | None = setting(
        None,
        help="Text between whose sentences needles and facts are hidden; by default eight plain sentences.",
        reads="file",
    )
    device: str = setting("auto", help="auto takes the GPU if there is one.", test=device_name)
    out: Path = setting(
        Path("runs/suite"), help="Folder of results.csv.gz and the heat maps.", writes="folder"
    )

    def __post_init__(self) -> None:
        check(self)
        for task in self.task_list:
            check_choice("task", task, (*PROBES, *GROUPS))

    @property
    def task_list(self) -> list[str]:
        names = [name for part in split_names(self.tasks) for name in GROUPS.get(part, (part,))]
        return list(dict.fromkeys(names))


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape suite", description=DESCRIPTION)
    from dape.loading import load_named

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    lengths, haystack = sorted(split_numbers("lengths", options.lengths)), sentences(options.haystack)

    def report(line: str) -> None:
        if not sys.stdout.isatty():
            print(line, file=sys.stderr, flush=True)

    path = options.out / "results.csv.gz"
    for name in options.models:
        named = load_named(name)
        model: Any = named.model
        results = evaluate_suite(
            model.to(find_device(options.device)).float().eval(), load_tokenizer(named.tokenizer).encode, name,
            options.task_list, lengths, path, report=report, examples=options.examples, seed=options.seed,
            haystack=haystack,
        ).groupby(["metric", "corpus", "length"])[["sum", "count"]].sum()  # fmt: skip
        table = Table(
            "task", *map(str, lengths), title=f"{name}: answers right, in % with intervals; loss per token"
        )
        shares = pd.DataFrame(index=options.task_list, columns=lengths, dtype=float)
        for task in options.task_list:
            cells = []
            for length in lengths:
                if ("loss", task, length) not in results.index:
                    cells.append("too short")
                    continue
                right, loss = (
                    accuracy(*results.loc["accuracy", task, length]),
                    results.loc["loss", task, length],
                )
                shares.loc[task, length] = 100 * right.value
                interval = f"[{100 * right.low:.0f}, {100 * right.high:.0f}]"
                cells.append(f"{100 * right.value:.0f} {interval}  {loss['sum'] / loss['count']:.2f}")
            table.add_row(task, *cells)
        console.print(table)
        figure, ((axes,),) = canvas(1.8 + 0.75 * len(lengths), 0.9 + 0.28 * len(shares))
        draw_heat_map(axes, shares)
        axes.set(xlabel="tokens", title=f"{name}: answers right, %")
        drawn = save(figure, options.out / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.svg")
        console.print(f"heat map  {drawn}", soft_wrap=True)
    console.print(f"results   {path}", soft_wrap=True)
    return 0


def sentences(path: Path | None) -> tuple[str, ...]:
    """The sentences of a text, in their order."""
    if path is None:
        return NOISE
    text = " ".join(path.read_text("utf-8", errors="replace").split())
    parts = tuple(part.strip() for part in re.split(r"(?<=[.!?])\s+", text) if part.strip())
    if not parts:
        raise ValueError(f"{path} has no sentence to hide anything in")
    return parts
