"""The data that claims are decided on: results of one experiment, and the trainings and lengths a claim selects.

Selectors that rules on language models share (`Where`):
    corpus  the paper's names or ours; by default all corpora in the results
    train   training lengths: "all", "shortest", "longest", "4x" (of the shortest), or numbers
    at      input lengths: "all", "train", "within", "beyond", "shortest", "longest", multiples of training's, or several
    view    equal-step or equal-time
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from dape.evaluation.inference import Estimate
from dape.lab.accuracies import Accuracies
from dape.lab.evidence import Evidence, Finding
from dape.lab.folders import Folder
from dape.lab.kinds.timing import Times
from dape.lab.paper import Paper
from dape.lab.records import STEP, listed
from dape.lab.stats import Losses, Trained, signed
from dape.lab.tables import exp, number

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Pick:
    """A method with a variant or a training length."""

    method: str
    variant: str | None = None
    train: Any = None


Choice = str | Pick
# A difference, its description, the setting, and the methods compared: arguments of `finding`.
Gap = tuple[Estimate, str, tuple[Any, ...], tuple[str, ...]]


class Where(NamedTuple):
    """Corpora, training lengths, evaluation lengths and the view of a claim."""

    corpus: Any = None
    train: Any = "all"
    at: Any = "all"
    view: str = STEP


class Setting(NamedTuple):
    """A corpus, a training length of the claim, and all training lengths of the corpus."""

    corpus: str
    train_length: int
    available: list[int]


@dataclass
class Data:
    """The results of one experiment at one scale; `missing` collects trainings and lengths of a claim that they lack."""

    folder: Folder
    paper: Paper = field(default_factory=Paper)
    missing: list[str] = field(default_factory=list)
    slice: str = ""
    metric: str = "loss"
    first_seed: int = 0

    def since(self, seed: int) -> Data:
        """The same without the seeds before this one, for a claim that those suggested; of language models."""
        return replace(self, first_seed=seed)

    def on(self, slice: str, metric: str = "loss") -> Data:
        """The same for the tokens of a slice (hit, new or other), or for their change from the training length."""
        return replace(self, slice=slice, metric=metric)

    @property
    def frame(self) -> pd.DataFrame:
        assert self.folder.best is not None
        return self.folder.best.frame

    @cached_property
    def losses(self) -> Losses:
        losses = self.folder.losses_on(self.slice, self.metric) if self.slice else self.folder.losses
        if not self.first_seed:
            return losses
        return losses.only(
            {seed for one in losses.rows for seed in losses.seeds(one) if seed >= self.first_seed}
        )

    @cached_property
    def accuracies(self) -> Accuracies:
        return Accuracies(self.folder.best, self.folder.seed_variance)

    @cached_property
    def times(self) -> Times:
        return Times(self.folder.best)

    def lack(self, what: str) -> None:
        if what not in self.missing:
            self.missing.append(what)

    def evidence(
        self, findings: Sequence[Finding], need: str | int = "every", unit: str = "comparisons"
    ) -> Evidence:
        return Evidence(findings, self.missing, need, unit)

    def settings(self, where: Where) -> Iterator[Setting]:
        """Corpora and training lengths of the claim."""
        wanted = None if where.corpus is None else listed(where.corpus)
        for name in wanted or ():
            if not self.losses.corpora([name]):
                self.lack(name)
        present = self.losses.corpora(wanted)
        if not present and wanted is None:
            since = f" of seeds from {self.first_seed} on" if self.first_seed else ""
            self.lack(f"losses{' by recall' if self.slice else ''}{since}")
        for name in present:
            available = self.losses.train_lengths(where.view, name)
            lengths = train_lengths(available, where.train)
            if not lengths:
                self.lack(f"training length {where.train} on {name}")
            for length in lengths:
                yield Setting(name, length, available)

    def models(self, choice: Choice, setting: Setting, view: str, like: str | None = None) -> list[Trained]:
        """Trainings of the choice in that setting: of the variant that it or `like` names, else without a variant if
        there is such a training, else of every variant."""
        pick = Pick(choice) if isinstance(choice, str) else choice
        lengths = (
            [setting.train_length] if pick.train is None else train_lengths(setting.available, pick.train)
        )
        models = []
        for length in lengths:
            where = (view, setting.corpus, length, pick.method)
            variants = [trained.variant for trained in self.losses.rows if trained[:4] == where]
            own = pick.variant if pick.variant is not None else like
            if own is None and "" in variants:
                own = ""
            models += [Trained(*where, variant) for variant in variants if own is None or variant == own]
        if not models:
            of = f" ({pick.variant})" if pick.variant else ""
            at = setting.train_length if pick.train is None else pick.train
            self.lack(f"{pick.method}{of} on {setting.corpus}, training length {at}")
        return models

    def lengths(self, *trained: Trained, at: Any) -> list[int]:
        """Lengths of the claim, of those at which all were evaluated."""
        lengths = eval_lengths(self.losses.lengths(*trained), trained[0].train_length, at)
        if not lengths:
            self.lack(f"{trained[0].label} at {at}")
        return lengths

    def chosen(self, a: Any, where: Where) -> Iterator[Trained]:
        """Every choice in every setting."""
        for setting in self.settings(where):
            for choice in listed(a):
                yield from self.models(choice, setting, where.view)

    def pairs(self, a: Choice, b: Any, where: Where) -> Iterator[tuple[Trained, Trained]]:
        """Every a with every b of the same corpus, training length and variant, unless the choice says which."""
        for setting in self.settings(where):
            for one in self.models(a, setting, where.view):
                for choice in listed(b):
                    for other in self.models(choice, setting, where.view, like=one.variant):
                        yield one, other

    def fields(self, methods: Sequence[Choice], where: Where) -> list[tuple[list[Trained], int]]:
        """All methods together, for every corpus, training length and evaluation length at which all were run."""
        fields = []
        for setting in self.settings(where):
            models = [self.models(choice, setting, where.view) for choice in methods]
            if all(models):
                options = [several[0] for several in models]
                fields += [(list(options), length) for length in self.lengths(*options, at=where.at)]
        return fields

    def gaps(self, a: Choice, b: Any, where: Where) -> Iterator[Gap]:
        """Loss of every a minus that of its b at every length."""
        for one, other in self.pairs(a, b, where):
            for length in self.lengths(one, other, at=where.at):
                yield self.gap(one, other, length)

    def gap(self, one: Trained, other: Trained, length: int) -> Gap:
        """Loss of one minus that of the other, its description, the setting and the methods."""
        gap = self.losses.difference((1, one, length), (-1, other, length))
        both = one.train_length == other.train_length
        names = [f"{t.label}{'' if both else f' trained at {t.train_length}'}" for t in (one, other)]
        where = (
            f"{trained_on(one)}, evaluated at {length}" if both else f"{one.corpus}, evaluated at {length}"
        )
        common = {*self.losses.rows[one][length]} & {*self.losses.rows[other][length]}
        shown = [self.ppl(t, length, common) for t in (one, other)]
        of = f" on {self.slice} tokens" if self.slice else ""
        text = (
            f"{names[0]} has perplexity {shown[0]}{of}, {names[1]} {shown[1]} "
            f"({where}; loss {signed(gap)}, {len(common)} seed{'s' if len(common) > 1 else ''})"
        )
        return gap, text, setting_of(one, other), (one.label, other.label)

    def ppl(self, one: Trained, length: int, seeds: Container[int] | None = None) -> str:
        """Perplexity over these seeds, by default all of its own."""
        losses = self.losses if seeds is None else self.losses.only(seeds)
        return number(exp(losses.loss(one, length).value))


def setting_of(*trained: Trained) -> tuple[Any, ...]:
    """Setting of comparisons between these trainings: text, training lengths and view."""
    return trained[0].view, trained[0].corpus, *(one.train_length for one in trained)


def trained_on(one: Trained) -> str:
    return f"{one.corpus}, trained at {one.train_length}"


def train_lengths(available: Sequence[int], wanted: Any) -> list[int]:
    """Select training lengths: "all", "shortest", "longest", "4x" (of the shortest), or numbers."""
    if not available:
        return []
    choices = {"all": list(available), "shortest": [available[0]], "longest": [available[-1]]}
    if isinstance(wanted, str) and wanted in choices:
        return choices[wanted]
    numbers = [
        int(one[:-1]) * available[0] if isinstance(one, str) and one.endswith("x") else one
        for one in listed(wanted)
    ]
    if bad := [one for one in numbers if not isinstance(one, int)]:
        raise ValueError(f'train={bad[0]!r}: use "all", "shortest", "longest", "4x" or a length')
    return [length for length in available if length in numbers]


def eval_lengths(available: Sequence[int], train_length: int, wanted: Any) -> list[int]:
    """Select evaluation lengths: see the head of this file."""
    if not available:
        return []
    choices = {
        "all": list(available),
        "train": [length for length in available if length == train_length],
        "within": [length for length in available if length <= train_length],
        "beyond": [length for length in available if length > train_length],
        "shortest": [available[0]],
        "longest": [available[-1]],
    }
    lengths: set[int] = set()
    for one in listed(wanted):
        if isinstance(one, str) and one not in choices:
            raise ValueError(f'at="{one}": use {", ".join(choices)}, or multiples of the training length')
        lengths.update(choices[one] if isinstance(one, str) else [round(one * train_length)])
    return [length for length in available if length in lengths]
