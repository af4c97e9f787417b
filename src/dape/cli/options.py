"""Options of the form name=value, shared by several commands."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import tyro

from dape.cli.parsing import Parser
from dape.training import TrainConfig
from dape.training.config import read_config

# Several values after one flag, or the flag several times.
Named = Annotated[
    tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE …")
]
Config = TypeVar("Config", bound=TrainConfig)
# Options from which others derive their defaults.
DERIVED_FROM: dict[str, type] = {"steps": int, "learning_rate": float, "data": str}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a method's encoding and processor, in addition to those of every method."""

    position_option: Named = ()
    """Options of the position encoding, such as scaling=ntk factor=4 for rope; a wrong name lists them."""
    score_option: Named = ()
    """Options of the score convolution, such as depth=3 padding=causal; a wrong name lists them."""


def parse_option(text: str) -> tuple[str, Any]:
    """Parse name=value; the value is a Python literal or else a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f'option "{text}" is not of the form name=value')
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def named(given: Iterable[Iterable[str]]) -> dict[str, Any]:
    """Values by name; the last one of a repeated name."""
    return dict(parse_option(text) for texts in given for text in texts)


def with_options(kind: type[Config], parsed: Any) -> Config:
    """Configuration from parsed options: those of the file, overridden by the command line."""
    values = {field.name: getattr(parsed, field.name) for field in fields(kind)}
    values["position_options"] = {**parsed.position_options, **named(parsed.position_option)}
    values["score_options"] = {**parsed.score_options, **named(parsed.score_option)}
    return kind(**values)


def training_defaults(arguments: list[str]) -> dict[str, Any]:
    """Options on which other defaults depend: those of the file, the preset, steps, learning rate, data."""
    early = Parser(add_help=False, allow_abbrev=False)
    for name in ("config", "preset", *DERIVED_FROM):
        early.add_argument(f"--{name.replace('_', '-')}")
    try:
        given = {
            name: text
            for name, text in vars(early.parse_known_args(arguments)[0]).items()
            if text is not None
        }
    except ValueError:  # said in full when all options are parsed
        given = {}
    changes = read_config(given["config"]) if "config" in given else {}
    if "preset" in given:
        changes["preset"] = given["preset"]
    for name, kind in DERIVED_FROM.items():
        with contextlib.suppress(KeyError, ValueError):
            changes[name] = kind(given[name])
    return {"preset": "tiny", **changes}
