"""A Griffe extension for the reference: docstrings' lines such as `rows: their meaning` as lists, settings by default."""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"^(\w[\w ,…*]{0,40}):\s+(?=\S)")


class Fields(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)

    # Before Griffe derives the constructors of dataclasses.
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if isinstance(attr.value, griffe.ExprCall) and str(attr.value.function) == "setting":
            attr.value = default_of(attr.value)


def default_of(setting: griffe.ExprCall) -> Any:
    """The default of a field declared by `dape.settings.setting`; None if it has none."""
    first, *_ = setting.arguments
    if not isinstance(first, griffe.ExprKeyword):
        return first
    made = {entry.name: entry.value for entry in setting.arguments if isinstance(entry, griffe.ExprKeyword)}
    return f"{made['default_factory']}()" if "default_factory" in made else None


def listed(text: str) -> str:
    """The text with runs of `name: meaning` lines as lists; paragraphs and code as they are."""
    result: list[str] = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        # A field begins a paragraph or follows a whole sentence; within one, a colon is a colon.
        sentences = [True, *(line.endswith((".", ":")) for line in lines)]
        first = next((i for i, line in enumerate(lines) if sentences[i] and FIELD.match(line)), None)
        if first is None or paragraph.lstrip().startswith((">>>", "    ", "|")):
            result.append(paragraph)
            continue
        entries = [FIELD.sub(lambda found: f"- `{found[1]}`: ", line) for line in lines[first:]]
        result += ["\n".join(lines[:first])] if first else []
        result.append("\n".join(line if line.startswith("- ") else f"  {line.strip()}" for line in entries))
    return "\n\n".join(result)
