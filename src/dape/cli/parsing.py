"""Command line parsing by a dataclass of settings or argparse; errors are one sentence."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import itertools
import re
import sys
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dape.files import check_output
from dape.settings import check, check_choice, option_name, rule_of

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises errors, which `dape.cli` prints."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(kind: type[Options] | Any, arguments: list[str], *, prog: str, **options: Any) -> Options:
    """Parse a command line into settings; values, inputs and output paths are checked.

    kind:    a dataclass of settings, or a union of them for subcommands.
    options: of tyro.cli.
    """
    import tyro

    actions = action_names(kind)
    if actions and arguments and not arguments[0].startswith("-"):
        check_choice("action", arguments[0], actions)
    complaint = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(kind, args=arguments, prog=prog, **options)
    except SystemExit as end:
        if not end.code:
            raise
        complaint.seek(0)
        raise ValueError(with_suggestion(one_line(complaint.read()), kind)) from None
    complaint.seek(0)
    sys.stderr.write(complaint.read())
    check(parsed)
    check_inputs(parsed)
    check_outputs(parsed)
    return parsed


def with_suggestion(complaint: str, kind: Any) -> str:
    """The error message for an unknown option, with the nearest option."""
    unknown = re.match(r"Unrecognized options: .*?(--[\w-]+)", complaint)
    near = unknown and difflib.get_close_matches(unknown[1], option_names(kind), n=1)
    if not (unknown and near):
        return complaint
    if near[0] == unknown[1]:
        return f"{complaint}; it is a positional argument: give its value without {near[0]}"
    return f"{complaint}; did you mean {near[0]}?"


def action_names(kind: Any) -> list[str]:
    """Names of the subcommands of a union of settings; none of a single dataclass."""
    marks = [mark for part in typing.get_args(kind) for mark in getattr(part, "__metadata__", ())]
    return [mark.name for mark in marks if getattr(mark, "name", None)]


def option_names(kind: Any) -> list[str]:
    """Names of the options of a dataclass of settings, or of all members of a union."""
    if is_dataclass(kind):
        return [option_name(member.name) for member in fields(kind)]
    return [name for part in typing.get_args(kind) for name in option_names(part)]


def check_inputs(settings: Any) -> None:
    """Raise for an input that does not exist, or is a folder instead of a file, or the reverse."""
    for member in fields(settings):
        value, rule = getattr(settings, member.name), rule_of(member)
        if value is None or rule.reads is None:
            continue
        path, option = Path(value), shown_name(settings, member.name)
        if not path.exists():
            raise FileNotFoundError(f"{option}: there is no {rule.reads} {path}")
        if rule.reads == "folder" and not path.is_dir():
            raise NotADirectoryError(f"{option}: {path} is a file, expected a folder")
        if rule.reads == "file" and path.is_dir():
            raise IsADirectoryError(f"{option}: {path} is a folder, expected a file")


def check_outputs(settings: Any) -> None:
    """Raise for an output that could not be written, before any work."""
    for member in fields(settings):
        value, rule = getattr(settings, member.name), rule_of(member)
        if value is not None and rule.writes is not None:
            try:
                check_output(value, folder=rule.writes == "folder")
            except OSError as error:
                raise type(error)(f"{shown_name(settings, member.name)}: {error}") from None


def shown_name(settings: Any, name: str) -> str:
    """An option as on the command line: --name, or NAME of a positional one."""
    import tyro

    hint = typing.get_type_hints(type(settings), include_extras=True)[name]
    positional = tyro.conf.Positional in getattr(hint, "__metadata__", ())
    return name.upper() if positional else option_name(name)


def one_line(complaint: str) -> str:
    """tyro's error message as one sentence that begins with the option."""
    # A title, then paragraphs between rules; without box characters in the encoding, the title has a rule below it.
    lines = [line.strip("│╭╮╰╯ ") for line in complaint.splitlines()]
    rest = lines[2:] if len(lines) > 1 and re.fullmatch(r"[─-]+", lines[1]) else lines[1:]
    said = itertools.takewhile(lambda line: not re.fullmatch(r"[─-]+", line), rest)
    text = " ".join(" ".join(said).split()) or " ".join(complaint.split())
    if match := re.match(r"Error parsing ([^:]*): (.*)", text):
        # Of a single option, or of the settings as a whole, whose own sentence begins with the field's name.
        subject, text = match.groups()
        text = f"{subject}: {text}" if subject.startswith("-") or subject.isupper() else text
    return re.sub(r"^([a-z]\w*)=", lambda match: f"{option_name(match[1])}=", text)
