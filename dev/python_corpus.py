"""Write the list of files of the corpus `python` (src/dape/data/python_corpus.txt) from the packages installed here.

Run it in an environment made by `make setup`, whenever constraints.txt changes one of the packages:

    .venv/bin/python dev/python_corpus.py

Files of 30 to 150 kB, in an order fixed by a hash of their path, at most PER_PACKAGE of each package. A file is left out
if a fifth of it is digits (tables of numbers), or if more than half of its text stands in files that came before it
(lines of 20 characters or more): transformers' models copy each other. The held-out packages come first, so that
nothing of their text is trained on.
"""

import hashlib
import importlib.metadata
from pathlib import Path

from dape.data.python_corpus import HELD_OUT, LIST, PACKAGES

SMALLEST, LARGEST = 30_000, 150_000
PER_PACKAGE = 100
LONG_LINE = 20
MOST_COPIED = 0.5
MOST_DIGITS = 0.2


def files_of(package: str, root: Path) -> list[Path]:
    """The package's sources of the right size, in an order that depends on their paths alone."""
    paths = [p for p in (root / package).rglob("*.py") if SMALLEST <= p.stat().st_size <= LARGEST]
    return sorted(paths, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())


def main() -> None:
    # An environment may see its packages through a path file.
    root = Path(str(importlib.metadata.distribution("torch").locate_file("")))
    seen: set[str] = set()
    lines = ["# Files of the corpus `python`: sha256, bytes, path. Written by dev/python_corpus.py."]
    for package in [*HELD_OUT, *(name for name in PACKAGES if name not in HELD_OUT)]:
        lines.append(f"# {package} {importlib.metadata.version(package)}")
        kept = copies = 0
        for path in files_of(package, root):
            if kept == PER_PACKAGE:
                break
            data = path.read_bytes()
            text = data.decode("utf-8")
            if sum(map(str.isdigit, text)) > MOST_DIGITS * len(text):
                continue
            long = [line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE]
            total = sum(map(len, long))
            if not total or sum(len(line) for line in long if line in seen) > MOST_COPIED * total:
                copies += 1
                continue
            seen.update(long)
            kept += 1
            lines.append(
                f"{hashlib.sha256(data).hexdigest()} {len(data)} {path.relative_to(root).as_posix()}"
            )
        print(f"{package}: {kept} files, {copies} left out as copies")
    LIST.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
