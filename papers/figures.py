"""Figures of the experiments, from their tables."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from dape.evaluation.table import ALL
from dape.files import write_atomically
from papers.ledger import CORPORA, Data

STYLE: dict[str, Any] = {
    "font.size": 8, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.4, "lines.markersize": 3.5, "legend.frameon": False, "legend.fontsize": 7, "svg.hashsalt": "dape",
    "axes.grid": True, "grid.alpha": 0.25, "svg.fonttype": "none", "font.family": "sans-serif",
}  # fmt: skip
PANEL = (2.9, 2.4)
# The same colour for a method in every figure: by encoding, with the processor as the marker.
COLOURS = {"kerple": "#1f77b4", "rope": "#d62728", "alibi": "#2ca02c", "fire": "#9467bd", "nope": "#7f7f7f"}
COLOURS |= {"t5": "#8c564b", "cope": "#e377c2", "dape1x3-kerple": "#000000", "keyshift-kerple": "#e08214"}


def look(method: str, number: int) -> dict[str, Any]:
    """Colour and marker of a method."""
    colour = COLOURS.get(method) or matplotlib.colormaps["tab20"]((2 * number + 1) % 20)
    width = 2.0 if method == "dape1x3-kerple" else 1.2
    return {"color": colour, "marker": "os^Dv<>pX*"[number % 10], "linewidth": width}


def curves(table: pd.DataFrame, reference: str = "kerple"):
    """Loss less that of a reference method by length of input, a panel for each corpus and training length."""
    from matplotlib.figure import Figure

    losses = table[(table["metric"] == "loss") & (table["slice"] == ALL)]
    panels = list(losses.groupby(["corpus", "train_length"], sort=False))
    methods = list(dict.fromkeys(losses["method"]))
    drawn = Figure((PANEL[0] * len(panels) + 1.9, PANEL[1] + 0.4), layout="constrained")
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    for axis, ((corpus, train), rows) in zip(axes, panels, strict=True):
        sums = rows.groupby(["method", "length"])[["sum", "count"]].sum()
        means = (sums["sum"] / sums["count"]).unstack("length")
        base = reference if reference in means.index else means.index[means.mean(axis=1).argmin()]
        data, gaps = Data(rows), means - means.loc[base]
        for number, method in enumerate(methods):
            if method not in gaps.index:
                continue
            axis.plot(gaps.columns, gaps.loc[method], label=method, **look(method, number))
            known = [
                n
                for n in gaps.columns
                if n in (train, max(gaps.columns)) and gaps.loc[method, n] == gaps.loc[method, n]
            ]
            ends = [data.gap(method, base, n) for n in known] if method != base else []
            for n, one in zip(known, ends, strict=False):
                if one.known and one.dof >= 2:
                    axis.plot([n, n], [one.low, one.high], color=look(method, number)["color"], alpha=0.5)
        low, high = float(gaps.min().min()), float(gaps.max().max())
        axis.set_ylim(1.15 * min(low, -0.02), min(1.1 * high, max(0.3, -3 * low)) + 0.02)
        axis.axvline(train, color="grey", linestyle=":", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(gaps.columns, [str(n) for n in gaps.columns], rotation=45)
        axis.set_title(f"{CORPORA.get(str(corpus), corpus)}, trained at {train}: loss − {base}", fontsize=8)
        axis.set_xlabel("tokens of input")
    axes[0].set_ylabel("nats per token")
    handles = {
        label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(handles.values(), handles.keys(), loc="outside right center")
    return drawn


def levels(table: pd.DataFrame):
    """Perplexity by length of input; lines that leave the panel end at a multiple of the lowest."""
    from matplotlib.figure import Figure

    losses = table[(table["metric"] == "loss") & (table["slice"] == ALL)]
    sums = losses.groupby(["method", "length"], sort=False)[["sum", "count"]].sum()
    values = np.exp(sums["sum"] / sums["count"]).unstack("length")
    train, top = losses["train_length"].iloc[0], 2 * float(values.min().min())
    drawn = Figure((6.4, 3.2), layout="constrained")
    axis = drawn.subplots()
    for number, (method, row) in enumerate(values.iterrows()):
        axis.plot(row.index, row, **look(str(method), number))
        # The name stands where the line ends, or where it leaves the panel.
        inside = row[row <= top]
        place = (
            (inside.index[-1], inside.iloc[-1])
            if len(inside) == len(row)
            else (1.06 * row.index[1] / 2**0.8, 0.97 * top)
        )
        axis.annotate(
            str(method),
            place,
            xytext=(6, -2),
            textcoords="offset points",
            color=look(str(method), number)["color"],
        )
    axis.axvline(train, color="grey", linestyle=":", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(values.columns, [f"{n}\n{n // train}×" for n in values.columns])
    axis.set_xlim(values.columns[0] / 1.1, values.columns[-1] * 2.6)
    axis.set_ylim(0.93 * float(values.min().min()), top)
    axis.set_xlabel("tokens of input, and multiples of the training length")
    axis.set_ylabel("perplexity of the same tokens")
    return drawn


def mean_accuracy(rows: pd.DataFrame) -> tuple[float, float]:
    """Mean over the lengths beyond training, and the standard error over seeds (NaN for one)."""
    beyond = rows[rows["length"] > rows["train_length"]]
    shares = beyond.assign(share=beyond["sum"] / beyond["count"])
    by_length = (
        shares.groupby(["seed", "length"])["share"].mean()
        if (rows["document"] >= 0).any()
        else shares.set_index(["seed", "length"])["share"]
    )
    by_seed = by_length.groupby("seed").mean()
    return float(by_seed.mean()), float(by_seed.sem()) if len(by_seed) > 1 else float("nan")


# By experiment or metric; other metrics are tables of a few numbers.
DRAW = {"code": levels, "loss": curves}


def write_figures(experiments: Iterable[tuple[str, str, pd.DataFrame]], folder: Path) -> list[Path]:
    """Draw (name, metric, table) into FOLDER/NAME.svg; the same table gives the same bytes."""
    written = []
    with matplotlib.rc_context(STYLE):
        for name, metric, table in experiments:
            text = io.StringIO()
            DRAW.get(name, DRAW[metric])(table).savefig(text, format="svg", metadata={"Date": None})
            folder.mkdir(exist_ok=True)
            write_atomically(
                folder / f"{name}.svg",
                "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n",
            )
            written.append(folder / f"{name}.svg")
    return written
