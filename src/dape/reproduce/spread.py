"""How far trainings differ that have other seeds: known where several were run, borrowed by comparisons like them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from statistics import fmean, variance
from typing import Any

from dape.methods import parse_method

Results = dict[str, Any]
# What a record has of its training beside method, variant and seed.
SETTING = ("view", "corpus", "train_length", "steps", "batch_size")
ONE_POSITION, TWO_POSITIONS = "one position", "two positions"
BySeed = Mapping[int, float]


class Spread:
    """Variances between seeds of differences of losses, in squared nats.

    variances: what is compared → multiple of the training length that is read → one variance a setting. What is
    compared goes from the particular to the general, see `of_methods` and `of_lengths`: the first that has several
    seeds anywhere speaks for one that has not.
    """

    def __init__(self) -> None:
        self.variances: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(self, kinds: Iterable[tuple[str, ...]], multiple: float, one: BySeed, other: BySeed) -> None:
        """Count the difference of two losses, if both have several seeds."""
        differences = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
        if len(differences) > 1:
            for kind in kinds:
                self.variances[kind][multiple].append(variance(differences))

    def expected(self, kinds: Iterable[tuple[str, ...]], multiple: float) -> float | None:
        """The standard deviation between seeds, at the nearest multiple known; None if nothing like it is."""
        found = next((self.variances[kind] for kind in kinds if kind in self.variances), None)
        if found is None:
            return None
        nearest = min(found, key=lambda known: abs(math.log(known / multiple)))
        return math.sqrt(fmean(found[nearest]))


def of_methods(a: str, b: str) -> list[tuple[str, ...]]:
    """The difference between two trainings: these methods, two that share or do not share a position encoding, any."""
    alike = parse_method(a).position == parse_method(b).position
    return [
        ("methods", *sorted((a, b))),
        ("methods", ONE_POSITION if alike else TWO_POSITIONS),
        ("methods",),
    ]


def of_lengths(method: str) -> list[tuple[str, ...]]:
    """The difference between two readings by one model: of this method, of any."""
    return [("lengths", method), ("lengths",)]


def spread_of(many: Iterable[Results]) -> Spread:
    """The spread in the results of one scale; the same training in several results counts once."""
    # Setting → multiple of the training length → (method, variant) → seed → loss
    losses: dict[tuple[Any, ...], dict[float, dict[tuple[str, str], dict[int, float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for results in many:
        for row in results.get("records", ()) if results.get("kind") == "language" else ():
            if row.get("nll") is not None:
                setting, multiple = (
                    [row.get(name) for name in SETTING],
                    row["eval_length"] / row["train_length"],
                )
                model = (row["method"], row.get("variant") or "")
                losses[tuple(setting)][multiple][model][row["seed"]] = row["nll"]
    spread = Spread()
    for by_multiple in losses.values():
        for multiple, models in by_multiple.items():
            for (a, one), (b, other) in combinations(models.items(), 2):
                spread.add(of_methods(a[0], b[0]), multiple, one, other)
            if multiple != 1:
                for model, one in models.items():
                    spread.add(of_lengths(model[0]), multiple, one, by_multiple.get(1.0, {}).get(model, {}))
    return spread
