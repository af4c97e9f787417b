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

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from dape.evaluation.statistics import Estimate, accuracy, by_t, mean_over_seeds, paired_mean, quantile
from dape.evaluation.table import ALL, read_table, recall_slices
from papers.printed import printed_losses

HERE = Path(__file__).parent
# Our texts: the name that readers see, and the paper's text that each stands for.
CORPORA = {"latex13": "LaTeX", "latex": "LaTeX", "books13": "books", "books": "books", "python": "code"}
STANDS_FOR = {"LaTeX": "arxiv", "books": "books3"}
WORDS = ("reproduced", "contradicted", "unclear", "one seed", "too small", "out of reach")


@dataclass(frozen=True)
class Comparison:
    """An estimate, and the side of `bound` on which the claim expects it (+1 above, −1 below, 0 within ±bound).

    text: what tells it apart from the claim's others. points: (method, training length, length) of two perplexities.
    """

    text: str
    estimate: Estimate
    side: int
    bound: float = 0.0
    points: tuple[tuple[str, int, int], ...] = ()

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

    def sums(self, method: str, length: int, slices: Sequence[str] = (ALL,)) -> pd.DataFrame:
        """Sums of losses and counts [seed, document] of the slices together."""
        key = (method, length, tuple(slices))
        if key not in self._sums:
            rows = self.where(metric="loss", method=method, length=length).frame
            groups = rows[rows["slice"].isin(slices)].groupby(["seed", "document"])[["sum", "count"]]
            self._sums[key] = groups.sum().unstack("document", fill_value=0)
        return self._sums[key]

    def combine(self, *terms: tuple, counts: tuple | None = None) -> Estimate:
        """Weighted sum of sums per token, over the documents and seeds that all terms have.

        terms:  (weight, method, length[, slices]).
        counts: (method, length, slices) whose tokens divide the sums; those of the first term by default.
        """
        tables = [self.sums(*rest) for _, *rest in terms]
        seeds = sorted(set.intersection(*(set(table.index) for table in tables)))
        if not seeds or any(table.empty for table in tables):
            return Estimate()
        weighted = (term[0] * table["sum"].loc[seeds] for term, table in zip(terms, tables, strict=True))
        total = sum(weighted)
        tokens = self.sums(*counts)["count"] if counts else tables[0]["count"]
        if not total.notna().all(axis=None):
            raise ValueError(f"{terms} are not of the same documents")
        return paired_mean(total.to_numpy(float), tokens.loc[seeds].iloc[0].to_numpy(float))

    def hits(self, length: int, base: int = 0) -> list[str]:
        """Slices of tokens whose trigram `length` tokens of input show, and `base` tokens do not."""
        return recall_slices(self.frame, length, base)

    def gap(self, a: str, b: str, length: int) -> Estimate:
        """Loss of a less that of b, in nats per token."""
        return self.combine((1, a, length), (-1, b, length))

    def change(self, method: str, start: int, end: int) -> Estimate:
        return self.combine((1, method, end), (-1, method, start))

    def growth(self, a: str, b: str, start: int, end: int) -> Estimate:
        """Gap at the longer input less that at the shorter one, with its own error."""
        return self.combine((1, a, end), (-1, b, end), (-1, a, start), (1, b, start))

    def perplexity(self, method: str, length: int) -> float:
        table = self.sums(method, length)
        return math.exp(table["sum"].sum().sum() / table["count"].sum().sum())

    def right(self, *terms: tuple[float, str], lengths: Sequence[int] = ()) -> Estimate:
        """Weighted sum of accuracies in percent, means over the lengths beyond training: over seeds and samples, or over
        seeds alone where answers were not kept by sample."""
        rows = self.where(metric="accuracy").frame
        rows = rows[rows["method"].isin([name for _, name in terms])]
        rows = rows[rows["length"].isin(lengths) if lengths else rows["length"] > rows["train_length"]]
        rows = rows.assign(right=100 * rows["sum"] / rows["count"])
        table = rows.pivot(index=["method", "seed"], columns=["length", "document"], values="right")
        seeds = sorted(set.intersection(*(set(table.loc[method].index) for _, method in terms)))
        total = sum(weight * table.loc[method].loc[seeds] for weight, method in terms)
        if (rows["document"] == -1).any():
            return mean_over_seeds(total.mean(axis=1).to_numpy())
        return paired_mean(total.to_numpy(float), np.ones(total.shape[1]))

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


