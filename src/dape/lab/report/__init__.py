"""Pages and READMEs from jinja2 templates over results. A page is one self-contained file, for any screen, offline."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dape.files import plain
from dape.methods import parse_layers

# Content security policy: the browser loads nothing from outside the page.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@cache
def environment() -> Environment:
    """Template environment: .html.j2 templates escape values, .md.j2 templates do not."""
    templates = Environment(
        loader=PackageLoader("dape.lab", "report"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"words": words, "embedded": embedded}
    templates.globals |= {"policy": POLICY, "asset": asset}
    return templates


def render(template: str, **values: Any) -> str:
    """Render a template."""
    return environment().get_template(template).render(**values)


def asset(name: str) -> str:
    """A file next to the templates, or plotly's script, safe within a script element."""
    if name == "plotly.js":
        from plotly.offline import get_plotlyjs

        return get_plotlyjs().replace("</script", r"<\/script")
    return (files("dape.lab.report") / name).read_text("utf-8")


def embedded(value: Any) -> str:
    """JSON that is safe within a script element."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


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
