"""`dape data prepare` and `dape data show`: pack text into tokens, and summarise packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dape.cli.parsing import parse_action
from dape.data import TokenData, open_data, prepare, verify
from dape.data.corpora import default_tokenizer
from dape.data.preparation import parse_validation
from dape.settings import SEED, setting


@dataclass
class Prepare:
    """Pack a corpus into memory-mapped tokens, split by document into training and validation.

    An interrupted packing resumes; finished data is kept; other settings or changed texts in the same folder are an
    error.
    """

    corpus: str = setting(
        "stdlib",
        help='"python" (long source files of installed packages); "stdlib" (the library sources of this Python); a file, folder or glob (.txt .md .tex .py .jsonl .jsonl.gz .jsonl.zst .parquet); or hf:NAME[@CONFIGURATION][:SPLIT][:FIELD], streamed.',
        positional=True,
    )
    out: Path = setting(Path("data"), help="Output folder.", writes="folder")
    tokenizer: str | None = setting(
        None,
        help='"bytes"; "bpe:VOCAB", trained on the training split; a tokenizer.json; a Hugging Face name or folder. '
        "Default: bpe:2048 for python, bytes for other text.",
    )
    validation: str | None = setting(
        None,
        help="Fraction of documents to hold out, or names of documents or folders/, separated by commas. Default: three "
        "whole packages of python, a tenth of other text.",
        test=parse_validation,
    )
    seed: int = setting(0, help="Seed for choosing the held-out documents.", **SEED)
    field: str = setting(
        "text", help="Field of a JSON line, or column of a parquet file, that holds the text."
    )
    cut: int | None = setting(
        None,
        help="Make documents of at least this many characters out of longer ones. By default fewer than 10 text files "
        "are cut into about 64 documents.",
        low=1,
        high=2**40,
    )
    skip_bad: bool = setting(
        False,
        help="Leave out documents that are empty, binary, not UTF-8 or without the field, and count them.",
    )

    def run(self) -> None:
        options = vars(self) | {"tokenizer": self.tokenizer or default_tokenizer(self.corpus)}
        data = prepare(options.pop("corpus"), options.pop("out"), **options, progress=True)
        print_data(data)


@dataclass
class Show:
    """Summary of a folder of packed tokens."""

    folder: Path = setting(help="Folder written by `dape data prepare`.", reads="folder", positional=True)
    verify: bool = setting(False, help="Verify the checksums of all data.")

    def run(self) -> None:
        data = open_data(self.folder)
        if self.verify:
            verify(data)
        print_data(data)
        if self.verify:
            print("checksums agree")


ACTIONS = {"prepare": Prepare, "show": Show}


def main(arguments: list[str]) -> int:
    parse_action(
        ACTIONS, arguments, prog="dape data", description="Pack text into tokens; summarise packed tokens."
    ).run()
    return 0


def print_data(data: TokenData, console: Console | None = None) -> None:
    """Print a summary of the manifest, in 80 columns."""
    console = console or Console(width=80, highlight=False)
    recipe, sources = data.manifest["recipe"], data.manifest["sources"]
    console.print(str(data.folder), markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("split", "documents", "tokens", "longest", "median"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name in ("train", "validation"):
        tokens = data.split(name)
        lengths = sorted(int(n) for n in tokens.documents[1:] - tokens.documents[:-1])
        longest, median = (lengths[-1], lengths[len(lengths) // 2]) if lengths else (0, 0)
        table.add_row(name, f"{tokens.num_documents:,}", f"{len(tokens):,}", f"{longest:,}", f"{median:,}")
    console.print(table)
    held_out = recipe["validation"]
    choice = (
        ", ".join(held_out) if isinstance(held_out, list) else f"{held_out:g} by hash, seed {recipe['seed']}"
    )
    skipped = f", {sources['skipped']:,} documents skipped" if sources["skipped"] else ""
    console.print(
        f"corpus     {recipe['corpus']}: {sources['count']:,} source{'s' if sources['count'] != 1 else ''}, {sources['bytes']:,} bytes{skipped}"
    )
    for reason in sources.get("left_out", []):
        console.print(f"left out   {reason}", markup=False, soft_wrap=True)
    console.print(f"tokenizer  {recipe['tokenizer']}, {data.manifest['tokenizer']['vocab_size']:,} tokens")
    console.print(f"held out   {choice}")
    if recipe["cut"] is not None:
        console.print(f"cut        into documents of at least {recipe['cut']:,} characters")
    if data.validation.num_documents:
        beginning = data.tokenizer.decode(data.validation.document(0)[:200].tolist())
        console.print(f"begins     {' '.join(beginning.split())[:64]}", markup=False)