# --- rules: functions of the results on one corpus that yield the comparisons of a claim

Rule = Callable[[Data], list[Comparison]]
ENDS = ("train", "longest")


def rule(compare: Callable[..., Iterator[Comparison]]) -> Callable[..., Rule]:
    """`lower(a, b)(data)`: arguments first, the results later."""
    return lambda *arguments, **options: lambda data: list(compare(data, *arguments, **options))


def places(data: Data, methods: Sequence[str], at: Sequence = ENDS, train=None) -> Iterator[tuple]:
    """(results at one training length, that length, evaluated length) where all methods were trained and evaluated.

    at:    "train", "longest", or multiples of the training length. Losses at other lengths are of the same tokens: one
           interval at the training length and one at the longest, the curve is for looking.
    train: all training lengths, the "shortest", the "longest", or one in tokens.
    """
    known = data.settings(*methods)
    chosen = {"shortest": known[:1], "longest": known[-1:], None: known}
    for length, own in chosen.get(train, [one for one in known if one[0] == train]):  # type: ignore[call-overload]
        lengths = own.lengths(*methods)
        named = {"train": length, "longest": max(lengths, default=0)}
        wanted = dict.fromkeys(named[one] if one in named else one * length for one in at)
        yield from ((own, length, n) for n in wanted if n in lengths)


def listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


@rule
def lower(data: Data, better: str, worse: str | Sequence[str], factor: float = 1.0, **where):
    """The loss of `better` is below that of every one of `worse`, by a factor of perplexity (below 1: at most so much worse)."""
    for rival in listed(worse):
        for own, train, n in places(data, (better, rival), **where):
            points = ((better, train, n), (rival, train, n))
            yield Comparison(f"{rival} at {n}", own.gap(better, rival, n), -1, -math.log(factor), points)


@rule
def pairs(data: Data, *of: tuple[str, str], **where):
    """`lower` for each (better, worse)."""
    for better, worse in of:
        yield from lower(better, worse, **where)(data)


@rule
def ordered(data: Data, methods: Sequence[str], **where):
    """Each method is better than the one before it."""
    for worse, better in pairwise(methods):
        yield from lower(better, worse, **where)(data)


@rule
def some_lower(data: Data, several: Sequence[str], than: str, at: Sequence = ("longest",)):
    """In each setting the best of several (by its mean there) is below another; Bonferroni over them."""
    for own, train, n in places(data, (than, *several), at):
        gaps = {name: own.gap(name, than, n) for name in several}
        best = min(gaps, key=lambda name: gaps[name].value)
        one = by_t(gaps[best].value, gaps[best].error ** 2, gaps[best].dof, gaps[best].seeds)
        wide = one.error * quantile(one.dof, 1 - 0.05 / len(several))
        one = replace(one, low=one.value - wide, high=one.value + wide)
        yield Comparison(f"{best} at {n}", one, -1, 0.0, ((best, train, n), (than, train, n)))


@rule
def changes(
    data: Data, methods: str | Sequence[str], side: int, factor=1.0, at: Sequence = ENDS[1:], train=None
):
    """The loss rises (side 1) or falls (−1) from the training length to another, by a factor of perplexity."""
    for name in listed(methods):
        for own, length, n in places(data, (name,), at, train):
            if n != length and length in own.lengths(name):
                points = ((name, length, length), (name, length, n))
                yield Comparison(name, own.change(name, length, n), side, side * math.log(factor), points)


