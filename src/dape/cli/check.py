"""`dape check FILE`: conformance properties of an encoding or a processor in a user's file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dape.cli.parsing import parse
from dape.methods import parse_method
from dape.plugins import load_once
from dape.positions import POSITIONS
from dape.scores import SCORES
from dape.settings import setting

# Partners with which a new encoding or processor is tested.
PROCESSORS = ("{}", "dape1x3-{}")
ENCODINGS = ("nope", "kerple", "rope")


@dataclass(frozen=True)
class Options:
    """Run the conformance properties on every encoding and processor that a file registers: nothing leaks from the
    future, decoding equals prefill, padding changes nothing, gradients are right, saving and loading are exact."""

    file: Path = setting(
        help="Python file that registers encodings or processors.",
        reads="file",
        suffixes=(".py",),
        positional=True,
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape check")
    before = {*POSITIONS}, {*SCORES}
    load_once(str(options.file))
    # --import and DAPE_IMPORT may have loaded the same file before.
    encodings = [
        name
        for name, kind in POSITIONS.items()
        if name not in before[0] or kind.__module__ == options.file.stem
    ]
    processors = [
        name for name, kind in SCORES.items() if name not in before[1] or kind.__module__ == options.file.stem
    ]
    if not encodings and not processors:
        raise ValueError(
            f"{options.file} registers nothing new: call dape.register_position or dape.register_scores in it"
        )
    names = [pattern.format(name) for name in encodings for pattern in PROCESSORS]
    names += [f"{name}-{encoding}" for name in processors for encoding in (*ENCODINGS, *encodings)]
    return max(print_failures(name) for name in names)


def print_failures(name: str) -> int:
    """Print the properties that fail for a method; 1 if any does."""
    from dape.conformance import failures, properties

    method = parse_method(name)
    failed, count = failures(method), len({prop for prop, _, _ in properties(method)})
    print(
        f"{name}: {f'all {count} properties hold' if not failed else f'fails {len(failed)} of {count} properties'}"
    )
    # Properties that fail for the same reason, such as a constructor that raises, are listed together.
    together: dict[str, list[str]] = {}
    for prop, error in failed.items():
        together.setdefault(reason_of(error), []).append(prop.replace("_", " "))
    for reason, named in together.items():
        print(f"  {f'all {count} properties' if len(named) == count else ', '.join(named)}: {reason}")
    return int(bool(failed))


def reason_of(error: object) -> str:
    """The error in a line; of tensors that should be equal, by how much they differ."""
    text = " ".join(str(error).split())
    differs = re.search(r"Greatest absolute difference: (\S+)", text)
    return f"differs by {float(differs[1]):.2g}" if differs else text[:300]
