"""`dape inspect`: attention maps of models on a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dape.cli.parsing import parse
from dape.files import distinct_names, exclusive, write_atomically
from dape.settings import setting, split_names, split_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dape.data import Tokenizer
    from dape.inspection import Inspection
    from dape.inspection.page import Named

# A single word with a suffix, such as book.txt or data/a.jsonl; neither 3.14 nor the end of a sentence.
FILE_NAME = re.compile(r"\S+\.[A-Za-z]\w{0,7}")


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
        help="Runs, model folders, GGUF files, or hf:NAME of the Hugging Face hub.",
        positional=True,
    )
    text: str = setting(help="A file, or the text itself.")
    lengths: str = setting(
        "512",
        help="Number of tokens to inspect; several lengths by commas (the paper shows 512,2048,8192).",
        listed=int,
        low=1,
        high=2**24,
    )
    layers: str = setting(
        "all",
        help="Layers, separated by commas, counted from 0.",
        listed=int,
        low=0,
        high=10_000,
        words=("all",),
    )
    heads: str = setting(
        "all",
        help="Heads, separated by commas, counted from 0.",
        listed=int,
        low=0,
        high=2**16,
        words=("all",),
    )
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
        None,
        help="bytes, a tokenizer.json or a folder, for models without one; by default the model's.",
    )
    out: Path = setting(
        Path("inspection"),
        help="Output folder of index.html with its tiles, heads.json and the figures.",
        writes="folder",
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape inspect")
    from dape.inspection import inspect
    from dape.inspection.page import Named, token_texts, write_maps_page

    lengths = split_numbers("lengths", options.lengths)
    layers, heads = (
        None if text == "all" else split_numbers(name, text)
        for name, text in (("layers", options.layers), ("heads", options.heads))
    )
    formats = split_names(options.formats)
    if not options.runs:
        raise ValueError("name at least one run")
    console = Console()
    text, inspections = read_argument(options.text), []
    for name, model, tokenizer in open_models(options.runs, options.tokenizer):
        ids = tokenizer.encode(text)
        for length in lengths:
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
        for run in inspections:
            draw_all(run, options.out, formats, console)
        write_atomically(
            options.out / "heads.json",
            json.dumps([record for run in inspections for record in records(run)], indent=1),
        )
        write_maps_page(inspections, options.out)
    console.print(f"Explore: {options.out / 'index.html'}   Pictures: {options.out}", soft_wrap=True)
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


def open_models(
    models: Sequence[str], tokenizer: str | None = None
) -> Iterator[tuple[str, PreTrainedModel, Tokenizer]]:
    """Name, model and tokenizer of each model; one of others is shown as it is, through our attention."""
    import torch

    from dape.loading import load_named
    from dape.models import DapeForCausalLM
    from dape.retrofitting.attach import is_retrofitted, retrofit
    from dape.training.run import no_bars

    for label, name in zip(distinct_names([m.removeprefix("hf:") for m in models]), models, strict=True):
        with no_bars():
            named = load_named(name, dtype=torch.float32)
        model = named.model
        if not (isinstance(model, DapeForCausalLM) or is_retrofitted(model)):
            retrofit(model, "plain")
        yield label, model, find_tokenizer(named.tokenizer, tokenizer)


def find_tokenizer(source: str, spec: str | None) -> Tokenizer:
    """Load the given tokenizer, or the model's."""
    from dape.data import load_tokenizer

    if spec is None and Path(source).is_dir() and not (Path(source) / "tokenizer.json").exists():
        raise FileNotFoundError(
            f'there is no tokenizer in {source}: pass --tokenizer with a folder that has one, or "bytes" for a model '
            f"of bytes"
        )
    return load_tokenizer(source if spec is None else spec)


def draw_all(run: Named, out: Path, formats: list[str], console: Console) -> None:
    from dape.inspection.figure import draw_maps

    length = len(run.inspection.ids)
    jobs = [(layer_maps.layer, ending) for layer_maps in run.inspection.layers for ending in formats]
    for layer, ending in track(jobs, f"pictures of {run.name}", console=console, transient=True):
        draw_maps(run.inspection, layer, out / f"{run.name}-{length}-layer{layer}.{ending}")


def records(run: Named) -> list[dict[str, object]]:
    from dape.inspection.maps import STATISTICS
    from dape.inspection.page import plain_numbers

    about = {"run": run.name, "method": run.inspection.method, "length": len(run.inspection.ids)}
    return [
        {**about, "layer": layer.layer, "head": head, **dict(zip(STATISTICS, numbers, strict=True))}
        for layer in run.inspection.layers
        for head, *numbers in zip(
            layer.heads, *(plain_numbers(getattr(layer, name), 6) for name in STATISTICS), strict=True
        )
    ]


def heads_table(name: str, inspection: Inspection) -> Table:
    run = f"{inspection.method} ({name}), {len(inspection.ids)} tokens"
    table = Table(
        title=f"{run}: weight on the first token | on what the next token repeats | entropy in nats"
    )
    table.add_column("layer", justify="right")
    for head in inspection.layers[0].heads:
        table.add_column(f"head {head}", justify="right")
    for layer_maps in inspection.layers:
        cells = [
            f"{100 * sink:.1f} % | {'–' if np.isnan(copying) else f'{100 * copying:.1f} %'} | {entropy:.2f}"
            for sink, copying, entropy in zip(
                layer_maps.sink, layer_maps.copying, layer_maps.entropy, strict=True
            )
        ]
        table.add_row(str(layer_maps.layer), *cells)
    return table
