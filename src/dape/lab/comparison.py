"""Comparison: the tables of a comparison with what is derived from them: curves, verdict, tables, figures, page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dape.evaluation import table as results
from dape.evaluation.metrics import KEY, WINDOW
from dape.evaluation.statistics import Estimate, perplexity
from dape.evaluation.table import read_table, recall_slices, write_table
from dape.files import plain, read_json, write_atomically
from dape.lab.tables import Cell, Row, Table, change_cell, perplexity_cell, times
from dape.settings import SettingError, check, revive

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Views of a comparison, in the order in which they are shown, and their files.
STEP, TIME = "equal-step", "equal-time"
VIEWS = {STEP: "equal steps", TIME: "equal training time"}
FILES = {STEP: "results.csv.gz", TIME: "equal-time.csv.gz"}
ABOUT = "about.json"
# Change of the loss from the first length, in nats: upper limits for "held" and for "worse".
HELD, WORSE = 0.01, 0.1
# Documents below which standard errors over documents are rough.
FEW_DOCUMENTS = 10


@dataclass(frozen=True)
class Failure:
    """A run that failed. title: of the run; view: of the comparison."""

    title: str
    error: str
    view: str = STEP


@dataclass(frozen=True)
class About:
    """What a comparison knows beyond its tables.

    methods: names in the requested order, of failed ones too. baseline: with which the others are compared.
    curves:  step, training loss and held-out loss by method. samples: continuations of a prompt by method.
    """

    methods: tuple[str, ...]
    baseline: str
    command: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    curves: dict[str, list[tuple[float, float, float | None]]] = field(default_factory=dict)
    samples: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A method at a length: its loss, the change from the first length, the difference to the baseline."""

    length: int
    loss: Estimate
    change: Estimate
    difference: Estimate

    @property
    def ppl(self) -> float:
        return perplexity(self.loss.value)


@dataclass(frozen=True)
class Curve:
    """A method's points by length; none if all of its runs failed."""

    method: str
    points: tuple[Point, ...]
    steps: float = math.nan
    seconds: float = math.nan

    def at(self, length: int) -> Point | None:
        return next((point for point in self.points if point.length == length), None)


