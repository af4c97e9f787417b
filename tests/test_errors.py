"""Every error ends as one sentence; a traceback only where it is asked for."""

import copy
import errno
import io
import json
import os
import re
from pathlib import Path

import pytest
import torch
from fuzz_commands import RAW

import dape
from dape import cli
from dape.data import prepare
from dape.errors import expected, sentence
from dape.evaluation.table import COLUMNS, make_table, read_table, write_table
from dape.files import read_json
from dape.loading import load_base
from dape.training import load_run
from dape.training.display import read_metrics


def test_errors_of_the_system_name_the_path():
    assert sentence(PermissionError(errno.EACCES, "Permission denied", "a/b")) == "a/b: permission denied"
    assert sentence(OSError(errno.ENOSPC, "No space left on device", "x.json")) == "x.json: the disk is full"
    assert sentence(OSError(errno.ENOSPC, "No space left on device")) == "the disk is full"
    assert sentence(IsADirectoryError(errno.EISDIR, "Is a directory", "runs")) == "runs: is a directory"
    assert sentence(FileNotFoundError("there is no corpus x")) == "there is no corpus x"


def test_too_little_memory_names_the_size():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert expected(caught.value)
    assert "out of memory for 4611686018427387904 bytes" in sentence(caught.value)
    assert sentence(MemoryError("Unable to allocate 3.64 TiB for an array")) == (
        "out of memory for 3.64 TiB: make the batch, the length or the model smaller"
    )


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "x"), 2, "dape methods: x: permission denied\n"),
        (MemoryError(), 2, "dape methods: out of memory: make the batch, the length or the model smaller\n"),
        (ValueError("two\nlines"), 2, "dape methods: two lines\n"),
        (
            KeyError("splits"),
            1,
            "dape methods: there is no 'splits' (this is a bug in dape; rerun with --debug for the traceback)\n",
        ),
        (
            IndexError("3"),
            1,
            "dape methods: IndexError: 3 (this is a bug in dape; rerun with --debug for the traceback)\n",
        ),
    ],
)
def test_one_boundary(error, code, said, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr("dape.cli.methods.main", fail)
    monkeypatch.delenv("DAPE_DEBUG", raising=False)
    assert cli.main(["methods"]) == code
    assert capsys.readouterr().err == said
    with pytest.raises(type(error)):
        cli.main(["methods", "--debug"])
    monkeypatch.setenv("DAPE_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["methods"])


def test_a_full_disk_behind_standard_output_is_a_sentence(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.stdout", Full())
    assert cli.main(["methods"]) == 2
    assert capsys.readouterr().err == "dape methods: the disk is full\n"


@pytest.mark.parametrize(
    "content", ["null", "3", "[]", '"text"', "{", '{"steps": "many"}', '{"nosuch": 1}', "[" * 10**5]
)
def test_a_damaged_run_is_a_sentence(tmp_path, content, capsys):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json|nosuch|steps"):
        load_run(tmp_path)
    assert cli.main(["generate", str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert not RAW.search(said)


def test_an_entry_missing_in_a_file_of_ours_is_a_sentence_with_its_path(tmp_path, monkeypatch, capsys):
    file = tmp_path / "scores.json"
    file.write_text('{"training": {"steps": 3}}')
    content = read_json(file)
    assert content["training"]["steps"] == 3
    assert content.get("windows") is None
    for damaged in (content, copy.deepcopy(content), content["training"]):
        with pytest.raises(ValueError, match=rf'^{file} is damaged: it has no entry "windows"$'):
            damaged["windows"]

    def fail(arguments):
        return content["windows"]

    monkeypatch.setattr("dape.cli.methods.main", fail)
    assert cli.main(["methods"]) == 2
    assert capsys.readouterr().err == f'dape methods: {file} is damaged: it has no entry "windows"\n'


def test_text_from_outside_is_parsed_in_one_place():
    """Elsewhere, content that is too deeply nested, or an entry that is missing, would be a bug of ours."""
    source = Path(dape.__file__).parent
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"(json|tomllib)\.loads?\((?!json)|safe_load\(", path.read_text())
    }
    assert found == {
        "data/tokenizers.py",  # of the tokenizers library
        "files.py",
        "models/remote_code.py",  # code that is exported needs no other module of ours
    }


DEEP = {".json": "[" * 20_000, ".yaml": "[" * 20_000, ".toml": "a = " + "[" * 20_000}


@pytest.mark.parametrize("suffix", DEEP)
def test_a_deeply_nested_configuration_is_a_sentence(suffix, tmp_path, capsys):
    (tmp_path / f"run{suffix}").write_text(DEEP[suffix])
    assert cli.main(["train", "--config", str(tmp_path / f"run{suffix}")]) == 2
    assert "too deeply nested" in (said := capsys.readouterr().err)
    assert len(said.splitlines()) == 1


def test_deeply_nested_lines_of_a_corpus_and_of_metrics_are_left_out(tmp_path, capsys):
    (tmp_path / "corpus.jsonl").write_text(f'{DEEP[".json"]}\n{{"text": "{"a b " * 99}"}}\n' * 3)
    with pytest.raises(ValueError, match="too deeply nested"):
        prepare(str(tmp_path / "corpus.jsonl"), tmp_path / "data", progress=False)
    (tmp_path / "metrics.jsonl").write_text(f'{DEEP[".json"]}\n{{"step": 3}}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3}]


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 64, b"\x80\x04K\x01.", b"{" * 20_000])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json", "model.gguf"])
def test_damaged_files_of_a_foreign_model_are_a_sentence(name, content, tmp_path, capsys):
    config = {"model_type": "llama", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    (tmp_path / name).write_bytes(content)
    if name == "model.gguf":
        with pytest.raises(ValueError, match="no causal language model"):
            load_base(str(tmp_path / name))
        return
    assert cli.main(["eval", f"hf:{tmp_path}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("position", [0, 12, 30, -30, -5])
def test_a_damaged_table_of_results_is_a_sentence(position, tmp_path):
    row = {"run": "r", "method": "m", "corpus": "c", "train_length": 8, "metric": "loss", "sum": 1.0}
    path = write_table(make_table([{**row, "seed": seed} for seed in range(99)]), tmp_path / "r.csv.gz")
    content = bytearray(path.read_bytes())
    content[position] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a table of results"):
        read_table(path)
    # Or a number beyond every integer.
    (tmp_path / "r.csv").write_text(f"{','.join(COLUMNS)}\n{','.join(['1' + '0' * 30] * len(COLUMNS))}\n")
    with pytest.raises(ValueError, match="is not a table of results"):
        read_table(tmp_path / "r.csv")


@pytest.mark.parametrize("name", ["manifest.json", "sources.jsonl"])
def test_token_data_without_its_entries_is_a_sentence(tmp_path, name):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"{number}.txt").write_text(f"{number} " * 50)
    prepare(str(corpus), tmp_path / "data", validation=["0.txt"], progress=False)
    (tmp_path / "data" / name).write_text("{}\n")
    with pytest.raises(ValueError, match=re.escape(name)):
        prepare(str(corpus), tmp_path / "data", validation=["0.txt"], progress=False)
