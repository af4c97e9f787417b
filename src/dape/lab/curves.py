"""Curves of a comparison (loss, change and difference by length over seeds), its tables, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from dape.evaluation.inference import Estimate, crossed_mean
from dape.lab.records import STEP, VIEWS, Results
from dape.lab.stats import ERRORS, UNKNOWN, Losses, over_seeds, signed
from dape.lab.tables import OURS, Cell, Row, Table, change, exp, perplexity, plain, times
from dape.methods import canonical

# Change of the loss from the first length, in nats: upper limits for "held" and for "worse".
HELD, WORSE = 0.01, 0.1
# Slices of the tokens that are shown, in words.
SLICES = {"hit": "seen before", "other": "all others"}
# Documents below which standard errors over documents are rough.
FEW_DOCUMENTS = 10


@dataclass(frozen=True)
class Point:
    """A method at a length: its loss, the change from the first length, and the difference to the baseline."""

    eval_length: int
    loss: Estimate
    change: Estimate = UNKNOWN
    difference: Estimate = UNKNOWN

    @property
    def ppl(self) -> float:
        return exp(self.loss.value)


@dataclass(frozen=True)
class Curve:
    """Losses by length over seeds; no points if all runs failed. bars: errors to draw instead of those of the
    losses."""

    label: str
    method: str
    points: tuple[Point, ...]
    steps: int = 0
    train_seconds: float = math.nan
    failures: tuple[str, ...] = ()


class Bar(NamedTuple):
    """A value and the lengths of its error bar upwards and downwards."""

    value: float
    up: float
    down: float


class Quantity(NamedTuple):
    label: str
    logarithmic: bool
    of: Callable[[Point], Bar]


def _symmetric(estimate: Estimate) -> Bar:
    return Bar(estimate.value, estimate.error, estimate.error)


def _perplexity(point: Point) -> Bar:
    """Perplexity with a paired bar: the error of the difference to the baseline; none for the baseline itself."""
    error = point.difference.error
    return Bar(point.ppl, point.ppl * math.expm1(error), -point.ppl * math.expm1(-error))


def _loss(point: Point) -> Bar:
    return Bar(point.loss.value, point.difference.error, point.difference.error)


QUANTITIES = {
    "ppl": Quantity("perplexity", True, _perplexity),
    "nll": Quantity("loss (nats a token)", False, _loss),
    "change": Quantity("change of the loss from the first length", False, lambda p: _symmetric(p.change)),
    "difference": Quantity("loss minus the baseline's", False, lambda p: _symmetric(p.difference)),
}


def derive(results: Results, baseline: str) -> None:
    """Add rows of the metrics change (from the first length) and difference (to the baseline), paired by window."""
    content = results.content
    # Merged results whose windows are of other tokens: their changes cannot be derived again.
    kept = {row["run"] for row in content["rows"] if row["metric"] == "loss" and row.get("windows") is None}
    derived = [
        row["metric"] == "difference"
        or (row["metric"] == "change" and not row.get("slice") and row["run"] not in kept)
        for row in content["rows"]
    ]
    content["rows"] = [row for row, again in zip(content["rows"], derived, strict=True) if not again]
    slices = dict.fromkeys(row.get("slice", "") for row in content["rows"])
    rows = [row for slice in slices for row in _derived(Losses(results, slice=slice), baseline, slice)]
    content["rows"] += sorted(rows, key=lambda row: (row["run"], row["metric"], row["eval_length"]))
    results.__dict__.pop("frame", None)


def _derived(losses: Losses, baseline: str, slice: str) -> Iterator[dict[str, Any]]:
    for trained, by_length in losses.rows.items():
        base = losses.rows.get(trained._replace(method=_method(baseline), variant=_variant(baseline)), {})
        first = min(by_length)
        for length, seed, row in (
            (n, seed, row) for n, rows in by_length.items() for seed, row in rows.items()
        ):
            others = {"difference": (base.get(length, {}).get(seed), baseline)}
            # The tokens of a slice differ between lengths: changes of slices are stored with the losses.
            others |= {} if slice else {"change": (by_length[first].get(seed), str(first))}
            for metric, (other, against) in others.items():
                if other is None or (other is row and metric == "difference"):
                    continue
                if row.get("windows") is None or other.get("windows") is None:
                    continue
                sums, counts = losses.by_document((1, -1), (row, other), trained.corpus)
                estimate = crossed_mean(sums[counts > 0], counts[counts > 0])
                entry = {"run": row["run"], "eval_length": length, "metric": metric, "against": against}
                entry |= {"slice": slice} if slice else {}
                yield {**entry, "value": estimate.value, "error": 0.0 if other is row else estimate.error}


def _method(label: str) -> str:
    return label.partition(" (")[0]


def _variant(label: str) -> str:
    return label.partition(" (")[2].removesuffix(")")


def label_of(row: dict[str, Any]) -> str:
    variant = row.get("variant")
    return f"{row['method']} ({variant})" if variant else row["method"]


def views(results: Results) -> list[str]:
    """The views that have rows, in the order to show them."""
    present = {row.get("view", STEP) for row in results["runs"]}
    return [view for view in VIEWS if view in present]


def labels(results: Results) -> list[str]:
    """All methods, including failed ones, in the requested order."""
    asked = map(_canonical, results.settings.get("methods", ()))
    rows = [*results["runs"], *results["failures"]]
    return list(dict.fromkeys([*asked, *map(label_of, rows)]))


def _canonical(label: str) -> str:
    """The label with its method's options in the order of the runs; as it is if the method is not known here."""
    try:
        return label.replace(_method(label), canonical(_method(label)), 1)
    except ValueError:
        return label


