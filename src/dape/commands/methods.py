"""`dape methods`: every method with a line of explanation."""

from __future__ import annotations

import json
import shutil
import textwrap

from dape.commands.parsing import Parser
from dape.methods import LISTED_KERNELS, Method, all_methods
from dape.positions import POSITIONS


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="dape methods",
        description="List every method: a position encoding, alone or with a convolution of the scores "
        "(dape-NAME is kernel 1, dape1xK-NAME kernel K; any K works, the usual ones are listed; dapeQxK-NAME "
        "convolves over Q queries as well).",
    )
    parser.add_argument("--json", action="store_true", help="print records instead of a table")
    options = parser.parse_args(arguments)
    print(json.dumps([record(method) for method in all_methods()], indent=2) if options.json else table())
    return 0


def record(method: Method) -> dict[str, object]:
    encoding = POSITIONS[method.position]
    return {
        "name": method.name,
        "position": method.position,
        "kernel_size": method.kernel_size,
        "query_kernel_size": method.query_kernel_size,
        "additive_bias": encoding.additive,
        "direction": encoding.direction,
        "summary": method.summary,
    }


def table() -> str:
    methods = all_methods()
    width = max(len(method.name) for method in methods) + 2
    columns = max(shutil.get_terminal_size().columns, 60)
    lines = []
    for kernel in LISTED_KERNELS:
        lines.append("plain scores" if kernel is None else f"scores convolved, kernel 1×{kernel}")
        for method in methods:
            if method.kernel_size == kernel:
                text = textwrap.wrap(POSITIONS[method.position].summary, columns - width - 2)
                lines.append(f"  {method.name:<{width}}{text[0]}")
                lines += [" " * (width + 2) + rest for rest in text[1:]]
        lines.append("")
    return "\n".join(lines).rstrip()
