"""`dape suite`: evaluate models on questions about longer and longer texts, task by task."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dape.cli.parsing import parse
from dape.data import load_tokenizer
from dape.devices import device_name, find_device
from dape.evaluation.probes import GROUPS, NOISE
from dape.evaluation.suite import PROBES, ask
from dape.files import read_json, write_atomically
from dape.settings import check, setting, split_names, split_numbers

DESCRIPTION = """Ask models questions about texts of growing length: RULER's needles, chains of variables and
frequent words, BABILong's facts in a book, phone books, state tracking, copying, sorting, addition. Texts are generated; the same seed gives the same questions.

  dape suite hf:MODEL runs/a --lengths 256,512,1024 --tasks niah_single_2,phonebook --haystack book.txt

An answer is right if greedy decoding gives all of it. Zero-shot: a model that was not trained on such text fails at
every length, and its loss is more informative. OUT/suite.json has every result with its standard error; finished ones
are not computed again."""


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
    out: Path = setting(Path("runs/suite"), help="Folder of suite.json and the heat maps.", writes="folder")

    def __post_init__(self) -> None:
        check(self)
        if not self.models:
            raise ValueError("name at least one model: a run folder, or hf:MODEL")
        for task in self.task_list:
            if task not in PROBES:
                raise ValueError(f'unknown task "{task}"; the tasks are {", ".join((*GROUPS, *PROBES))}')

    @property
    def task_list(self) -> list[str]:
        names = [name for part in split_names(self.tasks) for name in GROUPS.get(part, (part,))]
        return list(dict.fromkeys(names))


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape suite", description=DESCRIPTION)
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    lengths = sorted(split_numbers("lengths", options.lengths))
    haystack = sentences(options.haystack)
    path = options.out / "suite.json"
    before = read_json(path) if path.exists() else {}
    kept: list[dict[str, Any]] = before.get("results", [])
    asked: dict[str, Any] = {
        "seed": options.seed,
        "examples": options.examples,
        "haystack": str(options.haystack or ""),
    }
    asked["haystack_digest"] = digest_of("\n".join(haystack).encode())
    for name in options.models:
        model, tokenizer = open_model(name, options.device)
        # A folder may hold another model than last time.
        asked["model_digest"] = digest_of(*map(raw, model.state_dict().values()))
        for task in options.task_list:
            for length in lengths:
                known = {"model": name, **asked, "task": task, "length": length}
                if any(known.items() <= record.items() for record in kept):
                    continue
                result = ask(
                    model,
                    tokenizer.encode,
                    task,
                    length,
                    examples=options.examples,
                    seed=options.seed,
                    haystack=haystack,
                )
                if not sys.stdout.isatty():
                    told = f"{result.accuracy:.0%}" if result else "too long for the task"
                    print(f"{name}: {task} at {length}: {told}", file=sys.stderr, flush=True)
                kept.append(known | (asdict(result) if result else {"accuracy": None}))
                options.out.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps({"results": kept}, indent=1) + "\n")
        shown = [r for r in kept if r["model"] == name and asked.items() <= r.items()]
        console.print(accuracy_table(name, shown, options.task_list, lengths))
        drawn = options.out / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.svg"
        draw_heat_map(name, shown, options.task_list, lengths, drawn)
        console.print(f"heat map  {drawn}", soft_wrap=True)
    console.print(f"results   {path}", soft_wrap=True)
    return 0


def digest_of(*parts: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def raw(value: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def open_model(name: str, device: str) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer."""
    from dape.loading import load_named

    base = load_named(name)
    tokenizer = load_tokenizer(base.tokenizer)
    model: Any = base.model
    return model.to(find_device(device)).float().eval(), tokenizer


def sentences(path: Path | None) -> tuple[str, ...]:
    """The sentences of a text, in their order."""
    if path is None:
        return NOISE
    text = " ".join(path.read_text("utf-8", errors="replace").split())
    parts = tuple(part.strip() for part in re.split(r"(?<=[.!?])\s+", text) if part.strip())
    if not parts:
        raise ValueError(f"{path} has no sentence to hide anything in")
    return parts


def _record(records: list[dict[str, Any]], task: str, length: int) -> dict[str, Any] | None:
    matching = [
        r for r in records if (r["task"], r["length"]) == (task, length) and r["accuracy"] is not None
    ]
    return matching[0] if matching else None


def accuracy_table(name: str, records: list[dict[str, Any]], tasks: list[str], lengths: list[int]) -> Table:
    drawn = Table(
        "task", *map(str, lengths), title=f"{name}: answers right, in %, and loss of an answer's token"
    )
    for task in tasks:
        cells = []
        for length in lengths:
            record = _record(records, task, length)
            cells.append(
                f"{100 * record['accuracy']:.0f} ± {100 * record['accuracy_se']:.0f}  {record['nll']:.2f}"
                if record
                else "too short"
            )
        drawn.add_row(task, *cells)
    return drawn


def draw_heat_map(
    name: str, records: list[dict[str, Any]], tasks: list[str], lengths: list[int], path: Path
) -> None:
    """The heat map length × task: colour by accuracy, the number in each cell."""
    from dape.lab.figures import canvas, save

    figure, ((axes,),) = canvas(1.8 + 0.75 * len(lengths), 0.9 + 0.28 * len(tasks))
    values = [
        [100 * record["accuracy"] if (record := _record(records, task, n)) else float("nan") for n in lengths]
        for task in tasks
    ]
    axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), list(map(str, lengths)))
    axes.set_yticks(range(len(tasks)), tasks)
    axes.set_xlabel("tokens")
    axes.set_title(f"{name}: answers right, %", fontsize=8)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value == value:
                colour = "black" if value > 60 else "white"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)
    save(figure, path)
