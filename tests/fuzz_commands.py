"""Random command lines and damaged results: each ends by success or one sentence (`make fuzz`, kinds command and merge).

A case runs in a forked process with little memory and time. Work that takes longer is not a failure.
"""

import contextlib
import functools
import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd

import dape
from dape import cli
from dape.cli import parsing
from dape.lab.comparison import ABOUT, FILES, STEP
from dape.settings import option_name, rule_of

SECONDS, BYTES = 15.0, 8 << 30
TINY = (
    "--num-layers 1 --hidden-size 16 --num-heads 2 --score-width 4 --train-length 16 --batch-size 4 --steps 3 "
    "--validation 3.txt"
)
EVALUATION = "--lengths 16,32 --windows 4 --no-equal-time"
# What a command needs to end within seconds; {x} are the paths of `world`.
COMMANDS = {
    "train": f"--corpus {{corpus}} {TINY} --out {{out}}",
    "compare": f"--methods kerple --corpus {{corpus}} {TINY} {EVALUATION} --out {{out}}",
    "sweep": f"--methods kerple --corpus {{corpus}} {TINY} {EVALUATION} --out {{out}} --over learning_rate=1e-3",
    "data prepare": "{corpus} --out {out}",
    "data show": "{data}",
    "eval": "{run} --lengths 16 --windows 4",
    "generate": "{run} --tokens 4",
    "inspect": "{run} --text ab --out {out}",
    "merge": "{compared} {compared} --out {out}",
    "retrofit": "{run} --steps 2 --corpus {corpus} --out {out}",
    "suite": "{run} --out {out}",
    "tasks run": "even_pairs --method nope --steps 2 --test-lengths 5 --samples 2 --layers 1 --out {out}",
    "tasks show": "even_pairs",
    "tasks table": "{out}",
    "methods": "",
    "check": "kerple",
    "doctor": "",
    "bench attention": "--lengths 16 --rounds 1 --heads 2 --head-dim 4",
    "bench decode": "--lengths 16 --rounds 1 --heads 2 --head-dim 4",
    "bench train": "--length 8 --batch 1 --rounds 1 --steps 1",
    "bench generate": "--rounds 1",
}
TEXTS = [
    "", " ", "x", "nosuch", "-1", "1", "1,2", "16,", ",", "2:4", "4:2:0", "ü\u202e", "a" * 300, "a\nb", "[", "{", "%s", "{0}",
    "rope[", "rope[scaling=", "kerple", "dape1x3-rope", "talking-nope,kerple", "bytes", "bpe:300", "bpe:0", "0.5", "1e400", "hf:",
    "hf:x", "NaN", "~", "*", "/dev/null", "/proc/self/mem", "seed=1,2", "steps=1,x", "dropout=", "=", "learning_rate=1e-3,2e-3",
    "slurm[", "local[x=1]", "module:Class", "cuda", "cpu:7", "xla", "theta=0", "depth=3", "kernel_size=2,2", "loss,accuracy",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "3", "7", "16", "33", "-1", "0.5", "1e-3", "nan", "inf", "1e9", "1000000", "x", ""]
# Sentences of Python for its programmers.
RAW = re.compile(
    r"Traceback|bug in dape|__init__|NoneType|object is not|has no attribute|positional argument|unexpected keyword|"
    r"list index|out of range|invalid literal|could not convert|unhashable|not subscriptable|unsupported operand|"
    r"not supported between|division by zero|math domain|\bKeyError|\bIndexError|AssertionError|RuntimeError"
)


class Captured(BaseException):
    """Carries the settings class out of a command."""


