"""`dape migrate`: convert results of earlier versions to the current schema."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from dape.cli.parsing import parse
from dape.lab.migrate import migrate


@dataclass(frozen=True)
class Options:
    """Rewrite results.json of earlier versions in the current schema; numbers do not change."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Files, or folders of which every results.json and results-paper.json is converted."""


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape migrate")
    if not options.files:
        raise ValueError("name a results.json, or a folder that has some")
    for path in options.files:
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
        for file in sorted(path.rglob("results*.json")) if path.is_dir() else [path]:
            print(f"{file}: {'migrated' if migrate(file) else 'up to date'}")
    return 0
