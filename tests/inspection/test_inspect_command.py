"""`dape inspect`: what it writes, and a sentence for what it cannot look at."""

import json

import pytest
import torch
from builders import decoder

from dape.cli import main
from dape.cli.inspect import read_argument
from dape.models import DapeForCausalLM
from dape.models.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "small"
    decoder(vocab_size=257, num_hidden_layers=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_it_writes_page_pictures_and_numbers(model, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--text", "the cat sat", "--lengths", "4,11", "--heads", "1,3", "--out", str(out)]
    assert main(["inspect", str(model), *options]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "heads.json", "index.html", "small-11-layer0.png", "small-4-layer0.png", "tiles"
    ]  # fmt: skip
    records = json.loads((out / "heads.json").read_text())
    assert [(record["length"], record["head"]) for record in records] == [(4, 1), (4, 3), (11, 1), (11, 3)]
    assert all(0 < record["sink"] <= 1 and 0 < record["change"] <= 1 for record in records)
    assert "entropy in nats" in capsys.readouterr().out
    # A tokenizer that is named does for a missing one.
    assert main(["inspect", str(bare(model, tmp_path)), "--tokenizer", "bytes", *options]) == 0


def test_by_default_the_whole_text_up_to_512_tokens_is_shown(model, tmp_path):
    for text, length in (("the cat", 7), ("a" * 600, 512)):
        out = tmp_path / str(length)
        assert main(["inspect", str(model), "--text", text, "--layers", "0", "--out", str(out)]) == 0
        assert {record["length"] for record in json.loads((out / "heads.json").read_text())} == {length}


def bare(model, tmp_path):
    """The same model without a tokenizer."""
    folder = tmp_path / "bare"
    DapeForCausalLM.from_pretrained(model).save_pretrained(folder)
    return folder


def other(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


REFUSALS = {
    "no tokenizer": (lambda model, path: [bare(model, path), "--text", "a b"], "pass --tokenizer with a folder that has one"),
    "short text": (lambda model, path: [model, "--text", "a b", "--lengths", "3,512"], "has 3 tokens for small, too few for a length of 512"),
    "no text": (lambda model, path: [model, "--text", ""], "has 0 tokens for small, too few for a length of 1"),
    "no file": (lambda model, path: [model, "--text", "book.txt"], "there is no file book.txt"),
    "no file of another ending": (lambda model, path: [model, "--text", "texts/nofile.json"], "there is no file texts/nofile.json"),
    "no model": (lambda model, path: [path / "nothing", "--text", "a"], "is not a run folder: it has no run.json"),
    "other model": (lambda model, path: [other(path), "--text", "a"], "no causal language model in the folder"),
    "format": (lambda model, path: [model, "--text", "a", "--formats", "bmp"], "choose among png, svg, pdf"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_mistakes_are_one_sentence(case, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, sentence = REFUSALS[case]
    arguments = [*map(str, make(model, tmp_path))]
    capsys.readouterr()
    assert main(["inspect", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said
    assert not (tmp_path / "inspection").exists()


@pytest.mark.parametrize("text", ["3.14", "word", "The end.", "read book.txt", "wait..."])
def test_a_text_need_not_be_a_file(text):
    assert read_argument(text) == text
