"""Options of the form name=value, and those of a training, shared by several commands."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from dape.cli.parsing import check_paths, read_options
from dape.settings import setting
from dape.training import TrainConfig
from dape.training.config import read_config

# Several values after one flag, or the flag several times.
Named = tuple[tuple[str, ...], ...]
Config = TypeVar("Config", bound=TrainConfig)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a method's encoding and processor, in addition to those of every method."""

    position_option: Named = setting(
        (),
        help="Options of the position encoding, such as scaling=ntk factor=4 for rope; a wrong name lists them.",
    )
    score_option: Named = setting(
        (), help="Options of the score convolution, such as depth=3 padding=causal; a wrong name lists them."
    )


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


def read_training(
    line: type,
    kind: type[Config],
    recipe: Callable[..., Config],
    arguments: list[str],
    *,
    prog: str,
    description: str,
) -> tuple[Config, dict[str, Any]]:
    """The configuration of a command line, and all options given: the preset's recipe, overridden by the file, overridden
    by the command line.

    line: dataclass of the options, which are those of the configuration, `kind`, and more.
    """
    names = {field.name for field in fields(kind)}

    def configured(given: dict[str, Any]) -> Config:
        values = {**(read_config(given["config"]) if given.get("config") else {}), **given}
        for name in ("position_option", "score_option"):
            values[f"{name}s"] = {**values.get(f"{name}s", {}), **named(values.get(name, ()))}
        preset = values.pop("preset", "tiny")
        return recipe(preset, **{name: value for name, value in values.items() if name in names})

    given = read_options(
        line, arguments, prog=prog, description=description, defaults=lambda given: asdict(configured(given))
    )
    config = configured(given)
    check_paths(config)
    return config, given
