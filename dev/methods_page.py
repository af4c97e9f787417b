"""`python -m dev.methods_page`: write docs/methods.json, of `dape bench methods --json`, into the table of docs/methods.md."""

from __future__ import annotations

import json
from pathlib import Path

from dape.bench.methods import COLUMNS
from dape.bench.report import Record
from dape.files import write_atomically

DOCS = Path(__file__).parents[1] / "docs"
START, END = "<!-- methods -->", "<!-- /methods -->"


def markdown(records: list[Record]) -> str:
    # Without --tasks no method reads long.
    columns = [column for column in COLUMNS if any(record[column[1]] != "" for record in records)]
    lines = ["| " + " | ".join(heading for heading, *_ in columns) + " |"]
    lines.append("|" + "|".join("--:" if form else "---" for _, _, form in columns) + "|")
    for record in records:
        name, *cells = [format(record[key], form) for _, key, form in columns]
        lines.append("| " + " | ".join([f"`{name}`", *cells]) + " |")
    return "\n".join(lines)


def page(text: str, records: list[Record]) -> str:
    """The page with the table of these records."""
    before, after = text[: text.index(START)], text[text.index(END) :]
    return f"{before}{START}\n{markdown(records)}\n{after}"


if __name__ == "__main__":
    path = DOCS / "methods.md"
    write_atomically(
        path, page(path.read_text("utf-8"), json.loads((DOCS / "methods.json").read_text("utf-8")))
    )
