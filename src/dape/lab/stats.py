"""Statistics: means with standard errors, the variance between seeds, paired differences of losses."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import NormalDist, fmean, stdev, variance
from typing import Any, NamedTuple

import numpy as np

from dape.evaluate.statistics import clustered_mean
from dape.lab.records import STEP, Results
from dape.methods import LAYERS, parse_layers

Row = dict[str, Any]
# Standard errors beyond which one comparison counts.
ERRORS = 2.0
# A time of a step that was measured once is trusted to this share of itself.
TIME_ERROR = 0.05
# Of a normal distribution, in standard deviations: its interquartile range, and the error of a median to a mean's.
RANGE, MEDIAN = 1.349, 1.253


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; the error is NaN where it is not known."""

    value: float
    error: float = math.nan

    @property
    def known(self) -> bool:
        return math.isfinite(self.value)


UNKNOWN = Estimate(math.nan)


def signed(estimate: Estimate) -> str:
    """+0.012 ± 0.003, with a true minus sign."""
    error = f" ± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return f"{estimate.value:+.3f}{error}".replace("-", "−")


def over_seeds(
    values: Iterable[float | None], errors: Iterable[float | None], *, expected: float | None = None
) -> Estimate:
    """Mean over seeds; its error joins that over documents with the variance between seeds.

    Seeds see the same documents, so averaging does not lessen the error over documents: it is taken as the mean of
    the seeds' errors. expected: a standard deviation between seeds known from other comparisons; it counts as one
    degree of freedom beside those of the seeds here, so that one seed has an error too.
    """
    numbers = [math.nan if value is None else value for value in values]
    squares = [(len(numbers) - 1, variance(numbers))] if len(numbers) > 1 else []
    squares += [(1, expected**2)] if expected is not None else []
    weight = sum(freedom for freedom, _ in squares)
    between = math.sqrt(sum(n * square for n, square in squares) / weight / len(numbers)) if weight else 0.0
    documents = fmean(math.nan if error is None else error for error in errors)
    return Estimate(fmean(numbers), math.hypot(documents, between))


def searched(count: int) -> float:
    """Standard errors beyond which the most extreme of `count` comparisons counts: 2 for one, 3.1 for 24.

    Among many comparisons some lie beyond two errors by chance, so a single one that is to prove a claim, or to
    disprove one made of all of them, must be as unlikely as one comparison beyond two errors.
    """
    tail = 1 - NormalDist().cdf(ERRORS)
    return NormalDist().inv_cdf(1 - tail / count)


def median_error(spread: float | None, rounds: int) -> float:
    """Standard error of a median, from the interquartile range and the number of rounds; NaN for a single one."""
    return MEDIAN / RANGE * spread / math.sqrt(rounds) if spread is not None and rounds > 1 else math.nan


def share_error(share: float, samples: int) -> float:
    """Standard error of a share of right answers; 0 and 1 are as uncertain as one answer more either way."""
    share = min(max(share, 1 / (samples + 2)), 1 - 1 / (samples + 2))
    return math.sqrt(share * (1 - share) / samples)


def quotient(one: Estimate, other: Estimate) -> Estimate:
    """Of two ratios to the same base; their errors are treated as independent."""
    value = one.value / other.value
    return Estimate(value, value * math.hypot(one.error / one.value, other.error / other.value))


# --- the variance between seeds

Comparison = tuple[str, ...]
# What a row has of its training beside method, variant and seed.
SETTING = ("view", "corpus", "train_length", "steps", "batch_size")
ONE_POSITION, TWO_POSITIONS = "one position", "two positions"
# So many settings of a general comparison count beside those of a particular one.
PRIOR = 4


