"""Claims and their verdicts: what a paper says, its number, ours on each corpus, and one word.

A claim has a test: a function of the results on one corpus that returns comparisons, each an estimate with its 95 %
interval and the side of a bound on which the claim expects it. The word follows from the numbers:

    reproduced      every comparison is on the claim's side, with its interval
    contradicted    one is on the other side (p < 0.05 after Bonferroni over the claim's comparisons)
    unclear         neither, by at least two seeds
    one seed        whatever one seed shows: its interval is over documents alone
    too small       not reproduced, and longer training (of the claim `longer`) moves the number towards the claim
    out of reach    the paper's own difference is smaller than the interval here, or it needs the paper's size
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from dape.evaluation.statistics import Estimate, accuracy, by_t, mean_over_seeds, paired_mean
from dape.evaluation.table import ALL, read_table, recall_slices

HERE = Path(__file__).parent
# Our texts: the name that readers see, and the paper's text that each stands for.
CORPORA = {"latex13": "LaTeX", "latex": "LaTeX", "books13": "books", "books": "books", "python": "code"}
STANDS_FOR = {"LaTeX": "arxiv", "books": "books3", "code": "arxiv"}
WORDS = ("reproduced", "contradicted", "unclear", "one seed", "too small", "out of reach")


@dataclass(frozen=True)
class Comparison:
    """An estimate, and the side of `bound` on which the claim expects it (+1 above, −1 below, 0 within ±bound).

    note: which of several comparisons, in brief; points: (method, length) whose perplexities are compared.
    """

    text: str
    estimate: Estimate
    side: int
    bound: float = 0.0
    note: str = ""
    points: tuple[tuple[str, int], ...] = ()

    @property
    def holds(self) -> bool:
        low, high = self.estimate.low, self.estimate.high
        if not self.side:
            return -self.bound < low and high < self.bound
        return low > self.bound if self.side > 0 else high < self.bound

    def against(self, of: int) -> bool:
        """Whether it contradicts the claim as one of `of` comparisons."""
        one = self.estimate
        if not self.margin < 0:
            return False
        if one.error == 0:
            return True
        shifted = replace(one, value=self.margin)
        return bool(shifted.p_value * of < 0.05)

    @property
    def margin(self) -> float:
        """Distance from the bound, positive on the claim's side."""
        if not self.side:
            return self.bound - abs(self.estimate.value)
        return self.side * (self.estimate.value - self.bound)

    @property
    def certainty(self) -> float:
        """Margin in half-widths of the interval: 1 where it just holds."""
        reach = (self.estimate.high - self.estimate.low) / 2
        return self.margin / reach if reach else math.copysign(math.inf, self.margin)


