"""Statistics: means over seeds and documents, seed variance, paired differences of losses."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import combinations
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

import numpy as np

from dape.evaluation.inference import Estimate, VariancePrior, crossed_mean, satterthwaite, variance_prior
from dape.lab.records import STEP, Results
from dape.methods import LAYERS, Method, parse_layers
from dape.tasks.registry import TASKS, build_task

Row = dict[str, Any]
# Standard errors of a normal distribution beyond which one comparison counts.
ERRORS = 2.0
# Of a normal distribution, in standard deviations: its interquartile range, and the error of a median to a mean's.
RANGE, MEDIAN = 1.349, 1.253
UNKNOWN = Estimate(math.nan)


def signed(estimate: Estimate) -> str:
    """Format an estimate: +0.012 ± 0.003, with a true minus sign."""
    error = f" ± {estimate.error:.3f}" if math.isfinite(estimate.error) else ""
    return f"{estimate.value:+.3f}{error}".replace("-", "−")


def over_seeds(
    values: Iterable[float | None],
    errors: Iterable[float | None],
    *,
    dof: float = math.inf,
    prior: VariancePrior | None = None,
) -> Estimate:
    """Mean over seeds; its error combines that over documents with the seed variance.

    Seeds share the same documents, so averaging does not reduce the error over documents: it is the mean of the seeds'
    errors, with `dof` degrees of freedom. prior: seed variance of other comparisons, so that a single seed has an error
    too. If losses are known by document, `crossed_mean` is sharper.
    """
    numbers = [math.nan if value is None else value for value in values]
    documents = fmean(math.nan if error is None else error for error in errors) ** 2
    sources = [(documents, dof)]
    sample = (variance(numbers), len(numbers) - 1.0) if len(numbers) > 1 else (math.nan, 0.0)
    between = prior.posterior(*sample) if prior is not None else sample
    if between[1] > 0:
        sources.append((between[0] / len(numbers), between[1]))
    total = sum(part for part, _ in sources)
    return Estimate(fmean(numbers), math.sqrt(total), satterthwaite(total, sources))


def searched(count: int) -> float:
    """Standard errors beyond which the most extreme of `count` comparisons counts: 2 for one, 3.1 for 24.

    Among many comparisons some exceed two errors by chance, so a single one that is to prove a claim, or to disprove
    one about all of them, must be as unlikely as one comparison beyond two errors.
    """
    tail = 1 - NormalDist().cdf(ERRORS)
    return NormalDist().inv_cdf(1 - tail / count)


def median_error(spread: float | None, rounds: int) -> float:
    """Standard error of a median, from the interquartile range and the number of rounds; NaN for a single one."""
    return MEDIAN / RANGE * spread / math.sqrt(rounds) if spread is not None and rounds > 1 else math.nan


def share_error(share: float, samples: int) -> float:
    """Standard error of a share of right answers; 0 and 1 are as uncertain as with one answer more either way."""
    share = min(max(share, 1 / (samples + 2)), 1 - 1 / (samples + 2))
    return math.sqrt(share * (1 - share) / samples)


def quotient(one: Estimate, other: Estimate) -> Estimate:
    """Quotient of two ratios to the same base; their errors are treated as independent."""
    value = one.value / other.value
    return Estimate(value, value * math.hypot(one.error / one.value, other.error / other.value))


# --- seed variance

Comparison = tuple[str, ...]
# Columns of a training other than method, variant and seed.
SETTING = ("view", "corpus", "train_length", "steps", "batch_size", "layers")
ONE_POSITION, TWO_POSITIONS = "one position", "two positions"
# A model that has this much more loss than at its training length has failed there, and its seeds differ accordingly.
FAILED = math.log(2)
# Accuracies less than this share of the way from chance, or from all right, are of models that guess, or solve the task.
BAND = 0.1
# Minimum samples of a kind of comparison for a prior of its own.
ENOUGH = 3


class Sample(NamedTuple):
    """Seed variance of one setting."""

    setting: Any
    variance: float
    dof: float


class SeedVariance:
    """Seed variances: of losses and accuracies, and of their differences between methods or between lengths.

    samples: kind of comparison → evaluation length as a multiple of the training length → a sample for each setting.
    """

    def __init__(self) -> None:
        self.samples: dict[Comparison, dict[float, list[Sample]]] = defaultdict(lambda: defaultdict(list))

    def add(
        self, kinds: Iterable[Comparison], multiple: float, setting: Any, by_seed: Sequence[float]
    ) -> None:
        """Add measurements with several seeds; runs that agree to the last digit are the same run."""
        if len(by_seed) > 1 and (sample_variance := variance(by_seed)) > 0:
            for kind in kinds:
                self.samples[kind][multiple].append(Sample(setting, sample_variance, len(by_seed) - 1))

    def prior(
        self, kinds: Sequence[Comparison], multiple: float, setting: Any = None
    ) -> VariancePrior | None:
        """Prior of the seed variance; None without similar comparisons.

        kinds: from the particular to the general. The narrowest of the general ones with enough samples gives the
        prior, on a logarithmic scale, which the samples of the particular one update: ALiBi's seeds are judged by
        ALiBi's. setting: the one in question, whose own samples are excluded.
        """
        pooled = None
        for kind in kinds[1:] or kinds:
            samples = self._nearest(kind, multiple, setting)
            if len(samples) >= ENOUGH or (samples and kind is kinds[-1]):
                total = sum(sample.dof for sample in samples)
                pooled = variance_prior([s.variance for s in samples], [s.dof for s in samples])
                # Samples may agree by chance: they have no more degrees of freedom than their seeds.
                pooled = VariancePrior(pooled.variance, min(pooled.dof, total))
                break
        own = self._nearest(kinds[0], multiple, setting) if len(kinds) > 1 else []
        if not own:
            return pooled
        total = sum(sample.dof for sample in own)
        mean = sum(sample.variance * sample.dof for sample in own) / total
        return VariancePrior(mean, total) if pooled is None else VariancePrior(*pooled.posterior(mean, total))

    def _nearest(self, kind: Comparison, multiple: float, setting: Any) -> list[Sample]:
        """Samples of other settings, at the multiple nearest by ratio at which there are any."""
        others = {
            known: kept
            for known, samples in self.samples.get(kind, {}).items()
            if (kept := [sample for sample in samples if sample.setting != setting])
        }
        return others[min(others, key=lambda known: abs(math.log(known / multiple)))] if others else []


def of_sum(priors: Iterable[VariancePrior | None]) -> VariancePrior | None:
    """Prior of the seed variance of a sum of independent trainings; None if any is unknown."""
    each = list(priors)
    known = [prior for prior in each if prior is not None]
    if len(known) < len(each):
        return None
    total = sum(prior.variance for prior in known)
    return VariancePrior(total, satterthwaite(total, [(prior.variance, prior.dof) for prior in known]))


def of_methods(a: str, b: str, *, failed: bool = False) -> list[Comparison]:
    """Kinds of a difference between trainings: these methods, these encodings, the same encoding or different ones.

    failed: one of the two has failed at this length. Only the last kind pools failed and working models.
    """
    names = sorted((positions_of(a), positions_of(b)))
    alike = ("methods", ONE_POSITION if names[0] == names[1] else TWO_POSITIONS)
    return [*_in_state(failed, ("methods", *sorted((a, b))), ("positions", *names), alike), alike]


def of_lengths(method: str, *, failed: bool = False) -> list[Comparison]:
    """Kinds of a difference between two lengths of one model: this method, its encoding, plain or not."""
    scores = "plain" if all(layer.is_plain for layer in _layers(method)) else "processed"
    alike = ("lengths", scores)
    return [*_in_state(failed, ("lengths", method), ("lengths", positions_of(method), scores), alike), alike]


def _in_state(failed: bool, *kinds: Comparison) -> list[Comparison]:
    return [(*kind, "failed" if failed else "works") for kind in kinds]


def has_failed(here: Iterable[float], start: Iterable[float]) -> bool:
    """Whether the mean loss over seeds exceeds that at the training length by FAILED."""
    far, near = list(here), list(start)
    return bool(far and near) and sum(far) / len(far) - sum(near) / len(near) > FAILED


def positions_of(method: str) -> str:
    """The position encodings of a method's layers."""
    return LAYERS.join(layer.position for layer in _layers(method)) or method


