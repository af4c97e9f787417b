"""Checkpoints: whole or absent, a SHA-256 for every file, checked before anything is believed.

step-00000200/  model.safetensors  optimizer.safetensors  state.json  manifest.json
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dape.checksums import file_digest
from dape.files import sync_folder
from dape.training.tensorfile import write_tensors

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"


class Checkpoints:
    """The checkpoints of a run, oldest first in `all()`; at most `keep` of them stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.folder / f".writing-{step:08d}"

    def begin(self, step: int) -> Path:
        """An empty folder to write into, which no reader looks at."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.discard_unfinished()
        temporary = self.temporary(step)
        temporary.mkdir()
        return temporary

    def write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> Path:
        """Save groups of tensors, a file each, and the JSON state, as the checkpoint of a step."""
        temporary = self.begin(step)
        try:
            digests = {}
            for group, members in tensors.items():
                digests[f"{group}.safetensors"] = write_tensors(temporary / f"{group}.safetensors", members)
            return self.commit(step, state, digests)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def commit(self, step: int, state: dict[str, Any], digests: Mapping[str, str]) -> Path:
        """Turn the begun folder into the checkpoint: manifest last, then one rename, then old ones go."""
        temporary, final = self.temporary(step), self.path(step)
        _write_json(temporary / STATE, state)
        files = {**digests, STATE: file_digest(temporary / STATE)}
        sizes = {name: (temporary / name).stat().st_size for name in files}
        entries = {name: {"sha256": files[name], "bytes": sizes[name]} for name in files}
        _write_json(temporary / MANIFEST, {"format": FORMAT, "step": step, "files": entries})
        sync_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync_folder(self.folder)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def newest_good(self, say: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that is whole; damaged ones are set aside, saying so.

        One that this process may not read, or that a later version wrote, is not damaged: it raises.
        """
        self.discard_unfinished()
        for path in reversed(self.all()):
            damage = find_damage(path)
            if damage is None:
                return path
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            say(f"checkpoint {path.name} is damaged ({damage}): set aside as {aside.name}")
        return None

    def discard_unfinished(self) -> None:
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """None for a whole checkpoint, or what is wrong with it; an OSError where it cannot be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        entries = {name: (entry["sha256"], entry["bytes"]) for name, entry in manifest["files"].items()}
        number = manifest["format"]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {number}, this version of dape reads {FORMAT}: continue with the version "
            f"that wrote it"
        )
    if number != FORMAT:
        return f"it has format {number}, this version reads {FORMAT}"
    for name, (digest, size) in entries.items():
        try:
            if (path / name).stat().st_size != size:
                return f"{name} has {(path / name).stat().st_size} bytes instead of {size}"
            if file_digest(path / name) != digest:
                return f"{name} does not have the SHA-256 of its manifest"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE).read_text())


def read_tensors(path: Path, group: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / f"{group}.safetensors")


def _write_json(path: Path, content: Any) -> None:
    with open(path, "w") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
