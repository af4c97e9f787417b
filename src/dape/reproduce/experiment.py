"""Experiments as data: papers/PAPER/NAME/experiment.toml, checked when read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dape

SCALES = ("smoke", "laptop", "paper")
KINDS = ("language", "tasks", "timing", "maps")
FILE = "experiment.toml"
KEYS = {"title", "kind", "source", "summary", "rank", "grid", "scale"}
NEEDED = {"title", "kind", "source", "summary", "scale"}
# Of a scale, by kind; a language scale has its defaults in papers/scales.toml.
SCALE_KEYS = {
    "language": {"corpora", "train_lengths", "seeds", "multiples", "lengths", "windows", "last", "room"}
    | {"equal_time", "train", "grid", "also", "note"},
    "maps": {
        "corpora",
        "train_lengths",
        "seeds",
        "train",
        "grid",
        "note",
        "map_lengths",
        "samples",
        "pictures",
    },
    "tasks": {
        "tasks",
        "methods",
        "layers",
        "seeds",
        "protocol",
        "protocol_of",
        "results",
        "construction",
        "note",
    },
    "timing": {"methods", "length", "batch", "lengths", "tokens", "rounds", "base", "note"},
}
GRID_KEYS = {"methods", "variant", "train", "train_lengths", "corpora", "seeds", "lengths", "multiples"}
GRID_KEYS |= {"tokens_per_step", "at_evaluation"}


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper.

    name, paper: folder and the folder's parent, such as baselines of dape_v2; source: where it stands in the paper.
    rank:   the order in which `--all` takes experiments up.
    grid:   blocks of methods with what they change; scales: by name, with the defaults filled in.
    """

    name: str
    paper: str
    folder: Path
    kind: str
    title: str
    source: str
    summary: str
    rank: int
    grid: list[dict[str, Any]]
    scales: dict[str, dict[str, Any]]

    @property
    def trains_cells(self) -> bool:
        """Whether it has a grid of language models to train."""
        return self.kind in ("language", "maps")

    def at(self, scale: str) -> dict[str, Any]:
        """The settings at a scale."""
        if scale not in self.scales:
            raise ValueError(f"{self.name} has no scale {scale}: it has {', '.join(self.scales)}")
        return self.scales[scale]

    def blocks(self, scale: str) -> list[dict[str, Any]]:
        """The grid at a scale: the scale's own if it has one, and what it has also."""
        settings = self.at(scale)
        return [*settings.get("grid", self.grid), *settings.get("also", [])]


def find_papers(given: Path | None = None) -> Path:
    """The folder papers/: the one given, that of the working directory, or that beside the sources."""
    beside = Path(dape.__file__).parents[2] / "papers"
    for folder in [given] if given is not None else [Path("papers"), beside]:
        if (folder / "scales.toml").exists():
            return folder.absolute()
    if given is not None:
        raise FileNotFoundError(f"{given} holds no experiments: it has no scales.toml")
    raise FileNotFoundError(
        "the experiments are not part of the installed package: clone the repository and give --papers "
        "CLONE/papers, or run this inside the clone"
    )


def load_experiments(papers: Path, names: Iterable[str] | None = None) -> list[Experiment]:
    """The experiments of those names (NAME or PAPER/NAME), or all of them, by rank."""
    defaults = read_toml(papers / "scales.toml")
    known = [load(file, defaults) for file in sorted(papers.glob(f"*/*/{FILE}"))]
    known.sort(key=lambda e: (e.rank, e.paper, e.name))
    if names is None:
        return known
    return [pick(known, name) for name in dict.fromkeys(names)]


def pick(known: list[Experiment], name: str) -> Experiment:
    found = [e for e in known if name in (e.name, f"{e.paper}/{e.name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{name} is in {' and '.join(e.paper for e in found)}: say which, as PAPER/{name}")
    near = difflib.get_close_matches(name, [e.name for e in known], n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(f'there is no experiment "{name}"; {hint}`dape reproduce --list` shows them all')


def load(file: Path, defaults: dict[str, Any]) -> Experiment:
    """The experiment in a file; whatever is wrong with it is an error that names the file."""
    content = read_toml(file)
    try:
        check_keys("the experiment", content, KEYS)
        if missing := NEEDED - set(content):
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        if content["kind"] not in KINDS:
            raise ValueError(f'kind="{content["kind"]}": choose one of {", ".join(KINDS)}')
        scales = {
            name: fill(content["kind"], name, own, defaults.get(name, {}))
            for name, own in content["scale"].items()
        }
        own = [
            block for scale in scales.values() for name in ("grid", "also") for block in scale.get(name, [])
        ]
        for block in [*content.get("grid", []), *own]:
            check_keys("a block of the grid", block, GRID_KEYS)
            if not block.get("methods"):
                raise ValueError("a block of the grid names no methods")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return Experiment(
        name=file.parent.name,
        paper=file.parent.parent.name,
        folder=file.parent,
        kind=content["kind"],
        title=content["title"],
        source=content["source"],
        summary=" ".join(content["summary"].split()),
        rank=content.get("rank", 100),
        grid=content.get("grid", []),
        scales=scales,
    )


def fill(kind: str, scale: str, own: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A scale's settings, with what is said of that scale for all experiments where this one says nothing."""
    if scale not in SCALES:
        raise ValueError(f'unknown scale "{scale}": choose among {", ".join(SCALES)}')
    check_keys(f"scale {scale}", own, SCALE_KEYS[kind])
    usual = {name: value for name, value in defaults.items() if name in SCALE_KEYS[kind]}
    train = {**usual.get("train", {}), **own.get("train", {})}
    if "lengths" in own:
        usual.pop("multiples", None)
    return {**usual, **own, **({"train": train} if "train" in SCALE_KEYS[kind] else {})}


def check_keys(what: str, table: dict[str, Any], known: set[str]) -> None:
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else f": it takes {', '.join(sorted(known))}"
            raise ValueError(f'{what} has no key "{name}"{hint}')


def read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ValueError("the experiments are TOML files, for which Python 3.11 or newer is needed") from None
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