class Data:
    """Results on one corpus: estimates of differences, paired by seed and document."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        self._parts: dict[tuple, Data] = {}
        self._sums: dict[tuple, pd.DataFrame] = {}

    def where(self, **columns: object) -> Data:
        """The rows with these values; kept, as many claims ask for the same."""
        key = tuple(columns.items())
        if key not in self._parts:
            chosen = self.frame
            for name, value in key:
                chosen = chosen[chosen[name] == value]
            self._parts[key] = Data(chosen)
        return self._parts[key]

    def since(self, seed: int) -> Data:
        """Results of that seed and later ones."""
        return Data(self.frame[self.frame["seed"] >= seed])

    def values(self, column: str) -> list:
        return sorted(self.frame[column].unique())

    @property
    def methods(self) -> list[str]:
        return list(self.frame["method"].unique())

    def settings(self, *methods: str) -> list[tuple[int, Data]]:
        """(training length, results) for each training length that all the methods were trained at."""
        found = ((length, self.where(train_length=length)) for length in self.values("train_length"))
        return [(length, data) for length, data in found if set(methods) <= set(data.methods)]

    def lengths(self, *methods: str) -> list[int]:
        """Evaluated lengths that all the methods have."""
        of = [set(self.where(metric="loss", slice=ALL, method=method).frame["length"]) for method in methods]
        return sorted(set.intersection(*of)) if of else []

    def sums(self, method: str, length: int, slices: Sequence[str] = (ALL,), metric: str = "loss") -> pd.DataFrame:
        """Sums and counts [seed, document] of the slices together."""
        key = (method, length, tuple(slices), metric)
        if key not in self._sums:
            rows = self.where(metric=metric, method=method, length=length).frame
            rows = rows[rows["slice"].isin(slices)]
            table = rows.groupby(["seed", "document"])[["sum", "count"]].sum().unstack("document", fill_value=0)
            self._sums[key] = table
        return self._sums[key]

    def combine(self, *terms: tuple, counts: tuple | None = None) -> Estimate:
        """Weighted sum of sums per token, over the documents and seeds that all terms have.

        terms:  (weight, method, length[, slices[, metric]]).
        counts: (method, length, slices) whose tokens divide the sums; those of the first term by default.
        """
        tables = [self.sums(*rest) for _, *rest in terms]
        seeds = sorted(set.intersection(*(set(table.index) for table in tables)))
        if not seeds:
            return Estimate()
        total = sum(weight * table["sum"].loc[seeds] for (weight, *_), table in zip(terms, tables, strict=True))
        tokens = self.sums(*counts)["count"] if counts else tables[0]["count"]
        if not total.notna().all(axis=None):
            raise ValueError(f"{terms} are not of the same documents")
        return paired_mean(total.to_numpy(float), tokens.loc[seeds].iloc[0].to_numpy(float))

    def hits(self, length: int, base: int = 0) -> list[str]:
        """Slices of tokens whose trigram `length` tokens of input show, and `base` tokens do not."""
        return recall_slices(self.frame, length, base)

    def gap(self, a: str, b: str, length: int, slices: Sequence[str] = (ALL,)) -> Estimate:
        """Loss of a less that of b, in nats per token."""
        return self.combine((1, a, length, slices), (-1, b, length, slices))

    def change(self, method: str, start: int, end: int) -> Estimate:
        return self.combine((1, method, end), (-1, method, start))

    def growth(self, a: str, b: str, start: int, end: int) -> Estimate:
        """Gap at the longer input less that at the shorter one, with its own error."""
        return self.combine((1, a, end), (-1, b, end), (-1, a, start), (1, b, start))

    def perplexity(self, method: str, length: int) -> float:
        table = self.sums(method, length)
        return math.exp(table["sum"].sum().sum() / table["count"].sum().sum())

    def right(self, *terms: tuple[float, str], lengths: Sequence[int] = ()) -> Estimate:
        """Weighted sum of accuracies, means over the lengths beyond training: over seeds and samples, or over seeds alone
        (with the binomial error, for one seed) where answers were not kept by sample."""
        rows = self.frame[self.frame["metric"] == "accuracy"]
        known = rows["train_length"].iloc[0]
        rows = rows[rows["length"].isin(lengths)] if lengths else rows[rows["length"] > (known or 0)]
        rows = rows[rows["method"].isin([method for _, method in terms])]
        if (rows["document"] == -1).any():
            return self._binomial(rows, terms)
        means = rows.assign(right=rows["sum"] / rows["count"])
        table = means.pivot(index=["method", "seed"], columns=["length", "document"], values="right")
        seeds = sorted(set.intersection(*(set(table.loc[method].index) for _, method in terms)))
        total = sum(weight * table.loc[method].loc[seeds] for weight, method in terms)
        return paired_mean(total.to_numpy(float), np.ones(total.shape[1]))

    @staticmethod
    def _binomial(rows: pd.DataFrame, terms: Sequence[tuple[float, str]]) -> Estimate:
        means = rows.assign(right=rows["sum"] / rows["count"]).groupby(["method", "seed"])["right"].mean()
        seeds = sorted(set.intersection(*(set(means.loc[method].index) for _, method in terms)))
        values = sum(weight * means.loc[method].loc[seeds].to_numpy() for weight, method in terms)
        if len(seeds) > 1:
            return mean_over_seeds(values)
        variance = 0.0
        for weight, method in terms:
            own = rows[rows["method"] == method]
            of = [accuracy(row["sum"], row["count"]).error for _, row in own.iterrows()]
            variance += weight**2 * sum(error**2 for error in of) / len(of) ** 2
        return by_t(float(values[0]), variance, 1e6, 1) if variance else Estimate(float(values[0]), 0.0, *values, *values, 1, 1)

    def relative(self, method: str) -> Estimate:
        """Time of a step, as an interleaved ratio to the experiment's base."""
        rows = self.where(method=method).frame.set_index("metric")
        value, error = (rows["sum"][name] / rows["count"][name] for name in ("ratio", "ratio_error"))
        return by_t(value, error**2, rows["count"]["ratio"] - 1)

    def ratio(self, a: str, b: str) -> Estimate:
        """Time of a over that of b."""
        return quotient(self.relative(a), self.relative(b))


