"""The command `dape`: a table of subcommands, each a function imported only when called."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import NamedTuple

from dape.errors import expected, install, sentence
from dape.plugins import load_plugins, take_imports
from dape.settings import SettingError


class Command(NamedTuple):
    target: str
    extra: str
    summary: str


# A subcommand is a function `main(arguments) -> exit code`; `extra` is the extra that installs its dependencies.
COMMANDS = {
    "methods": Command("dape.cli.methods:main", "", "list every method with a line of explanation"),
    "data": Command("dape.cli.data:main", "lab", "pack a corpus into tokens, show packed tokens"),
    "train": Command("dape.cli.train:main", "lab", "train a language model with any method on any text"),
    "generate": Command("dape.cli.generate:main", "lab", "generate text with a trained run"),
    "eval": Command("dape.cli.evaluate:main", "lab", "perplexity by length, with standard errors"),
    "compare": Command("dape.cli.compare:main", "lab", "train methods alike, evaluate by length, report"),
    "sweep": Command("dape.cli.sweep:main", "lab", "a comparison over a grid of any options"),
    "merge": Command("dape.cli.merge:main", "lab", "several comparisons in one report"),
    "demo": Command("dape.cli.demo:main", "lab", "the idea in seconds, then a comparison in minutes"),
    "bench": Command("dape.cli.bench:main", "lab", "time attention backends, decoding and models, as ratios"),
    "inspect": Command("dape.cli.inspect:main", "lab", "attention maps of trained runs"),
    "tasks": Command("dape.cli.tasks:main", "lab", "generated tasks: list, show, run, table"),
    "suite": Command("dape.cli.suite:main", "lab", "questions about longer and longer texts, by task"),
    "check": Command("dape.cli.check:main", "lab", "test an encoding or processor of your own"),
    "lm-eval": Command(
        "dape.cli.lm_eval:main", "lm-eval", "evaluate a model on tasks of the lm-evaluation-harness"
    ),
    "retrofit": Command(
        "dape.cli.retrofit:main",
        "lab",
        "change a pretrained model's positions and scores, tune it",
    ),
    "doctor": Command("dape.cli.doctor:main", "", "report what this machine can run, with advice"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code; an error is one sentence on stderr and code 2.

    `--debug` among the arguments, or DAPE_DEBUG=1 in the environment, shows the traceback instead.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments or os.environ.get("DAPE_DEBUG", "0") not in ("", "0")
    try:
        try:
            return dispatch([word for word in arguments if word != "--debug"], debug=debug)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has closed it: exit silently, also in the flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def dispatch(arguments: list[str], *, debug: bool = False) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = arguments
    if name == "--version":
        from dape import __version__

        print(f"dape {__version__}")
        return 0
    if name == "--print-completion":
        from dape.cli.completion import completion

        modules = {known: command.target.split(":")[0] for known, command in COMMANDS.items()}
        try:
            print(completion(rest[0] if rest else "bash", modules))
        except ValueError as error:
            print(f"dape --print-completion: {error}", file=sys.stderr)
            return 2
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f'dape: unknown command "{name}"; {hint}`dape --help` lists them', file=sys.stderr)
        return 2
    try:
        rest = take_imports(rest)
        load_plugins()
    except Exception as error:
        if debug:
            raise
        print(f"dape {name}: {sentence(error)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    module, function = command.target.split(":")
    try:
        entry = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if not command.extra or (error.name or "").startswith("dape"):
            raise
        print(f"dape {name} needs {error.name}: {install(command.extra)}", file=sys.stderr)
        return 2
    try:
        return entry(rest) or 0
    except KeyboardInterrupt:
        print(f"\ndape {name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        # The only handler that prints errors.
        if debug:
            raise
        more = "" if expected(error) else " (this is a bug in dape; rerun with --debug for the traceback)"
        message = error.as_option if isinstance(error, SettingError) else sentence(error)
        print(f"dape {name}: {message}{more}", file=sys.stderr)
        return 2 if expected(error) else 1


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    head = ["usage: dape COMMAND [options]", "", "Attention scores as feature maps.", ""]
    return "\n".join(
        [
            *head,
            *lines,
            "",
            "dape COMMAND --help explains a command; --debug shows the traceback of an error;",
            "--import FILE.py loads encodings and processors of your own;",
            "dape --print-completion bash (or zsh) prints a script that completes commands and options.",
        ]
    )