class SeedVariance:
    """Variances between seeds, in squared nats: of losses, and of differences between methods or between lengths.

    variances: kind of comparison → multiple of the training length that is read → (setting, variance) pairs.
    """

    def __init__(self) -> None:
        self.variances: dict[Comparison, dict[float, list[tuple[Any, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def add(
        self, kinds: Iterable[Comparison], multiple: float, setting: Any, by_seed: Sequence[float]
    ) -> None:
        """Count what was measured with several seeds."""
        if len(by_seed) > 1:
            for kind in kinds:
                self.variances[kind][multiple].append((setting, variance(by_seed)))

    def expected(self, kinds: Sequence[Comparison], multiple: float, setting: Any = None) -> float | None:
        """The standard deviation between seeds; None if nothing like it is known.

        kinds: from the particular to the general; the fewer settings a particular one has, the more the general
        counts. setting: the one in question, which must not count for itself.
        """
        mean = None
        for kind in reversed(kinds):
            found = [value for other, value in self._nearest(kind, multiple) if other != setting]
            if found:
                mean = fmean(found) if mean is None else (sum(found) + PRIOR * mean) / (len(found) + PRIOR)
        return None if mean is None else math.sqrt(mean)

    def _nearest(self, kind: Comparison, multiple: float) -> list[tuple[Any, float]]:
        """At the multiple that is nearest by ratio."""
        by_multiple = self.variances.get(kind)
        if not by_multiple:
            return []
        return by_multiple[min(by_multiple, key=lambda known: abs(math.log(known / multiple)))]


def of_methods(a: str, b: str) -> list[Comparison]:
    """The difference between two trainings: of these methods, of two that share a position encoding or do not, any."""
    alike = positions_of(a) == positions_of(b)
    return [("methods", *sorted((a, b))), ("methods", ONE_POSITION if alike else TWO_POSITIONS), ("methods",)]


def of_lengths(method: str) -> list[Comparison]:
    """The difference between two lengths of one model: of this method, its encoding, plain or not, any."""
    scores = "plain" if all(layer.is_plain for layer in parse_layers(method)) else "processed"
    return [("lengths", method), ("lengths", positions_of(method), scores), ("lengths", scores), ("lengths",)]


def positions_of(method: str) -> str:
    """The position encodings of a method's layers."""
    return LAYERS.join(layer.position for layer in parse_layers(method))


def of_losses(method: str) -> list[Comparison]:
    """The loss of one training: of this method, of any."""
    return [("losses", method), ("losses",)]


@dataclass
class Model:
    """The losses of a method in one setting by seed, and the training losses, which tell trainings apart."""

    method: str
    losses: dict[int, float] = field(default_factory=dict)
    trainings: dict[int, Any] = field(default_factory=dict)


def seed_variance(many: Iterable[Results]) -> SeedVariance:
    """The variance between seeds in the results of one scale; a training in several results counts once."""
    # Setting → multiple of the training length → (method, variant) → its losses
    found: dict[tuple[Any, ...], dict[float, dict[tuple[str, str], Model]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for results in many:
        for row in results.lines("loss") if results.kind == "language" else ():
            if row.get("value") is not None:
                models = found[setting_of(results, row)][row["eval_length"] / row["train_length"]]
                model = models.setdefault((row["method"], row["variant"]), Model(row["method"]))
                model.losses[row["seed"]] = row["value"]
                model.trainings[row["seed"]] = row.get("train_loss")
    spread = SeedVariance()
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
    shared = json.dumps([results.settings.get("train"), results.settings.get("last")], sort_keys=True)
    return (*(row.get(name) for name in SETTING), shared)


def _gaps(one: Model, other: Model) -> list[float]:
    """Differences over the seeds that both have."""
    return [one.losses[seed] - other.losses[seed] for seed in one.losses.keys() & other.losses.keys()]


def _same(one: Model, other: Model) -> bool:
    """Whether two are evaluations of the same training."""
    known = [(seed, loss) for seed, loss in one.trainings.items() if loss is not None]
    return one.method == other.method and any(other.trainings.get(seed) == loss for seed, loss in known)


# --- losses of language models


class Trained(NamedTuple):
    """A method as it was trained, over its seeds."""

    view: str
    corpus: str
    train_length: int
    method: str
    variant: str

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method


class Losses:
    """Losses by what was trained, length and seed, paired window by window.

    rows: what was trained → evaluation length → seed → line of the results.
    stands_for: the paper's corpora by our names. seeds: what is known of the variance between them elsewhere.
    """

    def __init__(
        self,
        results: Results | None,
        stands_for: Mapping[str, str] | None = None,
        seeds: SeedVariance | None = None,
    ) -> None:
        self.results = results or Results({})
        self.stands_for, self.known = dict(stands_for or {}), seeds or SeedVariance()
        self.rows: dict[Trained, dict[int, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
        for row in self.results.lines("loss"):
            if row.get("value") is not None:
                place = (row.get("view", STEP), row["corpus"], row["train_length"])
                trained = Trained(*place, row["method"], row["variant"])
                self.rows[trained][row["eval_length"]][row["seed"]] = row
        self.last: int = self.results.settings.get("last") or 0
        self.documents = {name: np.asarray(ids) for name, ids in self.results["documents"].items()}

    def paper_corpus(self, corpus: str) -> str:
        return self.stands_for.get(corpus, corpus)

    def corpora(self, wanted: Iterable[str] | None = None) -> list[str]:
        """Our corpora in the order of the rows; those that stand for the wanted ones, if any are named."""
        present = list(dict.fromkeys(trained.corpus for trained in self.rows))
        if wanted is None:
            return present
        names = set(wanted)
        return [name for name in present if name in names or self.paper_corpus(name) in names]

    def train_lengths(self, view: str, corpus: str) -> list[int]:
        return sorted({t.train_length for t in self.rows if (t.view, t.corpus) == (view, corpus)})

    def lengths(self, *trained: Trained) -> list[int]:
        """Evaluation lengths that all of them have."""
        found = [set(self.rows[one]) if one in self.rows else set() for one in trained]
        return sorted(set.intersection(*found))

    def start(self, trained: Trained) -> int | None:
        """The length from which a change with the length is measured; None if it was not evaluated.

        The training length, unless the scored tokens fill it: then the first length from there on at which each of
        them has at least as many tokens before it as are scored.
        """
        lengths = self.lengths(trained)
        if trained.train_length not in lengths:
            return None
        return next((n for n in lengths if n >= max(trained.train_length, 2 * self.last)), None)

    def seeds(self, trained: Trained) -> list[int]:
        return sorted({seed for rows in self.rows.get(trained, {}).values() for seed in rows})

    def loss(self, trained: Trained, length: int) -> Estimate:
        """The loss over seeds; NaN if there is none."""
        rows = list(self.rows.get(trained, {}).get(length, {}).values())
        if not rows:
            return UNKNOWN
        return over_seeds((row["value"] for row in rows), (row.get("error") for row in rows))

    def difference(self, *terms: tuple[float, Trained, int]) -> Estimate:
        """A sum of losses (factor, what was trained, length), paired by window, clustered by document, over seeds.

        With factors 1 and −1 it is the difference of two losses. NaN if no seed has all the terms. The variance
        between few seeds is joined with that of other comparisons.
        """
        rows = [self.rows[trained][length] for _, trained, length in terms]
        seeds = sorted(set.intersection(*(set(row) for row in rows)))
        if not seeds:
            return UNKNOWN
        factors = [factor for factor, _, _ in terms]
        pairs = [self.paired(factors, [row[seed] for row in rows], terms[0][1].corpus) for seed in seeds]
        expected = self._expected(terms, [row[seeds[0]] for row in rows])
        return over_seeds((value for value, _ in pairs), (error for _, error in pairs), expected=expected)

    def paired(self, factors: Sequence[float], rows: Sequence[Row], corpus: str) -> tuple[float, float]:
        """The sum for one seed, and its standard error over documents."""
        windows = [row.get("windows") for row in rows]
        documents = self.documents.get(corpus)
        if documents is None or any(w is None or len(w) != len(documents) for w in windows):
            raise ValueError(
                f'losses on "{corpus}" have {[len(w or ()) for w in windows]} windows, but the documents of '
                f"{0 if documents is None else len(documents)} are named: they cannot be paired"
            )
        total = sum(f * np.array(losses, np.float64) for f, losses in zip(factors, windows, strict=True))
        return clustered_mean(np.asarray(total), np.ones(len(documents)), documents)

    def _expected(self, terms: Sequence[tuple[float, Trained, int]], rows: Sequence[Row]) -> float | None:
        """The standard deviation between seeds that other settings let expect, if any do."""
        trainings = {
            _training(trained, row): trained for (_, trained, _), row in zip(terms, rows, strict=True)
        }
        multiples: dict[Trained, float] = {}
        for _, trained, length in terms:
            multiples[trained] = max(multiples.get(trained, 1.0), length / trained.train_length)
        here = setting_of(self.results, rows[0])
        one, *others = trainings.values()
        if not self.known.variances:
            return None
        if not others:
            return self.known.expected(of_lengths(one.method), max(multiples.values()), here)
        if len({trained.train_length for trained in trainings.values()}) == 1:
            kinds = of_methods(one.method, others[0].method)
            return self.known.expected(kinds, max(multiples.values()), here)
        # Trained at different lengths they have nothing in common that a seed could change for both.
        each = [self.known.expected(of_losses(t.method), multiples[t]) for t in (one, *others)]
        known = [value for value in each if value is not None]
        return math.hypot(*known) if len(known) == len(each) else None

    def step_seconds(self, trained: Trained) -> Estimate:
        """Seconds of a training step; one measurement is trusted to a share of itself."""
        by_seed = {
            seed: row["seconds_per_step"]
            for rows in self.rows.get(trained, {}).values()
            for seed, row in rows.items()
            if row.get("seconds_per_step")
        }
        values = list(by_seed.values())
        if not values:
            return UNKNOWN
        floor = TIME_ERROR * fmean(values)
        between = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return Estimate(fmean(values), max(floor, between))


def _training(trained: Trained, row: Row) -> tuple[Any, ...]:
    """What tells a training from others; variants may be evaluations of the same."""
    loss = row.get("train_loss")
    return trained if loss is None else (trained.method, trained.train_length, loss)