def quotient(a: Estimate, b: Estimate) -> Estimate:
    """Ratio of two timings, with relative errors added in squares."""
    value = a.value / b.value
    variance = value**2 * ((a.error / a.value) ** 2 + (b.error / b.value) ** 2)
    return by_t(value, variance, min(a.dof, b.dof))


# --- tests


Test = Callable[[Data], list[Comparison]]


def points(data: Data, train: int, at: Sequence, *methods: str) -> list[int]:
    """Lengths by name: "train", "longest", a multiple of the training length; those that were evaluated.

    Losses at neighbouring lengths are of the same tokens: one interval at the training length and one at the longest,
    the curve is for looking. Where the scored tokens would have no context, "train" is the next length.
    """
    known = data.lengths(*methods)
    named = {"train": [train], "longest": known[-1:], "within": [n for n in known if n == train]}
    wanted = [n for one in at for n in named.get(one, [int(one) * train if isinstance(one, (int, float)) else -1])]
    return [n for n in dict.fromkeys(wanted) if n in known]


def trains(data: Data, which: str | int | None, *methods: str) -> list[tuple[int, Data]]:
    """Settings by training length: all, or the "shortest", the "longest", or one in tokens."""
    found = data.settings(*methods)
    if which is None or not found:
        return found
    return {"shortest": found[:1], "longest": found[-1:]}.get(which, [s for s in found if s[0] == which])  # type: ignore[call-overload]


def lower(
    better: str, worse: str | Sequence[str], *, at: Sequence = ("train", "longest"), train=None, factor: float = 1.0
) -> Test:
    """The loss of `better` is below that of every one of `worse`, by a factor of perplexity."""
    rivals = [worse] if isinstance(worse, str) else worse

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(
                f"{better} − {rival} at {n}", own.gap(better, rival, n), -1, -math.log(factor),
                f"{rival} at {n}", ((better, n), (rival, n)),
            )  # fmt: skip
            for rival in rivals
            for length, own in trains(data, train, better, rival)
            for n in points(own, length, at, better, rival)
        ]

    return test


def pairs(*of: tuple[str, str], **options) -> Test:
    """`lower` for each (better, worse)."""
    return lambda data: [one for a, b in of for one in lower(a, b, **options)(data)]


def ordered(methods: Sequence[str], **options) -> Test:
    """Each method is better than the one before it."""
    return pairs(*((b, a) for a, b in pairwise(methods)), **options)


def changes(methods: str | Sequence[str], side: int, *, at: Sequence = ("longest",), train=None, factor: float = 1.0) -> Test:
    """The loss rises (side 1) or falls (−1) from the training length to another, by a factor of perplexity."""
    names = [methods] if isinstance(methods, str) else methods

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(
                f"{name}, {length} → {n}", own.change(name, length, n), side, side * math.log(factor),
                name, ((name, length), (name, n)),
            )  # fmt: skip
            for name in names
            for length, own in trains(data, train, name)
            if length in own.lengths(name)
            for n in points(own, length, at, name)
            if n != length
        ]

    return test


def grows(a: str, b: str | Sequence[str], *, train=None) -> Test:
    """The lead of a over b is larger at the longest input than at the training length."""
    rivals = [b] if isinstance(b, str) else b

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(f"({a} − {rival}), {length} → {own.lengths(a, rival)[-1]}",
                       own.growth(a, rival, length, own.lengths(a, rival)[-1]), -1)
            for rival in rivals for length, own in trains(data, train, a, rival)
        ]  # fmt: skip

    return test


def near(a: str, b: str, factor: float, *, at: Sequence = ("train", "longest")) -> Test:
    """Perplexities of a and b differ by less than a factor."""

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(f"{a} − {b} at {n}", own.gap(a, b, n), 0, math.log(factor))
            for length, own in trains(data, None, a, b)
            for n in points(own, length, at, a, b)
        ]

    return test


