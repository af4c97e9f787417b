"""`dape bench data`: packing, against a plain copy and against the tokenizer alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from dape.bench import report
from dape.bench.timing import interleave
from dape.cli.parsing import parse
from dape.data import find_corpus, load_tokenizer, prepare, train_bpe
from dape.data.packing import BATCH
from dape.settings import setting

COLUMNS: list[report.Column] = [
    ("what", "what", ""),
    ("MB", "megabytes", ".1f"),
    ("ms", "milliseconds", ".0f"),
    ("spread", "spread", ".0f"),
    ("MB/s", "megabytes_per_second", ".1f"),
    ("× baseline", "ratio", ".2f"),
    ("baseline", "beside", ""),
]


@dataclass(frozen=True)
class Options:
    """Time `dape data prepare` on the library sources of this Python, repeated to a size, as files and as records."""

    megabytes: int = setting(100, help="Text to pack as bytes.", low=1, high=10**6)
    bpe_megabytes: int = setting(8, help="Text to pack with a BPE.", low=1, high=10**6)
    vocab: int = setting(
        2048, help="Vocabulary of that BPE, which is trained beforehand.", low=256, high=2**24
    )
    rounds: int = setting(3, help="Rounds; the median is reported.", low=1, high=10**6)
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = setting(
        None, help="Write one record per row.", writes="file"
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape bench data")
    records = run(options)
    report.print_table("packing text into tokens", COLUMNS, records)
    if options.json is not None:
        report.write_json(options.json, records)
    return 0


def run(options: Options) -> list[report.Record]:
    with tempfile.TemporaryDirectory(prefix="dape-bench-") as name:
        folder = Path(name)
        return _bytes(options, folder / "bytes") + _bpe(options, folder / "bpe")


def _bytes(options: Options, folder: Path) -> list[report.Record]:
    texts = library(options.megabytes)
    files, records = write(texts, folder)
    candidates: dict[str, Callable[[], object]] = {
        "copy": lambda: copy(files, folder / "copied"),
        "bytes, text files": packing(files, folder / "packed-files", "bytes"),
        "bytes, JSON lines": packing(records, folder / "packed-records", "bytes"),
    }
    return table(candidates, options.rounds, size(texts), baseline="copy")


def _bpe(options: Options, folder: Path) -> list[report.Record]:
    texts = library(options.bpe_megabytes)
    files, _ = write(texts, folder)
    train_bpe(texts, options.vocab).save(folder / "tokenizer")
    tokenizer = load_tokenizer(folder / "tokenizer")
    batches = in_batches(texts)
    candidates: dict[str, Callable[[], object]] = {
        "tokenizers": lambda: [tokenizer.encode_batch(batch) for batch in batches],
        f"bpe:{options.vocab}, text files": packing(files, folder / "packed", str(folder / "tokenizer")),
    }
    return table(candidates, options.rounds, size(texts), baseline="tokenizers")


def library(megabytes: int) -> list[str]:
    """Documents of the library, repeated with small changes up to the requested size."""
    sources = find_corpus("stdlib").sources
    texts: list[str] = []
    total = 0
    while total < megabytes * 1e6:
        for source in sources:
            texts.append(f"# {len(texts)}\n" + "".join(chunk.text for chunk in source.read()))
            total += len(texts[-1])
            if total >= megabytes * 1e6:
                break
    return texts


def write(texts: list[str], folder: Path) -> tuple[Path, Path]:
    """The texts as a folder of files and as a file of JSON lines."""
    files, records = folder / "files", folder / "records.jsonl"
    files.mkdir(parents=True)
    with open(records, "w", encoding="utf-8") as lines:
        for number, text in enumerate(texts):
            (files / f"{number:06}.txt").write_text(text, "utf-8", newline="")
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return files, records


def copy(files: Path, target: Path) -> None:
    """The minimal work of any packing: read every file, widen the bytes, write them."""
    with open(target, "wb") as out:
        for path in sorted(files.iterdir()):
            out.write(np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16).tobytes())


def packing(corpus: Path, folder: Path, tokenizer: str) -> Callable[[], object]:
    def pack() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        prepare(str(corpus), folder, tokenizer=tokenizer, progress=False)

    return pack


def in_batches(texts: list[str]) -> list[list[str]]:
    batches: list[list[str]] = [[]]
    held = 0
    for text in texts:
        batches[-1].append(text)
        held += len(text)
        if held >= BATCH:
            batches.append([])
            held = 0
    return [batch for batch in batches if batch]


def size(texts: list[str]) -> float:
    return sum(len(text.encode("utf-8")) for text in texts) / 1e6


def table(
    candidates: dict[str, Callable[[], object]], rounds: int, megabytes: float, *, baseline: str
) -> list[report.Record]:
    timings = interleave(candidates, rounds)
    return [
        {
            "what": name,
            "megabytes": megabytes,
            "milliseconds": timing.milliseconds,
            "spread": timing.spread,
            "megabytes_per_second": megabytes / timing.milliseconds * 1e3,
            "ratio": timing.milliseconds / timings[baseline].milliseconds,
            "beside": baseline,
        }
        for name, timing in timings.items()
    ]