def curves(results: Results, view: str) -> list[Curve]:
    """A curve for every method, in the requested order."""
    lines = [line for line in results.lines() if line.get("view", STEP) == view]
    return [_curve(results, lines, view, label) for label in labels(results)]


def _curve(results: Results, lines: list[dict[str, Any]], view: str, label: str) -> Curve:
    mine = [line for line in lines if label_of(line) == label]
    runs = {line["run"]: line for line in mine}.values()
    documents = num_documents(results) or math.inf
    baseline = results.settings.get("baseline")
    failed = [f for f in results["failures"] if label_of(f) == label and f.get("view", STEP) == view]

    def estimate(metric: str, length: int) -> Estimate:
        matching = [row for row in mine if row["metric"] == metric and row["eval_length"] == length]
        if metric == "difference":
            # Merged results may have differences to other baselines.
            matching = [row for row in matching if row.get("against", baseline) == baseline]
        if not matching:
            return UNKNOWN
        return over_seeds(
            (row.get("value") for row in matching),
            (row.get("error") for row in matching),
            dof=max(1, documents - 1),
        )

    lengths = sorted({line["eval_length"] for line in mine if line["metric"] == "loss"})
    points = [
        Point(n, estimate("loss", n), estimate("change", n), estimate("difference", n)) for n in lengths
    ]
    seconds = [run["train_seconds"] for run in runs if run.get("train_seconds") is not None]
    return Curve(
        label,
        mine[0]["method"] if mine else label,
        tuple(points),
        round(fmean(run["steps"] for run in runs)) if mine else 0,
        fmean(seconds) if seconds else math.nan,
        tuple(f"seed {row['seed']}: {row['error']}" for row in failed),
    )


def train_length(results: Results) -> int:
    return results["runs"][0]["train_length"] if results["runs"] else results.settings.get("train_length", 0)


def bars(curve: Curve, quantity: str) -> list[Bar]:
    """Error bars of the curve's points."""
    return [QUANTITIES[quantity].of(point) for point in curve.points]


def best_at(shown: Sequence[Curve], length: int) -> str | None:
    losses = [(p.loss.value, c.label) for c in shown for p in c.points if p.eval_length == length]
    return min(losses)[1] if losses else None


def mark(estimate: Estimate) -> str:
    """Mark of a change: held, worse or much-worse; empty if unknown."""
    if not estimate.known:
        return ""
    doubt = 2 * estimate.error if math.isfinite(estimate.error) else 0.0
    if estimate.value <= max(HELD, doubt):
        return "held"
    return "worse" if estimate.value <= WORSE else "much-worse"


def loss_table(results: Results, view: str, colours: dict[str, str] | None = None) -> Table:
    """Perplexities by length, the change of the loss from the first length to the last, and the training time."""
    shown, unit = curves(results, view), train_length(results)
    lengths = sorted({point.eval_length for curve in shown for point in curve.points})
    heads = [f"{times(length, unit)}\n{length}" for length in lengths]
    span = f"{times(lengths[0], unit)} → {times(lengths[-1], unit)}" if lengths else ""
    heads += [f"change\n{span}", "steps", "train\ns"]
    best = {length: best_at(shown, length) for length in lengths}
    rows = []
    for curve in shown:
        points = {point.eval_length: point for point in curve.points}
        if not points:
            cells = [Cell("failed", mark="failed"), *[Cell()] * (len(heads) - 1)]
        else:
            cells = [
                perplexity(points[n].loss, best=best[n] == curve.label, mark=mark(points[n].change))
                if n in points
                else Cell("–")
                for n in lengths
            ]
            last = points[lengths[-1]].change if lengths[-1] in points else UNKNOWN
            cells.append(change(last, mark=mark(last)))
            cells += [Cell(str(curve.steps), curve.steps), plain(curve.train_seconds, 0)]
        name = curve.label + (" !" if curve.failures and points else "")
        colour = (colours or {}).get(curve.label, "")
        rows.append(Row(name, OURS, tuple(cells), colour, bool(lengths) and best[lengths[-1]] == curve.label))
    seeds = {run["seed"] for run in results["runs"]}
    tail = f", mean of {len(seeds)} seeds" if len(seeds) > 1 else ""
    return Table(f"Perplexity at {VIEWS[view]}{tail}", tuple(heads), tuple(rows), corner="method")