def across(a: tuple[str, int], b: tuple[str, int], at: Sequence[int], factor: float = 1.0) -> Test:
    """The loss of one (method, training length) is below that of another; factor < 1 tolerates a worse perplexity."""

    def test(data: Data) -> list[Comparison]:
        frame = data.frame
        by_train = Data(frame.assign(method=frame["method"] + " (" + frame["train_length"].astype(str) + ")"))
        if not {f"{m} ({n})" for m, n in (a, b)} <= set(by_train.methods):
            return []
        return [
            Comparison(
                f"{a[0]} ({a[1]}) − {b[0]} ({b[1]}) at {n}",
                by_train.gap(f"{a[0]} ({a[1]})", f"{b[0]} ({b[1]})", n),
                -1,
                -math.log(factor),
            )
            for n in at
        ]

    return test


def at_most(methods: Sequence[str], perplexity: float, at: Sequence) -> Test:
    """Perplexities are at most a bound."""

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(f"{name} at {n}", own.combine((1, name, n)), -1, math.log(perplexity))
            for name in methods
            for length, own in trains(data, None, name)
            for n in points(own, length, at, name)
        ]

    return test


def some_lower(several: Sequence[str], than: str, *, at: Sequence = ("longest",), train=None) -> Test:
    """In each setting the best of several (by its mean there) is below another; Bonferroni over them."""

    def test(data: Data) -> list[Comparison]:
        found = []
        for length, own in trains(data, train, than, *several):
            for n in points(own, length, at, than, *several):
                gaps = {name: own.gap(name, than, n) for name in several}
                best = min(gaps, key=lambda name: gaps[name].value)
                one = by_t(gaps[best].value, gaps[best].error**2, gaps[best].dof, gaps[best].seeds)
                wide = (one.high - one.low) / 2 * _bonferroni(one.dof, len(several))
                one = replace(one, low=one.value - wide, high=one.value + wide)
                found.append(Comparison(f"{best} − {than} at {n}", one, -1))
        return found

    return test


def _bonferroni(dof: float, of: int) -> float:
    from scipy.stats import t

    return float(t.ppf(1 - 0.025 / of, dof) / t.ppf(0.975, dof))


def more_accurate(a: str, b: str | Sequence[str], tasks: Sequence[str], by: float = 0.0) -> Test:
    """On each task a is more accurate than b (in points), over the lengths beyond training."""
    rivals = [b] if isinstance(b, str) else b

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(f"{task.replace('_', ' ')}: {a} − {rival}", _points(own.right((1, a), (-1, rival))), 1, by)
            for task in tasks
            for own in [data.where(corpus=task)]
            for rival in rivals
            if {a, rival} <= set(own.methods)
        ]

    return test


def accurate(methods: Sequence[str], tasks: Sequence[str], least: float) -> Test:
    """Each method answers at least a share of all inputs right, at all lengths."""

    def test(data: Data) -> list[Comparison]:
        found = []
        for task in tasks:
            own = data.where(corpus=task)
            for name in (name for name in methods if name in own.methods):
                lengths = own.where(method=name, metric="accuracy").values("length")
                one = _points(own.right((1, name), lengths=lengths))
                # A construction has no seed.
                one = replace(one, seeds=0 if task == "construction" else one.seeds)
                found.append(Comparison(f"{task.replace('_', ' ')}: {name}", one, 1, least))
        return found

    return test


def _points(one: Estimate) -> Estimate:
    return replace(one, value=100 * one.value, error=100 * one.error, low=100 * one.low, high=100 * one.high)


def slower(a: str, b: str, sizes: Sequence[str] = ("tiny", "125m"), factor: float = 1.0) -> Test:
    """A step of a takes longer than one of b."""

    def test(data: Data) -> list[Comparison]:
        return [
            Comparison(f"{a} / {b}, {size}", data.where(corpus=size).ratio(a, b), 1, factor)
            for size in sizes
            if {a, b} <= set(data.where(corpus=size).methods)
        ]

    return test


def slower_when_longer(method: str, length: int, than: int) -> Test:
    """With the same tokens, a step on longer windows takes longer."""

    def test(data: Data) -> list[Comparison]:
        one, other = (data.where(length=n) for n in (length, than))
        return [Comparison(f"{method}, {length} / {than}", quotient(one.relative(method), other.relative(method)), 1, 1.0)]

    return test


