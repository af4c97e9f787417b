"""Numbers printed in a paper's tables and text, from paper.json, each with its section."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dape.files import read_json
from dape.lab.records import STEP, Results

FILE = "paper.json"
# Size of most of the paper's models; other sizes are treated as variants.
USUAL_SIZE = "125m"


@dataclass(frozen=True)
class Printed:
    """One number of the paper.

    quantity: perplexity, accuracy (percent), milliseconds or ratio; section: section of the paper; experiments: those
    that show it with their own; about: its conditions, such as corpus, train_length, method, variant, eval_length,
    task or size.
    """

    quantity: str
    value: float
    section: str
    experiments: tuple[str, ...]
    about: dict[str, Any]

    def get(self, name: str) -> Any:
        return self.about.get(name, "" if name == "variant" else None)


@dataclass(frozen=True)
class Paper:
    """All printed numbers; without a paper.json there are none."""

    title: str = ""
    numbers: tuple[Printed, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()

    def find(self, quantity: str, **about: Any) -> list[Printed]:
        """Numbers of a quantity that match all conditions."""
        return [
            number
            for number in self.numbers
            if number.quantity == quantity and all(number.get(name) == value for name, value in about.items())
        ]

    def value(self, quantity: str, **about: Any) -> float | None:
        """Number that matches all conditions; None if the paper prints none."""
        numbers = self.find(quantity, **about)
        return numbers[0].value if numbers else None

    def shown_with(self, experiment: str, quantity: str) -> list[Printed]:
        """Numbers that an experiment shows with its own."""
        return [n for n in self.numbers if n.quantity == quantity and experiment in n.experiments]

    def notes_on(self, experiment: str) -> list[str]:
        return [text for name, text in self.notes if name == experiment]


def load_paper(folder: Path) -> Paper:
    """Load the folder's paper.json; an empty Paper if there is no such file."""
    path = folder / FILE
    if not path.exists():
        return Paper()
    content = read_json(path)
    numbers = [number for table in content["tables"] for number in of_table(table)]
    numbers += [of_sentence(dict(entry)) for entry in content["sentences"]]
    notes = tuple((table["experiments"][0], table["note"]) for table in content["tables"] if "note" in table)
    return Paper(content["title"], tuple(numbers), notes)


def of_table(table: dict[str, Any]) -> Iterator[Printed]:
    """Numbers of a table; the meaning of its columns depends on its quantity."""
    shared: dict[str, Any] = {
        name: table[name]
        for name in ("corpus", "train_length", "length", "batch", "ratio_to")
        if name in table
    }
    shared |= as_variant(table.get("size"))
    for row in table["rows"]:
        own = {name: value for name, value in row.items() if name != "values"}
        for column, value in zip(table["columns"], row["values"], strict=True):
            quantity, about = of_column(table["quantity"], column)
            about = {**shared, **own, **about}
            yield Printed(quantity, value, table["section"], tuple(table["experiments"]), about)


def of_column(quantity: str, column: Any) -> tuple[str, dict[str, Any]]:
    if quantity == "perplexity":
        return quantity, {"eval_length": column}
    if quantity == "accuracy":
        return quantity, {"method": column}
    if quantity == "milliseconds":
        size, _, ratio = column.partition(" ")
        return ratio or quantity, {"size": size}
    return quantity, {"size": column}


def of_sentence(entry: dict[str, Any]) -> Printed:
    quantity, value, section, experiment = (
        entry.pop(name) for name in ("quantity", "value", "section", "experiment")
    )
    if quantity == "perplexity":
        entry |= {"variant": entry.get("variant", ""), **as_variant(entry.pop("size", None))}
    return Printed(quantity, value, section, (experiment,), entry)


def as_variant(size: str | None) -> dict[str, str]:
    return {} if size in (None, USUAL_SIZE) else {"variant": str(size)}


def printed_results(paper: Paper, experiment: str, kind: str) -> Results | None:
    """The printed numbers as results without errors, for the rules of claims; None if there are none."""
    quantity = {"language": "perplexity", "tasks": "accuracy", "timing": "milliseconds"}.get(kind)
    numbers = paper.shown_with(experiment, quantity) if quantity else []
    results = Results(
        {
            "kind": kind,
            "scale": "paper",
            "printed": True,
            "documents": {n.get("corpus"): [0, 1] for n in numbers},
        }
    )
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    names = {"language": ("corpus", "train_length", "method", "variant"), "tasks": ("task", "method")}
    for n in numbers:
        key = tuple(n.get(name) for name in names.get(kind, ("size", "method", "train_length")))
        runs.setdefault(key, []).append(_printed_row(n, kind))
        # Of two numbers for the same quantity, in a table and in the text, one is enough.
        runs[key] = list({row.get("eval_length"): row for row in runs[key]}.values())
    for key, rows in runs.items():
        run: dict[str, Any] = {"seed": 0, "view": STEP}
        if kind == "language":
            run |= dict(zip(names[kind], key, strict=True))
        elif kind == "tasks":
            run |= {"corpus": key[0], "method": key[1], "layers": 0}
        else:
            run |= {"size": key[0] or "", "method": key[1]}
            rows += [{**row, "metric": "ratio", "against": "one"} for row in rows]
        results.add(run, rows)
    return results if runs else None


def _printed_row(n: Printed, kind: str) -> dict[str, Any]:
    if kind == "language":
        loss = math.log(n.value)
        length = n.get("eval_length")
        return {"metric": "loss", "eval_length": length, "value": loss, "error": 0.0, "windows": [loss] * 2}
    if kind == "tasks":
        return {"metric": "accuracy", "eval_length": 500, "value": n.value / 100, "count": 10**12}
    length = n.get("train_length") or n.get("length") or 0
    return {"metric": "milliseconds", "eval_length": length, "value": n.value, "error": 0.0}
