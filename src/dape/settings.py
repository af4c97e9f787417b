"""Settings: dataclass fields with help, range and role, and one check for all of them.

    @dataclass(frozen=True, kw_only=True)
    class Options:
        steps: int = setting(1000, help="Optimizer steps.", low=1, high=10**9)

        def __post_init__(self) -> None:
            check(self)

A number without a range cannot be declared: `check` raises. Not-a-number and infinity are refused everywhere.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Hashable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex

RULE = "rule"
# Ranges that many settings have: numbers of tokens, other counts, and seeds.
TOKENS: dict[str, Any] = {"low": 1, "high": 2**24}
COUNT: dict[str, Any] = {"low": 1, "high": 10**9}
SEED: dict[str, Any] = {"low": 0, "high": 2**63 - 1}


@dataclass(frozen=True)
class Rule:
    """Constraints of a setting in addition to its type. None is always allowed if the type includes it.

    low, high:    inclusive bounds of a number, or of every number of a tuple or list.
    above, below: exclusive bounds.
    listed:       the value is text: distinct items of this type, separated by commas.
    words:        texts that are accepted instead of a list.
    reads:        the value is the path of an existing file or folder.
    writes:       the value is the path of a file or folder to write; checked by `dape.files.check_output` before the work.
    suffixes:     allowed suffixes of the file.
    test:         raises ValueError for an invalid value.
    fixes_run:    a run or a comparison continues only with the same value.
    positional:   on the command line a value without a flag.
    hidden:       not an option of the command line.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    listed: type[int] | type[str] | None = None
    words: tuple[str, ...] = ()
    reads: Literal["file", "folder", "path"] | None = None
    writes: Literal["file", "folder"] | None = None
    suffixes: tuple[str, ...] = ()
    test: Callable[[Any], object] | None = None
    fixes_run: bool = True
    positional: bool = False
    hidden: bool = False

    @property
    def bounded(self) -> bool:
        return None not in (
            (self.low, self.above)[self.low is None],
            (self.high, self.below)[self.high is None],
        )


class SettingError(ValueError):
    """Invalid value of the setting `name`; the message has `name=value` and the reason."""

    def __init__(self, name: str, value: Any, problem: str) -> None:
        super().__init__(f"{name}={shown(value)}{problem}")
        self.name, self.value, self.problem = name, value, problem

    @property
    def as_option(self) -> str:
        """The message with the option's name on the command line."""
        return f"{option_name(self.name)}={shown(self.value)}{self.problem}"


def check_choice(kind: str, name: str, known: Collection[str]) -> None:
    """Raise unless the name is known, with the nearest one and all of them."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f'unknown {kind} "{name}"; {hint}the {kind}s are {", ".join(known)}')


def check_counts(**sizes: int) -> None:
    """Raise if a size is not a whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, SupportsIndex) or value < 1:
            raise ValueError(f"{name}={value} must be a whole number, at least 1")


def option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def setting(
    default: Any = MISSING, *, help: str, default_factory: Callable[[], Any] | None = None, **rule: Any
) -> Any:
    """A dataclass field with its help and the arguments of `Rule`."""
    metadata = {"help": " ".join(help.split()), RULE: Rule(**rule)}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def rule_of(member: Field[Any]) -> Rule:
    return member.metadata.get(RULE, Rule())


def default_of(member: Field[Any]) -> Any:
    """The default of a field; MISSING if it has none."""
    return member.default if member.default_factory is MISSING else member.default_factory()


def check(settings: Any) -> None:
    """Raise SettingError for the first field whose value is not of its type or within its range."""
    kind: Any = type(settings)
    hints = type_hints(kind)
    for member in fields(settings):
        value, rule = getattr(settings, member.name), rule_of(member)
        if _numeric(hints[member.name], rule) and not rule.bounded:
            raise TypeError(f"{kind.__name__}.{member.name} is a number and declares no range")
        problem = type_problem(value, hints[member.name])
        if problem is None and value is not None:
            problem = _rule_problem(value, rule)
        if problem is not None:
            raise SettingError(member.name, value, problem)


def free_names(kind: type) -> set[str]:
    """Names of the settings that do not fix a run."""
    return {member.name for member in fields(kind) if not rule_of(member).fixes_run}


def fixed(settings: Any) -> dict[str, Any]:
    """The values that fix a run, by name."""
    return {m.name: getattr(settings, m.name) for m in fields(settings) if rule_of(m).fixes_run}


