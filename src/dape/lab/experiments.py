"""Experiments as data (papers/PAPER/NAME/experiment.toml), their texts, and the workspace of their runs."""

from __future__ import annotations

import difflib
import os
import sysconfig
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dape
from dape.data.chunks import Chunk, cut_documents
from dape.files import parse_text, write_atomically
from dape.lab.environment import threads_of

SCALES = ("smoke", "laptop", "paper")
FILE = "experiment.toml"
# Files of results next to the experiment, by scale, the largest first; those of the smoke scale, which are not
# evidence, are kept with the runs.
RESULTS = {"paper": "results-paper.json", "laptop": "results.json"}
KEYS = {"title", "kind", "source", "summary", "rank", "grid", "scale"}
NEEDED = {"title", "kind", "source", "summary", "scale"}
GRID_KEYS = {"methods", "variant", "train", "train_lengths", "corpora", "seeds", "lengths", "multiples"}
GRID_KEYS |= {"tokens_per_step", "at_evaluation"}
ENVIRONMENT = "DAPE_CORPORA"


@dataclass(frozen=True)
class Experiment:
    """One table or figure of a paper, or a comparison of the user's.

    name, paper: folder and the folder's parent, such as baselines of dape_v2; source: table or figure of the paper.
    rank:   order of the experiments with `--all`.
    grid:   blocks of methods with their changes; scales: settings by name, with the defaults filled in.
    """

    name: str
    kind: str
    grid: list[dict[str, Any]]
    scales: dict[str, dict[str, Any]]
    title: str = ""
    source: str = ""
    summary: str = ""
    rank: int = 100
    paper: str = ""
    folder: Path = field(default_factory=Path)

    def at(self, scale: str) -> dict[str, Any]:
        """The settings at a scale."""
        if scale not in self.scales:
            raise ValueError(f"{self.name} has no scale {scale}: it has {', '.join(self.scales)}")
        return self.scales[scale]

    def blocks(self, scale: str) -> list[dict[str, Any]]:
        """The grid at a scale: the scale's own or the common one, and its additional blocks."""
        settings = self.at(scale)
        return [*settings.get("grid", self.grid), *settings.get("also", [])]

    def shown(self, scale: str) -> dict[str, Any]:
        """The settings for results.json."""
        settings = {name: value for name, value in self.at(scale).items() if name not in ("grid", "also")}
        return {**settings, **({"grid": blocks} if (blocks := self.blocks(scale)) else {})}

    def values(self, name: str, scale: str) -> list[Any]:
        """Seeds, training lengths or corpora at a scale, in order, followed by those of individual blocks."""
        own = (value for block in self.blocks(scale) for value in block.get(name, []))
        return list(dict.fromkeys([*self.at(scale)[name], *own]))


def find_papers(given: Path | None = None) -> Path:
    """The folder papers/: the given one, that of the working directory, or that next to the sources."""
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
    """Load experiments by name (NAME or PAPER/NAME), or all of them, by rank."""
    defaults = read_toml(papers / "scales.toml") if (papers / "scales.toml").exists() else {}
    known = [load_experiment(file, defaults) for file in sorted(papers.glob(f"*/*/{FILE}"))]
    known.sort(key=lambda e: (e.rank, e.paper, e.name))
    if names is None:
        return known
    return [pick(known, name) for name in dict.fromkeys(names)]