@rule
def grows(data: Data, a: str, b: str | Sequence[str], train=None):
    """The lead of a over b is larger at the longest input than at the training length."""
    for rival in listed(b):
        for own, length, n in places(data, (a, rival), ("longest",), train):
            if length in own.lengths(a, rival):
                yield Comparison(f"{rival}, {length} → {n}", own.growth(a, rival, length, n), -1)


@rule
def near(data: Data, a: str, b: str, factor: float):
    """Perplexities of a and b differ by less than a factor."""
    for own, _, n in places(data, (a, b)):
        yield Comparison(f"{b} at {n}", own.gap(a, b, n), 0, math.log(factor))


@rule
def across(data: Data, a: tuple[str, int], b: tuple[str, int], at: Sequence[int], factor: float = 1.0):
    """`lower` for (method, training length) of different training lengths."""
    names = data.frame["method"] + " (" + data.frame["train_length"].astype(str) + ")"
    by_train, one, other = Data(data.frame.assign(method=names)), f"{a[0]} ({a[1]})", f"{b[0]} ({b[1]})"
    if {one, other} <= set(by_train.methods):
        for n in at:
            yield Comparison(f"{other} at {n}", by_train.gap(one, other, n), -1, -math.log(factor))


@rule
def at_most(data: Data, methods: Sequence[str], perplexity: float, at: Sequence):
    """Losses are at most that of a perplexity; the difference from it."""
    for name in methods:
        for own, _, n in places(data, (name,), at):
            yield Comparison(f"{name} at {n}", own.combine((1, name, n)), -1, math.log(perplexity))


@rule
def on_hits(data: Data, a: str, b: str):
    """More than half of the lead of a over b is on recall hits, at the longest input: gain on hits less half of the gain."""
    for own, _, n in places(data, (a, b), ("longest",)):
        hits = own.hits(n)
        terms = ((-1, a, n, hits), (1, b, n, hits), (0.5, a, n), (-0.5, b, n))
        yield Comparison(f"at {n}", own.combine(*terms, counts=(a, n)), 1)


@rule
def more_on_hits(data: Data, a: str, b: str):
    """Per token, the lead of a over b is larger on recall hits than on all tokens, at the longest input."""
    for own, _, n in places(data, (a, b), ("longest",)):
        if not (hits := own.hits(n)):
            continue
        share = own.sums(a, n, hits)["count"].iloc[0].sum() / own.sums(a, n)["count"].iloc[0].sum()
        terms = ((-1 / share, a, n, hits), (1 / share, b, n, hits), (1, a, n), (-1, b, n))
        yield Comparison(f"at {n}", own.combine(*terms, counts=(a, n)), 1)


@rule
def recalls_more(data: Data, a: str, b: str):
    """On tokens that only inputs beyond the training length can copy, the loss of a falls more than that of b."""
    for own, length, n in places(data, (a, b), ("longest",)):
        new = own.hits(n, length)
        terms = ((1, a, n, new), (-1, a, length, new), (-1, b, n, new), (1, b, length, new))
        yield Comparison(f"at {n}", own.combine(*terms), -1)


@rule
def more_accurate(data: Data, a: str, b: str | Sequence[str], tasks: Sequence[str], by: float = 0.0):
    """On each task a is more accurate than b (in points), over the lengths beyond training."""
    for task in tasks:
        own, title = data.where(corpus=task), task.replace("_", " ")
        for rival in (rival for rival in listed(b) if {a, rival} <= set(own.methods)):
            yield Comparison(f"{title}, {rival}", own.right((1, a), (-1, rival)), 1, by)


@rule
def accurate(data: Data, methods: Sequence[str], tasks: Sequence[str], least: float):
    """Each method answers at least so many percent of all inputs right, at all lengths."""
    for task in tasks:
        for name in methods:
            own = data.where(corpus=task, method=name)
            if task == "construction":
                one = accuracy(*own.where(metric="accuracy", method=name).frame[["sum", "count"]].sum())
                one = replace(one, value=100 * one.value, low=100 * one.low, high=100 * one.high, seeds=0)
            else:
                one = own.right((1, name), lengths=own.where(metric="accuracy").values("length"))
            yield Comparison(name, one, 1, least)