def sink(a: str, b: str) -> Test:
    """Attention weights on the first token, in percent: a's less b's, mean over layers and heads, over seeds."""

    def test(data: Data) -> list[Comparison]:
        rows = data.where(metric="sink_share").frame
        means = (100 * rows.groupby(["length", "method", "seed"])["sum"].mean()).unstack("method")
        gaps = (means[a] - means[b]).unstack("length")
        return [Comparison(f"{a} − {b} at {n}, points", mean_over_seeds(gaps[n].to_numpy()), 1) for n in gaps]

    return test


def overhead_falls(a: str, b: str, small: str, large: str) -> Test:
    """The ratio of the times of a and b is smaller in the larger model."""

    def test(data: Data) -> list[Comparison]:
        if not {small, large} <= set(data.values("corpus")):
            return []
        one, other = (data.where(corpus=size).ratio(a, b) for size in (large, small))
        variance = one.error**2 + other.error**2
        return [Comparison(f"{a} / {b}: {large} less {small}", by_t(one.value - other.value, variance, min(one.dof, other.dof)), -1)]

    return test


def exact(check: Callable[[], tuple[str, float]], tolerance: float = 1e-9) -> Test:
    """A statement that is decided by computing it: the largest deviation is below a tolerance."""

    def test(data: Data) -> list[Comparison]:
        text, deviation = check()
        return [Comparison(text, Estimate(deviation, 0.0, deviation, deviation, 1.0), -1, tolerance)]

    return test


def on_hits(a: str, b: str) -> Test:
    """More than half of the lead of a over b is on recall hits, at the longest input."""

    def test(data: Data) -> list[Comparison]:
        found = []
        for _, own in trains(data, None, a, b):
            n = own.lengths(a, b)[-1]
            hits = own.hits(n)
            # Gain on hits less half of the whole gain, per scored token.
            terms = ((-1, a, n, hits), (1, b, n, hits), (0.5, a, n), (-0.5, b, n))
            found.append(Comparison(f"gain on hits − half of the gain, at {n}", own.combine(*terms, counts=(a, n)), 1))
        return found

    return test


def more_on_hits(a: str, b: str) -> Test:
    """Per token, the lead of a over b is larger on recall hits than on all tokens, at the longest input."""

    def test(data: Data) -> list[Comparison]:
        found = []
        for _, own in trains(data, None, a, b):
            n = own.lengths(a, b)[-1]
            share = own.sums(a, n, own.hits(n))["count"].iloc[0].sum() / own.sums(a, n)["count"].iloc[0].sum()
            terms = ((-1 / share, a, n, own.hits(n)), (1 / share, b, n, own.hits(n)), (1, a, n), (-1, b, n))
            found.append(Comparison(f"gain on a hit − mean gain, at {n}", own.combine(*terms, counts=(a, n)), 1))
        return found

    return test


def recalls_more(a: str, b: str) -> Test:
    """On tokens that only inputs beyond the training length can copy, the loss of a falls more than that of b."""

    def test(data: Data) -> list[Comparison]:
        found = []
        for length, own in trains(data, None, a, b):
            n = own.lengths(a, b)[-1]
            new = own.hits(n, length)
            terms = ((1, a, n, new), (-1, a, length, new), (-1, b, n, new), (1, b, length, new))
            found.append(Comparison(f"new hits: ({a} − {b}), {length} → {n}", own.combine(*terms), -1))
        return found

    return test


