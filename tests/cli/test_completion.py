"""The completion script completes commands, then their options."""

import subprocess

import pytest

from dape.cli import main
from dape.cli.completion import completion

COMMANDS = {"methods": "dape.cli.methods", "doctor": "dape.cli.doctor", "absent": "dape.cli.absent"}


@pytest.mark.parametrize(
    ("words", "found"),
    [("dape me", {"methods"}), ("dape doctor --he", {"--help"}), ("dape absent --he", set())],
)
def test_bash_completes(words, found):
    script = completion("bash", COMMANDS)
    ask = f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _dape; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == found


def test_zsh_has_the_same_and_others_are_refused(capsys):
    assert completion("zsh", COMMANDS).startswith("autoload")
    assert main(["--print-completion", "fish"]) == 2
    assert '"fish" is not a shell' in capsys.readouterr().err
