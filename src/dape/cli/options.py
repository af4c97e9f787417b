"""Options of a training, shared by several commands."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from dape.cli import parsing
from dape.training import TrainConfig, recipe
from dape.training.config import read_config

Config = TypeVar("Config", bound=TrainConfig)


def read_training(
    line: type, kind: type[Config], arguments: list[str], *, prog: str, description: str
) -> Config:
    """The configuration of a command line: the preset's recipe, overridden by the file, overridden by the command line.

    line: dataclass of the options, which are those of the configuration, `kind`, and perhaps more.
    """
    names = {field.name for field in fields(kind)}

    def configured(given: dict[str, Any]) -> Config:
        values = {**(read_config(given["config"]) if given.get("config") else {}), **given}
        preset = values.pop("preset", "tiny")
        return recipe(preset, kind, **{name: value for name, value in values.items() if name in names})

    given = parsing.read_options(
        line, arguments, prog=prog, description=description, defaults=lambda given: vars(configured(given))
    )
    config = configured(given)
    parsing.check_paths(config)
    return config
