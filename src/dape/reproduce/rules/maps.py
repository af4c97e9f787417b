"""Rules on attention maps: numbers by layer and head, compared over heads."""

from __future__ import annotations

import math
from statistics import fmean, variance
from typing import Any

from dape.report.results import Estimate, over_seeds
from dape.reproduce.evidence import Evidence, Finding
from dape.reproduce.folders import Folder, Results
from dape.reproduce.paper import Paper
from dape.reproduce.rules.choosing import Chosen


def measured(results: Results, name: str) -> dict[tuple[str, int], Estimate]:
    """(method, length) → mean of what is called `name` in the records, over layers and heads, and over seeds.

    Its error is over the heads of a layer, as layers differ by more than chance; joined with the seeds' spread.
    """
    models: dict[tuple[str, int], dict[int, dict[int, list[float]]]] = {}
    for row in results.get("records", ()):
        if row.get(name) is not None:
            layers = models.setdefault((row["method"], row["length"]), {}).setdefault(row.get("seed", 0), {})
            layers.setdefault(row["layer"], []).append(row[name])
    found = {}
    for key, seeds in models.items():
        means = [fmean(fmean(heads) for heads in layers.values()) for layers in seeds.values()]
        found[key] = over_seeds(means, [_head_error(list(layers.values())) for layers in seeds.values()])
    return found


def _head_error(layers: list[list[float]]) -> float:
    """Of the mean of the layers' means; NaN where a layer has one head."""
    if min(map(len, layers)) < 2:
        return math.nan
    return math.sqrt(sum(variance(heads) / len(heads) for heads in layers)) / len(layers)


def sink_higher(folder: Folder, _: Paper, *, a: str, b: str, lengths: Any = None) -> Evidence:
    """More of the weight goes to the first token in a than in b, at every length."""
    found, chosen, findings = measured(folder.best or {}, "sink_share"), Chosen(), []
    for method in (a, b):
        if all(name != method for name, _ in found):
            chosen.lack(method)
    for length in sorted({length for _, length in found} if lengths is None else set(lengths)):
        if (a, length) in found and (b, length) in found:
            one, other = found[a, length], found[b, length]
            text = f"{a} gives the first of {length} tokens {share(one)} of the weight, {b} {share(other)}"
            findings.append(Finding(one.value - other.value, math.hypot(one.error, other.error), text))
    return Evidence(findings, chosen.missing)


def share(found: Estimate) -> str:
    error = f" ± {100 * found.error:.3f}" if math.isfinite(found.error) else ""
    return f"{100 * found.value:.3f}{error} %"
