"""Checks that data on disk, finished or partly packed, belongs to a recipe and a corpus."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from dape.data.corpora import BUILT_IN, Corpus, corpus_record
from dape.data.readers import Watched
from dape.data.tokens import read_manifest
from dape.files import read_json, read_json_lines, write_atomically


def begin(folder: Path, recipe: dict[str, Any], corpus: Corpus, *, restart: bool) -> Path:
    """Temporary folder next to `folder` to pack into; that of an interrupted packing if recipe and sources are the same."""
    partial = folder.parent / f".{folder.name}.partial"
    plan = {"recipe": recipe, "sources": hashlib.sha256(corpus_record(corpus).encode()).hexdigest()}
    file = partial / "plan.json"
    if partial.exists() and not restart:
        begun = read_json(file) if file.exists() else {}
        if "recipe" in begun and (difference := difference_of(begun["recipe"], recipe)):
            raise ValueError(f"{folder} was begun with {difference}: pass --restart to begin again")
        if begun == plan:
            return partial
    # No earlier packing, or its sources have changed since: it cannot be reused.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_atomically(file, json.dumps(plan))
    return partial


def difference_of(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Differences between two recipes, or "". Files may have moved: names and contents are compared."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not any(recipe["corpus"].startswith("hf:") or recipe["corpus"] in BUILT_IN for recipe in (old, new)):
        keys = [key for key in keys if key != "corpus"]
    return ", ".join(f"{key} {json.dumps(old.get(key))} (now {json.dumps(new.get(key))})" for key in keys)


def check_same_data(folder: Path, recipe: dict[str, Any], corpus: Corpus | None) -> None:
    """Raise if the token data has another recipe or other texts. corpus: None if the text no longer exists."""
    manifest = read_manifest(folder)
    if difference := difference_of(manifest["recipe"], recipe):
        raise ValueError(f"{folder} was prepared with {difference}: give another folder or delete it")
    # For text of the hub, deleted text, or another Python's library, the packed tokens are the only record.
    if corpus is None or corpus.spec.startswith("hf:") or corpus.spec in BUILT_IN:
        return
    records = {record["name"]: record for record in read_json_lines(folder / "sources.jsonl")}
    advice = f"since {folder} was prepared: give another folder or delete it"
    for source in corpus.sources:
        record = records.pop(source.name, None)
        if record is None:
            raise ValueError(f"{source.name} has been added to the corpus {advice}")
        if record["bytes"] != source.size or (
            record["stamp"] != source.stamp and _has_changed(source, record)
        ):
            raise ValueError(f"{source.name} has changed {advice}")
    if records:
        raise ValueError(f"{next(iter(records))} has been removed from the corpus {advice}")


def _has_changed(source: Any, record: dict[str, Any]) -> bool:
    if not record["sha256"]:  # a file that was skipped, unread
        return True
    with Watched(source.path) as watched:
        return watched.digest() != record["sha256"]