def _layers(method: str) -> tuple[Method, ...]:
    """The methods of the layers; none if it is in a file that was not imported here."""
    try:
        return parse_layers(method)
    except ValueError:
        return ()


def of_losses(method: str, *, failed: bool = False) -> list[Comparison]:
    """Kinds of the loss of one training: this method, any method."""
    return [*_in_state(failed, ("losses", method), ("losses",)), ("losses",)]


def of_accuracies(task: str, by_seed: Sequence[float]) -> list[Comparison]:
    """Kinds of an accuracy: those of the task in the same band (guessing, partial or solved), those of any task.

    Seeds hardly differ where all guess or all solve the task, and differ most where some learn it. A single seed does
    not show which of these it is: it counts as partial.
    """
    low, band = chance(task), "partial"
    if len(by_seed) > 1:
        learned = (fmean(by_seed) - low) / (1 - low)
        band = "guessing" if learned < BAND else "solved" if learned > 1 - BAND else band
    return [("accuracy", task, band), ("accuracy", band)]


def chance(task: str) -> float:
    """Accuracy of guessing or of the best constant answer, whichever is higher; 0 for tasks that are not known here."""
    if task not in TASKS:
        return 0.0
    known = build_task(task)
    return max(known.random_accuracy, known.constant_accuracy)


