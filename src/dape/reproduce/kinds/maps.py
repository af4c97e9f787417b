"""Attention maps of trained cells: weight on the first token and entropy of every head, and the paper's pictures."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from dape.data import Tokens
from dape.evaluate.windows import same_targets
from dape.inspection import Inspection, inspect
from dape.inspection.figure import draw
from dape.reproduce.grid import Cell
from dape.reproduce.results import load_results
from dape.training import Run, load_run

if TYPE_CHECKING:
    from dape.reproduce.place import Place
    from dape.reproduce.runner import Plan

# Rows and columns of a picture's map.
RESOLUTION = 192


def body(plan: Plan, place: Place) -> dict[str, Any]:
    """A record a method, length, layer and head, over the same stretches of held-out text for every method."""
    settings = plan.experiment.at(place.scale)
    folder = place.results(plan.experiment).parent / (
        "" if place.scale == "laptop" else f"pictures-{place.scale}"
    )
    records: list[dict[str, Any]] = []
    pictures: list[str] = []
    missing, seconds = [], 0.0
    for cell in plan.cells:
        run = place.work / "runs" / cell.id
        content = load_results(place.scores / f"{cell.id}.json")
        if content is None or not (run / "model").is_dir():
            missing.append(cell.label)
            continue
        seconds += content["training"]["seconds"]
        wanted = cell.method in settings.get("pictures", []) and cell.seed == settings["seeds"][0]
        for length in settings["map_lengths"]:
            found = look(load_run(run), length, settings)
            records += head_records(cell, length, found)
            if wanted:
                folder.mkdir(parents=True, exist_ok=True)
                pictures += paint(cell, found[0], folder)
    return {
        "seconds": round(seconds, 1),
        "complete": not missing and not plan.failures,
        "missing": missing,
        "failures": list(plan.failures.values()),
        "pictures": pictures,
        "records": records,
    }


def look(run: Run, length: int, settings: dict[str, Any]) -> list[Inspection]:
    """What the model does with stretches of that many tokens; those of other lengths end at the same places."""
    tokens: Tokens = run.data().validation
    windows = same_targets(tokens, max(settings["map_lengths"]), 1, settings["samples"])
    model, ids = run.model(), windows.ids(tokens, length)[:, :-1]
    return [inspect(model, row, resolution=min(length, RESOLUTION)) for row in ids]


def head_records(cell: Cell, length: int, found: list[Inspection]) -> list[dict[str, Any]]:
    """Means over the stretches, and the shares of each, by which methods can be paired."""
    records = []
    for number, layer in enumerate(found[0].layers):
        for place, head in enumerate(layer.heads):
            sinks = [float(one.layers[number].sink[place]) for one in found]
            entropies = [float(one.layers[number].entropy[place]) for one in found]
            processed = [
                float(np.nanmean(np.abs(one.layers[number].maps["processed"][place])))
                for one in found
                if "processed" in one.layers[number].maps
            ]
            records.append(
                {
                    "corpus": cell.corpus.name,
                    "method": cell.method,
                    "variant": cell.variant,
                    "train_length": cell.train_length,
                    "seed": cell.seed,
                    "length": length,
                    "layer": layer.layer,
                    "head": head,
                    "sink_share": round(fmean(sinks), 6),
                    "entropy": round(fmean(entropies), 6),
                    "processed": round(fmean(processed), 6) if processed else None,
                    "sink_shares": [round(value, 5) for value in sinks],
                }
            )
    return records


def paint(cell: Cell, found: Inspection, folder: Path) -> list[str]:
    """The pictures of one stretch, a file a layer."""
    length = int(found.edges[-1])
    return [
        draw(found, layer.layer, folder / f"{cell.method}-{length}-layer{layer.layer}.png", max_heads=4).name
        for layer in found.layers
    ]