@rule
def slower(data: Data, a: str, b: str):
    """A step of a takes longer than one of b, in every size."""
    for size in data.values("corpus"):
        yield Comparison(f"{size}", data.where(corpus=size).ratio(a, b), 1, 1.0)


@rule
def slower_when_longer(data: Data, method: str, length: int, than: int):
    """With the same tokens, a step on longer windows takes longer."""
    one, other = (data.where(length=n).relative(method) for n in (length, than))
    yield Comparison(f"{length} / {than}", quotient(one, other), 1, 1.0)


@rule
def overhead_falls(data: Data, a: str, b: str, small: str, large: str):
    """The ratio of the times of a and b is smaller in the larger model."""
    one, other = (data.where(corpus=size).ratio(a, b) for size in (large, small))
    variance = one.error**2 + other.error**2
    yield Comparison(large, by_t(one.value - other.value, variance, min(one.dof, other.dof)), -1)


@rule
def sink(data: Data, a: str, b: str):
    """Attention weights on the first token, in points: a's less b's, mean over layers and heads, over seeds."""
    rows = data.where(metric="sink_share").frame
    means = (100 * rows.groupby(["length", "method", "seed"])["sum"].mean()).unstack("method")
    gaps = (means[a] - means[b]).unstack("length")
    yield from (Comparison(f"at {n}", mean_over_seeds(gaps[n].to_numpy()), 1) for n in gaps)


@rule
def exact(data: Data, check: Callable[[Data], float], tolerance: float = 1e-9):
    """A statement that is decided by computing it: the largest deviation is below a tolerance."""
    deviation = check(data)
    yield Comparison("deviation", Estimate(deviation, 0.0, deviation, deviation, 1.0), -1, tolerance)


