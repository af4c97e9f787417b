"""Rules on time: milliseconds with their spread, and ratios of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from dape.report.results import Estimate
from dape.reproduce.evidence import Evidence, Finding
from dape.reproduce.folders import Folder, Results
from dape.reproduce.paper import Paper
from dape.reproduce.rules.choosing import Chosen, listed

# Of a normal distribution, in standard deviations: its interquartile range, and the error of a median to a mean's.
RANGE, MEDIAN = 1.349, 1.253


class Timing:
    """The records of an experiment of kind "timing": (size, length) → method → milliseconds, and ratios.

    Each took turns with the one that all of its size are compared with: their ratio, round by round, is what was
    measured.
    """

    def __init__(self, results: Results) -> None:
        self.times: dict[tuple[str, int], dict[str, Estimate]] = {}
        self.ratios: dict[tuple[str, int], dict[str, Estimate]] = {}
        self.base = ""
        for row in results.get("records", ()):
            place, method, rounds = (row["size"], row.get("length") or 0), row["method"], row["rounds"]
            time, ratio = row["milliseconds"], row["ratio"]
            error = 0.0 if is_base(row) else median_error(row["ratio_spread"], rounds)
            self.base = self.base or base_name(row)
            self.times.setdefault(place, {})[method] = Estimate(time, median_error(row["spread"], rounds))
            self.ratios.setdefault(place, {})[method] = Estimate(ratio, error)

    @staticmethod
    def of(folder: Folder) -> Timing:
        return Timing(folder.best or {})

    def name_of(self, place: tuple[str, int]) -> str:
        """A place by what sets it apart from the others: its size, its length, or both."""
        sizes, lengths = ({place[part] for place in self.times} for part in (0, 1))
        words = [place[0]] if len(sizes) > 1 or len(lengths) == 1 else []
        return ", ".join([*words, f"length {place[1]}"] if len(lengths) > 1 else words)

    def ratio(self, place: tuple[str, int], a: str, b: str) -> Estimate:
        """Time of a over time of b."""
        return quotient(self.ratios[place][a], self.ratios[place][b])


def is_base(row: dict[str, Any]) -> bool:
    """Whether a record is of what all of its size are compared with: a method, at one of the lengths if several."""
    return bool(row["method"] == row["ratio_to"] and row["length"] == row.get("ratio_length", row["length"]))


def base_name(row: dict[str, Any]) -> str:
    """What all are compared with, for people; the length where others are compared with it as well."""
    return f"{row['ratio_to']}" + (f" at {row['ratio_length']}" if row.get("ratio_length") else "")


def quotient(one: Estimate, other: Estimate) -> Estimate:
    """Of two ratios to the same; their errors are treated as independent."""
    value = one.value / other.value
    return Estimate(value, value * math.hypot(one.error / one.value, other.error / other.value))


def median_error(spread: float | None, rounds: int) -> float:
    """The standard error of a median, from the interquartile range and the number of rounds; NaN for a single one.

    For normal times the range is 1.35 standard deviations, and a median's error 1.25 of a mean's.
    """
    return MEDIAN / RANGE * spread / math.sqrt(rounds) if spread is not None and rounds > 1 else math.nan


def slower(folder: Folder, _: Paper, *, a: str, b: Any, sizes: Any = None, factor: float = 1.0) -> Evidence:
    """a takes longer than b, by a factor at least, at every size."""
    data, chosen, findings = Timing.of(folder), Chosen(), []
    for method in listed(b):
        for place in _places(data, a, method, sizes, chosen):
            ratio = data.ratio(place, a, method)
            one, other = data.times[place][a], data.times[place][method]
            text = (
                f"{a} takes {one.value:.1f} ms and {method} {other.value:.1f} ms at {data.name_of(place)} "
                f"({ratio_text(ratio)} times)"
            )
            findings.append(Finding(ratio.value - factor, ratio.error, text))
    return Evidence(findings, chosen.missing)


def overhead_falls(folder: Folder, _: Paper, *, a: str, b: str, sizes: Any = None) -> Evidence:
    """The time of a over the time of b is less for each larger size; sizes in the order of b's times."""
    data, chosen, findings = Timing.of(folder), Chosen(), []
    places = _places(data, a, b, sizes, chosen)
    places.sort(key=lambda place: data.times[place][b].value)
    for length in dict.fromkeys(length for _, length in places):
        row = [place for place in places if place[1] == length]
        for small, large in pairwise(row):
            before, after = data.ratio(small, a, b), data.ratio(large, a, b)
            text = (
                f"{a} takes {ratio_text(before)} times as long as {b} at {small[0]}, "
                f"{ratio_text(after)} times at {large[0]}"
            )
            error = math.hypot(before.error, after.error)
            findings.append(Finding(before.value - after.value, error, text))
    if places and not findings:
        chosen.lack("a second size")
    return Evidence(findings, chosen.missing)


def slower_when_longer(folder: Folder, _: Paper, *, a: str, times: int, factor: float = 1.0) -> Evidence:
    """A step of a at so many times the shortest length takes longer than one at that, by a factor at least."""
    data, chosen, findings = Timing.of(folder), Chosen(), []
    for size in dict.fromkeys(size for size, _ in data.times):
        lengths = [length for name, length in data.times if name == size and a in data.times[name, length]]
        short = min(lengths, default=0)
        if short * times not in lengths:
            chosen.lack(f"{a} at {times} times the shortest length")
            continue
        few, many = (size, short), (size, short * times)
        ratio = quotient(data.ratios[many][a], data.ratios[few][a])
        text = (
            f"{a} takes {data.times[few][a].value:.1f} ms for a step at length {few[1]} and "
            f"{data.times[many][a].value:.1f} ms at {many[1]} ({ratio_text(ratio)} times, {size})"
        )
        findings.append(Finding(ratio.value - factor, ratio.error, text))
    if not data.times:
        chosen.lack(a)
    return Evidence(findings, chosen.missing)


def _places(data: Timing, a: str, b: str, sizes: Any, chosen: Chosen) -> list[tuple[str, int]]:
    """Sizes and lengths where both were timed."""
    wanted = None if sizes is None else listed(sizes)
    for size in wanted or ():
        if all(name != size for name, _ in data.times):
            chosen.lack(f"size {size}")
    found = [place for place in data.times if wanted is None or place[0] in wanted]
    for name in (a, b):
        if not any(name in data.times[place] for place in found):
            chosen.lack(name)
    return [place for place in found if {a, b} <= set(data.times[place])]


def ratio_text(ratio: Estimate) -> str:
    return f"{ratio.value:.3f}" + (f" ± {ratio.error:.3f}" if math.isfinite(ratio.error) else "")
