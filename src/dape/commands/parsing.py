"""Command lines: options from a dataclass of settings or from argparse; a mistake is one sentence."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import sys
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from dape.files import check_output
from dape.settings import check, option_name, rule_of

Options = TypeVar("Options")


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises its complaint, for the one place that prints errors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(kind: type[Options] | Any, arguments: list[str], *, prog: str, **options: Any) -> Options:
    """The settings that a command line gives, their values and output paths checked.

    kind:    a dataclass of settings, or a union of them for subcommands.
    options: of tyro.cli.
    """
    import tyro

    complaint = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(kind, args=arguments, prog=prog, **options)
    except SystemExit as end:
        if not end.code:
            raise
        complaint.seek(0)
        raise ValueError(one_line(complaint.read())) from None
    complaint.seek(0)
    sys.stderr.write(complaint.read())
    check(parsed)
    check_outputs(parsed)
    return parsed


def check_outputs(settings: Any) -> None:
    """Raise for an output that could not be written, before the work whose results it should take."""
    for member in fields(settings):
        value, rule = getattr(settings, member.name), rule_of(member)
        if value is not None and rule.writes is not None:
            try:
                check_output(value, folder=rule.writes == "folder")
            except OSError as error:
                raise type(error)(f"{option_name(member.name)}: {error}") from None


def one_line(complaint: str) -> str:
    """What tyro says in a box, as a sentence that begins with the option."""
    # A title, then paragraphs between rules; where the encoding has no box, the title has a rule below it.
    lines = [line.strip("│╭╮╰╯ ") for line in complaint.splitlines()]
    rest = lines[2:] if len(lines) > 1 and re.fullmatch(r"[─-]+", lines[1]) else lines[1:]
    said = itertools.takewhile(lambda line: not re.fullmatch(r"[─-]+", line), rest)
    text = " ".join(" ".join(said).split()) or " ".join(complaint.split())
    if found := re.match(r"Error parsing ([^:]*): (.*)", text):
        # Of a single option, or of the settings as a whole, whose own sentence begins with the field's name.
        subject, text = found.groups()
        text = f"{subject}: {text}" if subject.startswith("-") or subject.isupper() else text
    return re.sub(r"^([a-z]\w*)=", lambda match: f"{option_name(match[1])}=", text)
