"""results.json: the records of a comparison, and the curves that they make over seeds.

{"settings", "environment", "command",
 "records":  [{method, seed, view, steps, train_seconds, train_length, eval_length, nll, nll_se, ppl, tokens}],
 "pairs":    [{view, method, baseline, seed, eval_length, difference, difference_se}],   the same target tokens
 "changes":  [{view, method, seed, from_length, eval_length, change, change_se}],        one method, two lengths
 "failures": [{method, seed, view, error}]}

What is not a finite number (the error of a single document, an overflowing perplexity) is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from dape.files import write_atomically

Results = dict[str, Any]
Row = dict[str, Any]

RECORD_FIELDS = (
    "method",
    "seed",
    "view",
    "steps",
    "train_seconds",
    "train_length",
    "eval_length",
    "nll",
    "nll_se",
    "ppl",
    "tokens",
)
# In the order in which they are shown.
VIEWS = {
    "equal-step": "equal steps",
    "equal-time": "equal training time",
}


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; the error is NaN where it is not known."""

    value: float
    error: float


@dataclass(frozen=True)
class Point:
    """A method at a length: its loss, and the loss less that at the first length and less the baseline's."""

    eval_length: int
    nll: Estimate
    change: Estimate
    difference: Estimate

    @property
    def ppl(self) -> float:
        return math.exp(self.nll.value) if self.nll.value < 700 else math.inf


@dataclass(frozen=True)
class Curve:
    """A method's scores by length, over its seeds. No points: every one of its runs failed."""

    method: str
    view: str
    seeds: tuple[int, ...]
    steps: int
    train_seconds: float
    points: tuple[Point, ...]
    failures: tuple[str, ...] = ()


def over_seeds(
    values: Iterable[float | None], errors: Iterable[float | None], *, expected: float | None = None
) -> Estimate:
    """Mean over seeds; its error joins that over documents with the spread between seeds.

    Seeds see the same documents, so averaging does not lessen the error over documents: it is taken as the
    mean of the seeds' errors, which is what it would be if their losses rose and fell together.
    expected: a standard deviation between seeds known from elsewhere; it counts as one degree of freedom beside
    those of the seeds here, so that one seed has an error and two that agree by chance are not taken to be exact.
    """
    numbers = [math.nan if value is None else value for value in values]
    squares = [(len(numbers) - 1, variance(numbers))] if len(numbers) > 1 else []
    squares += [(1, expected**2)] if expected is not None else []
    weight = sum(freedom for freedom, _ in squares)
    spread = math.sqrt(sum(n * square for n, square in squares) / weight / len(numbers)) if weight else 0.0
    documents = fmean(math.nan if error is None else error for error in errors)
    return Estimate(fmean(numbers), math.hypot(documents, spread))


def views(results: Results) -> list[str]:
    """The views that have records, in the order to show them."""
    present = {record["view"] for record in results["records"]}
    return [view for view in VIEWS if view in present]


def methods(results: Results) -> list[str]:
    """All methods, failed ones too, in the order in which they were asked for."""
    rows = [*results["records"], *results["failures"]]
    return list(dict.fromkeys([*results["settings"].get("methods", ()), *(row["method"] for row in rows)]))


def curves(results: Results, view: str) -> list[Curve]:
    """A curve for every method, in the order in which they were asked for."""
    return [curve(results, view, method) for method in methods(results)]


def curve(results: Results, view: str, method: str) -> Curve:
    records, changes, pairs = (
        [row for row in results.get(kind, ()) if row["method"] == method and row["view"] == view]
        for kind in ("records", "changes", "pairs")
    )
    failures = [row for row in results["failures"] if row["method"] == method and row["view"] == view]
    lengths = sorted({record["eval_length"] for record in records})
    points = [
        Point(
            length,
            _estimate(records, length, "nll", "nll_se"),
            _estimate(changes, length, "change", "change_se"),
            _estimate(pairs, length, "difference", "difference_se"),
        )
        for length in lengths
    ]
    return Curve(
        method,
        view,
        tuple(sorted({record["seed"] for record in records})),
        round(fmean(record["steps"] for record in records)) if records else 0,
        fmean(record["train_seconds"] for record in records) if records else math.nan,
        tuple(points),
        tuple(f"seed {row['seed']}: {row['error']}" for row in failures),
    )


def _estimate(rows: list[Row], length: int, value: str, error: str) -> Estimate:
    """Over the seeds' rows of a length; NaN where there are none."""
    chosen = [row for row in rows if row["eval_length"] == length]
    if not chosen:
        return Estimate(math.nan, math.nan)
    return over_seeds((row[value] for row in chosen), (row[error] for row in chosen))


def finite(value: Any) -> Any:
    """The value with None for what JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_results(results: Results, path: Path) -> None:
    write_atomically(path, json.dumps(finite(results), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def load_results(path: Path) -> Results:
    """The results in the file; an error in a sentence if it holds none."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: `dape compare` writes it")
    try:
        results = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    missing = {"settings", "records", "failures"} - set(results if isinstance(results, dict) else ())
    if missing:
        raise ValueError(f"{path} holds no comparison: {', '.join(sorted(missing))} is missing")
    for index, record in enumerate(results["records"]):
        if lacking := [field for field in RECORD_FIELDS if field not in record]:
            raise ValueError(f"{path}: record {index} lacks {', '.join(lacking)}")
    return results
