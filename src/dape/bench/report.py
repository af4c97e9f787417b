"""Output of benchmarks: a table on the screen, records in a JSON file, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dape.files import replacing, write_atomically

Record = dict[str, Any]

# Heading, key, format; a missing value is a dash.
Column = tuple[str, str, str]


def print_table(title: str, columns: Sequence[Column], records: Sequence[Record]) -> None:
    """Print a table without lines; headings are broken between words to fit 80 columns."""
    rows = [
        ["–" if record.get(key) is None else format(record[key], form) for _, key, form in columns]
        for record in records
    ]
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    needed = 0
    for index, (heading, _, form) in enumerate(columns):
        # Neither numbers nor words of a heading are broken, even on a narrower terminal.
        width = max(map(len, [*heading.split(), *(row[index] for row in rows)]))
        table.add_column(escape(heading), justify="right" if form else "left", min_width=width)
        needed += width + 2
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=max(needed, 80)).print(table)


def write_json(path: Path, records: Sequence[Record]) -> None:
    write_atomically(path, json.dumps(records, indent=2) + "\n")


def write_plot(path: Path, records: Sequence[Record]) -> None:
    """Plot milliseconds over length, both logarithmic, one panel per pass, one line per backend."""
    import pandas as pd
    from matplotlib.figure import Figure

    passes = pd.DataFrame(records).dropna(subset="milliseconds").groupby("pass", sort=False)
    figure = Figure(figsize=(5 * max(1, len(passes)), 4), layout="constrained")
    axes = figure.subplots(1, max(1, len(passes)), squeeze=False)[0]
    for axis, (name, rows) in zip(axes, passes, strict=False):
        by_length = rows.pivot(index="length", columns="backend", values="milliseconds")
        by_length.plot(
            ax=axis, style="o-", loglog=True, grid=True, title=str(name), xlabel="keys", ylabel="milliseconds"
        )
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:])
