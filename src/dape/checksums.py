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


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def content_digest(content: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, independent of its formatting."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checksums(folder: str | os.PathLike[str]) -> None:
    """Write the checksums of all other files of the folder, and give them the usual mode of a new file."""
    folder, entries = Path(folder), {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != CHECKSUMS and not path.name.startswith("."):
            usual_mode(path)
            entries[path.name] = {"sha256": file_digest(path), "bytes": path.stat().st_size}
    write_atomically(folder / CHECKSUMS, json.dumps({"format": FORMAT, "files": entries}, indent=2) + "\n")


def renew_checksum(folder: str | os.PathLike[str], name: str) -> None:
    """Update the checksum of one file that was changed on purpose; the others keep theirs."""
    folder = Path(folder)
    if not (folder / CHECKSUMS).exists():
        return
    content = read_json(folder / CHECKSUMS)
    content["files"][name] = {"sha256": file_digest(folder / name), "bytes": (folder / name).stat().st_size}
    write_atomically(folder / CHECKSUMS, json.dumps(content, indent=2) + "\n")


def names_with_checksums(folder: str | os.PathLike[str]) -> set[str]:
    """Files directly in the folder that have checksums; none if there are no readable checksums."""
    try:
        names = read_json(Path(folder) / CHECKSUMS)["files"]
        return {name for name in names if Path(name).name == name}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


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
        raise ValueError(f"{path} has format {number}, this version of dape reads {FORMAT}")
    check_inside(folder, entries, path)
    for name, (digest, size) in entries.items():
        file = folder / name
        if not file.exists():
            raise ValueError(f"{file} is missing: copy or export the model again")
        if file.stat().st_size != size or file_digest(file) != digest:
            raise ValueError(
                f"{file} is damaged or was changed, its SHA-256 is not that of {CHECKSUMS}: copy or export it again, "
                f"or delete {CHECKSUMS} to take it as it is"
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
