"""What a paper printed: the numbers of its tables and sentences, from paper.json, each with its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dape.files import read_json

FILE = "paper.json"
# The size of most of the paper's models; others are named like variants.
USUAL_SIZE = "125m"


@dataclass(frozen=True)
class Printed:
    """One number of the paper.

    quantity: perplexity, accuracy (percent), milliseconds or ratio; section: where it stands; experiments: those
    that show it beside theirs; about: what it belongs to, such as corpus, train_length, method, variant,
    eval_length, task or size.
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
        """The numbers of that quantity that are about all of this."""
        return [
            number
            for number in self.numbers
            if number.quantity == quantity and all(number.get(name) == value for name, value in about.items())
        ]

    def value(self, quantity: str, **about: Any) -> float | None:
        """The number about all of this; None if the paper prints none."""
        found = self.find(quantity, **about)
        return found[0].value if found else None

    def shown_with(self, experiment: str, quantity: str) -> list[Printed]:
        """The numbers that an experiment shows beside its own."""
        return [n for n in self.numbers if n.quantity == quantity and experiment in n.experiments]

    def notes_on(self, experiment: str) -> list[str]:
        return [text for name, text in self.notes if name == experiment]


def load_paper(folder: Path) -> Paper:
    """The numbers in the folder's paper.json; an empty Paper if there is no such file."""
    path = folder / FILE
    if not path.exists():
        return Paper()
    content = read_json(path)
    numbers = [number for table in content["tables"] for number in of_table(table)]
    numbers += [of_sentence(dict(entry)) for entry in content["sentences"]]
    notes = tuple((table["experiments"][0], table["note"]) for table in content["tables"] if "note" in table)
    return Paper(content["title"], tuple(numbers), notes)


def of_table(table: dict[str, Any]) -> Iterator[Printed]:
    """The numbers of a table; what its columns stand for depends on what it measures."""
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