def pick(known: list[Experiment], name: str) -> Experiment:
    matching = [e for e in known if name in (e.name, f"{e.paper}/{e.name}")]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(
            f"{name} is in {' and '.join(e.paper for e in matching)}: say which, as PAPER/{name}"
        )
    near = difflib.get_close_matches(name, [e.name for e in known], n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    raise ValueError(f'there is no experiment "{name}"; {hint}`dape reproduce --list` shows them all')


def load_experiment(file: Path, defaults: dict[str, Any]) -> Experiment:
    """Load the experiment in a file; errors in it name the file."""
    from dape.lab.kinds import KINDS, kind_named

    content = read_toml(file)
    try:
        check_keys("the experiment", content, KEYS)
        if missing := NEEDED - set(content):
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
        if content["kind"] not in KINDS:
            raise ValueError(f'kind="{content["kind"]}": choose one of {", ".join(KINDS)}')
        known = kind_named(content["kind"]).scale_keys
        scales = {
            name: fill(name, own, defaults.get(name, {}), known) for name, own in content["scale"].items()
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
    folder = file.parent
    about = {name: content[name] for name in ("title", "kind", "source", "rank", "grid") if name in content}
    summary = " ".join(content["summary"].split())
    about = {"grid": [], **about}
    return Experiment(
        name=folder.name, paper=folder.parent.name, folder=folder, summary=summary, scales=scales, **about
    )


def fill(scale: str, own: dict[str, Any], defaults: dict[str, Any], known: Set[str]) -> dict[str, Any]:
    """Settings of a scale, with the defaults of that scale for all experiments."""
    if scale not in SCALES:
        raise ValueError(f'unknown scale "{scale}": choose among {", ".join(SCALES)}')
    check_keys(f"scale {scale}", own, known)
    usual = {name: value for name, value in defaults.items() if name in known}
    train = {**usual.get("train", {}), **own.get("train", {})}
    if "lengths" in own:
        usual.pop("multiples", None)
    return {**usual, **own, **({"train": train} if "train" in known else {})}


def check_keys(what: str, table: dict[str, Any], known: Set[str]) -> None:
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else f": it takes {', '.join(sorted(known))}"
            raise ValueError(f'{what} has no key "{name}"{hint}')


def read_toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("the experiments are TOML files, for which Python 3.11 or newer is needed") from None
    try:
        return parse_text(path.read_text("utf-8"), ".toml")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Corpus:
    """A text by its name in the experiments, or one given by the user.

    hold_out: documents of the validation split, by name; or `part` and `every`: files are cut at line ends into
    parts of that many characters, and every n-th is held out; or a fraction, chosen by hash.
    library: a package of Python's own library, which exists wherever Python does.
    given:   corpus, validation, field and, optionally, data of TrainConfig, if given by the user.
    """

    name: str
    title: str = ""
    obtain: str = ""
    stands_for: str = ""
    hold_out: tuple[str, ...] = ()
    part: int = 0
    every: int = 0
    fraction: float = 0.0
    library: str = ""
    given: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that determine the training and held-out text, independent of the files' location."""
        return {
            key: value
            for key in ("name", "hold_out", "part", "every", "fraction", "library", "given")
            if (value := getattr(self, key))
        }

    def exists(self, folder: Path | None) -> bool:
        return bool(self.library or self.given) or (folder is not None and (folder / self.name).is_dir())

    def locate(self, folder: Path | None, work: Path, *, must_exist: bool = True) -> dict[str, str]:
        """The fields corpus and validation of TrainConfig; files are linked, or cut, under `work`."""
        if self.given:
            return dict(self.given)
        if self.library:
            corpus = str(Path(sysconfig.get_path("stdlib")) / self.library / "*.py")
            return {"corpus": corpus, "validation": self.validation(work)}
        target = work / self.name
        if folder is not None and self.exists(folder):
            work.mkdir(parents=True, exist_ok=True)
            if self.part:
                cut_files(folder / self.name, target, self.part)
            else:
                link(folder / self.name, target)
        elif must_exist:
            raise FileNotFoundError(self.missing(folder))
        return {"corpus": str(target), "validation": self.validation(target)}

    def validation(self, target: Path) -> str:
        if self.part:
            parts = sorted(path.stem for path in target.glob("*.txt"))
            return ",".join(parts[self.every // 2 :: self.every])
        return ",".join(self.hold_out) if self.hold_out else str(self.fraction)

    def missing(self, folder: Path | None) -> str:
        where = f"there is no folder {folder / self.name}" if folder else "no folder of texts was given"
        return (
            f'the corpus "{self.name}" ({self.title}) is not there: {where}. {self.obtain} Then give the folder '
            f"that holds {self.name}/ by --corpora, or in the environment variable {ENVIRONMENT}"
        )


CORPUS_KEYS = {"title", "stands_for", "obtain", "hold_out", "part", "every", "library", "fraction"}


def load_corpora(papers: Path) -> dict[str, Corpus]:
    """Load the corpora of papers/corpora.toml by name; none without that file."""
    corpora = {}
    file = papers / "corpora.toml"
    for name, table in read_toml(file).items() if file.exists() else ():
        check_keys(f"corpus {name}", table, CORPUS_KEYS)
        corpora[name] = Corpus(**{"name": name, **table, "hold_out": tuple(table.get("hold_out", ()))})
    return corpora


def corpora_folder(given: Path | None) -> Path | None:
    """Folder of texts: the given one, or that of the environment."""
    if given is None and os.environ.get(ENVIRONMENT):
        given = Path(os.environ[ENVIRONMENT])
    if given is not None and not given.is_dir():
        raise FileNotFoundError(f"there is no folder of texts {given}")
    return given.absolute() if given is not None else None


def link(source: Path, target: Path) -> None:
    """Link `target` to `source`: runs refer to the text by a path that stays valid when the text moves."""
    if target.is_symlink() and target.readlink() == source:
        return
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def cut_files(source: Path, target: Path, size: int) -> None:
    """Cut every text file of `source` at line ends into files of about `size` characters in `target`, once."""
    files = sorted(source.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{source} has no file that ends in .txt")
    stamp = "\n".join(f"{size} {file.name} {file.stat().st_size}" for file in files)
    note = target / ".cut"
    if note.exists() and note.read_text("utf-8") == stamp:
        return
    target.mkdir(exist_ok=True)
    for old in target.glob("*.txt"):
        old.unlink()
    for file in files:
        whole = [Chunk(file.stem, file.read_text("utf-8"), last=True)]
        for number, chunk in enumerate(cut_documents(whole, size), start=1):
            write_atomically(target / f"{file.stem}-{number:03}.txt", chunk.text)
    write_atomically(note, stamp)


@dataclass(frozen=True)
class Workspace:
    """Workspace of experiments: folder of runs, texts, number of concurrent jobs, and file names.

    papers: folder of experiments, where results are kept; None: everything goes into `work`.
    """

    work: Path
    scale: str = "own"
    papers: Path | None = None
    corpora: dict[str, Corpus] = field(default_factory=dict)
    texts: Path | None = None
    jobs: int = 1
    # Whether jobs run in this process: those of the smoke scale are shorter than the start of another.
    in_process: bool = False

    @property
    def evaluations(self) -> Path:
        """Folder of the trainings' evaluations: small files, kept with the results, so that trainings need not be
        repeated; those of the smoke scale, which are not evidence, stay with the runs."""
        if self.papers is None or self.scale not in RESULTS:
            return self.work / "evaluations"
        return self.papers / "evaluations" / self.scale

    @property
    def threads(self) -> int:
        """Threads of each job."""
        return threads_of(self.jobs)

    def results(self, experiment: Experiment) -> Path:
        if self.papers is None:
            return self.work / "results.json"
        if self.scale in RESULTS:
            return experiment.folder / RESULTS[self.scale]
        return self.work / "results" / experiment.paper / f"{experiment.name}.json"
