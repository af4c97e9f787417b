"""The table of results: a pandas frame with the columns of COLUMNS, on disk one compressed CSV file an experiment.

    table = pandas.read_csv("results.csv.gz")           # or read_table, which also checks the columns
    rows = table.query("metric == 'loss' and slice == 'all' and length == 512")
    sums = rows.groupby("method")[["sum", "count"]].sum()
    loss = sums["sum"] / sums["count"]                   # nats per token; numpy.exp(loss) is the perplexity

A row is a sum over the tokens (answers, repetitions) of one document, and their number. What is known of a run as a
whole (steps, train_seconds, step_seconds, train_loss, parameters) has length 0 and document -1. The metric "targets" is
a checksum of a document's target tokens: rows of runs in which it differs are never paired.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import pandas as pd

from dape.evaluation.statistics import Estimate, mean_over_seeds, paired_mean
from dape.files import write_atomically

COLUMNS = {
    "run": "training and evaluation: words to recognise it by and a hash of all settings",
    "method": "name of the method, or of a variant of it",
    "seed": "of initial weights and data order",
    "corpus": "text or generated task",
    "train_length": "tokens in a training window; 0 if unknown",
    "length": "tokens of input at the evaluation; 0 if it does not apply",
    "document": "index of the document in the held-out split; -1 if it does not apply",
    "slice": "the tokens counted: all; recall<=N: their 3-gram occurs in the last N tokens of input, but not in as few as "
    "the next smaller N; recall>N: it does not; input A–B: those after A to B tokens of input; sliding by N: every token of a "
    "text; window and key: what a model makes of its own window",
    "metric": "what was measured: loss (nats), accuracy, milliseconds …",
    "sum": "sum of the metric over these tokens",
    "count": "their number",
}
# Columns that tell apart the rows of one run, and those of the run itself.
ROW = ("length", "document", "slice", "metric")
RUN = ("run", "method", "seed", "corpus", "train_length")
KINDS = {
    "seed": "int64",
    "train_length": "int64",
    "length": "int64",
    "document": "int64",
    "sum": "float64",
    "count": "int64",
}
ALL = "all"


def make_table(rows: Iterable[dict[str, object]] = ()) -> pd.DataFrame:
    """A table of rows; columns that a row lacks are those of a run as a whole."""
    usual = {"seed": 0, "train_length": 0, "length": 0, "document": -1, "slice": ALL, "count": 1}
    table = pd.DataFrame([{**usual, **row} for row in rows], columns=list(COLUMNS))
    return table.astype({**dict.fromkeys(COLUMNS, "str"), **KINDS})


def read_table(path: str | Path) -> pd.DataFrame:
    """Read a table; raises ValueError if the file has other columns."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no table of results {path}")
    kinds = {**dict.fromkeys(COLUMNS, "str"), **KINDS}
    try:
        table = pd.read_csv(path, dtype=kinds, keep_default_na=False, na_values={"sum": [""]})
    except (ValueError, OverflowError, EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a table of results: it is damaged, or a column of numbers holds text"
        ) from error
    if list(table.columns) != list(COLUMNS):
        raise ValueError(f"{path} has the columns {', '.join(table.columns)}, expected {', '.join(COLUMNS)}")
    return table


def write_table(table: pd.DataFrame, path: str | Path) -> Path:
    """Write the table as compressed CSV, replacing the file at once; the same table gives the same bytes."""
    text = io.StringIO()
    table.to_csv(text, index=False, lineterminator="\n", float_format="%.10g")
    write_atomically(path, gzip.compress(text.getvalue().encode(), mtime=0))
    return Path(path)


