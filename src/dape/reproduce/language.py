"""Records of trained language models: by what was trained and the length read, paired window by window."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from dape.evaluate.statistics import clustered_mean
from dape.report.results import Estimate, over_seeds
from dape.reproduce.folders import Folder, Results
from dape.reproduce.spread import Spread, of_lengths, of_losses, of_methods, setting_of

Row = dict[str, Any]
# A time of a step that was measured once is trusted to this share of itself.
TIME_ERROR = 0.05


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


class Language:
    """The records of an experiment of kind "language".

    scores: what was trained → evaluation length → seed → record. Corpora go by our names; `paper_corpus` gives
    the paper's.
    """

    def __init__(self, results: Results, stands_for: dict[str, str], spread: Spread | None = None) -> None:
        self.results, self.stands_for = results, stands_for
        self.spread = spread or Spread()
        self.scores: dict[Trained, dict[int, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
        for row in results.get("records", ()):
            if row.get("nll") is None:
                continue
            trained = Trained(
                row.get("view", "equal-step"),
                row["corpus"],
                row["train_length"],
                row["method"],
                row.get("variant") or "",
            )
            self.scores[trained][row["eval_length"]][row["seed"]] = row
        self.last: int = results.get("settings", {}).get("last", 0)
        self.documents = {corpus: np.asarray(ids) for corpus, ids in results.get("documents", {}).items()}

    @staticmethod
    def of(folder: Folder) -> Language:
        return Language(folder.best or {}, folder.stands_for, folder.spread)

    def paper_corpus(self, corpus: str) -> str:
        return self.stands_for.get(corpus, corpus)

    def corpora(self, wanted: Iterable[str] | None = None) -> list[str]:
        """Our corpora in the order of the records; those that stand for the wanted ones, if any are named."""
        present = list(dict.fromkeys(trained.corpus for trained in self.scores))
        if wanted is None:
            return present
        names = set(wanted)
        return [name for name in present if name in names or self.paper_corpus(name) in names]

    def train_lengths(self, view: str, corpus: str) -> list[int]:
        return sorted({t.train_length for t in self.scores if (t.view, t.corpus) == (view, corpus)})

    def variants(self, view: str, corpus: str, train_length: int, method: str) -> list[str]:
        """Under which variants the method was trained there."""
        place = (view, corpus, train_length, method)
        return [trained.variant for trained in self.scores if trained[:4] == place]

    def lengths(self, *trained: Trained) -> list[int]:
        """Evaluation lengths that all of them have."""
        found = [set(self.scores[one]) if one in self.scores else set() for one in trained]
        return sorted(set.intersection(*found))

    def start(self, trained: Trained) -> int | None:
        """The length from which a change with the length counts; None if it was not read.

        It is the training length, unless the tokens that are scored fill it: the first of them have next to no text
        before them then, and any model gains where they have. So it is the first length from there on at which each
        has at least as many tokens before it as are scored.
        """
        lengths = self.lengths(trained)
        if trained.train_length not in lengths:
            return None
        return next((n for n in lengths if n >= max(trained.train_length, 2 * self.last)), None)

    def seeds(self, trained: Trained) -> list[int]:
        return sorted({seed for rows in self.scores.get(trained, {}).values() for seed in rows})

    def loss(self, trained: Trained, length: int) -> Estimate:
        """The loss over seeds; NaN if there is none."""
        rows = list(self.scores.get(trained, {}).get(length, {}).values())
        if not rows:
            return Estimate(math.nan, math.nan)
        return over_seeds((row["nll"] for row in rows), (row.get("nll_se") for row in rows))

    def difference(self, *terms: tuple[float, Trained, int]) -> Estimate:
        """A sum of losses (factor, what was trained, length), paired by window, clustered by document, over seeds.

        With factors 1 and −1 it is the difference of two losses. NaN if no seed has all the terms. Few seeds tell
        little of the spread between them: it is joined with that of other comparisons.
        """
        rows = [self.scores[trained][length] for _, trained, length in terms]
        seeds = sorted(set.intersection(*(set(row) for row in rows)))
        if not seeds:
            return Estimate(math.nan, math.nan)
        factors = [factor for factor, _, _ in terms]
        corpus = terms[0][1].corpus
        pairs = [self._paired(factors, [row[seed] for row in rows], corpus) for seed in seeds]
        expected = self._expected(terms, [row[seeds[0]] for row in rows])
        return over_seeds((value for value, _ in pairs), (error for _, error in pairs), expected=expected)

    def _expected(self, terms: Sequence[tuple[float, Trained, int]], rows: Sequence[Row]) -> float | None:
        """The spread between seeds that other settings let expect, if any do."""
        trainings = {
            _training(trained, row): trained for (_, trained, _), row in zip(terms, rows, strict=True)
        }
        multiples: dict[Trained, float] = {}
        for _, trained, length in terms:
            multiples[trained] = max(multiples.get(trained, 1.0), length / trained.train_length)
        here = setting_of(self.results, rows[0])
        one, *others = trainings.values()
        if not others:
            return self.spread.expected(of_lengths(one.method), max(multiples.values()), here)
        if len({trained.train_length for trained in trainings.values()}) == 1:
            kinds = of_methods(one.method, others[0].method)
            return self.spread.expected(kinds, max(multiples.values()), here)
        # Trained at different lengths they have nothing in common that a seed could change for both.
        each = [self.spread.expected(of_losses(t.method), multiples[t]) for t in (one, *others)]
        known = [value for value in each if value is not None]
        return math.hypot(*known) if len(known) == len(each) else None

    def _paired(self, factors: list[float], rows: list[Row], corpus: str) -> tuple[float, float]:
        windows = [row.get("windows") for row in rows]
        documents = self.documents.get(corpus)
        if documents is None or any(w is None or len(w) != len(documents) for w in windows):
            raise ValueError(
                f'records on "{corpus}" have {[len(w or ()) for w in windows]} windows, but the documents of '
                f"{0 if documents is None else len(documents)} are named: they cannot be paired"
            )
        total = sum(
            factor * np.array(losses, np.float64) for factor, losses in zip(factors, windows, strict=True)
        )
        return clustered_mean(np.asarray(total), np.ones(len(documents)), documents)

    def step_seconds(self, trained: Trained) -> Estimate:
        """Seconds of a training step; one measurement is trusted to a share of itself."""
        by_seed = {
            seed: row["seconds_per_step"]
            for rows in self.scores.get(trained, {}).values()
            for seed, row in rows.items()
            if row.get("seconds_per_step")
        }
        values = list(by_seed.values())
        if not values:
            return Estimate(math.nan, math.nan)
        floor = TIME_ERROR * fmean(values)
        spread = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return Estimate(fmean(values), max(floor, spread))


def _training(trained: Trained, row: Row) -> tuple[Any, ...]:
    """What tells a training from others; variants may be readings of the same."""
    loss = row.get("train_loss")
    return trained if loss is None else (trained.method, trained.train_length, loss)