# --- claims and verdicts


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, or a hypothesis of ours (section ""), once.

    experiments: whose results decide it, taken together. corpora: on which the statement is made, by readers' names;
    those without results are shown as not run. paper: its number, where the printed tables do not have the
    comparison. longer: experiments with more steps, for effects that the training budget may not reach.
    needs: why it is out of reach at this scale. numbers: claims about printed values, decided at the paper's scale.
    """

    name: str
    section: str
    text: str
    experiments: tuple[str, ...] | str
    test: Test
    corpora: tuple[str, ...] = ("LaTeX",)
    paper: str = ""
    longer: str = ""
    needs: str = ""
    ours: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.experiments,) if isinstance(self.experiments, str) else self.experiments


@dataclass(frozen=True)
class Judgement:
    """The word for a claim on one corpus, with the comparison that is least certain."""

    corpus: str
    word: str
    comparison: Comparison | None = None
    count: int = 0
    why: str = ""

    @property
    def seeds(self) -> int:
        return self.comparison.estimate.seeds if self.comparison else 0


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    paper: str
    judgements: tuple[Judgement, ...] = field(default_factory=tuple)

    @property
    def word(self) -> str:
        """The word of all corpora if they agree; contradicted if one contradicts; else the weakest."""
        words = {one.word for one in self.judgements} - {"not run"}
        if len(words) < 2:
            return next(iter(words), "out of reach" if self.claim.needs else "not run")
        weakest = ("contradicted", "out of reach", "too small", "one seed", "unclear", "reproduced")
        return min(words, key=weakest.index)

    @property
    def words(self) -> str:
        """The word, by corpus where they differ."""
        run = [one for one in self.judgements if one.word != "not run"]
        if len({one.word for one in run}) < 2:
            return self.word
        return ", ".join(f"{one.corpus}: {one.word}" for one in run)


class Ledger:
    """Results of all experiments of a paper, its printed numbers, and its claims."""

    def __init__(self, folder: Path, claims: Iterable[Claim]) -> None:
        self.folder, self.claims = folder, list(claims)
        names = [claim.name for claim in self.claims]
        assert len(set(names)) == len(names), "a claim stands twice"

    @cache  # noqa: B019  # one ledger a process
    def table(self, experiment: str) -> pd.DataFrame | None:
        """Results of an experiment of this paper or, as PAPER/NAME, of another; None before it was run."""
        paper, _, name = experiment.rpartition("/")
        path = (HERE / paper if paper else self.folder) / "results" / f"{name}.csv.gz"
        return read_table(path) if path.exists() else None

    def tables(self, experiments: Iterable[str]) -> pd.DataFrame | None:
        found = [table for name in experiments if (table := self.table(name)) is not None]
        return pd.concat(found, ignore_index=True).drop_duplicates(ignore_index=True) if found else None

    @cache  # noqa: B019
    def by_corpus(self, experiments: tuple[str, ...]) -> dict[str, Data]:
        """Results by the readers' names of our texts."""
        table = self.tables(experiments)
        groups = table.groupby("corpus", sort=False) if table is not None else ()
        return {CORPORA[str(name)]: Data(rows) for name, rows in groups if name in CORPORA}

    @cache  # noqa: B019
    def printed(self) -> pd.DataFrame:
        """The paper's perplexities as a table of results: one seed, one document."""
        path = self.folder / "printed.json"
        return printed_losses(json.loads(path.read_text("utf-8"))) if path.exists() else pd.DataFrame()

    @cache  # noqa: B019
    def printed_on(self, corpus: str) -> Data:
        printed = self.printed()
        return Data(printed[printed["corpus"] == corpus] if len(printed) else printed)

    def judge(self, claim: Claim) -> Verdict:
        table, judgements = self.tables(claim.sources), []
        if claim.needs or table is None:
            return Verdict(claim, claim.paper, (Judgement("", "out of reach" if claim.needs else "not run", why=claim.needs),))
        by_name = self.by_corpus(claim.sources) if set(claim.corpora) & set(STANDS_FOR) else {claim.corpora[0]: Data(table)}
        wanted = dict.fromkeys([*claim.corpora, *(["code"] if "code" in by_name else [])])
        theirs: dict[str, list[Comparison]] = {}
        for name in wanted:
            theirs[name] = self._theirs(claim, name)
            found = claim.test(by_name[name]) if name in by_name else []
            found = [one for one in found if one.estimate.known]
            if found or name in claim.corpora:
                judgements.append(self._word(claim, name, found, theirs[name]) if found else Judgement(name, "not run"))
        paper = claim.paper or "; ".join(
            text for name in wanted if name != "code" and (text := _shown_paper(theirs[name], self.printed_on(STANDS_FOR.get(name, "")), STANDS_FOR.get(name, "")))
        )
        return Verdict(claim, paper, tuple(judgements))

    def _theirs(self, claim: Claim, corpus: str) -> list[Comparison]:
        """The same test on the paper's own numbers."""
        data = self.printed_on(STANDS_FOR.get(corpus, ""))
        if data.frame.empty or corpus == "code":
            return []
        try:
            return claim.test(data)
        except (LookupError, ValueError, IndexError):
            return []

    def _word(self, claim: Claim, corpus: str, found: list[Comparison], theirs: list[Comparison]) -> Judgement:
        weakest = min(found, key=lambda one: one.certainty)
        seeds = min(one.estimate.seeds for one in found)
        decided = not any(one.estimate.seeds for one in found)
        if all(one.holds for one in found):
            word = "reproduced"
        else:
            word = "contradicted" if any(one.against(len(found)) for one in found) else "unclear"
        if seeds == 1 and not decided:
            word = "one seed"
        why = ""
        if word != "reproduced" and claim.longer and (more := self._more(claim, corpus)):
            if fmean(one.margin for one in more) > fmean(one.margin for one in found):
                shown = min(more, key=lambda one: one.certainty)
                word, why = "too small", f"with more steps {shown.text}: {show(shown)}"
        reach = (weakest.estimate.high - weakest.estimate.low) / 2
        smallest = min((one.margin for one in theirs), default=math.inf)
        if word in ("unclear", "one seed") and not weakest.holds and 0 < smallest < reach:
            word, why = "out of reach", f"the paper's difference is {smallest:.3f}, the interval here ±{reach:.3f}"
        return Judgement(corpus, word, weakest, len(found), why)

    def _more(self, claim: Claim, corpus: str) -> list[Comparison]:
        """The same test on longer training."""
        by_name = self.by_corpus((claim.longer,))
        return claim.test(by_name[corpus]) if corpus in by_name else []

    @cache  # noqa: B019
    def verdicts(self) -> list[Verdict]:
        return [self.judge(claim) for claim in self.claims]


