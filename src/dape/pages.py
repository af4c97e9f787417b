"""Self-contained HTML pages from jinja2 templates: values escaped, data as JSON, and no script but our own.

The only module that marks text as HTML: the files beside a template, and JSON within a script element. Every page has a
content security policy that lists its scripts by their hash, so that text which got into the page all the same does not
run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dape.files import plain


@functools.cache
def environment(package: str) -> Environment:
    """Templates in a package; values in them are escaped."""
    templates = Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["embedded"] = embedded
    templates.globals |= {"asset": functools.partial(asset, package), "policy": policy}
    return templates


def asset(package: str, name: str) -> Markup:
    """A style sheet or script beside the templates."""
    text = (files(package) / name).read_text("utf-8")
    assert not re.search(r"</(script|style)|<!--", text, re.IGNORECASE), name
    return Markup(text)


def policy(scripts: Iterable[str] = (), *, loads_more: bool = False) -> str:
    """Content security policy under which these scripts run, and no others.

    loads_more: these scripts may add further ones to the page.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    allowed += ["'strict-dynamic'"] if loads_more else []
    none = "'none'"
    return (
        f"default-src 'none'; script-src {' '.join(allowed) or none}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"base-uri 'none'; form-action 'none'"
    )


def embedded(value: Any) -> Markup:
    """JSON for an element <script type="application/json">, which ends at the first "</script"."""
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