@dataclass
class Model:
    """Losses of a method in one setting by seed, and the training losses, which identify trainings."""

    method: str
    losses: dict[int, float] = field(default_factory=dict)
    trainings: dict[int, Any] = field(default_factory=dict)


def seed_variance(many: Iterable[Results]) -> SeedVariance:
    """Seed variance in the results of one scale; a training in several results counts once."""
    # Setting → multiple of the training length → (method, variant) → its losses, or its accuracies
    settings: dict[tuple[Any, ...], dict[float, dict[tuple[str, str], Model]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for results in many:
        metric = {"language": "loss", "tasks": "mean_accuracy"}.get(results.kind)
        for row in results.lines(metric) if metric else ():
            if row.get("value") is not None:
                multiple = row["eval_length"] / row["train_length"] if metric == "loss" else 1.0
                models = settings[setting_of(results, row)][multiple]
                model = models.setdefault((row["method"], row["variant"]), Model(row["method"]))
                model.losses[row["seed"]] = row["value"]
                model.trainings[row["seed"]] = row.get("train_loss")
    spread = SeedVariance()
    for setting, by_multiple in settings.items():
        if setting[0] == "mean_accuracy":
            for name, model in by_multiple[1.0].items():
                values = list(model.losses.values())
                spread.add(of_accuracies(setting[1], values), 1.0, (setting, name), values)
            continue
        starts = by_multiple.get(1.0, {})
        for multiple, models in by_multiple.items():
            failed = {
                name: name in starts and has_failed(model.losses.values(), starts[name].losses.values())
                for name, model in models.items()
            }
            for (name, one), (name_other, other) in combinations(models.items(), 2):
                if not _same(one, other):
                    pair, lost = (one.method, other.method), failed[name] or failed[name_other]
                    spread.add(of_methods(*pair, failed=lost), multiple, setting, _gaps(one, other))
            for name, model in models.items():
                kinds = of_losses(model.method, failed=failed[name])
                spread.add(kinds, multiple, setting, list(model.losses.values()))
                if multiple != 1 and name in starts:
                    kinds = of_lengths(model.method, failed=failed[name])
                    spread.add(kinds, multiple, setting, _gaps(model, starts[name]))
    return spread


def setting_of(results: Results, row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Properties of a training and its evaluation other than method, variant and seed, as far as recorded."""
    if results.kind == "tasks":
        protocol = (row.get("settings") or {}).get("protocol")
        return "mean_accuracy", row["corpus"], row.get("layers"), json.dumps(protocol, sort_keys=True)
    shared = json.dumps([results.settings.get("train"), results.settings.get("last")], sort_keys=True)
    return (*(row.get(name) for name in SETTING), shared)


def _gaps(one: Model, other: Model) -> list[float]:
    """Differences over common seeds."""
    return [one.losses[seed] - other.losses[seed] for seed in one.losses.keys() & other.losses.keys()]


def _same(one: Model, other: Model) -> bool:
    """Whether two results come from the same training."""
    known = [(seed, loss) for seed, loss in one.trainings.items() if loss is not None]
    return one.method == other.method and any(other.trainings.get(seed) == loss for seed, loss in known)


# --- losses of language models


class Trained(NamedTuple):
    """A trained method, over its seeds."""

    view: str
    corpus: str
    train_length: int
    method: str
    variant: str

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method


class Losses:
    """Losses by training, length and seed, paired window by window.

    rows: training → evaluation length → seed → line of the results.
    stands_for: the paper's corpora by our names. seeds: seed variance in other settings.
    metric, slice: of the selected rows: the losses of all tokens, or of a slice.
    """

    def __init__(
        self,
        results: Results | None,
        stands_for: Mapping[str, str] | None = None,
        seeds: SeedVariance | None = None,
        *,
        metric: str = "loss",
        slice: str = "",
    ) -> None:
        self.results = results or Results({})
        self.stands_for, self.known = dict(stands_for or {}), seeds or SeedVariance()
        self.rows: dict[Trained, dict[int, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
        for row in self.results.lines(metric, slice):
            if row.get("value") is not None:
                group = (row.get("view", STEP), row["corpus"], row["train_length"])
                trained = Trained(*group, row["method"], row["variant"])
                self.rows[trained][row["eval_length"]][row["seed"]] = row
        self.last: int = self.results.settings.get("last") or 0
        self.documents = {name: np.asarray(ids) for name, ids in self.results["documents"].items()}

    def only(self, seeds: Container[int]) -> Losses:
        """The same for some of the seeds."""
        kept = copy(self)
        kept.rows = defaultdict(lambda: defaultdict(dict))
        for trained, by_length in self.rows.items():
            for length, rows in by_length.items():
                if own := {seed: row for seed, row in rows.items() if seed in seeds}:
                    kept.rows[trained][length] = own
        return kept

    def common_seeds(self, trained: Iterable[Trained]) -> list[int]:
        """Seeds that all of them have."""
        return sorted(set.intersection(*(set(self.seeds(one)) for one in trained)))

    def paper_corpus(self, corpus: str) -> str:
        return self.stands_for.get(corpus, corpus)

    def corpora(self, wanted: Iterable[str] | None = None) -> list[str]:
        """Our corpora in the order of the rows; only those that replace the wanted ones, if given."""
        present = list(dict.fromkeys(trained.corpus for trained in self.rows))
        if wanted is None:
            return present
        names = set(wanted)
        return [name for name in present if name in names or self.paper_corpus(name) in names]

    def train_lengths(self, view: str, corpus: str) -> list[int]:
        return sorted({t.train_length for t in self.rows if (t.view, t.corpus) == (view, corpus)})

    def lengths(self, *trained: Trained) -> list[int]:
        """Evaluation lengths that all of them have."""
        available = [set(self.rows[one]) if one in self.rows else set() for one in trained]
        return sorted(set.intersection(*available))

    def start(self, trained: Trained) -> int | None:
        """Reference length of changes with the length; None if it was not evaluated.

        The training length, unless the target tokens fill it: then the first length from there on at which each of
        them has at least as many tokens before it as there are targets.
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
        dof = len(set(self.documents.get(trained.corpus, ())))
        errors = (row.get("error") for row in rows)
        return over_seeds((row["value"] for row in rows), errors, dof=dof - 1.0 if dof > 1 else math.inf)

    def difference(self, *terms: tuple[float, Trained, int]) -> Estimate:
        """A sum of losses (factor, training, length) on the same tokens, over documents and seeds.

        With factors 1 and −1 it is the difference of two losses. NaN if no seed has all the terms.
        """
        pairs = list(self._by_seed(*terms).values())
        if not pairs:
            return UNKNOWN
        sums, counts = np.stack([sums for sums, _ in pairs]), pairs[0][1]
        # Documents without a token of a slice do not count.
        return crossed_mean(sums[:, counts > 0], counts[counts > 0], seeds=self.seed_prior(*terms))

    def differences(self, *terms: tuple[float, Trained, int]) -> dict[int, float]:
        """The same sum by seed."""
        return {
            seed: float(sums.sum() / counts.sum()) for seed, (sums, counts) in self._by_seed(*terms).items()
        }

    def _by_seed(self, *terms: tuple[float, Trained, int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        rows = [self.rows[trained][length] for _, trained, length in terms]
        factors = [factor for factor, _, _ in terms]
        return {
            seed: self.by_document(factors, [row[seed] for row in rows], terms[0][1].corpus)
            for seed in sorted(set.intersection(*(set(row) for row in rows)))
        }

    def by_document(
        self, factors: Sequence[float], rows: Sequence[Row], corpus: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The sum of one seed's losses in each document, and the number of windows, or tokens of a slice, in each."""
        windows = [row.get("windows") for row in rows]
        tokens = rows[0].get("tokens")
        if tokens is not None:
            documents, weights = np.arange(len(tokens)), np.array(tokens, np.float64)
        else:
            documents = self.documents.get(corpus, np.zeros(0))
            weights = np.ones(len(documents))
        if any(w is None or len(w) != len(documents) for w in windows) or any(
            row.get("tokens") != tokens for row in rows
        ):
            raise ValueError(
                f'losses on "{corpus}" have {[len(w or ()) for w in windows]} windows, but the documents of '
                f"{len(documents)} are named: they cannot be paired"
            )
        total = sum(f * np.array(losses, np.float64) for f, losses in zip(factors, windows, strict=True))
        _, group = np.unique(documents, return_inverse=True)
        return np.bincount(group, weights=total), np.bincount(group, weights=weights)

    def seed_prior(self, *terms: tuple[float, Trained, int]) -> VariancePrior | None:
        """Prior of the seed variance of `difference` from other settings, if any."""
        every = [self.rows[trained][length] for _, trained, length in terms]
        seed = min(set.intersection(*(set(rows) for rows in every)))
        rows = [of_seed[seed] for of_seed in every]
        trainings = {
            _training(trained, row): trained for (_, trained, _), row in zip(terms, rows, strict=True)
        }
        multiples: dict[Trained, float] = {}
        for _, trained, length in terms:
            multiples[trained] = max(multiples.get(trained, 1.0), length / trained.train_length)
        here = setting_of(self.results, rows[0])
        state = {trained: False for _, trained, _ in terms}
        for _, trained, length in terms:
            state[trained] |= self._has_failed(trained, length)
        failed = any(state.values())
        one, *others = trainings.values()
        if not others:
            kind = of_lengths if len(terms) > 1 else of_losses
            kinds = kind(one.method, failed=failed)
            return self.known.prior(kinds, max(multiples.values()), here)
        if len({trained.train_length for trained in trainings.values()}) == 1:
            kinds = of_methods(one.method, others[0].method, failed=failed)
            return self.known.prior(kinds, max(multiples.values()), here)
        # Trainings at different lengths share nothing that a seed would change in both.
        return of_sum(
            self.known.prior(of_losses(t.method, failed=state[t]), multiples[t]) for t in (one, *others)
        )

    def _has_failed(self, trained: Trained, length: int) -> bool:
        far, near = (self.rows[trained].get(n, {}) for n in (length, trained.train_length))
        return has_failed(*([row["value"] for row in rows.values()] for rows in (far, near)))


def _training(trained: Trained, row: Row) -> tuple[Any, ...]:
    """Identity of a training; variants may be evaluations of the same one."""
    loss = row.get("train_loss")
    return trained if loss is None else (trained.method, trained.train_length, loss)
