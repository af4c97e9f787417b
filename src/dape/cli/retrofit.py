"""`dape retrofit`: give a pretrained model other positions and scores, tune it briefly, and say what it gained."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rich.console import Console

from dape.cli.parsing import parse
from dape.retrofitting.settings import AdaptSettings
from dape.settings import setting
from dape.training.config import TrainingStopped
from dape.training.display import clock

if TYPE_CHECKING:
    from dape.retrofitting.adapt import Adapted

DESCRIPTION = """Give a pretrained model the positions and score processor of a method, and tune it.

  dape retrofit MODEL --corpus my_texts/ --control --seeds 3 --out runs/longer
  dape retrofit runs/rope --method dape1x3-kerple --steps 800
  dape retrofit MODEL --method nope --steps 800
  dape retrofit MODEL --method rope[scaling=linear,factor=8] --skip-length 1024

The last two are DroPE and PoSE. MODEL is a folder, a name on the hub, a GGUF file, or a run of `dape train`. The table
compares with the base cut to its window, which costs nothing, and with --control with the base trained on for as many
steps. The same command resumes an interrupted one, or adds seeds. OUT/model is the result, for dape.load_retrofitted
and `dape eval OUT/model`."""


@dataclass(frozen=True, kw_only=True)
class Options(AdaptSettings):
    model: str = setting(
        help="A folder, a name on the Hugging Face hub, a GGUF file, or a run folder.", positional=True
    )
    corpus: str = setting(
        "python", help="Text to train on, as for `dape data prepare`, or a folder that it packed."
    )
    window: int | None = setting(
        None, help="The model's training length; by default from its configuration.", low=8, high=2**24
    )
    out: str = setting("runs/retrofit", help="Output folder.", writes="folder", fixes_run=False)


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape retrofit", description=DESCRIPTION)
    from dape.loading import load_base
    from dape.retrofitting.adapt import adapt

    console = Console(width=80 if not os.isatty(1) else None, highlight=False)
    base = load_base(options.model, options.device)
    settings = AdaptSettings(**{f.name: getattr(options, f.name) for f in fields(AdaptSettings)})
    try:
        adapted = adapt(
            base.model,
            texts=options.corpus,
            tokenizer=base.tokenizer,
            window=options.window or base.window,
            out=options.out,
            progress=True,
            settings=settings,
        )
    except TrainingStopped as stopped:
        console.print(f"{stopped}: the same command continues", soft_wrap=True, markup=False)
        return 1
    print_report(adapted, console)
    return 0


def print_report(adapted: Adapted, console: Console) -> None:
    """Print the table, what it says, and where everything is."""
    from dape.retrofitting.adapt import FIGURE, RESULTS, WEIGHTS

    console.print(adapted.report.rich())
    for sentence in adapted.report.sentences():
        console.print(sentence, markup=False)
    steps = sum(result.steps for result in adapted.results.values())
    seconds = sum(result.seconds for result in adapted.results.values())
    console.print(f"\n{adapted.added:,} parameters added, {steps} steps in {clock(seconds)}.", markup=False)
    for name, file in (("model", WEIGHTS), ("losses", RESULTS), ("figure", FIGURE)):
        console.print(f"{name:<8}{adapted.folder}/{file}", markup=False, soft_wrap=True)
