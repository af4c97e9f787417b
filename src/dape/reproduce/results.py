"""results.json of an experiment: one form for every kind, written anew whenever something is finished."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dape.compare.environment import environment
from dape.evaluate import LengthScore
from dape.files import write_atomically
from dape.reproduce.experiment import Experiment
from dape.reproduce.grid import Cell

NAMES = {"laptop": "results.json", "paper": "results-paper.json"}


def results_path(experiment: Experiment, scale: str, work: Path) -> Path:
    """Beside the experiment; those of the smoke scale, which say nothing, with the runs."""
    if scale in NAMES:
        return experiment.folder / NAMES[scale]
    return work / "results" / experiment.paper / f"{experiment.name}.json"


def load_results(path: Path) -> dict[str, Any] | None:
    """The results in a file, or None if there are none yet."""
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def write_results(
    experiment: Experiment, scale: str, path: Path, body: dict[str, Any], *, jobs: int
) -> dict[str, Any]:
    """Write what was found, with all that is needed to judge it; here is where it was, unless the body knows better."""
    content = {
        "experiment": experiment.name,
        "paper": experiment.paper,
        "title": experiment.title,
        "source": experiment.source,
        "scale": scale,
        "kind": experiment.kind,
        "command": f"dape reproduce {experiment.name} --scale {scale}",
        "settings": shown(experiment, scale),
        "environment": environment(jobs),
        **body,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump(content))
    return content


def shown(experiment: Experiment, scale: str) -> dict[str, Any]:
    settings = {name: value for name, value in experiment.at(scale).items() if name not in ("grid", "also")}
    return {**settings, **({"grid": blocks} if (blocks := experiment.blocks(scale)) else {})}


def dump(content: dict[str, Any]) -> str:
    """JSON with a line a record, so that a diff shows what changed."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list) and value:
            rows = ",\n  ".join(json.dumps(plain(row)) for row in value)
            lines.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(plain(value))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plain(value: Any) -> Any:
    """Without numbers that JSON has no words for: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def language_body(
    cells: Iterable[Cell], scores: Path, failures: list[dict[str, Any]], missing: list[str]
) -> dict[str, Any]:
    """Records of the cells that are trained and evaluated; the rest is named as missing."""
    records: list[dict[str, Any]] = []
    documents: dict[str, list[int]] = {}
    trainings: dict[str, float] = {}
    texts: dict[str, str] = {}
    places: list[dict[str, Any]] = []
    missing = list(missing)
    for cell in cells:
        content = load_results(scores / f"{cell.id}.json")
        if content is None or not has_lengths(content, cell):
            missing.append(cell.label)
            continue
        trainings[cell.id] = content["training"]["seconds"]
        places.append(content["environment"])
        texts[cell.corpus.name] = content["training"]["text"]
        documents[cell.corpus.name] = content["documents"]
        records += language_records(cell, content)
    return {
        **({"environment": united(places)} if places else {}),
        "seconds": round(sum(trainings.values()), 1),
        "complete": not missing and not failures,
        "missing": missing,
        "failures": failures,
        "texts": texts,
        "documents": documents,
        "records": records,
    }


def united(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """One that says of each thing what it was, or all that it was where trainings differ."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in environments for name in one):
        values = list(dict.fromkeys(one.get(name) for one in environments))
        found[name] = values[0] if len(values) == 1 else values
    return found


def has_lengths(content: dict[str, Any], cell: Cell) -> bool:
    """Whether these scores are of the cell's windows, at all of its lengths."""
    return content["evaluation"] == cell.evaluation and set(cell.keys) <= set(content["windows"])


def language_records(cell: Cell, content: dict[str, Any]) -> list[dict[str, Any]]:
    """One record a length."""
    training = content["training"]
    documents, ends = np.array(content["documents"]), np.array(content["ends"])
    records = []
    for length in cell.lengths:
        windows = np.array(content["windows"][cell.reading.key(length)])
        found = LengthScore.of(length, windows, documents, ends, cell.evaluation["last"])
        records.append(
            {
                "corpus": cell.corpus.name,
                "method": cell.method,
                "variant": cell.variant,
                "train_length": cell.train_length,
                "eval_length": length,
                "seed": cell.seed,
                "view": cell.view,
                "steps": cell.steps,
                "batch_size": cell.train["batch_size"],
                "nll": round(found.nll, 6),
                "nll_se": found.nll_se if math.isnan(found.nll_se) else round(found.nll_se, 6),
                "ppl": float(f"{found.ppl:.6g}"),
                "train_seconds": round(training["seconds"], 1),
                "seconds_per_step": float(f"{training['seconds_per_step']:.4g}"),
                "train_loss": round(training["loss"], 4),
                "parameters": training["parameters"],
                "windows": [round(loss, 4) for loss in windows.tolist()],
            }
        )
    return records
