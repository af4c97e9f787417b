"""`dape suite`: scores, a table, a heat map; what is done is not done again."""

import re
import shutil
import subprocess
import sys

import pytest
import torch
from builders import llama_of_bytes
from transformers import LlamaForCausalLM

from dape import cli
from dape.cli.suite import Options
from dape.evaluation.table import read_table


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": None}
    return llama_of_bytes(tmp_path_factory.mktemp("model") / "small", **sizes)


def test_a_log_has_no_bars_of_other_libraries(model, tmp_path):
    command = [
        sys.executable,
        "-m",
        "dape",
        "suite",
        f"hf:{model}",
        "--lengths",
        "128",
        "--tasks",
        "flip-flop",
    ]
    done = subprocess.run(
        [*command, "--examples", "2", "--out", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert [line.rpartition(": flip-flop at 128")[1] for line in done.stderr.splitlines()] == [
        ": flip-flop at 128"
    ]


def test_scores_table_and_heat_map(model, tmp_path, capsys):
    arguments = [
        f"hf:{model}", "--lengths", "128,256", "--tasks", "flip-flop,niah_single_1", "--examples", "2"
    ]  # fmt: skip
    assert cli.main(["suite", *arguments, "--device", "cpu", "--out", str(tmp_path)]) == 0
    table = read_table(tmp_path / "results.csv.gz").drop_duplicates(["corpus", "length"])
    assert list(zip(table["corpus"], table["length"], strict=True)) == [
        (task, length) for task in ("flip-flop", "niah_single_1") for length in (128, 256)
    ]
    printed = capsys.readouterr()
    assert "niah_single_1" in printed.out
    # A line for each result where there is no terminal.
    told = re.findall(r"(\S+) at (\d+): \d+%", printed.err)
    assert told == [(task, length) for task in ("flip-flop", "niah_single_1") for length in ("128", "256")]
    assert "<svg" in next(tmp_path.glob("*.svg")).read_text()
    before = (tmp_path / "results.csv.gz").read_bytes()
    assert cli.main(["suite", *arguments, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.csv.gz").read_bytes() == before


def test_a_haystack_of_ones_own(model, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael. It was the best of times. " * 3)
    arguments = ["--lengths", "300", "--tasks", "babilong_qa1", "--examples", "2", "--haystack", str(book)]
    arguments += ["--device", "cpu", "--out", str(tmp_path / "out")]
    assert cli.main(["suite", f"hf:{model}", *arguments]) == 0


def test_benchmarks_are_groups_of_tasks():
    def tasks(text):
        return Options(models=("a",), tasks=text).task_list

    niah = [f"niah_{kind}_{n}" for kind in ("single", "multikey") for n in (1, 2, 3)]
    assert tasks("ruler") == [
        *niah, "niah_multivalue", "niah_multiquery", "ruler_vt", "ruler_cwe", "ruler_fwe"
    ]  # fmt: skip
    assert tasks("babilong") == [f"babilong_qa{n}" for n in range(1, 6)]
    assert tasks("ruler_vt,ruler")[:2] == ["ruler_vt", "niah_single_1"]
    assert len(tasks("all")) == len({*tasks("all,ruler,babilong")})


def test_unknown_tasks_are_refused(model, tmp_path, capsys):
    assert cli.main(["suite", f"hf:{model}", "--tasks", "haystack", "--out", str(tmp_path)]) == 2
    assert "unknown task" in capsys.readouterr().err


def test_another_model_or_text_under_the_same_name_is_asked_anew(model, tmp_path):
    """Results were kept by the path as given."""
    folder, book = tmp_path / "model", tmp_path / "book.txt"
    shutil.copytree(model, folder)
    book.write_text("Call me Ishmael. It was the best of times. " * 3)
    arguments = [
        f"hf:{folder}", "--lengths", "300", "--tasks", "babilong_qa1", "--examples", "2", "--device", "cpu"
    ]  # fmt: skip
    arguments += ["--haystack", str(book), "--out", str(tmp_path / "out")]

    def losses() -> list[float]:
        assert cli.main(["suite", *arguments]) == 0
        rows = read_table(tmp_path / "out" / "results.csv.gz").query("metric == 'loss'")
        return rows.groupby("run")["sum"].sum().tolist()

    assert len(losses()) == len(losses()) == 1
    changed = LlamaForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(changed.lm_head.weight)
    changed.save_pretrained(folder)
    assert len(set(losses())) == 2
    book.write_text("Quite another book. It has other words. " * 3)
    assert len(set(losses())) == 3