def join(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all tables; a row that is in several of them counts once."""
    parts = [table for table in tables if len(table)]
    if not parts:
        return make_table()
    return pd.concat(parts, ignore_index=True).drop_duplicates([*RUN, *ROW], ignore_index=True)


class Term(NamedTuple):
    """A weighted mean of one method at one length."""

    weight: float
    method: str
    length: int


class Options(TypedDict, total=False):
    """Options of `contrast`."""

    metric: str
    slices: Sequence[str]
    corpus: str | None
    train_length: int | None


def contrast(
    table: pd.DataFrame,
    terms: Sequence[Term],
    *,
    metric: str = "loss",
    slices: Sequence[str] = (ALL,),
    corpus: str | None = None,
    train_length: int | None = None,
) -> Estimate:
    """Weighted sum of means on the same tokens, paired by seed and document; unknown without common seeds.

    Raises ValueError if the terms are of different target tokens.
    """
    table = table[table["method"].isin({term.method for term in terms})]
    for column, value in (("corpus", corpus), ("train_length", train_length)):
        if value is not None:
            table = table[table[column] == value]
        elif table.groupby("method")[column].nunique().gt(1).any():
            known = ", ".join(map(str, table[column].unique()))
            raise ValueError(f"the table has several values of {column} ({known}): choose one")
    rows = table[(table["metric"] == metric) & table["slice"].isin(slices)]
    for (method, seed), own in rows.groupby(["method", "seed"])["run"]:
        if own.nunique() > 1:
            found = ", ".join(own.unique())
            raise ValueError(f"{method} has several runs of seed {seed} ({found}): label the variants apart")
    checksums = table[table["metric"] == "targets"].set_index("run")
    cells = []
    for term in terms:
        own = rows[(rows["method"] == term.method) & (rows["length"] == term.length)]
        cells.append(own.groupby(["seed", "document"])[["sum", "count"]].sum())
    seeds = set.intersection(*(set(cell.index.get_level_values("seed")) for cell in cells))
    if not seeds:
        return Estimate()
    used = rows[rows["seed"].isin(seeds)]["run"].unique()
    targets = {
        tuple(checksums.loc[[run], ["document", "sum"]].itertuples(index=False, name=None))
        for run in used
        if run in checksums.index
    }
    kept = [cell[cell.index.get_level_values("seed").isin(seeds)].sort_index() for cell in cells]
    first = kept[0]
    if len(targets) > 1 or any(not cell["count"].equals(first["count"]) for cell in kept[1:]):
        named = " and ".join(f"{term.method} at {term.length}" for term in terms)
        raise ValueError(f"{named} have different target tokens, so they cannot be paired")
    total = sum(term.weight * cell["sum"] for term, cell in zip(terms, kept, strict=True))
    sums = pd.Series(total, first.index).unstack("document")
    counts = first["count"].unstack("document")
    if counts.nunique().max() > 1 or counts.isna().any(axis=None):
        raise ValueError(f"the seeds of {terms[0].method} have different target tokens")
    if list(sums.columns) == [-1]:
        return mean_over_seeds((sums[-1] / counts[-1]).to_numpy())
    return paired_mean(sums.to_numpy(), counts.iloc[0].to_numpy())


def mean(table: pd.DataFrame, method: str, at: int, **options: Unpack[Options]) -> Estimate:
    """Mean of the metric of one method at a length; options: those of `contrast`."""
    return contrast(table, [Term(1, method, at)], **options)


def difference(table: pd.DataFrame, a: str, b: str, *, at: int, **options: Unpack[Options]) -> Estimate:
    """Mean of a minus mean of b at a length, on the same tokens; options: those of `contrast`."""
    return contrast(table, [Term(1, a, at), Term(-1, b, at)], **options)


def change(table: pd.DataFrame, method: str, start: int, stop: int, **options: Unpack[Options]) -> Estimate:
    """Mean at one length minus the mean at another, on the same tokens; options: those of `contrast`."""
    return contrast(table, [Term(1, method, stop), Term(-1, method, start)], **options)


def growth(
    table: pd.DataFrame, a: str, b: str, start: int, stop: int, **options: Unpack[Options]
) -> Estimate:
    """How much more a changes from one length to another than b, on the same tokens; options: those of `contrast`."""
    terms = [Term(1, a, stop), Term(-1, b, stop), Term(-1, a, start), Term(1, b, start)]
    return contrast(table, terms, **options)


def recall_slices(table: pd.DataFrame, length: int, base: int = 0) -> list[str]:
    """Slices of the tokens that inputs of `length` tokens make recall hits, and inputs of `base` tokens do not."""
    names = [name for name in table["slice"].unique() if re.fullmatch(r"recall.*<=\d+", name)]
    return [name for name in names if base < int(name.rpartition("<=")[2]) <= length]


def means(table: pd.DataFrame, metric: str = "loss", slice: str = ALL) -> pd.DataFrame:
    """Means over documents and seeds of every method (rows, in the table's order) at every length (columns)."""
    rows = table[(table["metric"] == metric) & (table["slice"] == slice)]
    sums = rows.groupby(["method", "length"], sort=False)[["sum", "count"]].sum()
    values = (sums["sum"] / sums["count"]).unstack("length").sort_index(axis=1)
    return values.reindex(rows["method"].unique())


def perplexities(table: pd.DataFrame) -> pd.DataFrame:
    """Perplexity of every method (rows) at every length (columns)."""
    return np.exp(means(table))
