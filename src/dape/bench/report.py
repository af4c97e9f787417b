"""Output of benchmarks: a table on the screen, records in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dape.files import write_atomically

Record = dict[str, Any]

# Heading, key, format; a missing value is a dash.
Column = tuple[str, str, str]


def print_table(title: str, columns: Sequence[Column], records: Sequence[Record]) -> None:
    """Print a table without lines; headings are broken between words."""
    rows = [
        ["–" if record.get(key) is None else format(record[key], form) for _, key, form in columns]
        for record in records
    ]
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading, _, form in columns:
        broken = escape(heading).replace(" ", "\n")
        table.add_column(broken, justify="right" if form else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    # Neither numbers nor words are broken, even on a narrower terminal.
    Console(width=1000).print(table)


def show(title: str, columns: Sequence[Column], records: Sequence[Record], file: Path | None) -> None:
    """Print the table and the reasons of skipped cases; write the records to the file, if given."""
    print_table(title, columns, records)
    for record in records:
        if record.get("skipped"):
            print(f"{record['backend']}, {record['pass']}, {record['length']}: {record['skipped']}")
    if file is not None:
        write_atomically(file, json.dumps(records, indent=2) + "\n")
