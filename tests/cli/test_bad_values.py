"""Every command with bad values for each of its options, generated from what the settings declare.

One line on stderr that names the option, exit code 2, no traceback, nothing written, nothing begun.
"""

import typing
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from fuzz_commands import Captured, settings_of

from dape import cli
from dape.cli import parsing
from dape.cli.bench import BENCHMARKS
from dape.settings import option_name, rule_of

# What a command needs beside the option under test; paths are made by the test.
NEEDED = {
    "eval": ["folder"], "generate": ["folder"], "inspect": ["folder", "--text", "some text"],
    "lm-eval": ["folder", "--tasks", "task.yaml"], "data show": ["folder"], "retrofit": ["folder"],
    "merge": ["folder"], "suite": ["folder"], "tasks run": ["even_pairs"], "tasks table": ["folder"]
}  # fmt: skip
# No options with values.
PLAIN = {"methods", "doctor", "lm-eval", "bench", "data", "tasks", "tasks list"}
COMMANDS = [
    *cli.COMMANDS,
    *(f"data {name}" for name in ("prepare", "show")),
    *(f"bench {name}" for name in BENCHMARKS),
    *(f"tasks {name}" for name in ("list", "run", "table")),
]


def hidden(kind: type, name: str) -> bool:
    """Options without a flag: positional ones, and those that a command does not show."""
    (rule,) = (rule_of(member) for member in fields(kind) if member.name == name)
    return rule.positional or rule.hidden


def kinds(hint) -> set:
    members = typing.get_args(hint) or (hint,)
    return {item for member in members for item in (member, *typing.get_args(member))} | {hint}


def bad_values(member, hint, folder: Path) -> list[list[str]]:
    """Words that must be refused for a field, by what it declares."""
    rule, values = rule_of(member), []
    names = kinds(hint)
    if rule.bounded or int in names or float in names or rule.listed is int:
        values += ["x", "nan", "" if rule.listed else "1e"]
        values += [] if float in names else ["1.5"]
        values += ["inf", "-inf"] if float in names else []
        for bound, step in ((rule.low, -1), (rule.high, 1), (rule.above, 0), (rule.below, 0)):
            if bound is not None:
                values.append(str(bound + step))
        values += [str(n) for n in (0, -1, 10**9, 10**30) if outside(n, rule)]
        values += ["7,7", ","] if rule.listed else []
    if typing.get_origin(_optional(hint)) is typing.Literal:
        values.append("nosuch")
    if rule.test is not None and _optional(hint) is str:
        values.append("-3")
    if rule.suffixes:
        values.append(str(folder / "x.doc"))
    if rule.writes == "file":
        values += [str(folder / "folder"), "/dev/null/x", str(folder / ("n" * 300))]
    if rule.writes == "folder":
        values += [str(folder / "file"), "/dev/null/x", str(folder / ("n" * 300))]
    if rule.reads is not None:
        values += [str(folder / "missing")]
    pair = typing.get_origin(hint) is tuple and float in typing.get_args(hint)
    return [[value, "0.5"] if pair else [value] for value in dict.fromkeys(values)]


def _optional(hint):
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return members[0] if type(None) in typing.get_args(hint) and len(members) == 1 else hint


def outside(number: int, rule) -> bool:
    return (
        (rule.low is not None and number < rule.low)
        or (rule.above is not None and number <= rule.above)
        or (rule.high is not None and number > rule.high)
        or (rule.below is not None and number >= rule.below)
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_bad_value_is_one_line_that_names_the_option(command, tmp_path, monkeypatch, capsys):
    if command == "lm-eval":
        pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DAPE_DEBUG", raising=False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    kind = settings_of(command, NEEDED.get(command, []))
    if kind is None or not fields(kind):
        assert command in PLAIN, f"dape {command} does not parse its options by settings"
        pytest.skip("no settings")
    before = sorted(tmp_path.rglob("*"))

    def accepted(settings):
        written(settings)
        raise Captured

    written = parsing.check_paths
    monkeypatch.setattr(parsing, "check_paths", accepted)
    hints, wrong, tried = typing.get_type_hints(kind), [], 0
    for member in fields(kind):
        if hidden(kind, member.name):
            continue
        option = option_name(member.name)
        for words in bad_values(member, hints[member.name], tmp_path):
            needed = NEEDED.get(command, []) if option not in NEEDED.get(command, []) else NEEDED[command][:1]
            arguments = [*command.split(), *needed, f"{option}={words[0]}" if len(words) == 1 else option]
            arguments += [] if len(words) == 1 else words
            tried += 1
            try:
                code: object = cli.main(arguments)
            except Captured:
                code = "accepted"
            except SystemExit as end:
                code = f"SystemExit({end.code})"
            said = capsys.readouterr().err
            named = option in said or member.name in said or words[0] in said
            if (
                code != 2
                or said.count("\n") != 1
                or not said.startswith(f"dape {command.split()[0]}: ")
                or not named
            ):
                wrong.append((arguments, code, said))
    assert wrong == []
    assert sorted(tmp_path.rglob("*")) == before
    numbers = [m for m in fields(kind) if m.default is not MISSING and type(m.default) in (int, float)]
    assert tried >= 4 * len([m for m in numbers if not hidden(kind, m.name)])


MISTAKES = [
    "fly", "trian", "bench nosuch", "data nosuch", "tasks nosuch", "train --nosuch 1", "train --steps",
    "train --config missing.toml", "train --config .", "train --corpus missing/",
    "train --tokenizer missing/tokenizer.json", "train --tokenizer bpe:7", "train --method nosuch",
    "train --preset nosuch", "train --backend nosuch", "train --device cuda:99", "train --device meta",
    "bench train --device 0.5", "bench attention --device ~",
    "train --learning-rate 1e-5 --final-learning-rate 1e-4", "train --steps 10 --warmup-steps 11",
    "train --batch-size 16777216", "train --hidden-size 1048576 --num-layers 10000 --num-heads 4",
    "data prepare missing/", "data show missing", "data show .", "eval missing", "eval .", "eval hf:",
    "generate missing", "inspect missing --text x", "compare --methods nosuch",
    "compare --lengths 1000000000", "compare --corpus missing/", "tasks run nosuch",
    "tasks run even_pairs --method nosuch", "reproduce nosuch", "methods --nosuch", "doctor --nosuch",
    "fly\nhigh", "compare --methods kerple --baseline a\nb", "--print-completion a\nb"
]  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_of_other_kinds_are_one_line_too(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split(" ")) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1, said.err
    assert list(tmp_path.iterdir()) == []