def settings_of(command: str, needed: list[str]) -> type | None:
    """The dataclass that a command's options come from."""
    found: list[type] = []

    def capture(kind: type, *arguments: Any, **options: Any) -> None:
        found.append(kind)
        raise Captured

    before, parsing.build_parser = parsing.build_parser, capture  # type: ignore[assignment]
    try:
        with contextlib.suppress(Captured, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            cli.main([*command.split(), *needed, "--help"])
    finally:
        parsing.build_parser = before
    return found[0] if found else None


@functools.cache
def world() -> dict[str, Path]:
    """A corpus, its tokens, a run and a comparison."""
    root = Path(tempfile.mkdtemp(prefix="dape-fuzz-"))
    # Commands are also tried as another user.
    root.chmod(0o755)
    paths = {name: root / name for name in ("corpus", "data", "run", "compared")}
    paths["corpus"].mkdir()
    for number in range(5):
        (paths["corpus"] / f"{number}.txt").write_text(f"{number} and some words. " * 40)
    tiny = TINY.replace("{corpus}", str(paths["corpus"]))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        shared = ["--corpus", str(paths["corpus"]), *tiny.split(), "--data", str(paths["data"])]
        assert cli.main(["train", *shared, "--out", str(paths["run"])]) == 0
        options = dict(zip(*[iter(tiny.replace("--", "").replace("-", "_").split())] * 2, strict=True))
        numbers = {name: int(value) if value.isdecimal() else value for name, value in options.items()}
        dape.compare(
            ["kerple", "rope"], corpus=paths["corpus"], lengths=[16, 32], windows=4, equal_time=False,
            out=paths["compared"], **numbers,
        )  # fmt: skip
    return paths


def ended(arguments: list[str], folder: Path, user: int | None = None) -> tuple[int | None, str]:
    """Exit code and output of a command in a process of its own, as that user; None if it was still working."""
    output = folder / "output"
    child = os.fork()
    if not child:
        os.setsid()
        with open(output, "wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
        os.environ.pop("DAPE_DEBUG", None)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.environ["HOME"] = str(folder)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        os.chdir(folder)
        code = 70
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        except BaseException as error:
            print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code, output.read_text("utf-8", "replace")
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # Its workers save and end by themselves; until then the folder cannot be removed.
    while works_in(folder):
        time.sleep(0.1)
    return None, output.read_text("utf-8", "replace")


def works_in(folder: Path) -> bool:
    """Whether a process was started with a path in that folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) + b"/" in path.read_bytes():
                return True
    return False


def complaint(name: str, arguments: list[str], folder: Path) -> str | None:
    """What is wrong with the way a command ended, or None."""
    code, said = ended(arguments, folder)
    lines = said.strip().splitlines()
    if raw := RAW.search(said):
        return f"{arguments}: {said[max(0, raw.start() - 300) : raw.start() + 300]}"
    if code not in (None, 0, 1, 2) or (code == 2 and not lines[-1].startswith(f"dape {name.split()[0]}: ")):
        return f"{arguments}: code {code}: {said[-500:]}"
    return None


def draw_value(draw: Any, name: str, member: Any, hint: Any, paths: dict[str, Path]) -> list[str]:
    parts = typing.get_args(hint)
    kinds = {hint, *parts, *(x for part in parts for x in typing.get_args(part))}
    rule = rule_of(member)
    if bool in kinds:
        return [draw.one(name, option_name(member.name), f"--no-{member.name.replace('_', '-')}")]
    choices = [x for x in kinds if typing.get_origin(x) is typing.Literal]
    values = [str(x) for one in choices for x in typing.get_args(one)]
    if {int, float} & kinds or rule.listed is int:
        values += NUMBERS
        values += [f"{bound:g}" for bound in (rule.low, rule.above, rule.below) if bound is not None]
    if not values or rule.listed or draw.random.random() < 0.1:
        # What others of the world read must stay as it is.
        values += TEXTS + ([] if rule.writes else list(map(str, paths.values())))
    count = draw.one(f"{name}: values", 1, 1, 1, 2)
    drawn = [draw.one(f"{name} {n}", *values) for n in range(count)]
    if rule.positional:
        return drawn
    return [f"{option_name(member.name)}={drawn[0]}"] if count == 1 else [option_name(member.name), *drawn]


def command(draw: Any) -> Iterator[str]:
    """A command with options that were drawn."""
    name = draw.one("command", *COMMANDS)
    with tempfile.TemporaryDirectory() as work:
        paths = world() | {"out": Path(work) / "out"}
        needed = COMMANDS[name].format(**paths).split()
        kind = settings_of(name, needed)
        arguments = [*name.split(), *needed]
        members = [m for m in fields(kind) if not rule_of(m).hidden] if kind else []
        for number in range(draw.one("options", 1, 2, 3, 5)) if members else ():
            member = draw.one(f"option {number}", *members)
            hint = typing.get_type_hints(kind)[member.name]
            arguments += draw_value(draw, member.name, member, hint, paths)
        if wrong := complaint(name, arguments, Path(work)):
            yield wrong


ODD: list[Any] = [
    None, "", "x", "</script>", "-", 0, -1, 1.5, True, [], {}, [[]], {"a": []}, "recall<=x", "recall>", "\u202e", 10**30
]  # fmt: skip


def replace_one(draw: Any, value: Any) -> Any:
    """The value with one of its parts replaced by something else."""
    if isinstance(value, dict) and value and draw.random.random() < 0.8:
        key = draw.random.choice(list(value))
        if draw.random.random() < 0.2:
            another = {"x": 1} if draw.random.random() < 0.5 else {}
            return {k: v for k, v in value.items() if k != key} | another
        return value | {key: replace_one(draw, value[key])}
    if isinstance(value, list) and value and draw.random.random() < 0.8:
        index = draw.random.randrange(len(value))
        return [*value[:index], replace_one(draw, value[index]), *value[index + 1 :]]
    return draw.random.choice(ODD)


def merge(draw: Any) -> Iterator[str]:
    """A comparison whose files hold something else, merged."""
    import shutil

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "damaged"
        folder.mkdir()
        for file in (ABOUT, FILES[STEP]):
            shutil.copy(world()["compared"] / file, folder)
        for _ in range(draw.one("changes", 1, 1, 2)):
            if draw.chance("about"):
                try:
                    content = json.loads((folder / ABOUT).read_text())
                except ValueError:
                    content = {}
                (folder / ABOUT).write_text(json.dumps(replace_one(draw, content)))
            else:
                table = pd.read_csv(folder / FILES[STEP], dtype=object, keep_default_na=False)
                column = draw.one("column", *table.columns)
                value = draw.one("value", *map(str, ODD), "64", "nan")
                rows = draw.one("rows", slice(None), slice(1), slice(0, None, 2), slice(0))
                if rows == slice(0):
                    table = table[:0]
                else:
                    table.loc[table.index[rows], column] = value
                table.to_csv(folder / FILES[STEP], index=False)
        arguments = ["merge", str(folder), str(world()["compared"]), "--out", str(Path(work) / "out")]
        if wrong := complaint("merge", arguments, Path(work)):
            yield wrong
