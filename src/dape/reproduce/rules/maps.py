"""Rules on attention maps: numbers by layer and head, compared over heads."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

from dape.report.results import Estimate
from dape.reproduce.evidence import Evidence, Finding
from dape.reproduce.folders import Folder, Results
from dape.reproduce.paper import Paper
from dape.reproduce.rules.choosing import Chosen


def measured(results: Results, name: str) -> dict[tuple[str, int], Estimate]:
    """(method, length) → mean of what is called `name` in the records, with its error over layers and heads."""
    heads: dict[tuple[str, int], dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in results.get("records", ()):
        if row.get(name) is not None:
            # Seeds and texts of one head are not further heads.
            heads[row["method"], row["length"]][row["layer"], row["head"]].append(row[name])
    found = {}
    for key, by_head in heads.items():
        values = [fmean(head) for head in by_head.values()]
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        found[key] = Estimate(fmean(values), error)
    return found


def sink_higher(folder: Folder, _: Paper, *, a: str, b: str, lengths: Any = None) -> Evidence:
    """More of the weight goes to the first token in a than in b, at every length."""
    found, chosen, findings = measured(folder.best or {}, "sink_share"), Chosen(), []
    for method in (a, b):
        if all(name != method for name, _ in found):
            chosen.lack(method)
    for length in sorted({length for _, length in found} if lengths is None else set(lengths)):
        if (a, length) in found and (b, length) in found:
            one, other = found[a, length], found[b, length]
            text = (
                f"{a} gives the first of {length} tokens {100 * one.value:.1f} ± {100 * one.error:.1f} % of the weight, "
                f"{b} {100 * other.value:.1f} ± {100 * other.error:.1f} %"
            )
            findings.append(Finding(one.value - other.value, math.hypot(one.error, other.error), text))
    return Evidence(findings, chosen.missing)
