"""How far trainings differ that have other seeds: known where several were run, borrowed by comparisons like them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, variance
from typing import Any

from dape.methods import parse_method

Results = dict[str, Any]
Kind = tuple[str, ...]
# What a record has of its training beside method, variant and seed.
SETTING = ("view", "corpus", "train_length", "steps", "batch_size")
ONE_POSITION, TWO_POSITIONS = "one position", "two positions"
# So many settings of a general kind count beside those of a particular one.
PRIOR = 4


class Spread:
    """Variances between seeds, in squared nats: of losses, and of differences between methods or between lengths.

    variances: kind of comparison → multiple of the training length that is read → (setting, variance) pairs.
    """

    def __init__(self) -> None:
        self.variances: dict[Kind, dict[float, list[tuple[Any, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, kinds: Iterable[Kind], multiple: float, setting: Any, by_seed: Sequence[float]) -> None:
        """Count what was measured with several seeds."""
        if len(by_seed) > 1:
            for kind in kinds:
                self.variances[kind][multiple].append((setting, variance(by_seed)))

    def expected(self, kinds: Sequence[Kind], multiple: float, setting: Any = None) -> float | None:
        """The standard deviation between seeds; None if nothing like it is known.

        kinds: from the particular to the general; the fewer settings a particular one has, the more the general
        counts. setting: the one in question, which must not speak for itself.
        """
        mean = None
        for kind in reversed(kinds):
            found = [value for other, value in self._nearest(kind, multiple) if other != setting]
            if found:
                mean = fmean(found) if mean is None else (sum(found) + PRIOR * mean) / (len(found) + PRIOR)
        return None if mean is None else math.sqrt(mean)

    def _nearest(self, kind: Kind, multiple: float) -> list[tuple[Any, float]]:
        """At the multiple that is nearest by ratio."""
        by_multiple = self.variances.get(kind)
        if not by_multiple:
            return []
        return by_multiple[min(by_multiple, key=lambda known: abs(math.log(known / multiple)))]


def of_methods(a: str, b: str) -> list[Kind]:
    """The difference between two trainings: of these methods, of two that share a position encoding or do not, any."""
    alike = parse_method(a).position == parse_method(b).position
    return [("methods", *sorted((a, b))), ("methods", ONE_POSITION if alike else TWO_POSITIONS), ("methods",)]


def of_lengths(method: str) -> list[Kind]:
    """The difference between two readings by one model: of this method, its encoding, plain or not, any."""
    parsed = parse_method(method)
    scores = "plain" if parsed.name == parsed.position else "processed"
    return [("lengths", method), ("lengths", parsed.position, scores), ("lengths", scores), ("lengths",)]


def of_losses(method: str) -> list[Kind]:
    """The loss of one training: of this method, of any."""
    return [("losses", method), ("losses",)]


@dataclass
class Model:
    """The losses of a method in one setting by seed, and the training losses, which tell trainings apart."""

    method: str
    losses: dict[int, float] = field(default_factory=dict)
    trainings: dict[int, Any] = field(default_factory=dict)


def spread_of(many: Iterable[Results]) -> Spread:
    """The spread in the results of one scale; the same training in several results counts once."""
    # Setting → multiple of the training length → (method, variant) → its losses
    found: dict[tuple[Any, ...], dict[float, dict[tuple[str, str], Model]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for results in many:
        for row in results.get("records", ()) if results.get("kind") == "language" else ():
            if row.get("nll") is not None:
                name = (row["method"], row.get("variant") or "")
                models = found[setting_of(results, row)][row["eval_length"] / row["train_length"]]
                model = models.setdefault(name, Model(row["method"]))
                model.losses[row["seed"]] = row["nll"]
                model.trainings[row["seed"]] = row.get("train_loss")
    spread = Spread()
    for setting, by_multiple in found.items():
        for multiple, models in by_multiple.items():
            for one, other in combinations(models.values(), 2):
                if not _same(one, other):
                    spread.add(of_methods(one.method, other.method), multiple, setting, _gaps(one, other))
            for name, model in models.items():
                spread.add(of_losses(model.method), multiple, setting, list(model.losses.values()))
                start = by_multiple.get(1.0, {}).get(name)
                if multiple != 1 and start is not None:
                    spread.add(of_lengths(model.method), multiple, setting, _gaps(model, start))
    return spread


def setting_of(results: Results, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """All of a training and its evaluation but method, variant and seed, as far as results tell."""
    settings = results.get("settings", {})
    shared = json.dumps([settings.get("train"), settings.get("last")], sort_keys=True)
    return (*(row.get(name) for name in SETTING), shared)


def _gaps(one: Model, other: Model) -> list[float]:
    """Differences over the seeds that both have."""
    return [one.losses[seed] - other.losses[seed] for seed in one.losses.keys() & other.losses.keys()]


def _same(one: Model, other: Model) -> bool:
    """Whether two are readings of the same training."""
    known = [(seed, loss) for seed, loss in one.trainings.items() if loss is not None]
    return one.method == other.method and any(other.trainings.get(seed) == loss for seed, loss in known)
