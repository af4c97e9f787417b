"""`dape check FILE`: conformance properties of an encoding or a processor in a user's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from dape.commands.parsing import parse
from dape.methods import parse_method
from dape.plugins import load
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

    file: tyro.conf.Positional[Path] = setting(
        help="Python file that registers them.", reads="file", suffixes=(".py",)
    )


def main(arguments: list[str]) -> int:
    options: Options = parse(Options, arguments, prog="dape check")
    before = {*POSITIONS}, {*SCORES}
    load(str(options.file))
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
    return max(report(name) for name in names)


def report(name: str) -> int:
    """Print the properties that fail for a method; 1 if any does."""
    from dape.conformance import failures, properties

    method = parse_method(name)
    failed, count = failures(method), len({prop for prop, _, _ in properties(method)})
    print(f"{name}: {'all ' + str(count) + ' properties hold' if not failed else 'fails'}")
    for prop, error in failed.items():
        reason = " ".join(str(error).split())
        print(f"  {prop.replace('_', ' ')}: {reason[:300]}")
    return int(bool(failed))