def show(one: Comparison) -> str:
    """The estimate with its interval; perplexities and accuracies in their own units."""
    e = one.estimate
    if e.error == 0:
        return f"{e.value:.3g}"
    digits = 1 if max(abs(e.value), e.error) >= 10 else 2 if max(abs(e.value), e.error) >= 1 else 3
    signs = one.side <= 0 or one.bound == 0
    return interval(e, digits, signs)


def interval(one: Estimate, digits: int = 3, signs: bool = True) -> str:
    """value [low, high]; a zero has no sign."""
    value, low, high = (f"{x:{'+' if signs and round(x, digits) else ''}.{digits}f}" for x in (one.value, one.low, one.high))
    return f"{value} [{low}, {high}]".replace("-0." + "0" * digits + "]", "0." + "0" * digits + "]").replace("-", "−")


def printed_losses(content: dict) -> pd.DataFrame:
    """Printed perplexities (125M parameters) as a table of results."""
    rows = []
    for table in content["tables"]:
        if table["quantity"] == "perplexity" and table["size"] == "125m":
            for row in table["rows"]:
                about = (row.get("corpus", table.get("corpus")), row["method"], table["train_length"])
                rows += [(*about, n, v) for n, v in zip(table["columns"], row["values"], strict=True)]
    for one in content["sentences"]:
        if one["quantity"] == "perplexity" and one["size"] == "125m" and "variant" not in one:
            rows.append((one["corpus"], one["method"], one["train_length"], one["eval_length"], one["value"]))
    frame = pd.DataFrame(rows, columns=["corpus", "method", "train_length", "length", "sum"]).drop_duplicates()
    frame = frame.drop_duplicates(["corpus", "method", "train_length", "length"])
    return frame.assign(run="printed", seed=0, document=0, slice=ALL, metric="loss", count=1, sum=np.log(frame["sum"]))


def _shown_paper(found: list[Comparison], data: Data, corpus: str) -> str:
    """The paper's own perplexities where its margin is smallest."""
    if not found:
        return ""
    one = min(found, key=lambda c: c.margin)
    name = {"arxiv": "Arxiv", "books3": "Books3"}.get(corpus, corpus)
    if not one.points:
        return f"{name} {one.estimate.value:+.3f}".replace("-", "−")
    (a, m), (b, n) = one.points
    trained = {length: own for length, own in data.settings(a, b) if {m, n} <= set(own.lengths(a, b))}
    own = next((own for length, own in trained.items() if math.isclose(_log(own, b, n) - _log(own, a, m), one.estimate.value * (1 if a == b else -1), abs_tol=1e-9)), None)
    if own is None:
        return f"{name} {one.estimate.value:+.3f}".replace("-", "−")
    x, y = own.perplexity(a, m), own.perplexity(b, n)
    return f"{name} {x:.2f} {'→' if a == b else '<' if x < y else '>'} {y:.2f}"


def _log(data: Data, method: str, length: int) -> float:
    return math.log(data.perplexity(method, length))
