"""Command lines as dataclasses of settings: one argparse parser from their fields; errors are one sentence."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shutil
import textwrap
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from dape.files import check_output
from dape.settings import alternatives, check, check_choice, default_of, option_name, rule_of, type_hints

Options = TypeVar("Options")
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
EXPECTED = {int: "a whole number", float: "a number"}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises errors, which `dape.cli` prints."""

    def __init__(self, **options: Any) -> None:
        options["description"] = wrapped_paragraphs(options.get("description") or "")
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(kind: type[Options], arguments: list[str], *, prog: str, description: str | None = None) -> Options:
    """Parse a command line into a dataclass of settings; values, inputs and output paths are checked.

    description: for --help, by default the docstring of the class.
    """
    settings = kind(**read_options(kind, arguments, prog=prog, description=description))
    check(settings)
    check_paths(settings)
    return settings


def parse_action(actions: dict[str, type], arguments: list[str], *, prog: str, description: str) -> Any:
    """Parse `PROG ACTION …` into the settings of the action."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {prog} {' | '.join(actions)} …\n\n{description}\nEach has its own --help.")
        raise SystemExit(0)
    check_choice("action", arguments[0], actions)
    return parse(actions[arguments[0]], arguments[1:], prog=f"{prog} {arguments[0]}")


def read_options(
    kind: Any,
    arguments: list[str],
    *,
    prog: str,
    description: str | None = None,
    defaults: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Values of the options that a command line gives, by field name; --help prints the help and exits.

    defaults: values of all options from those given, for --help; by default those of the fields.
    """
    words = [re.sub(r"^--[a-z_]+", lambda match: match[0].replace("_", "-"), word) for word in arguments]
    if {"-h", "--help"} & {*words}:
        given = {}
        parser = build_parser(kind, prog, description, required=False)
        if defaults is not None:
            given = vars(parser.parse_known_args([w for w in words if w not in ("-h", "--help")])[0])
        build_parser(kind, prog, description, defaults and defaults(given)).print_help()
        raise SystemExit(0)
    found, unknown = build_parser(kind, prog, description).parse_known_args(words)
    if unknown:
        raise ValueError(_unknown(unknown, kind))
    hints = type_hints(kind)
    return {name: _typed(value, hints[name]) for name, value in vars(found).items()}


def build_parser(
    kind: Any,
    prog: str,
    description: str | None = None,
    defaults: dict[str, Any] | None = None,
    *,
    required: bool = True,
) -> Parser:
    """Parser of a dataclass of settings; it sets only the options that are given."""
    shown = [member for member in fields(kind) if not rule_of(member).hidden]
    positional = [member for member in shown if rule_of(member).positional]
    hints = type_hints(kind)
    names = " ".join(_metavar(member, hints[member.name]) for member in positional)
    text = inspect.cleandoc(kind.__doc__ or "") if description is None else description
    parser = Parser(
        prog=prog,
        usage=" ".join(filter(None, (prog, names, "[options]"))),
        description=text,
        argument_default=argparse.SUPPRESS,
    )
    parser._positionals.title, parser._optionals.title = "arguments", "options"
    for member in shown:
        default = defaults[member.name] if defaults and member.name in defaults else default_of(member)
        _add(parser, member, hints[member.name], default, required)
    return parser