class Comparison:
    """Results of a comparison.

    frame:  the table of the runs with equal steps (see `dape.evaluation.table`); tables: by view.
    folder: folder of its runs and files, if any.
    """

    def __init__(self, tables: dict[str, pd.DataFrame], about: About, folder: Path | None = None) -> None:
        self.tables = {view: tables[view] for view in VIEWS if view in tables and len(tables[view])}
        self.about, self.folder = about, folder

    @property
    def frame(self) -> pd.DataFrame:
        return self.tables.get(STEP, results.make_table())

    @property
    def views(self) -> list[str]:
        return list(self.tables)

    @property
    def train_length(self) -> int:
        """The shortest training length; 0 if none is known."""
        known = {int(n) for table in self.tables.values() for n in table["train_length"].unique() if n}
        return min(known, default=0)

    @property
    def lengths(self) -> list[int]:
        return sorted(
            {point.length for view in self.views for curve in self.curves(view) for point in curve.points}
        )

    @property
    def num_documents(self) -> int:
        """Documents with evaluation windows."""
        documents = self.frame["document"]
        return documents[documents >= 0].nunique()

    @property
    def num_seeds(self) -> int:
        return self.frame["seed"].nunique()

    @property
    def failed(self) -> bool:
        """Whether a run failed, or a loss is not a number."""
        sums = [table.loc[table["metric"] == "loss", "sum"] for table in self.tables.values()]
        return bool(self.about.failures) or not all(np.isfinite(values).all() for values in sums)

    def methods(self, view: str) -> list[str]:
        return list(dict.fromkeys([*self.about.methods, *self.tables[view]["method"]]))

    def curves(self, view: str = STEP) -> list[Curve]:
        """A curve for every method, in the requested order."""
        return self._curves.get(view, [])

    @cached_property
    def _curves(self) -> dict[str, list[Curve]]:
        return {
            view: [self._curve(table[table["method"].isin({name, self.about.baseline})], name)
                   for name in self.methods(view)]
            for view, table in self.tables.items()
        }  # fmt: skip

    def _curve(self, table: pd.DataFrame, method: str) -> Curve:
        rows = table[
            (table["method"] == method) & (table["metric"] == "loss") & (table["slice"] == results.ALL)
        ]
        lengths = sorted(rows["length"].unique().tolist())
        baseline = self.about.baseline
        points = [
            Point(
                length,
                results.mean(table, method, length),
                results.change(table, method, lengths[0], length),
                Estimate() if method == baseline else self._difference(table, method, baseline, length),
            )
            for length in lengths
        ]
        costs = (results.mean(table, method, 0, metric=name).value for name in ("steps", "train_seconds"))
        return Curve(method, tuple(points), *costs)

    @staticmethod
    def _difference(
        table: pd.DataFrame, a: str, b: str, length: int, slices: Sequence[str] = ("all",)
    ) -> Estimate:
        try:
            return results.difference(table, a, b, at=length, slices=slices)
        except ValueError:  # merged results of other target tokens
            return Estimate()

    def verdict(self, view: str = STEP) -> str:
        """The result in a sentence: the best method at the longest length against the baseline, or the next."""
        if view not in self.tables:
            return "No run was evaluated."
        longest, unit, baseline = self.lengths[-1], self.train_length, self.about.baseline
        ranked = [(point.loss.value, curve) for curve in self.curves(view) if (point := curve.at(longest))]
        ranked.sort(key=lambda pair: pair[0])
        best = ranked[0][1]
        where = f"At {times(longest, unit)} the training length" if unit else f"At {longest} tokens"
        where += "" if view == STEP else f" and {VIEWS[view]}"
        seeds, documents = self.num_seeds, self.num_documents
        counted = f"{seeds} seeds" if seeds > 1 else "one seed"
        counted += f", {documents} documents" if documents != 1 else ", one document"
        others = [curve for _, curve in ranked[1:]]
        other = next((curve for curve in others if curve.method == baseline), others[0] if others else None)
        if other is None:
            return f"{where} {best.method} has perplexity {perplexity(ranked[0][0]):.2f} ({counted})."
        gap = self._difference(self.tables[view], best.method, other.method, longest)
        if not gap.known:
            return f"{where} {best.method} has the lowest perplexity, on other tokens than {other.method} ({counted})."
        lower = -100 * math.expm1(gap.value)
        doubt = "" if gap.sign or not math.isfinite(gap.low) else ", the interval holds zero"
        return (
            f"{where} {best.method} has {lower:.1f} % lower perplexity than {other.method} "
            f"(loss {signed(gap)}{doubt}; {counted})."
        )

    def warnings(self) -> list[str]:
        """Caveats about the intervals."""
        found = []
        documents = self.num_documents
        if self.tables and self.num_seeds == 1:
            found.append(
                "One seed: intervals are over documents alone, and another training may differ by more."
            )
        if self.tables and documents < FEW_DOCUMENTS:
            only = "There is only one document, so there are no intervals"
            few = f"Intervals are over only {documents} documents, so they are rough"
            found.append(f"{only if documents == 1 else few}. Hold out more documents (--validation).")
        return found

    def loss_table(self, view: str = STEP) -> Table:
        """Perplexities by length, the change of the loss from the first length to the last, and the training time."""
        curves, lengths, unit = self.curves(view), self.lengths, self.train_length
        heads = self.heads()
        span = f"{times(lengths[0], unit)} → {times(lengths[-1], unit)}" if lengths else ""
        heads.append(f"change\n{span}")
        trained = bool(self.at_equal(view))
        heads += ["steps", "train\ns"] if trained else []
        best = {n: min((c.at(n).loss.value for c in curves if c.at(n)), default=math.nan) for n in lengths}  # type: ignore[union-attr]
        rows = []
        for index, curve in enumerate(curves):
            if not curve.points:
                cells = [Cell("failed", mark="failed"), *[Cell()] * (len(heads) - 1)]
                rows.append(Row(curve.method, tuple(cells), colour=index))
                continue
            cells = [
                perplexity_cell(p.loss, best=p.loss.value == best[n], mark=mark(p.change))
                if (p := curve.at(n)) else Cell("–")
                for n in lengths
            ]  # fmt: skip
            last = curve.points[-1]
            cells.append(change_cell(last.change, mark=mark(last.change)))
            costs = (curve.steps, curve.seconds) if trained else ()
            cells += [Cell(f"{n:.0f}", n) if math.isfinite(n) else Cell("–") for n in costs]
            rows.append(Row(curve.method, tuple(cells), last.loss.value == best.get(lengths[-1]), index))
        tail = f", mean of {self.num_seeds} seeds" if self.num_seeds > 1 else ""
        title = f"Perplexity{self.at_equal(view)}{tail}"
        return Table(title, tuple(heads), tuple(rows), "method")

    def difference_table(self, view: str = STEP) -> Table | None:
        """Differences of the loss to the baseline's at every length: on all tokens, on recall hits, on all others."""
        table, lengths = self.tables[view], self.lengths
        names = [name for name in table["slice"].unique() if name.startswith("recall")]
        rows = []
        for index, method in enumerate(self.methods(view)):
            curve = next(one for one in self.curves(view) if one.method == method)
            if not any(point.difference.known for point in curve.points):
                continue
            own = table[table["method"].isin({method, self.about.baseline})]
            gaps = {point.length: point.difference for point in curve.points}
            rows.append(self._gap_row(method, [gaps.get(n, Estimate()) for n in lengths], index))
            for title, wanted in (("seen before", True), ("all others", False)) if names else ():
                of_slice = []
                for length in lengths:
                    hits = recall_slices(own, length)
                    slices = hits if wanted else [name for name in names if name not in hits]
                    of_slice.append(self._difference(own, method, self.about.baseline, length, slices))
                rows.append(self._gap_row(f"  {title}", of_slice, index))
        if not rows:
            return None
        title = f"Loss minus {self.about.baseline}'s{self.at_equal(view)}"
        return Table(title, tuple(self.heads()), tuple(rows), "method")

    def at_equal(self, view: str) -> str:
        """The view in a title; empty for models that were not trained for this comparison."""
        trained = any(math.isfinite(curve.steps) for curve in self.curves(view))
        return f" at {VIEWS[view]}" if trained else ""

    def heads(self) -> list[str]:
        """Column heads of the lengths: multiple of the training length, and tokens."""
        unit = self.train_length
        return [f"{times(length, unit)}\n{length}" if unit else str(length) for length in self.lengths]

    def slice_table(self, method: str, prefix: str) -> Table:
        """Loss of a method on the slices of that name (rows) at every length (columns), and their share of the tokens."""
        own = self.frame[(self.frame["method"] == method) & (self.frame["metric"] == "loss")]
        names = [name for name in own["slice"].unique() if name.startswith(prefix)]
        lengths = sorted(own.loc[own["slice"].isin(names), "length"].unique().tolist())
        counts = own[own["length"] == lengths[-1]].groupby("slice")["count"].sum()
        rows = []
        for name in names:
            losses = [results.mean(own, method, length, slices=[name]) for length in lengths]
            cells = [Cell(f"{counts[name] / counts[names].sum():.1%}")]
            # In 80 columns there is room for the errors of a few lengths.
            known = len(lengths) <= 3 and math.isfinite(losses[0].error)
            cells += [
                Cell(f"{x.value:.3f}" + (f" ± {x.error:.3f}" if known else ""), x.value) for x in losses
            ]
            rows.append(Row(name, tuple(cells)))
        return Table(f"Loss of {method}", ("tokens", *map(str, lengths)), tuple(rows), "slice")

    def use_of_window(self, method: str) -> str:
        """What a model makes of its own window, and of inputs beyond it; empty if that was not measured."""
        own = self.frame[self.frame["method"] == method]
        lengths = sorted(own.loc[own["slice"] == WINDOW, "length"].unique().tolist())
        if not lengths:
            return ""
        (_, half, window), longest = lengths[:3], lengths[-1]
        losses = {n: results.mean(own, method, n, slices=[WINDOW]).value for n in lengths[:3]}
        ppl = perplexity(losses[window])
        said = f"{method} has a window of {window} tokens. Inputs cut to it have perplexity {ppl:.2f}"
        if longest > window:
            change = results.change(own, method, window, longest, slices=[WINDOW])
            said += f"; with all {longest} tokens the loss changes by {signed(change)}"
            key = results.change(own, method, window, longest, slices=[KEY])
            if key.known:
                said += f", on tokens that the later half of the window predicts by {signed(key)}"
        said += f". Its loss is {', '.join(f'{loss:.3f} with {n}' for n, loss in losses.items())} tokens"
        if not results.change(own, method, half, window, slices=[WINDOW]).sign < 0:
            said += "; the later half of the window gives no measurable gain, so a flat curve shows nothing"
        return said + "."

    @staticmethod
    def _gap_row(label: str, gaps: Sequence[Estimate], index: int) -> Row:
        return Row(label, tuple(change_cell(gap) if gap.known else Cell("–") for gap in gaps), colour=index)

    def table(self, metric: str = "perplexity", view: str = STEP) -> pd.DataFrame:
        """Methods by lengths: perplexity, change, difference, or the mean of a metric of the table."""
        import pandas as pd

        if metric in ("change", "difference"):
            columns = {
                curve.method: {point.length: getattr(point, metric).value for point in curve.points}
                for curve in self.curves(view)
            }
            return pd.DataFrame.from_dict(columns, orient="index").dropna(how="all")
        frame = self.tables.get(view, results.make_table())
        asked = "loss" if metric == "perplexity" else metric
        found = results.means(frame, asked)
        if found.empty:
            known = ", ".join(["perplexity", "change", "difference", *frame["metric"].unique()])
            raise ValueError(f'there is no metric "{metric}" at view "{view}": there are {known}')
        return np.exp(found) if metric == "perplexity" else found

    def plot(self, quantity: str = "perplexity", view: str = STEP) -> Figure:
        """Figure of perplexity, change or difference by length, with 95 % intervals."""
        from dape.lab.figures import comparison_figure

        return comparison_figure(self, view, quantity)

    def latex(self, view: str = STEP) -> str:
        """Table of perplexities for a paper."""
        return self.loss_table(view).latex()

    def report(self, path: str | Path) -> Path:
        """Write the self-contained page report.html; returns its path."""
        from dape.lab.page import page

        write_atomically(path, page(self))
        return Path(path)

    def save(self, folder: Path) -> None:
        """Write the tables, about.json, table.tex, figures/ and report.html; each is replaced at once."""
        from dape.lab.figures import FORMATS, save

        for view, file in FILES.items():
            if view in self.tables:
                write_table(self.tables[view], folder / file)
            else:
                (folder / file).unlink(missing_ok=True)
        write_atomically(folder / ABOUT, json.dumps(plain(asdict(self.about)), indent=1) + "\n")
        for view in self.views:
            drawn = self.plot(view=view)
            for suffix in FORMATS:
                save(drawn, folder / "figures" / f"perplexity-{view}.{suffix}")
        write_atomically(folder / "table.tex", "\n".join(map(self.latex, self.views)))
        self.report(folder / "report.html")

    def __repr__(self) -> str:
        return f"Comparison: {self.verdict()}"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<p>{escape(self.verdict())}</p>{self.table().round(2).to_html()}"


