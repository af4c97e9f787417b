"""What a benchmark leaves behind: a table on the screen, records in a JSON file, a plot. Files appear whole or not at all."""

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
    table = Table(title=escape(title), title_justify="left")
    for heading, _, form in columns:
        table.add_column(escape(heading), justify="right" if form else "left", no_wrap=not form)
    for record in records:
        values = [record.get(key) for _, key, _ in columns]
        table.add_row(
            *(
                "–" if x is None else escape(format(x, form))
                for x, (_, _, form) in zip(values, columns, strict=True)
            )
        )
    console = Console()
    # A pipe or a file has no width of its own; nothing should be cut to fit 80 columns there.
    (console if console.is_terminal else Console(width=120)).print(table)


def write_json(path: Path, records: Sequence[Record]) -> None:
    write_atomically(path, json.dumps(records, indent=2) + "\n")


def write_plot(path: Path, records: Sequence[Record]) -> None:
    """Milliseconds over length, both logarithmic, a panel a pass, a line a backend."""
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