def changed_setting(before: dict[str, Any], settings: Any) -> tuple[str, Any, Any] | None:
    """First changed setting among those that fix a run: name, old, new. One missing in `before` had the default."""
    for member in fields(settings):
        if not rule_of(member).fixes_run:
            continue
        new, default = getattr(settings, member.name), default_of(member)
        old = before.get(member.name, new if default in (None, MISSING) else default)
        if _plain(old) != _plain(new):
            return member.name, old, new
    return None


def split_numbers(name: str, text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise SettingError(name, text, ": expected whole numbers, separated by commas") from None


def split_names(text: str) -> list[str]:
    """Parse names separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


@functools.cache
def type_hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def revive(kind: Any, value: Any) -> Any:
    """A value of JSON as the type that it had, dataclasses and tuples; a TypeError that says what does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and value is not None:
        hints = typing.get_type_hints(kind)
        needed = {member.name for member in fields(kind) if default_of(member) is MISSING}
        if not isinstance(value, dict) or not needed <= {*value} <= {*hints}:
            raise TypeError(f"expected an object with {', '.join(sorted(needed))}")
        return kind(**{name: revive(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    if origin in (types.UnionType, typing.Union) and value is not None:
        return revive(next(one for one in arguments if one is not type(None)), value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, got {value}")
        return tuple(revive(arguments[0], one) for one in value)
    return value


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str | os.PathLike) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type alone."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _numeric(hint: Any, rule: Rule) -> bool:
    items = [item for member in alternatives(hint) for item in (member, *typing.get_args(member))]
    return rule.listed is int or int in items or float in items


NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}


def type_problem(value: Any, hint: Any) -> str | None:
    """The end of a sentence on a value that is not of the type, or None."""
    if _is_a(value, hint):
        return None
    members = alternatives(hint)
    if typing.get_origin(hint) is Literal:
        return f": choose one of {', '.join(map(str, typing.get_args(hint)))}"
    expected = [NAMES.get(member, str(member)) for member in members if member is not type(None)]
    return f": expected {' or '.join(expected)}"


def _is_a(value: Any, hint: Any) -> bool:
    if hint in (Any, object):
        return True
    if len(members := alternatives(hint)) > 1:
        return any(_is_a(value, member) for member in members)
    origin = typing.get_origin(hint) or hint
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is dict and typing.get_args(hint):
        key, item = typing.get_args(hint)
        return isinstance(value, dict) and all(_is_a(k, key) and _is_a(v, item) for k, v in value.items())
    if origin in (tuple, list):
        arguments = typing.get_args(hint)
        if not isinstance(value, tuple | list):
            return False
        if not arguments:
            return True
        if origin is list or arguments[-1] is Ellipsis:
            return all(_is_a(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_is_a, value, arguments))
    if origin is bool:
        return isinstance(value, bool)
    if origin is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if origin is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if origin in (str, Path):
        return isinstance(value, str | os.PathLike)
    return isinstance(value, origin)


def _rule_problem(value: Any, rule: Rule) -> str | None:
    if rule.listed is not None and value not in rule.words:
        try:
            items: list[Any] = split_numbers("", value) if rule.listed is int else split_names(value)
        except SettingError:
            return ": expected whole numbers, separated by commas"
        if not items:
            return " is empty: give at least one"
        if len(set(items)) < len(items):
            return " contains a duplicate"
        value = items if rule.listed is int else value
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, numbers.Real) and not isinstance(item, bool):
            problem = _range_problem(item, rule)
            if problem is not None:
                return problem
    if rule.suffixes and Path(value).suffix.lower() not in rule.suffixes:
        return f" must end in {', '.join(rule.suffixes)}"
    if rule.test is not None:
        try:
            rule.test(value)
        except ValueError as error:
            return f": {error}"
    return None


def _range_problem(value: Any, rule: Rule) -> str | None:
    # Whole numbers are compared as they are: as floats, large ones would lose their last digits.
    if not isinstance(value, numbers.Integral) and not math.isfinite(value):
        return " must be a finite number"
    if rule.low is not None and value < rule.low:
        return f" must be at least {rule.low:,}"
    if rule.above is not None and value <= rule.above:
        return f" must be greater than {rule.above:,}"
    if rule.high is not None and value > rule.high:
        return f" must be at most {rule.high:,}"
    if rule.below is not None and value >= rule.below:
        return f" must be less than {rule.below:,}"
    return None
