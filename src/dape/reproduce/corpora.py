"""The texts that experiments name, by papers/corpora.toml: where they are, what is held out, how to obtain them."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dape.data.pieces import Piece, cut_documents
from dape.files import write_atomically
from dape.reproduce.experiment import check_keys, read_toml

ENVIRONMENT = "DAPE_CORPORA"
KEYS = {"title", "stands_for", "obtain", "hold_out", "part", "every", "library", "fraction"}


@dataclass(frozen=True)
class NamedCorpus:
    """A text by its name in the experiments.

    hold_out: documents of the validation split, by name; or `part` and `every`: files are cut at line ends into
    parts of that many characters, and every n-th is held out; or a fraction, chosen by hash.
    library: a package of Python's own library, which is there wherever Python is.
    """

    name: str
    title: str
    obtain: str
    stands_for: str = ""
    hold_out: tuple[str, ...] = ()
    part: int = 0
    every: int = 0
    fraction: float = 0.0
    library: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which text is trained on and which is held out, wherever the files are."""
        return {
            key: value
            for key in ("name", "hold_out", "part", "every", "fraction", "library")
            if (value := getattr(self, key))
        }

    def found(self, folder: Path | None) -> bool:
        return bool(self.library) or (folder is not None and (folder / self.name).is_dir())

    def locate(self, folder: Path | None, work: Path, *, must_exist: bool = True) -> dict[str, str]:
        """The fields corpus and validation of TrainConfig; files are linked, or cut, under `work`."""
        if self.library:
            corpus = str(Path(sysconfig.get_path("stdlib")) / self.library / "*.py")
            return {"corpus": corpus, "validation": self.validation(work)}
        place = work / self.name
        if folder is not None and self.found(folder):
            work.mkdir(parents=True, exist_ok=True)
            if self.part:
                cut_files(folder / self.name, place, self.part)
            else:
                link(folder / self.name, place)
        elif must_exist:
            raise FileNotFoundError(self.missing(folder))
        return {"corpus": str(place), "validation": self.validation(place)}

    def validation(self, place: Path) -> str:
        if self.part:
            parts = sorted(path.stem for path in place.glob("*.txt"))
            return ",".join(parts[self.every // 2 :: self.every])
        return ",".join(self.hold_out) if self.hold_out else str(self.fraction)

    def missing(self, folder: Path | None) -> str:
        where = f"there is no folder {folder / self.name}" if folder else "no folder of texts was given"
        return (
            f'the corpus "{self.name}" ({self.title}) is not there: {where}. {self.obtain} Then give the folder '
            f"that holds {self.name}/ by --corpora, or in the environment variable {ENVIRONMENT}"
        )


def load_corpora(papers: Path) -> dict[str, NamedCorpus]:
    """Every corpus of papers/corpora.toml, by name."""
    found = {}
    for name, table in read_toml(papers / "corpora.toml").items():
        check_keys(f"corpus {name}", table, KEYS)
        hold_out = tuple(table.pop("hold_out", ()))
        found[name] = NamedCorpus(name=name, hold_out=hold_out, **table)
    return found


def corpora_folder(given: Path | None) -> Path | None:
    """The folder of texts: the one given, or that of the environment."""
    if given is None and os.environ.get(ENVIRONMENT):
        given = Path(os.environ[ENVIRONMENT])
    if given is not None and not given.is_dir():
        raise FileNotFoundError(f"there is no folder of texts {given}")
    return given.absolute() if given is not None else None


def link(source: Path, place: Path) -> None:
    """`place` leads to `source`: runs name the text by a path that stays when the text moves."""
    if place.is_symlink() and place.readlink() == source:
        return
    place.unlink(missing_ok=True)
    place.symlink_to(source)


def cut_files(source: Path, place: Path, size: int) -> None:
    """Every text file of `source` as files of about `size` characters in `place`, cut at line ends; made once."""
    files = sorted(source.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{source} has no file that ends in .txt")
    stamp = "\n".join(f"{size} {file.name} {file.stat().st_size}" for file in files)
    note = place / ".cut"
    if note.exists() and note.read_text("utf-8") == stamp:
        return
    place.mkdir(exist_ok=True)
    for old in place.glob("*.txt"):
        old.unlink()
    for file in files:
        whole = [Piece(file.stem, file.read_text("utf-8"), last=True)]
        for number, piece in enumerate(cut_documents(whole, size), start=1):
            write_atomically(place / f"{file.stem}-{number:03}.txt", piece.text)
    write_atomically(note, stamp)
