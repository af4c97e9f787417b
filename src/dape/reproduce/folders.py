"""Folders under papers/: an experiment's title and purpose, and whatever results it has so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dape.reproduce.experiment import FILE as EXPERIMENT
from dape.reproduce.experiment import read_toml
from dape.reproduce.results import NAMES
from dape.reproduce.spread import Spread, spread_of

Results = dict[str, Any]

CLAIMS = "claims.toml"
# The results that decide, the best first.
RESULTS = {scale: NAMES[scale] for scale in ("paper", "laptop")}
# What a text of ours stands in for, where papers/corpora.toml does not say.
STANDS_FOR = {"latex": "arxiv", "books": "books3"}


@dataclass(frozen=True)
class Folder:
    """One experiment: what it is about, and its results by scale.

    stands_for: the paper's corpora by our names; texts: what our corpora are; spreads: between seeds, by scale, in
    all experiments.
    """

    path: Path
    title: str
    shows: str
    source: str
    kind: str
    rank: int
    results: dict[str, Results]
    stands_for: dict[str, str]
    texts: dict[str, str]
    spreads: dict[str, Spread]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def best(self) -> Results | None:
        """The results of the largest scale that was run."""
        return next((self.results[scale] for scale in RESULTS if scale in self.results), None)

    @property
    def spread(self) -> Spread:
        """Between seeds, at the scale of the best results."""
        return next((self.spreads[scale] for scale in RESULTS if scale in self.results), Spread())

    def at(self, scale: str) -> Folder:
        """The same with the results of one scale alone."""
        return replace(self, results={scale: self.results[scale]})


def with_claims(papers: Path) -> list[Path]:
    """The folders directly under papers/ that have claims, the reproduced papers before what goes beyond."""
    found = [file.parent for file in papers.glob(f"*/{CLAIMS}")]
    return sorted(found, key=lambda folder: (folder.name == "beyond", folder.name))


def load_folders(paper: Path, named: Iterable[str] = ()) -> list[Folder]:
    """The experiments of a paper by rank, then those that are only named, by claims made of them."""
    shared = (load_corpora(paper.parent), load_spreads(paper.parent))
    present = [file.parent for file in sorted(paper.glob(f"*/{EXPERIMENT}"))]
    folders = [load_folder(path, *shared) for path in present]
    folders.sort(key=lambda folder: (folder.rank, folder.name))
    known = {folder.name for folder in folders}
    absent = [name for name in dict.fromkeys(named) if name not in known]
    return folders + [load_folder(paper / name, *shared) for name in absent]


def load_named(paper: Path, names: Iterable[str]) -> dict[str, Folder]:
    """The experiments of those names alone, whether they are there or not."""
    shared = (load_corpora(paper.parent), load_spreads(paper.parent))
    return {name: load_folder(paper / name, *shared) for name in dict.fromkeys(names)}


def load_folder(path: Path, corpora: dict[str, dict[str, Any]], spreads: dict[str, Spread]) -> Folder:
    file = path / EXPERIMENT
    about = read_toml(file) if file.exists() else {}
    results = {scale: load(path / name) for scale, name in RESULTS.items() if (path / name).exists()}
    return Folder(
        path,
        about.get("title", path.name.replace("_", " ")),
        " ".join(about.get("summary", "").split()),
        about.get("source", ""),
        about.get("kind", ""),
        about.get("rank", 100),
        results,
        {**STANDS_FOR, **_said(corpora, "stands_for", str.lower)},
        _said(corpora, "title", str),
        spreads,
    )


def load(path: Path) -> Results:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def load_spreads(papers: Path) -> dict[str, Spread]:
    """The spread between seeds by scale, from the results of all papers."""
    files = {scale: sorted(papers.glob(f"*/*/{name}")) for scale, name in RESULTS.items()}
    return {
        scale: _spread(tuple((path, path.stat().st_mtime_ns) for path in paths))
        for scale, paths in files.items()
    }


@cache
def _spread(files: tuple[tuple[Path, int], ...]) -> Spread:
    """Of these files as they were written at those times: every look into a claim asks for it."""
    return spread_of(load(path) for path, _ in files)


def load_corpora(papers: Path) -> dict[str, dict[str, Any]]:
    """papers/corpora.toml, if it is there."""
    file = papers / "corpora.toml"
    return read_toml(file) if file.exists() else {}


def _said(corpora: dict[str, dict[str, Any]], key: str, form: Callable[[str], str]) -> dict[str, str]:
    return {name: form(table[key]) for name, table in corpora.items() if table.get(key)}
