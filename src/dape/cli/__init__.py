"""The command `dape`: a table of subcommands, each a function imported only when called."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from dape.errors import expected, install, sentence
from dape.plugins import load_plugins, take_imports
from dape.settings import SettingError

# A subcommand is a function `main(arguments) -> exit code` of the module of its name.
COMMANDS = {
    "methods": "list every method with a line of explanation",
    "data": "pack a corpus into tokens; summarise packed tokens",
    "train": "train a language model with any method on any text",
    "generate": "generate text with a trained run",
    "eval": "perplexity by length, with standard errors",
    "compare": "train methods under the same conditions, evaluate by length",
    "sweep": "compare methods over a grid of options",
    "merge": "merge comparisons into one report",
    "bench": "time attention backends, decoding and training, as ratios",
    "inspect": "attention maps of models",
    "tasks": "generated tasks: list, show, run, table",
    "suite": "questions about texts of growing length",
    "check": "run the conformance tests on your encoding or processor",
    "lm-eval": "evaluate a model on tasks of the lm-evaluation-harness",
    "retrofit": "give a pretrained model another method, and tune it",
    "doctor": "report what this machine can run, with advice",
}


def module_of(name: str) -> str:
    return f"dape.cli.{name.replace('-', '_')}"


def complain(message: str) -> None:
    """Print an error as one line, whatever the words in it that came from outside."""
    print(" ".join(message.split()), file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code; an error is one sentence on stderr and code 2.

    `--debug` among the arguments, or DAPE_DEBUG=1 in the environment, shows the traceback instead.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not sys.stderr.isatty():
        # Bars of other libraries have no place between the lines of a log.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
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

        modules = {known: module_of(known) for known in COMMANDS}
        try:
            print(completion(rest[0] if rest else "bash", modules))
        except ValueError as error:
            complain(f"dape --print-completion: {error}")
            return 2
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        complain(f'dape: unknown command "{name}"; {hint}`dape --help` lists them')
        return 2
    try:
        rest = take_imports(rest)
        load_plugins()
    except Exception as error:
        if debug:
            raise
        complain(f"dape {name}: {sentence(error)}")
        return 2
    try:
        module = importlib.import_module(module_of(name))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dape"):
            raise
        extra = "lm-eval" if name == "lm-eval" else "lab"
        complain(f"dape {name} needs {error.name}: {install(extra)}")
        return 2
    try:
        return module.main(rest) or 0
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
        complain(f"dape {name}: {message}{more}")
        return 2 if expected(error) else 1


MORE = """dape COMMAND --help explains a command; --debug shows the traceback of an error;
--import FILE.py loads encodings and processors of your own;
dape --print-completion bash (or zsh) prints a script that completes commands and options."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        ["usage: dape COMMAND [options]", "", "Attention scores as feature maps.", "", *lines, "", MORE]
    )
