"""Folders under papers/: an experiment with its claims and its results so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from dape.lab.experiments import FILE, RESULTS, load_corpora, load_experiment, read_toml
from dape.lab.records import Results, load_results
from dape.lab.stats import Losses, SeedVariance, seed_variance

CLAIMS = "claims.py"
# Default description of the texts that replace the paper's, if papers/corpora.toml has none.
STANDS_FOR = {"latex": "arxiv", "books": "books3"}


@dataclass(frozen=True)
class Folder:
    """One experiment: its description, and its results by scale, the largest first.

    stands_for: the paper's corpora by our names; texts: descriptions of our corpora; seeds: seed variance by scale, in
    all experiments.
    """

    path: Path
    title: str
    shows: str = ""
    source: str = ""
    declared: str = ""
    rank: int = 100
    results: dict[str, Results] = field(default_factory=dict)
    stands_for: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, SeedVariance] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def best(self) -> Results | None:
        """Results of the largest scale that was run."""
        return next(iter(self.results.values()), None)

    @property
    def scale(self) -> str:
        return next(iter(self.results), "")

    @property
    def kind(self) -> str:
        return self.best.kind if self.best else self.declared

    @property
    def seed_variance(self) -> SeedVariance:
        """Seed variance at the scale of the best results."""
        return self.seeds.get(self.scale) or SeedVariance()

    @cached_property
    def losses(self) -> Losses:
        return Losses(self.best, self.stands_for, self.seed_variance)

    def losses_on(self, slice: str, metric: str = "loss") -> Losses:
        """The losses of a slice of the tokens, or their changes from the training length (metric "change")."""
        return Losses(self.best, self.stands_for, self.seed_variance, metric=metric, slice=slice)

    def at(self, scale: str) -> Folder:
        """The same with the results of one scale alone."""
        return replace(self, results={scale: self.results[scale]})


def with_claims(papers: Path) -> list[Path]:
    """Folders directly under papers/ that have claims, the reproduced papers first."""
    folders = [file.parent for file in papers.glob(f"*/{CLAIMS}")]
    return sorted(folders, key=lambda folder: (folder.name == "beyond", folder.name))


def load_folders(paper: Path, named: Iterable[str] = ()) -> list[Folder]:
    """Load the experiments of a paper by rank, then those that exist only in claims (`named`)."""
    present = [file.parent.name for file in sorted(paper.glob(f"*/{FILE}"))]
    folders = [load_folder(paper / name) for name in present]
    folders.sort(key=lambda folder: (folder.rank, folder.name))
    absent = [name for name in dict.fromkeys(named) if name not in present]
    return folders + [load_folder(paper / name) for name in absent]


def load_folder(path: Path) -> Folder:
    """Load the experiment in a folder; empty if there is none."""
    papers, file = path.parent.parent, path / FILE
    corpora = load_corpora(papers)
    results = {scale: load_results(path / name) for scale, name in RESULTS.items() if (path / name).exists()}
    shared: dict[str, Any] = {
        "results": results,
        "stands_for": STANDS_FOR | {c.name: c.stands_for.lower() for c in corpora.values() if c.stands_for},
        "texts": {corpus.name: corpus.title for corpus in corpora.values() if corpus.title},
        "seeds": load_seed_variance(papers),
    }
    if not file.exists():
        return Folder(path, path.name.replace("_", " "), **shared)
    about = load_experiment(file, _defaults(papers))
    return Folder(path, about.title, about.summary, about.source, about.kind, about.rank, **shared)


def _defaults(papers: Path) -> dict[str, dict]:
    file = papers / "scales.toml"
    return read_toml(file) if file.exists() else {}


def load_seed_variance(papers: Path) -> dict[str, SeedVariance]:
    """Seed variance by scale, from the results of all papers."""
    return {
        scale: _variance(
            tuple((path, path.stat().st_mtime_ns) for path in sorted(papers.glob(f"*/*/{name}")))
        )
        for scale, name in RESULTS.items()
    }


@cache
def _variance(files: tuple[tuple[Path, int], ...]) -> SeedVariance:
    """Seed variance of files by path and modification time; cached, as every claim needs it."""
    return seed_variance(load_results(path) for path, _ in files)