def difference_table(results: Results, view: str, colours: dict[str, str] | None = None) -> Table | None:
    """Paired differences of the loss to the baseline's, at every length; None if there are none."""
    shown, unit = curves(results, view), train_length(results)
    lengths = sorted({point.eval_length for curve in shown for point in curve.points})
    rows = []
    for curve in shown:
        gaps = {point.eval_length: point.difference for point in curve.points}
        if any(gap.known for gap in gaps.values()):
            cells = tuple(change(gaps[n]) if n in gaps else Cell("–") for n in lengths)
            rows.append(Row(curve.label, OURS, cells, (colours or {}).get(curve.label, "")))
    if not rows:
        return None
    heads = tuple(f"{times(length, unit)}\n{length}" for length in lengths)
    title = f"Loss minus {results.settings.get('baseline')}'s, at {VIEWS[view]}"
    return Table(title, heads, tuple(rows), corner="method")


def recall_table(results: Results, view: str) -> Table | None:
    """Loss minus the baseline's on recall hits and on all other tokens; None if unknown."""
    rows = []
    counts = {name: {r["eval_length"]: r["count"] for r in results.lines("loss", name)} for name in SLICES}
    lengths = sorted({n for of_slice in counts.values() for n in of_slice})
    for name, words in SLICES.items():
        lines = [r for r in results.lines("difference", name) if r.get("view", STEP) == view]
        for label in dict.fromkeys(map(label_of, lines)):
            mine = [line for line in lines if label_of(line) == label]
            by_length = {n: [r for r in mine if r["eval_length"] == n] for n in lengths}
            cells = [
                change(over_seeds((r["value"] for r in rows_), (r.get("error") for r in rows_)))
                if rows_
                else Cell("–")
                for rows_ in by_length.values()
            ]
            rows.append(Row(f"{label}, {words}", OURS, tuple(cells)))
    unit = train_length(results)
    heads = tuple(
        f"{times(n, unit)}\n" + " ".join(f"{known[n]} {name}" for name, known in counts.items() if n in known)
        for n in lengths
    )
    title = (
        f"Where it comes from: loss minus {results.settings.get('baseline')}'s by recall, at {VIEWS[view]}"
    )
    note = "hit: tokens whose trigram the input has shown before, which could be copied; other: all other tokens."
    return Table(title, heads, tuple(rows), note, corner="method") if rows else None


def verdict(results: Results, view: str = STEP) -> str:
    """Summary of the result: the best method at the longest length against the baseline, or against the next."""
    shown = [curve for curve in curves(results, view) if curve.points]
    if not shown:
        return "No run was evaluated."
    unit = train_length(results)
    longest = max(point.eval_length for curve in shown for point in curve.points)
    ranked = sorted(
        (c for c in shown if c.points[-1].eval_length == longest), key=lambda c: c.points[-1].loss.value
    )
    best, baseline = ranked[0], results.settings.get("baseline")
    where = f"At {times(longest, unit)} the training length"
    where += "" if view == STEP else f" and {VIEWS[view]}"
    other = next((c for c in ranked if c.label == baseline and c is not best), None)
    if other is None and len(ranked) > 1:
        other = ranked[1]
    if other is None:
        return f"{where} {best.label} has perplexity {best.points[-1].ppl:.2f} ({_evidence(results)})."
    gap = paired_gap(results, view, best, other, longest)
    lower = 100 * -math.expm1(gap.value)
    said = f"{where} {best.label} has {lower:.1f} % lower perplexity than {other.label}"
    doubt = ", error unknown"
    if math.isfinite(gap.error):
        doubt = "" if abs(gap.weight) > ERRORS else f", not significant: p = {gap.p_value:.2f}"
    return f"{said} (loss {signed(gap)} nats{doubt}; {_evidence(results)})."


def paired_gap(results: Results, view: str, one: Curve, other: Curve, length: int) -> Estimate:
    """Loss of one minus that of the other at a length, paired if their windows are known."""
    known = next((p.difference for p in one.points if p.eval_length == length), UNKNOWN)
    if other.label == results.settings.get("baseline") and known.known:
        return known
    losses = Losses(results)
    pair = [
        next(t for t in losses.rows if t.view == view and t.label == curve.label and length in losses.rows[t])
        for curve in (one, other)
    ]
    try:
        return losses.difference((1, pair[0], length), (-1, pair[1], length))
    except ValueError:
        return Estimate(losses.loss(pair[0], length).value - losses.loss(pair[1], length).value)


def _evidence(results: Results) -> str:
    seeds = len({run["seed"] for run in results["runs"]})
    said = f"{seeds} seed{'s' if seeds > 1 else ''}"
    documents = num_documents(results)
    return said + (f", {documents} document{'s' if documents > 1 else ''}" if documents else "")


def num_documents(results: Results) -> int:
    """Number of evaluated documents in all corpora; 0 if unknown."""
    return sum(len(set(ids)) for ids in results["documents"].values())


def warnings(results: Results) -> list[str]:
    """Caveats about the standard errors."""
    documents = num_documents(results)
    if not documents or documents >= FEW_DOCUMENTS:
        return []
    what = "one document carries" if documents == 1 else f"only {documents} documents carry"
    tail = "there are no standard errors" if documents == 1 else "they are rough"
    return [f"Errors are over documents, and {what} them: {tail}. Hold out more documents (--validation)."]