def signed(estimate: Estimate) -> str:
    """A difference of losses with its interval."""
    text = f"{estimate.value:+.3f}"
    if math.isfinite(estimate.low):
        text += f" [{estimate.low:+.3f}, {estimate.high:+.3f}]"
    return text.replace("-", "−") + " nats"


def mark(change: Estimate) -> str:
    """Mark of a change: held, worse or much-worse; empty if unknown."""
    if not change.known:
        return ""
    doubt = max(0.0, change.high - change.value) if math.isfinite(change.high) else 0.0
    if change.value <= max(HELD, doubt):
        return "held"
    return "worse" if change.value <= WORSE else "much-worse"


def load_comparison(folder: str | Path) -> Comparison:
    """Load the comparison in a folder of `dape compare`, `sweep` or `merge`."""
    folder = Path(folder)
    if not (folder / FILES[STEP]).exists():
        raise FileNotFoundError(
            f"{folder} is not a comparison: it has no {FILES[STEP]} (`dape compare` and `dape sweep` write one)"
        )
    tables = {view: read_table(folder / file) for view, file in FILES.items() if (folder / file).exists()}
    methods = tuple(dict.fromkeys(name for table in tables.values() for name in table["method"]))
    if (folder / ABOUT).exists():
        return Comparison(tables, read_about(folder / ABOUT, methods), folder)
    if not methods:
        raise ValueError(f"{folder / FILES[STEP]} has no rows")
    return Comparison(tables, About(methods, methods[0]), folder)


