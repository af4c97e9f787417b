"""The corpus `python`: long source files of packages that `dape[lab]` installs, so nothing needs to be downloaded.

Which files, and their checksums, is listed in python_corpus.txt: two machines whose files match the list have the same
text. Whole packages are held out. Near-duplicates are not in the list (see dev/python_corpus.py).

The text is not part of dape; each package has its own licence, all permissive (PACKAGES).
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from dape.checksums import file_digest

LIST = Path(__file__).with_name("python_corpus.txt")
# Import name (also that of the distribution): licence.
PACKAGES = {
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "pandas": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "matplotlib": "PSF-based (matplotlib license)",
    "networkx": "BSD-3-Clause",
    "numpy": "BSD-3-Clause",
}
HELD_OUT = ("matplotlib", "networkx", "numpy")


@dataclass(frozen=True)
class Listed:
    """A file of the list."""

    name: str
    size: int
    sha256: str

    @property
    def package(self) -> str:
        return self.name.split("/")[0]


@cache
def listed() -> tuple[list[Listed], dict[str, str]]:
    """The files in their fixed order, and the version of each package that they were listed from."""
    files, versions = [], {}
    for line in LIST.read_text("utf-8").splitlines()[1:]:
        first, second, *rest = line.split(maxsplit=2)
        if first == "#":
            versions[second] = rest[0]
        else:
            files.append(Listed(rest[0], int(second), first))
    return files, versions


def find_files() -> tuple[list[tuple[str, Path]], str]:
    """The files that are installed here, as (name, path), and a sentence on how they differ from the list, or "".

    A package of another version is used as it is, so that the text is a little different; without a package, or without
    any of its files, there is no corpus.
    """
    files, versions = listed()
    found: list[tuple[str, Path]] = []
    roots: dict[str, Path] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.origin:
            raise ValueError(
                f'the corpus "python" needs the package {package}, which is not installed: pip install "dape[lab]"'
            )
        roots[package] = Path(spec.origin).parent.parent
    differing: Counter[str] = Counter()
    for file in files:
        path = roots[file.package] / file.name
        try:
            same = path.stat().st_size == file.size and file_digest(path) == file.sha256
        except OSError:
            differing[file.package] += 1
            continue
        differing[file.package] += not same
        found.append((file.name, path))
    if missing := sorted(set(PACKAGES) - {name.split("/")[0] for name, _ in found}):
        raise ValueError(
            f'the corpus "python" has no file of {", ".join(missing)}: the installed versions are too different; '
            "install those in constraints.txt"
        )
    changed = [
        f"{package} {metadata.version(package)} instead of {versions[package]} ({count} files differ)"
        for package, count in differing.items()
        if count
    ]
    if not changed:
        return found, ""
    return found, (
        f'the corpus "python" differs from the one of published results: {"; ".join(changed)}. '
        "Losses measured on it cannot be compared with theirs"
    )
