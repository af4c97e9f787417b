"""Plug-ins: encodings and processors in users' own files, loaded before a command and in its workers.

A plug-in is a file or a module that calls `dape.register_position` or `dape.register_scores`. It is given by `--import`
of any command, by the environment variable DAPE_IMPORT (several separated by the system's path separator), or by an
entry point of the group "dape.plugins" of an installed package.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

VARIABLE, GROUP = "DAPE_IMPORT", "dape.plugins"
# Loaded plug-ins: name → the file's checksum, or the module's name.
LOADED: dict[str, str] = {}


def take_imports(arguments: list[str]) -> list[str]:
    """The arguments without `--import NAME`, which is put into the environment for worker processes."""
    rest, imports = [], []
    words = iter(arguments)
    for word in words:
        if word == "--import":
            name = next(words, None)
            if name is None:
                raise ValueError("--import is followed by a file, or the name of a module")
            imports.append(name)
        elif word.startswith("--import="):
            imports.append(word.partition("=")[2])
        else:
            rest.append(word)
    if imports:
        known = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
        full = [str(Path(name).absolute()) if name.endswith(".py") else name for name in imports]
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, *full]))
    return rest


def load_plugins() -> None:
    """Load the plug-ins of the environment and of installed packages, each once."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        load_once(name)
    for point in entry_points(group=GROUP):
        if point.name not in LOADED:
            point.load()
            LOADED[point.name] = point.value


def load_once(name: str) -> None:
    """Load a file, or a module by its name; no effect the second time, by either name."""
    if not name.endswith(".py"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"--import {name}: there is no such module, and a file's name ends in .py"
            ) from error
        LOADED[name] = name
        return
    path = Path(name).absolute()
    if not path.exists():
        raise FileNotFoundError(f"--import {name}: there is no such file")
    mark = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if LOADED.get(str(path)) != mark:
        load_file(path)
        LOADED[str(path)] = mark


def loaded_imports() -> dict[str, str]:
    """Imports to record with a run: a file's name without its folder, with its checksum, or a module's name."""
    return {Path(name).name: mark for name, mark in LOADED.items()}


def load_file(path: Path) -> ModuleType:
    """Load a file as a module of its own name, by which saved classes are found."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
