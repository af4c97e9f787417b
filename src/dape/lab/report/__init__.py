"""Pages and READMEs from jinja2 templates over results. A page is one self-contained file, for any screen, offline."""

from __future__ import annotations

from typing import Any

from dape import pages
from dape.methods import parse_layers


def render(template: str, **values: Any) -> str:
    """Render a template of this folder."""
    return environment().get_template(template).render(**values)


def environment() -> pages.Environment:
    """The templates of this folder, with `words` as a filter."""
    templates = pages.environment("dape.lab", "report")
    templates.filters["words"] = words
    return templates


def words(value: Any) -> str:
    """Readable form of a setting."""
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {words(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        joint = "; " if any(isinstance(entry, dict) for entry in value) else ", "
        return joint.join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "–" if value is None or value == "" else str(value)


def method_summary(name: str) -> str:
    """One-line description of a method; of several, if its layers differ."""
    return "; ".join(dict.fromkeys(layer.summary for layer in parse_layers(name)))
