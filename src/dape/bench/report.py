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
    values = [[row[index] for row in rows] for index in range(len(columns))]
    widths = [max(map(len, [heading, *cells])) for (heading, *_), cells in zip(columns, values, strict=True)]
    if sum(widths) + 2 * len(widths) > 80:
        widths = [
            max(map(len, [*heading.split(), *cells]))
            for (heading, *_), cells in zip(columns, values, strict=True)
        ]
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for (heading, _, form), width in zip(columns, widths, strict=True):
        table.add_column(escape(heading), justify="right" if form else "left", width=width, no_wrap=not form)
    for row in rows:
        table.add_row(*map(escape, row))
    # Numbers are not truncated, even on a narrower terminal.
    Console(width=max(sum(widths) + 2 * len(widths), 80)).print(table)


def write_json(path: Path, records: Sequence[Record]) -> None:
    write_atomically(path, json.dumps(records, indent=2) + "\n")


def write_plot(path: Path, records: Sequence[Record]) -> None:
    """Plot milliseconds over length, both logarithmic, one panel per pass, one line per backend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [record for record in records if record["milliseconds"] is not None]
    passes = list(dict.fromkeys(record["pass"] for record in timed)) or ["forward"]
    figure, axes = pyplot.subplots(1, len(passes), figsize=(5 * len(passes), 4), squeeze=False)
    for axis, name in zip(axes[0], passes, strict=True):
        for backend in dict.fromkeys(record["backend"] for record in timed):
            cells = [r for r in timed if r["backend"] == backend and r["pass"] == name]
            if cells:
                axis.plot(
                    [r["length"] for r in cells], [r["milliseconds"] for r in cells], "o-", label=backend
                )
        axis.set(title=name, xlabel="keys", ylabel="milliseconds", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:] or "png")
    pyplot.close(figure)
