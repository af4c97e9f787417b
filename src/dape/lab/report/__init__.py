"""Pages and READMEs: jinja2 templates over results. A page is one file for any browser, phone or desk, offline."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dape.files import plain
from dape.methods import parse_layers

# The browser itself refuses whatever is not in the page.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def environment() -> Environment:
    """Templates: those that end in .html.j2 escape what they are given, those in .md.j2 do not."""
    made = Environment(
        loader=PackageLoader("dape.lab", "report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"words": words, "embedded": embedded}
    made.globals |= {"policy": POLICY, "asset": asset}
    return made


def render(template: str, **values: Any) -> str:
    """The template, filled in."""
    return environment().get_template(template).render(**values)


def asset(name: str) -> str:
    """A file beside the templates, or plotly's script, safe within a script element."""
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        return get_plotlyjs().replace("</script", r"<\/script")
    return (files("dape.lab.report") / name).read_text("utf-8")


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def words(value: Any) -> str:
    """A setting for people."""
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
    """A line on a method; of several, if its layers differ."""
    return "; ".join(dict.fromkeys(layer.summary for layer in parse_layers(name)))
