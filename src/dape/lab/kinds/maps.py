"""Attention maps of trained models: weight on the first token and entropy of every head, and the paper's figures."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dape.evaluation.windows import same_targets
from dape.inspection import Inspection, inspect
from dape.inspection.figure import draw_maps
from dape.lab.figures import LEGEND, PANEL, canvas, errorbar, finish, legend, styles
from dape.lab.folders import Folder
from dape.lab.kinds import Plan
from dape.lab.kinds.language import Language, LanguageRun, evaluations_of, without_pauses
from dape.lab.paper import Paper
from dape.lab.records import Results
from dape.lab.stats import Estimate, over_seeds
from dape.lab.tables import OURS, Cell, Row, Table, plain
from dape.training import Run, load_run

# Rows and columns of a map in a figure.
RESOLUTION = 192


class Maps(Language):
    """Language models whose attention is inspected instead of evaluated."""

    scale_keys = frozenset(
        {
            "corpora",
            "train_lengths",
            "seeds",
            "train",
            "grid",
            "note",
            "map_lengths",
            "samples",
            "pictures",
        }
    )

    def timed(self, plan: Plan) -> list[list[LanguageRun]]:
        return []

    def collect(self, plan: Plan) -> None:  # type: ignore[override]  # maps are made of the models, at the end
        return None

    def finish(self, plan: Plan) -> dict[str, Any]:
        """Rows by method, length, layer and head, over the same excerpts of held-out text for every method."""
        settings, workspace = plan.settings, plan.workspace
        beside = "" if workspace.scale == "laptop" else f"pictures-{workspace.scale}"
        folder = workspace.results(plan.experiment).parent / beside
        results = Results({"kind": "maps"})
        pictures: list[str] = []
        missing, seconds = [], 0.0
        for item in plan.items:
            run, content = workspace.work / "runs" / item.id, evaluations_of(item, workspace)
            if content is None or not (run / "model").is_dir():
                missing.append(item.label)
                continue
            seconds += without_pauses(content["training"])
            rows = []
            for length in settings["map_lengths"]:
                seen = look(load_run(run), length, settings)
                rows += head_rows(length, seen)
                if item.method in settings.get("pictures", []) and item.seed == settings["seeds"][0]:
                    folder.mkdir(parents=True, exist_ok=True)
                    pictures += paint(item, seen[0], folder)
            known = {"method": item.method, "variant": item.variant, "seed": item.seed}
            results.add({**known, "corpus": item.corpus.name, "train_length": item.train_length}, rows)
        return {
            "seconds": round(seconds, 1),
            "missing": missing,
            "failures": list(plan.failures.values()),
            "pictures": pictures,
            "runs": results["runs"],
            "rows": results["rows"],
        }

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        """Table of the share of the weight on the first token and the entropy, by method and length."""
        shares, entropies = (measured(folder.best, name) for name in ("sink_share", "entropy"))
        rows = []
        for (method, length), share in shares.items():
            entropy = entropies.get((method, length))
            cells = [Cell(f"{length}", length), plain(100 * share.value, 3, 100 * share.error)]
            cells.append(Cell("–") if entropy is None else plain(entropy.value, 2, entropy.error))
            rows.append(Row(method, OURS, tuple(cells)))
        heads = ("length", "weight on the first token, %", "entropy of a row, nats")
        return [Table("Attention weights, mean over layers and heads", heads, tuple(rows))] if rows else []

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        """Figure of the share of the weight on the first token by length."""
        shares = measured(folder.best, "sink_share")
        if not shares:
            return None
        methods = list(dict.fromkeys(method for method, _ in shares))
        looks = styles(methods, methods)
        drawn, ((axis,),) = canvas(PANEL[0] + LEGEND + 0.6, PANEL[1])
        for method in methods:
            lengths = sorted(length for name, length in shares if name == method)
            estimates = [shares[method, length] for length in lengths]
            bars = [100 * e.error if math.isfinite(e.error) else 0.0 for e in estimates]
            errorbar(axis, lengths, [100 * e.value for e in estimates], bars, method, looks[method])
        axis.set_title("weight on the first token", loc="left")
        finish(axis, sorted({length for _, length in shares}), "% of the attention", "length")
        legend(drawn, [axis])
        return drawn


def look(run: Run, length: int, settings: dict[str, Any]) -> list[Inspection]:
    """Inspections of excerpts of `length` tokens; those of other lengths end at the same tokens."""
    tokens = run.data().validation
    windows = same_targets(tokens, max(settings["map_lengths"]), 1, settings["samples"])
    model, ids = run.model(), windows.ids(tokens, length)[:, :-1]
    return [inspect(model, row, resolution=min(length, RESOLUTION)) for row in ids]


def head_rows(length: int, inspections: list[Inspection]) -> list[dict[str, Any]]:
    """Means over the excerpts, and the shares of each, for pairing of methods."""
    rows = []
    for number, layer in enumerate(inspections[0].layers):
        for index, head in enumerate(layer.heads):
            sinks = [float(one.layers[number].sink[index]) for one in inspections]
            entropies = [float(one.layers[number].entropy[index]) for one in inspections]
            processed = [
                float(np.nanmean(np.abs(one.layers[number].maps["processed"][index])))
                for one in inspections
                if "processed" in one.layers[number].maps
            ]
            common = {"eval_length": length, "layer": layer.layer, "head": head, "count": len(inspections)}
            shares = [round(value, 5) for value in sinks]
            rows.append(
                {"metric": "sink_share", **common, "value": round(fmean(sinks), 6), "windows": shares}
            )
            rows.append({"metric": "entropy", **common, "value": round(fmean(entropies), 6)})
            if processed:
                rows.append({"metric": "processed", **common, "value": round(fmean(processed), 6)})
    return rows


def paint(item: LanguageRun, inspection: Inspection, folder: Path) -> list[str]:
    """Write the figures of one excerpt, one file per layer."""
    length = int(inspection.edges[-1])
    return [
        draw_maps(
            inspection, layer.layer, folder / f"{item.method}-{length}-layer{layer.layer}.png", max_heads=4
        ).name
        for layer in inspection.layers
    ]


def measured(results: Results | None, metric: str) -> dict[tuple[str, int], Estimate]:
    """(method, length) → mean of the metric over layers and heads, and over seeds.

    Its error is over the heads of a layer, as layers differ by more than chance; combined with the seed variance.
    """
    models: dict[tuple[str, int], dict[int, dict[int, list[float]]]] = {}
    for row in results.lines(metric) if results else ():
        if row.get("value") is not None:
            layers = models.setdefault((row["method"], row["eval_length"]), {}).setdefault(row["seed"], {})
            layers.setdefault(row["layer"], []).append(row["value"])
    estimates = {}
    for key, seeds in models.items():
        means = [fmean(fmean(heads) for heads in layers.values()) for layers in seeds.values()]
        errors = [_head_error(list(layers.values())) for layers in seeds.values()]
        heads = sum(len(heads) - 1 for heads in next(iter(seeds.values())).values())
        estimates[key] = over_seeds(means, errors, dof=max(1, heads))
    return estimates


def _head_error(layers: list[list[float]]) -> float:
    """Error of the mean of the layers' means; NaN if a layer has one head."""
    if min(map(len, layers)) < 2:
        return math.nan
    return math.sqrt(sum(variance(heads) / len(heads) for heads in layers)) / len(layers)
