"""Every block of the pages in docs/ runs as printed; commands with options added that make them small."""

import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt
from processes import Worker, copies

from dape.cli import compare, main, train
from dape.lab.experiment import Local

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/suite").glob("*.md"))]

# What makes a command small, added at its end, where the last of an option's values is the one that counts.
MODEL = "--num-layers 1 --hidden-size 32 --num-heads 4 --score-width 8 --steps 3 --batch-size 4 --device cpu"
SMALL = {
    "train": MODEL,
    "compare": f"{MODEL} --no-equal-time --windows 4 --lengths 64,128 --train-length 64",
    "eval": "--windows 4 --last 16",
    "generate": "--tokens 5",
    "inspect": "--resolution 16 --layers 0 --heads 0,1 --lengths 64 --formats svg",
    "tasks run": "--steps 2 --batch-size 2 --samples 2 --layers 1 --test-lengths 48",
    "lm-eval": "--limit 2",
}


class Block(NamedTuple):
    """A fenced block: its language, and after it a file's name, "not-run", or nothing."""

    language: str
    note: str
    text: str


def blocks(page: Path) -> list[Block]:
    tokens = MarkdownIt("commonmark").parse(page.read_text("utf-8"))
    assert not [token for token in tokens if token.type == "code_block"], "indented code: use a fence"
    fences = [token for token in tokens if token.type == "fence"]
    return [Block(*token.info.partition(" ")[::2], token.content) for token in fences]


# Pages for those who work on kernels are left out.
GUIDE = [page for page in PAGES if page.stem not in ("kernels", "kernel_log")]


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_paragraphs_have_five_lines_at_most(page):
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))
    texts = [text.content for text in tokens if text.type == "inline"]
    shown = [re.sub(r"\]\([^)]*\)", "]", text) for text in texts]
    assert [text for text in shown if len(text) > 5 * 105] == []


def commands(text: str) -> list[list[str]]:
    """The lines of a shell block as words, continuations joined, comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(Local, "start", Worker.start_for)
    write_texts(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    found = blocks(page)
    assert found
    for block in found:
        if block.note == "not-run":
            check_shell(block.text)
        elif block.note.endswith(".sbatch"):
            check_batch_job(block.text, tmp_path / block.note)
        elif block.note:
            (tmp_path / block.note).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.note).write_text(block.text)
        elif block.language == "text":
            # What the command before prints.
            assert capsys.readouterr().out.strip() == block.text.strip()
        elif block.language == "python":
            exec(compile(block.text, page.name, "exec"), names)
        else:
            assert block.language == "bash", (page.name, block.language)
            capsys.readouterr()
            for words in commands(block.text):
                run(words)


def write_texts(folder: Path) -> None:
    """my_texts/ and book.txt, which the pages' commands read."""
    (folder / "my_texts").mkdir()
    for number in range(40):
        words = " ".join(f"{number * word % 17} and {word}, {word % 7} times" for word in range(80))
        (folder / "my_texts" / f"{number}.txt").write_text(words)
    (folder / "book.txt").write_text(" ".join(f"Chapter {i}: {i * i}." for i in range(200)))


def small(words: list[str]) -> list[str]:
    """The arguments of `dape` with those added that make it quick."""
    added = SMALL.get(" ".join(words[:2])) or SMALL.get(words[0], "")
    if words[0] == "train" and not {"--corpus", "--data", "--config"} & {*words}:
        # The default corpus has 41 MB.
        added += " --corpus my_texts/ --tokenizer bytes --validation 0.1"
    return [*words, *added.split()]


def run(words: list[str]) -> None:
    if words[0] == "dape":
        assert main(small(words[1:])) == 0, shlex.join(words)
    elif words[0] == "torchrun":
        from torch.distributed.run import parse_args

        launched = parse_args(words[1:])
        assert (launched.module, launched.training_script) == (True, "dape")
        code = "import sys; from dape.cli import main; sys.exit(main(sys.argv[1:]))"
        copies(code, *small(launched.training_script_args), world=int(launched.nproc_per_node))
    else:
        pytest.fail(f"nobody runs {shlex.join(words)}: mark its block not-run")


def check_shell(text: str) -> None:
    """A block that is not run is at least a shell's language, and its options of ours exist."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    for words in commands(text):
        if words[0] == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert words[1] in targets
        if "dape" in words:
            check_options(words[words.index("dape") + 1 :])


def check_options(words: list[str]) -> None:
    parsers = {"train": train.parse_training, "compare": compare.parse_comparison}
    # A method of the reader's own is not there to be looked up.
    if words and words[0] in parsers and "--import" not in words:
        parsers[words[0]](words[1:])


STAND_INS = {
    "scontrol": "echo node-1; echo node-2",
    "srun": 'printf "%s\\n" "$@"',
}


def check_batch_job(text: str, path: Path) -> None:
    """Run a Slurm script with stand-ins for Slurm's commands; what it would start must parse."""
    from torch.distributed.run import parse_args

    path.write_text(text)
    tools = path.parent / "tools"
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "node-[1-2]", "NNODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "7"}
    environment = {**os.environ, **{f"SLURM_{name}": value for name, value in slurm.items()}}
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", str(path), "--seed", "5"], env=environment, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    launched = parse_args(words[words.index("torchrun") + 1 :])
    assert (launched.nnodes, launched.nproc_per_node, launched.rdzv_endpoint) == ("2", "8", "node-1:29500")
    assert (launched.module, launched.training_script) == (True, "dape")
    assert launched.training_script_args[0] == "train"
    assert train.parse_training(launched.training_script_args[1:]).seed == 5
    options = re.findall(r"^#SBATCH (--[\w-]+=\S+|--requeue)$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH")


def test_a_wrong_option_in_a_block_that_is_not_run_is_found():
    with pytest.raises(ValueError, match="unknown option --no-such-option"):
        check_shell("torchrun -m dape train --preset 125m --no-such-option 3")
    with pytest.raises(subprocess.CalledProcessError):
        check_shell(textwrap.dedent("if true; then echo"))
