"""The texts of the experiments: what they are, what is held out for evaluation, and how a reader obtains them."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from dape.data.chunks import Chunk, cut_documents
from dape.data.corpora import default_validation
from dape.files import write_atomically


@dataclass(frozen=True)
class Text:
    """A text in the folder of texts.

    folder:   its folder there; hold_out: documents of the validation split, or a fraction chosen by hash.
    part:     files are cut at line ends into parts of so many characters.
    """

    title: str
    folder: str
    hold_out: tuple[str, ...] | float
    obtain: str
    part: int = 0

    @property
    def validation(self) -> str:
        return str(self.hold_out) if isinstance(self.hold_out, float) else ",".join(self.hold_out)

    def locate(self, texts: Path | None, work: Path, name: str) -> str:
        """Path of the corpus: the given folder, or its parts, cut under `work`; a text without a folder has a name."""
        if not self.folder:
            return name
        if texts is None or not (texts / self.folder).is_dir():
            where = f"no folder {texts / self.folder}" if texts else "give --texts FOLDER, or DAPE_CORPORA"
            raise FileNotFoundError(f"the text {name} is missing: {where}. {self.title}: {self.obtain}")
        if not self.part:
            return str(texts / self.folder)
        cut_files(texts / self.folder, work / name, self.part)
        return str(work / name)


def cut_files(source: Path, target: Path, size: int) -> None:
    """Cut every text file of `source` at line ends into files of about `size` characters in `target`, once."""
    if (target / ".cut").exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.glob("*.txt")):
        whole = [Chunk(file.stem, file.read_text("utf-8"), last=True)]
        for number, chunk in enumerate(cut_documents(whole, size), start=1):
            write_atomically(target / f"{file.stem}-{number:03}.txt", chunk.text)
    write_atomically(target / ".cut", str(size))


def every_tenth(**parts: tuple[int, int]) -> tuple[str, ...]:
    """Every tenth part of files, from the first to the last number."""
    return tuple(
        f"{name}-{n:03}" for name, (first, last) in parts.items() for n in range(first, last + 1, 10)
    )


STACKS = (
    "Clone https://github.com/stacks/stacks-project (commit 4ac4815d) and copy its .tex files into a folder latex/, all but "
    "spaces*, stacks*, examples-stacks, bibliography, chapters, coding, conventions, desirables, fdl, introduction and preamble."
)
NOVELS = (
    "Take both from a public-domain library (Standard Ebooks or Project Gutenberg) as plain text, and put pepys_diary.txt "
    "and war_and_peace.txt into a folder books/."
)
SIX = ("topology", "pione", "discriminant", "weil", "dpa", "groupoids")
# And every fifth of the other chapters between 100 and 250 thousand bytes.
THIRTEEN = (*SIX, "cotangent", "derham", "exercises", "limits", "more-etale", "quot", "sheaves")
TEXTS = {
    "latex": Text("80 chapters of the Stacks project, LaTeX sources, 6 held out", "latex", SIX, STACKS),
    "latex13": Text("the same, 13 held out", "latex", THIRTEEN, STACKS),
    "books": Text(
        "The Diary of Samuel Pepys and War and Peace in parts of 100 kB, 10 held out", "books",
        every_tenth(pepys_diary=(6, 66), war_and_peace=(5, 25)), NOVELS, 100_000,
    ),
    "books13": Text(
        "the same in parts of 80 kB, 13 held out", "books",
        every_tenth(pepys_diary=(6, 86), war_and_peace=(7, 37)), NOVELS, 80_000,
    ),
    "python": Text(
        "sources of installed Python packages, matplotlib, networkx and numpy held out", "",
        tuple(default_validation("python").split(",")), "Built in: `--corpus python`.",
    ),
    "arxiv": Text(
        "the Arxiv part of the Pile", "arxiv", 0.01,
        "Put the articles, as text files or JSON lines with a field text, into a folder arxiv/.",
    ),
    "books3": Text(
        "the Books3 part of the Pile", "books3", 0.01,
        "Books3 was withdrawn; put a collection of books into a folder books3/ (PG-19 is the usual replacement).",
    ),
}  # fmt: skip
# Real text wherever Python is, for the smoke scale.
LIBRARY = str(Path(sysconfig.get_path("stdlib")) / "json" / "*.py")
