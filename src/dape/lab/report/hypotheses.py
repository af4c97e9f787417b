"""Hypotheses of an experiment, a text of its folder whose numbers are read from the results.

    The gap is {{ latex.gap("dape1x3-kerple", "kerple", 256)|signed }} nats, {{ latex.decided("dape1x3-kerple", "kerple") }}.

`hypotheses.md.j2` becomes `hypotheses.md`. Variables of the template are the corpora by name, without digits at the end
(`latex13` is `latex`), and `latex_in_time` for the trainings of equal time: `Numbers` of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dape.evaluation.inference import Estimate
from dape.lab.folders import Folder
from dape.lab.records import STEP, TIME
from dape.lab.report import environment
from dape.lab.stats import ERRORS, Losses, Trained, signed

TEMPLATE, FILE = "hypotheses.md.j2", "hypotheses.md"
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Numbers:
    """Losses on one corpus at its longest training length, for a template.

    Methods are given by name, variants as "method (variant)"; lengths are of the input, in tokens.
    """

    folder: Folder
    corpus: str
    view: str

    @property
    def losses(self) -> Losses:
        return self.folder.losses

    def trained(self, method: str) -> Trained:
        here = [t for t in self.losses.rows if (t.view, t.corpus) == (self.view, self.corpus)]
        found = [t for t in here if t.label == method]
        if not found:
            known = ", ".join(dict.fromkeys(t.label for t in here))
            raise ValueError(
                f"{self.folder.path / TEMPLATE}: no training of {method} on {self.corpus} ({self.view}) in the results; "
                f"they have {known or 'none'}"
            )
        return max(found, key=lambda t: t.train_length)

    def gap(self, one: str, other: str, length: int) -> Estimate:
        """The loss of one method less that of another."""
        return self.losses.difference(*self._gap(one, other, length))

    def gaps(self, one: str, other: str, length: int) -> list[float]:
        """The same by seed."""
        return list(self.losses.differences(*self._gap(one, other, length)).values())

    def change(self, method: str, start: int, end: int) -> Estimate:
        """The loss at a longer input less that at a shorter one."""
        return self.losses.difference(*self._change(method, start, end))

    def changes(self, method: str, start: int, end: int) -> list[float]:
        """The same by seed."""
        return list(self.losses.differences(*self._change(method, start, end)).values())

    def growth(self, one: str, other: str, start: int, end: int) -> Estimate:
        """The gap at a longer input less that at a shorter one."""
        return self.losses.difference(
            *self._gap(one, other, end), *((-f, t, n) for f, t, n in self._gap(one, other, start))
        )

    def all_losses(self, method: str, length: int) -> list[float]:
        """Losses by seed."""
        return [row["value"] for _, row in sorted(self.losses.rows[self.trained(method)][length].items())]

    def perplexity(self, method: str, length: int) -> str:
        return f"{math.exp(self.losses.loss(self.trained(method), length).value):.2f}"

    def decided(self, one: str, other: str) -> str:
        """The lengths at which the first is decided to be lower, in words."""
        lengths = self.losses.lengths(self.trained(one), self.trained(other))
        sure = [n for n in lengths if self.gap(one, other, n).weight < -ERRORS]
        if sure == lengths:
            return "decided at every length"
        if sure and sure == lengths[: len(sure)]:
            return f"decided up to {sure[-1]} tokens"
        return f"decided at {joined(map(str, sure))} tokens" if sure else "not decided at any length"

    def count(self, *methods: str) -> int:
        """Number of seeds that all of the methods have."""
        return len(self.losses.common_seeds(map(self.trained, methods)))

    def steps(self, method: str) -> int:
        return self._of_run(method, "steps")

    def parameters(self, method: str) -> int:
        return self._of_run(method, "parameters")

    def on_hits(self, one: str, other: str, length: int) -> list[float]:
        """Percentage of the gap that is on recall hits, by seed."""
        totals = [
            [
                part.by_document(
                    (1, -1), [part.rows[t][length][seed] for t in self._pair(one, other)], self.corpus
                )[0]
                for part in self._parts()
            ]
            for seed in self._seeds_of_slices(one, other)
        ]
        return [100 * hits.sum() / (hits.sum() + others.sum()) for hits, others in totals]

    def hits(self, method: str, length: int) -> float:
        """Percentage of tokens that are recall hits."""
        return 100 * share_of_hits(*self._parts(), self.trained(method), length)

    def hit_gap(self, one: str, other: str, length: int) -> Estimate:
        """The loss of one method less that of another on recall hits."""
        return self._parts()[0].difference(*self._gap(one, other, length))

    def new_hits(self, method: str, length: int) -> list[float]:
        """The change of the loss from the training length that is on hits which only the longer input offers, as a mean
        over all tokens, by seed.
        """
        trained = self.trained(method)
        changes = self.folder.losses_on("new", "change").rows[trained][length]
        everything = sum(
            sum(part.rows[trained][length][next(iter(changes))]["tokens"]) for part in self._parts()
        )
        return [sum(row["windows"]) / everything for _, row in sorted(changes.items())]

    def _of_run(self, method: str, column: str) -> int:
        rows = self.losses.rows[self.trained(method)]
        return next(row[column] for of_seed in rows.values() for row in of_seed.values())

    def _gap(self, one: str, other: str, length: int) -> tuple[tuple[float, Trained, int], ...]:
        return (1.0, self.trained(one), length), (-1.0, self.trained(other), length)

    def _change(self, method: str, start: int, end: int) -> tuple[tuple[float, Trained, int], ...]:
        return (1.0, self.trained(method), end), (-1.0, self.trained(method), start)

    def _pair(self, one: str, other: str) -> tuple[Trained, Trained]:
        return self.trained(one), self.trained(other)

    def _parts(self) -> tuple[Losses, Losses]:
        return self.folder.losses_on("hit"), self.folder.losses_on("other")

    def _seeds_of_slices(self, one: str, other: str) -> list[int]:
        return self._parts()[0].common_seeds(self._pair(one, other))


def share_of_hits(hits: Losses, others: Losses, trained: Trained, length: int) -> float:
    """Share of the scored tokens that are recall hits at this length."""
    counts = [sum(next(iter(part.rows[trained][length].values()))["tokens"]) for part in (hits, others)]
    return counts[0] / sum(counts)


def hypotheses(folder: Folder) -> str | None:
    """The text with its numbers; None if the folder has no template or no results."""
    template = folder.path / TEMPLATE
    if not template.exists() or folder.best is None:
        return None
    values: dict[str, Numbers] = {}
    for corpus in folder.losses.corpora():
        name = re.sub(r"\W|\d+$", "", corpus)
        values |= {name: Numbers(folder, corpus, STEP), f"{name}_in_time": Numbers(folder, corpus, TIME)}
    filters = {"signed": signed, "lower": lower, "joined": joined, "word": word, "by_seed": by_seed}
    shared = environment().overlay()
    shared.filters = shared.filters | filters
    return shared.from_string(template.read_text("utf-8")).render(**values)


def lower(estimate: Estimate) -> str:
    """By how much something is lower: the size of a negative difference; a positive one keeps a minus sign."""
    return signed(replace(estimate, value=-estimate.value)).removeprefix("+")


def by_seed(values: Iterable[float], digits: int = 3, factor: float = 1.0) -> str:
    """Values in words, times a factor: 0.053, 0.065 and 0.021."""
    # Adding zero turns −0.000 into 0.000.
    return joined(f"{round(factor * value, digits) + 0.0:.{digits}f}".replace("-", "−") for value in values)


def joined(parts: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def word(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else str(number)
