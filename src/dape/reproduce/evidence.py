"""From comparisons with standard errors to a verdict and the sentence that goes with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run at this scale"
VERDICTS = (HOLDS, FAILS, UNDECIDED, NOT_RUN)
# Standard errors beyond which one comparison counts.
ERRORS = 2.0


@dataclass(frozen=True)
class Finding:
    """One comparison: `value` is how far it speaks for the claim (against, below zero), `error` its standard error."""

    value: float
    error: float
    text: str

    @property
    def weight(self) -> float:
        """In standard errors; 0 where the error is not known, or nothing was measured."""
        if math.isnan(self.value) or math.isnan(self.error):
            return 0.0
        return (
            self.value / self.error if self.error else math.copysign(math.inf, self.value) * bool(self.value)
        )

    @property
    def speaks_for(self) -> bool:
        return self.weight > ERRORS

    @property
    def speaks_against(self) -> bool:
        return self.weight < -ERRORS


@dataclass(frozen=True)
class Evidence:
    """All comparisons that a claim rests on.

    need:    "every" of them must speak for the claim, "some", "most", or a number of them at least.
    missing: what the claim names and the results do not have.
    """

    findings: Sequence[Finding]
    missing: Sequence[str] = ()
    need: str | int = "every"
    unit: str = field(default="comparisons")

    def verdict(self) -> tuple[str, str]:
        """The verdict, and a sentence with the numbers behind it."""
        if not self.findings:
            return NOT_RUN, f"{_sentence(self.missing)}" if self.missing else "No results yet."
        verdict = self._verdict()
        return verdict, f"{self._summary(verdict)}{f' {_sentence(self.missing)}' if self.missing else ''}"

    def _verdict(self) -> str:
        """Three-valued: what is missing could still go either way."""
        total = len(self.findings) + len(self.missing)
        bound = searched(len(self.findings))
        sure = sum(finding.weight > bound for finding in self.findings)
        against = sum(finding.weight < -bound for finding in self.findings)
        open_ = NOT_RUN if self.missing else UNDECIDED
        if self.need == "every":
            if against:
                return FAILS
            return HOLDS if all(f.speaks_for for f in self.findings) and not self.missing else open_
        if self.need == "some":
            if sure:
                return HOLDS
            return FAILS if all(f.speaks_against for f in self.findings) and not self.missing else open_
        wanted = total // 2 + 1 if self.need == "most" else int(self.need)
        wins = sum(finding.speaks_for for finding in self.findings)
        losses = sum(finding.speaks_against for finding in self.findings)
        if wins >= wanted:
            return HOLDS
        return FAILS if total - losses < wanted else open_

    def _summary(self, verdict: str) -> str:
        shown = self._telling(verdict)
        if len(self.findings) == 1:
            return f"{shown.text}."
        wins = sum(finding.speaks_for for finding in self.findings)
        losses = sum(finding.speaks_against for finding in self.findings)
        counts = f"{len(self.findings)} {self.unit}: {wins} for, {losses} against"
        within = len(self.findings) - wins - losses
        counts += f", {within} within two standard errors" if within else ""
        if verdict == UNDECIDED and (wins if self.need == "some" else losses if self.need == "every" else 0):
            counts += f" (one of {len(self.findings)} decides beyond {searched(len(self.findings)):.1f})"
        return f"{counts}. {self._label(verdict)}: {shown.text}."

    def _telling(self, verdict: str) -> Finding:
        """The comparison that decides: the weakest where every one counts, the strongest where one is enough."""
        weights = [finding.weight for finding in self.findings]
        place = weights.index(max(weights) if self.need == "some" else min(weights))
        return self.findings[place]

    def _label(self, verdict: str) -> str:
        if self.need == "some":
            return "Strongest for it"
        return "Strongest against it" if min(f.weight for f in self.findings) < 0 else "Closest"


def searched(count: int) -> float:
    """Standard errors beyond which the most extreme of `count` comparisons counts: 2 for one, 3.1 for 24.

    Among many comparisons some lie beyond two errors by chance, so a single one that is to prove a claim, or to
    disprove one that is made of all of them, must be as unlikely as one comparison beyond two errors.
    """
    tail = 1 - NormalDist().cdf(ERRORS)
    return NormalDist().inv_cdf(1 - tail / count)


def _sentence(missing: Sequence[str]) -> str:
    shown = list(dict.fromkeys(missing))
    rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"Not run: {', '.join(shown[:3])}{rest}."