# --- claims and verdicts


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, or a hypothesis of ours (section ""), once.

    experiments: whose results decide it, taken together. corpora: on which the statement is made, by readers' names;
    those without results are shown as not run. paper: its number, where the printed tables do not have the
    comparison. longer: experiments with more steps, for effects that the training budget may not reach.
    needs: why it is out of reach at this scale.
    """

    name: str
    section: str
    text: str
    experiments: tuple[str, ...] | str
    test: Rule
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
    lean: str = ""

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
        """The word of all corpora of the claim if they agree; contradicted if one contradicts; else the weakest."""
        words = {one.word for one in self.judgements if one.corpus != "code"} - {"not run"}
        if len(words) < 2:
            return next(iter(words), "out of reach" if self.claim.needs else "not run")
        weakest = ("contradicted", "out of reach", "too small", "one seed", "unclear", "reproduced")
        return min(words, key=weakest.index)

    @property
    def words(self) -> str:
        """The word, by corpus where they differ."""
        run = [one for one in self.judgements if one.word != "not run"]
        if len({one.word + one.lean for one in run}) < 2:
            return self.word + (run[0].lean if run else "")
        return ", ".join(f"{one.corpus}: {one.word}{one.lean}" for one in run)


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
        return printed_losses(self.folder / "printed.json")

    @cache  # noqa: B019
    def printed_on(self, corpus: str) -> Data:
        printed = self.printed()
        return Data(printed[printed["corpus"] == corpus])

    def judge(self, claim: Claim) -> Verdict:
        table = self.tables(claim.sources)
        if claim.needs or table is None:
            word = "out of reach" if claim.needs else "not run"
            return Verdict(claim, claim.paper, (Judgement("", word, why=claim.needs),))
        on_texts = set(claim.corpora) & set(STANDS_FOR)
        results = self.by_corpus(claim.sources) if on_texts else {claim.corpora[0]: Data(table)}
        judgements, paper = [], []
        for corpus in dict.fromkeys([*claim.corpora, *(name for name in results if name == "code")]):
            found = claim.test(results[corpus]) if corpus in results else []
            found = [one for one in found if one.estimate.known]
            printed = self.printed_on(STANDS_FOR.get(corpus, ""))
            theirs = printed_comparisons(claim, printed)
            paper += [shown_paper(theirs, printed, STANDS_FOR[corpus])] if theirs else []
            if found:
                judgements.append(self.word(claim, corpus, found, theirs))
            elif corpus in claim.corpora:
                judgements.append(Judgement(corpus, "not run"))
        return Verdict(claim, claim.paper or "; ".join(paper), tuple(judgements))

    def word(self, claim: Claim, corpus: str, found: list[Comparison], theirs: list[Comparison]) -> Judgement:
        weakest = min(found, key=lambda one: one.certainty)
        seeds, why = {one.estimate.seeds for one in found}, ""
        if all(one.holds for one in found):
            word = "reproduced"
        else:
            word = "contradicted" if any(one.against(len(found)) for one in found) else "unclear"
        # Which way one seed leans.
        lean = {"reproduced": " ✓", "contradicted": " ✗"}.get(word, "") if 1 in seeds else ""
        word = "one seed" if 1 in seeds else word
        if word != "reproduced" and claim.longer:
            more = self.by_corpus((claim.longer,)).get(corpus)
            longer = claim.test(more) if more else []
            if longer and fmean(one.margin for one in longer) > fmean(one.margin for one in found):
                shown = min(longer, key=lambda one: one.certainty)
                word, why = "too small", f"with more steps {shown.text}: {show(shown)}"
        reach = (weakest.estimate.high - weakest.estimate.low) / 2
        # The paper's margin for the same methods.
        methods = [method for method, *_ in weakest.points]
        same = [one.margin for one in theirs if methods == [method for method, *_ in one.points]]
        if word in ("unclear", "one seed") and not weakest.holds and same and 0 < min(same) < reach:
            word, why = (
                "out of reach",
                f"the paper's difference is {min(same):.3f}, the interval ±{reach:.3f}",
            )
        return Judgement(corpus, word, weakest, len(found), why, lean if word == "one seed" else "")

    @cache  # noqa: B019
    def verdicts(self) -> list[Verdict]:
        return [self.judge(claim) for claim in self.claims]


def printed_comparisons(claim: Claim, printed: Data) -> list[Comparison]:
    """The same test on the paper's own numbers, as far as it prints them."""
    try:
        return [one for one in claim.test(printed) if one.estimate.known] if len(printed.frame) else []
    except LookupError:
        return []


def show(one: Comparison) -> str:
    """The estimate with its interval; perplexities and accuracies in their own units."""
    e = one.estimate
    if e.error == 0:
        return f"{e.value:.3g}"
    digits = 1 if max(abs(e.value), e.error) >= 10 else 2 if max(abs(e.value), e.error) >= 1 else 3
    return interval(e, digits, signs=one.side <= 0 or one.bound == 0)


def interval(one: Estimate, digits: int = 3, signs: bool = True) -> str:
    """value [low, high]; a zero has no sign."""
    shown = (
        f"{round(x, digits) or 0.0:{'+' if signs and round(x, digits) else ''}.{digits}f}"
        for x in (one.value, one.low, one.high)
    )
    return "{} [{}, {}]".format(*shown).replace("-", "−")


def shown_paper(found: list[Comparison], data: Data, corpus: str) -> str:
    """The paper's own perplexities where its margin is smallest."""
    if not found:
        return ""
    one = min(found, key=lambda comparison: comparison.margin)
    name = {"arxiv": "Arxiv", "books3": "Books3"}.get(corpus, corpus)
    if not one.points:
        return f"{name} {one.estimate.value:+.3f}".replace("-", "−")
    x, y = (data.where(train_length=train).perplexity(method, n) for method, train, n in one.points)
    sign = "→" if one.points[0][0] == one.points[1][0] else "<" if x < y else ">"
    return f"{name} {x:.2f} {sign} {y:.2f}"