def _add(parser: Parser, member: Field[Any], hint: Any, default: Any, required: bool) -> None:
    rule, needed = rule_of(member), default_of(member) is MISSING
    help_text = member.metadata.get("help", "").replace("%", "%%")
    value = " ".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
    if value and default is not MISSING and default is not None and not isinstance(default, dict):
        help_text += f" (default: {value if value.strip() else repr(value)})".replace("%", "%%")
    options: dict[str, Any] = {"help": help_text.strip()}
    item, count = _item(hint)
    if item is bool:
        parser.add_argument(option_name(member.name), action=argparse.BooleanOptionalAction, **options)
        return
    if typing.get_origin(item) is Literal:
        choices = typing.get_args(item)
        options |= {
            "choices": choices,
            "type": type(choices[0]),
            "metavar": "{" + ",".join(map(str, choices)) + "}",
        }
    else:
        options |= {"type": _converter(item), "metavar": METAVARS.get(item, "TEXT")}
        options |= {"metavar": "FILE"} if rule.writes == "file" else {}
    if count is not None:
        options["nargs"] = count
    if count == "*" and not rule.positional:
        # Several values after one flag, or the flag several times.
        options["action"] = "extend"
    if rule.positional:
        if count in (None, "*"):
            must = needed and required
            options["nargs"] = (None if must else "?") if count is None else ("+" if must else "*")
        options["metavar"] = member.name.upper()
        parser.add_argument(member.name, **options)
    else:
        parser.add_argument(option_name(member.name), required=needed and required, **options)


def _typed(value: Any, hint: Any) -> Any:
    """A list as a tuple where the field holds one."""
    held = any(typing.get_origin(member) is tuple for member in alternatives(hint))
    return tuple(value) if isinstance(value, list) and held else value


def _item(hint: Any) -> tuple[Any, Any]:
    """Type of one value, and the number of values: None for one, "*" for any."""
    members = [member for member in alternatives(hint) if member is not type(None)]
    first = members[0]
    if typing.get_origin(first) in (tuple, list):
        items = typing.get_args(first)
        if len(items) > 1 and items[1] is not Ellipsis:
            return items[0], len(items)
        return items[0], "*"
    return first, None


def _converter(kind: Any) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f'expected {EXPECTED.get(kind, "another value")}, got "{text}"'
            ) from None

    return convert


def _metavar(member: Field[Any], hint: Any) -> str:
    name = member.name.upper() + (" …" if _item(hint)[1] == "*" else "")
    return name if default_of(member) is MISSING else f"[{name}]"


def _unknown(words: list[str], kind: Any) -> str:
    """The error message for unexpected words, with the nearest option."""
    option = next((word for word in words if word.startswith("--")), "").partition("=")[0]
    if not option:
        return f'unexpected argument "{words[0]}"'
    names = {option_name(member.name): member for member in fields(kind) if not rule_of(member).hidden}
    near = difflib.get_close_matches(option, names, n=1)
    if not near:
        return f"unknown option {option}"
    if rule_of(names[near[0]]).positional and near[0] == option:
        return f"unknown option {option}: it is a positional argument: give its value without {option}"
    return f"unknown option {option}; did you mean {near[0]}?"


def wrapped_paragraphs(text: str) -> str:
    """Paragraphs wrapped to the terminal; of those with indented lines, each line."""
    columns = min(shutil.get_terminal_size().columns, 100)

    def wrapped(line: str) -> str:
        indent = "        " if line.startswith(" ") else ""
        return textwrap.fill(
            line, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )

    parts = [part.splitlines() if "\n " in f"\n{part}" else [part] for part in text.strip("\n").split("\n\n")]
    return "\n\n".join("\n".join(map(wrapped, lines)) for lines in parts)


def check_paths(settings: Any) -> None:
    """Raise for inputs that do not exist and outputs that could not be written, before any work."""
    for member in fields(settings):
        value, rule = getattr(settings, member.name), rule_of(member)
        if value is None:
            continue
        option = member.name.upper() if rule.positional else option_name(member.name)
        if rule.reads is not None and not Path(value).exists():
            raise FileNotFoundError(f"{option}: there is no {rule.reads} {value}")
        if rule.reads == "folder" and not Path(value).is_dir():
            raise NotADirectoryError(f"{option}: {value} is a file, expected a folder")
        if rule.reads == "file" and Path(value).is_dir():
            raise IsADirectoryError(f"{option}: {value} is a folder, expected a file")
        if rule.writes is not None:
            try:
                check_output(value, folder=rule.writes == "folder")
            except OSError as error:
                raise type(error)(f"{option}: {error}") from None
