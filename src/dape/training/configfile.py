"""Options in a TOML, YAML or JSON file: read, and checked against the fields of TrainConfig."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from dape.training.config import TrainConfig


def read_config(path: str | Path) -> dict[str, Any]:
    """The options in a TOML, YAML or JSON file, by the names of TrainConfig's fields."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no configuration {path}")
    text, suffix = path.read_text("utf-8"), path.suffix.lower()
    try:
        content = _parse(text, suffix)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a table of options")
    try:
        return checked(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix in (".yaml", ".yml"):
        return yaml.safe_load(text)
    if suffix == ".json":
        return json.loads(text)
    raise ValueError(f'"{suffix}" is not a kind of configuration: use .toml, .yaml or .json')


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options, each of its field's type; an unknown name or a wrong type is an error."""
    hints = typing.get_type_hints(TrainConfig)
    known = {f.name: hints[f.name] for f in fields(TrainConfig)}
    result = {}
    for name, value in options.items():
        key = name.replace("-", "_")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ValueError(
                f'there is no option "{name}"' + (f'; did you mean "{near[0]}"?' if near else "")
            )
        result[key] = _fit_type(key, value, known[key])
    return result


def _fit_type(name: str, value: Any, hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return value  # the settings' own check names the choices
    if origin is types.UnionType or origin is typing.Union:
        if value is None:
            return None
        return _fit_type(name, value, next(a for a in arguments if a is not type(None)))
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise ValueError(f"{name}={value!r}: expected {len(arguments)} numbers")
        return tuple(_fit_type(name, v, a) for v, a in zip(value, arguments, strict=True))
    kind = origin or hint
    if kind is float and isinstance(value, str | int) and not isinstance(value, bool):
        # YAML reads 2e-3, without a point, as text.
        try:
            return float(value)
        except ValueError:
            pass
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name}={value!r}: expected {kind.__name__}")
    return value
