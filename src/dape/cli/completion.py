"""Completion of commands and options in a shell: `dape --print-completion bash >> ~/.bashrc`, or zsh."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Mapping

SHELLS = ("bash", "zsh")
SCRIPT = """_dape() {{
  local words
  case $COMP_CWORD:${{COMP_WORDS[1]}} in
    1:*) words="{names}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _dape dape
"""


def completion(shell: str, commands: Mapping[str, str]) -> str:
    """The script of a shell; commands: their modules by name. Options are read from each command's help."""
    if shell not in SHELLS:
        raise ValueError(f'"{shell}" is not a shell that completion is written for: {" or ".join(SHELLS)}')
    cases = [f'    *:{name}) words="{" ".join(options(module))}" ;;' for name, module in commands.items()]
    script = SCRIPT.format(names=" ".join(commands), cases="\n".join(cases))
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


def options(module: str) -> list[str]:
    """Options of the command in a module; none if what it needs is not installed."""
    printed = io.StringIO()
    with contextlib.suppress(ModuleNotFoundError, SystemExit), contextlib.redirect_stdout(printed):
        importlib.import_module(module).main(["--help"])
    return sorted({*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", printed.getvalue())})
