"""The help of every command: at most 80 columns, and what it says of options that differ between commands."""

import re

import pytest
from processes import python

from dape import cli
from dape.cli.bench import BENCHMARKS

COMMANDS = [
    *([name] for name in cli.COMMANDS),
    *(["data", name] for name in ("prepare", "show")),
    *(["tasks", name] for name in ("list", "show", "run", "table")),
    *(["bench", name] for name in BENCHMARKS),
]


def printed(arguments, capsys):
    try:
        assert cli.main(arguments) == 0
    except SystemExit as end:
        assert end.code == 0  # noqa: PT017 (not every command ends by an exception)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_line_is_longer_than_80_columns(command, capsys, monkeypatch):
    if command == ["lm-eval"]:
        pytest.importorskip("lm_eval")
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed([*command, "--help"], capsys).splitlines()
    assert len(lines) > 2
    assert [line for line in lines if len(line) > 80] == []
    # Options that may be absent read as others do.
    assert [line for line in lines if re.search(r"None|\[\[|\(default: \)", line)] == []


def test_the_folder_of_a_comparison_has_its_own_text(capsys):
    text = " ".join(printed(["compare", "--help"], capsys).replace("│", " ").split())
    assert "finished runs are kept. (default: runs/compare)" in text
    assert "METHOD-PRESET" not in text


def test_a_mistyped_command_or_option_gets_a_suggestion(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err
    assert cli.main(["train", "--stpes", "3"]) == 2
    assert "did you mean --steps?" in capsys.readouterr().err
    assert cli.main(["data", "prepare", "a", "b", "--tokeniser", "bytes"]) == 2
    assert "did you mean --tokenizer?" in capsys.readouterr().err
    assert cli.main(["data", "prepare", "--corpus", "texts"]) == 2
    assert "it is a positional argument: give its value without --corpus" in capsys.readouterr().err


def test_help_does_not_load_transformers():
    """Which takes seconds."""
    commands = [command for command in COMMANDS if command[0] != "lm-eval"]
    code = (
        "import sys; from dape.cli import main\n"
        f"for command in {commands}:\n"
        "    try: main([*command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    assert 'transformers' not in sys.modules, command\n"
    )
    assert python("-c", code).count("usage: dape") == len(commands)