def read_about(path: Path, methods: Sequence[str]) -> About:
    """What a comparison's about.json holds; a ValueError with the path if it is not what `save` writes."""

    try:
        about: About = revive(About, read_json(path))
        check(about)
    except (KeyError, TypeError, SettingError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if about.baseline not in {*about.methods, *methods}:
        raise ValueError(f'{path} is damaged: its baseline "{about.baseline}" is not one of its methods')
    return about


def same_runs(one: pd.DataFrame, other: pd.DataFrame) -> bool:
    """Whether the rows are of the same runs with the same results."""
    if set(one["run"]) != set(other["run"]):
        return False
    both = one[one["document"] >= 0].merge(other, on=["run", *results.ROW])
    return bool(len(both)) and bool(np.isclose(both["sum_x"], both["sum_y"], rtol=1e-6).all())


def clashes(one: Comparison, other: Comparison) -> set[str]:
    """Methods that both have, with other runs or other results."""
    found = set()
    for view in one.tables.keys() & other.tables.keys():
        for method, own in one.tables[view].groupby("method"):
            theirs = other.tables[view][other.tables[view]["method"] == method]
            if len(theirs) and not same_runs(own, theirs):
                found.add(str(method))
    return found


def merge(parts: Sequence[Comparison], names: Sequence[str]) -> Comparison:
    """Merge comparisons; a method in several of them, with other runs, is labelled with its part's name."""
    tables: dict[str, list[pd.DataFrame]] = {}
    methods: list[str] = []
    baselines = []
    for index, (part, name) in enumerate(zip(parts, names, strict=True)):
        others = [other for number, other in enumerate(parts) if number != index]
        clashing = {method for other in others for method in clashes(part, other)}
        known = dict.fromkeys(
            [*part.about.methods, *(m for frame in part.tables.values() for m in frame["method"])]
        )
        labels = {method: f"{method} ({name})" if method in clashing else method for method in known}
        for view, frame in part.tables.items():
            tables.setdefault(view, []).append(frame.assign(method=frame["method"].map(labels)))
        methods += [labels[method] for method in part.about.methods]
        baselines.append(labels[part.about.baseline])
    first = parts[0].about
    about = About(
        tuple(dict.fromkeys(methods)),
        baselines[0],
        "\n".join(dict.fromkeys(part.about.command for part in parts)),
        first.settings,
        first.environment,
        tuple(failure for part in parts for failure in part.about.failures),
    )
    return Comparison({view: results.join(frames) for view, frames in tables.items()}, about)
