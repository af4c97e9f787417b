"""Checksums of the files of a folder, verified before the files are read.

checksums.json  {"format": 1, "files": {name: {"sha256": …, "bytes": …}}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dape.files import read_json, usual_mode, write_atomically

FORMAT = 1
CHECKSUMS = "checksums.json"


class LaterFormat(ValueError):
    """Checksums that a later version of dape wrote."""


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_checksums(folder: str | os.PathLike[str], names: Iterable[str] | None = None) -> None:
    """Write the checksums of the files of the folder, and give them the usual mode of a new file.

    Texts for people (*.md) have none: nothing reads them back.
    names: update these alone; the others that still exist keep theirs.
    """
    folder = Path(folder)
    entries = {} if names is None else _known_entries(folder)
    entries = {name: entry for name, entry in entries.items() if (folder / name).exists()}
    for name in sorted(path.name for path in folder.iterdir()) if names is None else names:
        path = folder / name
        if path.is_file() and name != CHECKSUMS and not name.startswith(".") and path.suffix != ".md":
            usual_mode(path)
            entries[name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
    save_checksums(folder, entries)


def save_checksums(folder: str | os.PathLike[str], entries: dict[str, Any]) -> None:
    """Write checksums that are known: sha256 and bytes by file name."""
    write_atomically(
        Path(folder) / CHECKSUMS, json.dumps({"format": FORMAT, "files": entries}, indent=2) + "\n"
    )


def _known_entries(folder: Path) -> dict[str, Any]:
    """Checksums in the folder; none if they are missing or cannot be read."""
    try:
        return dict(read_json(folder / CHECKSUMS)["files"])
    except (OSError, ValueError, TypeError):
        return {}


def names_with_checksums(folder: str | os.PathLike[str]) -> set[str]:
    """Files directly in the folder that have checksums; none if there are no readable checksums."""
    return {name for name in _known_entries(Path(folder)) if Path(name).name == name}


def verify_checksums(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError for a file that is missing, damaged or changed, or an index that leads out of the folder."""
    folder = Path(folder)
    for index in folder.glob("*.index.json"):
        check_inside(folder, read_json(index).get("weight_map", {}).values(), index)
    path = folder / CHECKSUMS
    if not path.exists():
        return
    content = read_json(path)
    try:
        entries = {
            name: (str(entry["sha256"]), int(entry["bytes"])) for name, entry in content["files"].items()
        }
        number = content["format"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if number != FORMAT:
        later = isinstance(number, int) and number > FORMAT
        raise (LaterFormat if later else ValueError)(
            f"{path} has format {number}, this version of dape reads {FORMAT}: use the version that wrote it"
        )
    check_inside(folder, entries, path)
    for name, (digest, size) in entries.items():
        file = folder / name
        if not file.exists():
            raise ValueError(f"{file} is missing: copy or export the model again")
        if file.stat().st_size != size or file_digest(file) != digest:
            raise ValueError(
                f"{file} is damaged or was changed: its SHA-256 differs from that in {CHECKSUMS}: copy or save the model "
                f"again, or delete {path} to take it as it is"
            )


def check_inside(folder: Path, names: Iterable[Any], source: Path) -> None:
    """Raise ValueError if a name that a file lists leads out of the folder."""
    root = os.path.realpath(folder)
    for name in {*map(str, names)}:
        if (
            os.path.isabs(name)
            or os.path.commonpath([root, os.path.normpath(os.path.join(root, name))]) != root
        ):
            raise ValueError(f'{source} names "{name}", which lies outside of {folder}: it is not used')
