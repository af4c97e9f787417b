"""`dape methods`: list encodings and score processors; every pair is a method."""

from __future__ import annotations

import json
import shutil
import textwrap
from itertools import groupby

from dape.cli.parsing import Parser
from dape.methods import LAYERS, PRESETS, Method, all_methods
from dape.positions import POSITIONS
from dape.scores import SCORES


def _counted(layers: str) -> str:
    """Methods of layers, those in a row that are the same with their number."""
    runs = [(name, len(list(run))) for name, run in groupby(layers.split(LAYERS))]
    return LAYERS.join(name if count == 1 else f"{count} × {name}" for name, count in runs)


USAGE = {
    "dape1x3-kerple": "any pair; dapeQxK reads Q queries and K keys",
    "rope[scaling=yarn,factor=8]": "options; of all: normaliser, window, canon",
    "nope[normaliser=entmax]": "or asentmax, stickbreaking, ssmax, sink",
    "rope[window=512]/nope": "methods by layer, cycled; a window of keys",
    **{name: _counted(methods) for name, methods in PRESETS.items()},
}


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="dape methods",
        description="List the position encodings and the score processors. A method is any pair of them.",
    )
    parser.add_argument("--json", action="store_true", help="print a record of every pair instead")
    options = parser.parse_args(arguments)
    print(
        json.dumps([as_record(method) for method in all_methods()], indent=2)
        if options.json
        else methods_table()
    )
    return 0


def as_record(method: Method) -> dict[str, object]:
    encoding = POSITIONS[method.position]
    return {
        "name": method.name,
        "position": method.position,
        "processor": method.processor,
        "kernel": method.kernel,
        "additive_bias": encoding.additive,
        "direction": method.direction,
        "summary": method.summary,
    }


def methods_table() -> str:
    """Listing on one screen: encodings × processors, and the syntax of a pair."""
    processors = {comma_separated(name): cls.summary for name, cls in SCORES.items() if name != "plain"}
    lines = ["position encodings (alone: plain scores)"]
    lines += _rows({name: encoding.summary for name, encoding in POSITIONS.items()})
    lines += ["× score processors, written before an encoding"]
    lines += _rows(processors)
    lines += ["writing methods"]
    lines += _rows(USAGE)
    return "\n".join(lines)


def comma_separated(processor: str) -> str:
    """A processor as a prefix of an encoding, with its smallest kernel and one more: "dape-, dape1x3- …"."""
    names = [method.short_name for method in all_methods() if method.processor == processor]
    prefixes = list(dict.fromkeys(name.partition("-")[0] + "-" for name in names))
    return ", ".join(prefixes[:2]) + (" …" if len(prefixes) > 2 else "")


def _rows(rows: dict[str, str]) -> list[str]:
    columns = max(shutil.get_terminal_size().columns, 60)
    width = min(max(map(len, rows)), 30) + 4
    lines = []
    for name, summary in rows.items():
        first, *rest = textwrap.wrap(summary, columns - width) or [""]
        head = f"  {name}"
        # A long name has a line of its own.
        lines += [f"{head:<{width}}{first}"] if len(head) < width else [head, " " * width + first]
        lines += [" " * width + line for line in rest]
    return lines
