"""`dape inspect`: attention maps of models on a text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dape.cli.parsing import parse
from dape.files import exclusive, write_atomically
from dape.settings import TOKENS, setting, split_names, split_numbers

if TYPE_CHECKING:
    from dape.inspection import Inspection

# A single word with a suffix, such as book.txt or data/a.jsonl; neither 3.14 nor the end of a sentence.
FILE_NAME = re.compile(r"\S+\.[A-Za-z]\w{0,7}")

DEFAULT_LENGTH = 512
NUMBERS: dict[str, Any] = {"listed": int, "words": ("all",), "low": 0, "high": 2**16}


def known_formats(text: str) -> None:
    if not {*split_names(text)} <= {"png", "svg", "pdf"}:
        raise ValueError("choose among png, svg, pdf")


@dataclass(frozen=True)
class Options:
    """Maps of scores, bias, processed scores and weights, as figures and as an interactive page.

    dape inspect runs/dape-kerple runs/dape1x3-kerple --text book.txt --lengths 512,2048

    The page shows two runs side by side and opens on the head that the processor changes most. The weight on the
    first token (the attention sink) and the entropy of every head are printed and saved; the share of the weight that
    the processor moves is saved.
    """

    runs: tuple[str, ...] = setting(
        help="Runs, model folders, GGUF files, or hf:NAME of the Hugging Face hub.", positional=True
    )
    text: str = setting(help="A file, or the text itself.")
    lengths: str = setting(
        "all", help="Number of tokens to inspect; several lengths by commas (the paper shows 512,2048,8192). By default "
        "the text, at most 512 tokens of it.", listed=int, words=("all",), **TOKENS,
    )  # fmt: skip
    layers: str = setting("all", help="Layers, separated by commas, counted from 0.", **NUMBERS)
    heads: str = setting("all", help="Heads, separated by commas, counted from 0.", **NUMBERS)
    resolution: int = setting(
        256, help="Maximum rows and columns of a map; longer texts are averaged.", low=1, high=2**16
    )
    formats: str = setting(
        "png",
        help="Formats of the figures: png, svg, pdf, several by commas.",
        listed=str,
        test=known_formats,
    )
    tokenizer: str | None = setting(
        None, help="bytes, a tokenizer.json or a folder, for models without one; by default the model's."
    )
    out: Path = setting(
        Path("inspection"),
        help="Output folder of index.html with its tiles, heads.json and the figures.",
        writes="folder",
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape inspect")
    from dape.data.tokenizers import token_texts
    from dape.inspection import inspect
    from dape.inspection.figure import draw_maps
    from dape.inspection.page import Named, write_maps_page
    from dape.loading import open_for_inspection

    lengths, layers, heads = (
        None if text == "all" else split_numbers(name, text)
        for name, text in (("lengths", options.lengths), ("layers", options.layers), ("heads", options.heads))
    )
    formats = split_names(options.formats)
    console = Console()
    text, inspections = read_argument(options.text), []
    for name, model, tokenizer in open_for_inspection(options.runs, options.tokenizer):
        ids = tokenizer.encode(text)
        for length in lengths or [min(max(len(ids), 1), DEFAULT_LENGTH)]:
            if len(ids) < length:
                raise ValueError(
                    f"the text has {len(ids)} tokens for {name}, too few for a length of {length}"
                )
            inspection = inspect(
                model, ids[:length], layers=layers, heads=heads, resolution=options.resolution
            )
            inspections.append(Named(name, inspection, token_texts(tokenizer.decode, ids[:length])))
            console.print(heads_table(name, inspection))
    options.out.mkdir(parents=True, exist_ok=True)
    # One command at a time: each replaces what another wrote.
    with exclusive(options.out / ".lock"):
        jobs = [(run, layer.layer) for run in inspections for layer in run.inspection.layers]
        for run, layer in track(jobs, "figures", console=console, transient=True):
            stem = f"{run.name}-{len(run.inspection.ids)}-layer{layer}"
            for ending in formats:
                draw_maps(run.inspection, layer, options.out / f"{stem}.{ending}")
        records = [{"run": run.name, **record} for run in inspections for record in run.inspection.records()]
        write_atomically(options.out / "heads.json", json.dumps(records, indent=1))
        write_maps_page(inspections, options.out)
    console.print(f"page     {options.out / 'index.html'}\nfigures  {options.out}", soft_wrap=True)
    return 0


def read_argument(text: str) -> str:
    """Contents of the file if one of that name exists, else the text itself."""
    path = Path(text)
    try:
        if path.is_file():
            return path.read_text("utf-8", errors="replace")
    except (OSError, ValueError):  # no file can have such a name
        return text
    if FILE_NAME.fullmatch(text):
        raise FileNotFoundError(f"there is no file {text}")
    return text


def heads_table(name: str, inspection: Inspection) -> Table:
    run = f"{inspection.method} ({name}), {len(inspection.ids)} tokens"
    title = f"{run}: weight on the first token | on what the next token repeats | entropy in nats"
    table = Table("layer", *(f"head {head}" for head in inspection.layers[0].heads), title=title)
    for column in table.columns:
        column.justify = "right"
    for layer in inspection.layers:
        cells = [
            f"{sink:.1%} | {'–' if np.isnan(copying) else f'{copying:.1%}'} | {entropy:.2f}"
            for sink, copying, entropy in zip(layer.sink, layer.copying, layer.entropy, strict=True)
        ]
        table.add_row(str(layer.layer), *cells)
    return table
