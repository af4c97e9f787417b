"""Evidence for a claim: comparisons with standard errors, the strict verdict on them and the pooled one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Any

from dape.evaluation.inference import Estimate, average, pool, student_quantile
from dape.lab.stats import ERRORS, searched, signed

# Thresholds above this many standard errors are said.
SAID = 2.5
HOLDS, FAILS, UNDECIDED, NOT_RUN = "holds", "does not hold", "undecided", "not run at this scale"


@dataclass(frozen=True)
class Finding:
    """One comparison: `value` is positive in favour of the claim, `error` its standard error.

    setting: comparisons of one setting share documents, seeds or both; those of different ones do not.
    methods: labels of the methods compared; only comparisons of the same methods are pooled.
    """

    value: float
    error: float
    text: str
    dof: float = math.inf
    setting: Any = None
    methods: tuple[str, ...] = ()

    @property
    def weight(self) -> float:
        """Equivalent z-score; 0 if the error is unknown."""
        return Estimate(self.value, self.error, self.dof).weight


def finding(
    estimate: Estimate,
    text: str,
    setting: Any = None,
    methods: tuple[str, ...] = (),
    *,
    sign: int = 1,
    beyond: float = 0.0,
) -> Finding:
    """The finding that sign · estimate exceeds `beyond`."""
    return Finding(sign * estimate.value - beyond, estimate.error, text, estimate.dof, setting, methods)


@dataclass(frozen=True)
class Evidence:
    """All comparisons behind a claim.

    need:    how many must favour the claim: "every", "some", "most", or a minimum number.
    missing: trainings or lengths of the claim that the results lack.
    """

    findings: Sequence[Finding]
    missing: Sequence[str] = ()
    need: str | int = "every"
    unit: str = "comparisons"

    def verdict(self) -> tuple[str, str]:
        """The strict verdict, by every single comparison, and a sentence with the numbers."""
        if not self.findings:
            return NOT_RUN, _not_run(self.missing) if self.missing else "No results yet."
        verdict = self._verdict()
        return verdict, f"{self._summary(verdict)}{f' {_not_run(self.missing)}' if self.missing else ''}"

    def pooled(self) -> tuple[str, str]:
        """The verdict on all settings together, and the numbers; empty if the claim is not about their mean.

        Each pair of methods is pooled by itself, and the claim holds if it does for every pair: the lead over a weak
        method says nothing about the lead over a strong one. The numbers are those of the pair that decides.
        """
        if self.need != "every" or self.missing or len(self.findings) < 2:
            return "", ""
        by_methods = _groups(self.findings, lambda finding: finding.methods)
        settings = [_means_by_setting(findings) for findings in by_methods]
        if not all(math.isfinite(mean.value) and mean.error > 0 for means in settings for mean in means):
            return "", ""
        means = [average(several) for several in settings]
        weights = [mean.weight for mean in means]
        least = weights.index(min(weights))
        fails = weights[least] < -searched(len(weights))
        verdict = HOLDS if weights[least] > ERRORS else FAILS if fails else UNDECIDED
        text = _pooled_text(means[least], settings[least])
        weakest = f"; the weakest of {len(means)}: {' against '.join(by_methods[least][0].methods)}"
        return verdict, f"{text}{weakest if len(means) > 1 else ''}"

    @property
    def margin(self) -> float:
        """The value by which the claim stands or falls: of the comparisons that it needs, the least in its favour."""
        values = sorted((finding.value for finding in self.findings), reverse=True)
        return values[min(self._wanted, len(values)) - 1]

    @property
    def resolution(self) -> float:
        """The least value that decides a comparison with an error such as these have, in the median."""
        known = (f for f in self.findings if math.isfinite(f.error) and f.dof > 0)
        return median([f.error * needed(f.dof) for f in known] or [math.inf])

    @property
    def _wanted(self) -> int:
        """How many comparisons must favour the claim."""
        total = len(self.findings) + len(self.missing)
        return {"every": total, "some": 1, "most": total // 2 + 1}.get(str(self.need)) or int(self.need)

    def _beyond(self, bound: float) -> tuple[int, int]:
        """Number of comparisons for and against the claim by more than `bound` standard errors."""
        weights = [finding.weight for finding in self.findings]
        return sum(weight > bound for weight in weights), sum(weight < -bound for weight in weights)

    def _verdict(self) -> str:
        """Three-valued verdict: missing comparisons could still go either way."""
        total = len(self.findings) + len(self.missing)
        sure, against = self._beyond(searched(len(self.findings)))
        wins, losses = self._beyond(ERRORS)
        open_ = NOT_RUN if self.missing else UNDECIDED
        if self.need == "every":
            if against:
                return FAILS
            return HOLDS if wins == total else open_
        if self.need == "some":
            if sure:
                return HOLDS
            return FAILS if losses == total else open_
        if wins >= self._wanted:
            return HOLDS
        return FAILS if total - losses < self._wanted else open_

    def _summary(self, verdict: str) -> str:
        weights = [finding.weight for finding in self.findings]
        # The decisive comparison: the weakest if every one must hold, the strongest if one is enough.
        shown = self.findings[weights.index(max(weights) if self.need == "some" else min(weights))]
        text = f"{shown.text}{_threshold(shown.dof)}"
        if len(self.findings) == 1:
            return f"{text}."
        wins, losses = self._beyond(ERRORS)
        counts = f"{len(self.findings)} {self.unit}: {wins} for, {losses} against"
        within = len(self.findings) - wins - losses
        counts += f", {within} undecided" if within else ""
        if verdict == UNDECIDED and (wins if self.need == "some" else losses if self.need == "every" else 0):
            counts += f" (one of {len(self.findings)} decides beyond {searched(len(self.findings)):.1f})"
        strongest = "Strongest against it" if min(weights) < 0 else "Least certain"
        return f"{counts}. {'Strongest for it' if self.need == 'some' else strongest}: {text}."


def _means_by_setting(findings: Sequence[Finding]) -> list[Estimate]:
    """Mean of each setting: its comparisons and their errors are averaged, as if fully correlated."""
    return [
        Estimate(fmean(f.value for f in g), fmean(f.error for f in g), min(f.dof for f in g))
        for g in _groups(findings, lambda finding: finding.setting)
    ]


def _groups(findings: Sequence[Finding], key: Callable[[Finding], Any]) -> list[list[Finding]]:
    """Findings with the same key together, in the order of their first."""
    groups: dict[Any, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(key(finding), []).append(finding)
    return list(groups.values())


def _pooled_text(mean: Estimate, settings: list[Estimate]) -> str:
    """The mean over settings, their number, and their spread beyond their own errors."""
    apart = pool(settings).between
    count = f"{len(settings)} setting{'s' if len(settings) > 1 else ''}"
    differ = f", which differ by {apart:.3f}" if apart > 0.0005 else ""
    return f"{signed(mean)} for it{_threshold(mean.dof)}, over {count}{differ}"


def needed(dof: float) -> float:
    """Standard errors beyond which a comparison with so many degrees of freedom is decided: 2 with many of them."""
    return student_quantile(NormalDist().cdf(ERRORS), dof)


def _threshold(dof: float) -> str:
    """The threshold in words, where it is clearly above that of many degrees of freedom."""
    errors = needed(dof) if dof > 0 else math.inf
    return f", threshold: {errors:.1f} standard errors" if SAID < errors < math.inf else ""


def _not_run(missing: Sequence[str]) -> str:
    shown = list(dict.fromkeys(missing))
    rest = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return f"Not run: {', '.join(shown[:3])}{rest}."
