"""`dape eval` and `dape data` from the command line: tables in 80 columns, files, sentences for mistakes."""

import math

import numpy as np
import pytest
import torch
from builders import SMALL_RUN
from transformers import GPT2Config, GPT2LMHeadModel

import dape
from dape.cli import main
from dape.data import ByteTokenizer, open_data, prepare, train_bpe
from dape.evaluation import losses_by_length, sliding_window
from dape.evaluation.statistics import mean_over_documents
from dape.evaluation.table import change, difference, mean, means, read_table
from dape.lab.comparison import load_comparison
from dape.models import DapeForCausalLM, preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token data, and two models of Hugging Face with the byte tokenizer."""
    root = tmp_path_factory.mktemp("eval")
    (root / "texts").mkdir()
    for n in range(12):
        (root / "texts" / f"{n}.txt").write_text("".join(f"text {n}, line {m * n}\n" for m in range(40)))
    prepare(str(root / "texts"), root / "data", validation=0.5, progress=False)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(root / "gpt2")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    DapeForCausalLM(preset("tiny", **sizes)).save_pretrained(root / "dape")
    for name in ("gpt2", "dape"):
        ByteTokenizer().save(root / name)
    return root


def evaluate(folder, *arguments):
    return main(["eval", *map(str, arguments)])


def test_two_models_side_by_side(folder, tmp_path, capsys):
    code = evaluate(
        folder, f"hf:{folder}/gpt2", f"hf:{folder}/dape", "--data", folder / "data", "--lengths", "32,64",
        "--last", 16, "--windows", 6, "--sliding", 32, "--sliding-tokens", 600, "--by-position", 32,
        "--recall", 2, "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80
    assert "At 64 tokens" in printed
    assert " ± " in printed
    assert "Loss minus gpt2's" in printed
    assert "equal steps" not in printed
    for name in ("input 16–31", "sliding by 16", "recall of 2-grams<=32"):
        assert printed.count(name) == 2
    tokens = open_data(folder / "data").validation
    models = [
        GPT2LMHeadModel.from_pretrained(folder / "gpt2"),
        DapeForCausalLM.from_pretrained(folder / "dape"),
    ]
    gpt2, ours = (losses_by_length(model, tokens, [32, 64], last=16, windows=6) for model in models)
    table = read_table(tmp_path / "out" / "results.csv.gz")
    for length in (32, 64):
        assert mean(table, "gpt2", length).value == pytest.approx(gpt2.at(length).value, rel=1e-6)
        found = difference(table, "dape", "gpt2", at=length)
        gap = (ours.losses[length] - gpt2.losses[length]).mean(1, dtype=np.float64)
        expected = mean_over_documents(gap, np.ones(6), ours.windows.documents)
        assert (found.value, found.error) == pytest.approx((expected.value, expected.error), rel=1e-5)
    found, expected = change(table, "dape", 32, 64), ours.change(32, 64)
    assert (found.value, found.error) == pytest.approx((expected.value, expected.error), rel=1e-4)
    slid = sliding_window(models[0], tokens, 32, max_tokens=600)
    expected = pytest.approx(slid["sum"].sum() / slid["count"].sum())
    assert means(table, slice="sliding by 16").loc["gpt2", 32] == expected
    # The same files as those of a comparison.
    assert load_comparison(tmp_path / "out").verdict() in " ".join(printed.split())
    assert "Evaluated to 64 tokens" in (tmp_path / "out" / "report.html").read_text()


def test_one_document_has_no_standard_errors_and_says_so(folder, capsys):
    book = folder / "texts" / "3.txt"
    assert evaluate(folder, f"hf:{folder}/gpt2", "--corpus", book, "--lengths", "16", "--windows", 3) == 0
    printed = capsys.readouterr().out
    assert "only one document, so there are no intervals" in " ".join(printed.split())
    assert " ± " not in printed


def test_a_run_brings_its_own_data_and_lengths(folder, tmp_path, capsys):
    sizes = {**SMALL_RUN, "num_heads": 2, "train_length": 16, "steps": 1, "seed": 7}
    run = dape.train("alibi", corpus=str(folder / "texts"), out=str(tmp_path / "run-7"), **sizes)
    capsys.readouterr()
    assert evaluate(folder, run.folder, "--windows", 4, "--out", tmp_path / "out") == 0
    assert "At 16× the training length run-7 has perplexity" in " ".join(capsys.readouterr().out.split())
    table = read_table(tmp_path / "out" / "results.csv.gz")
    assert set(table["seed"]) == {7}
    assert set(table["train_length"]) == {16}
    expected = losses_by_length(run.model(), run.data().validation, [16, 256], last=4, windows=4)
    assert means(table).columns.tolist() == [16, 32, 64, 128, 256]
    for length in (16, 256):
        assert means(table).loc["run-7", length] == pytest.approx(expected.at(length).value)


MISTAKES = {
    "both": (["hf:{}/gpt2", "--data", "{}/data", "--corpus", "{}/texts"], "token data or a corpus, not both"),
    "long": (["hf:{}/gpt2", "--data", "{}/data", "--lengths", "64,99999"], "or let the context run across"),
    "limit": (["hf:{}/gpt2", "--data", "{}/data", "--lengths", "256"], "embeddings for 128 positions"),
    "stride": (["hf:{}/gpt2", "--data", "{}/data", "--stride", "4"], "--stride needs --sliding"),
    "no data": (["hf:{}/gpt2", "--data", "{}/texts"], "holds no token data"),
    "no model": (["hf:{}/texts", "--data", "{}/data"], "no causal language model in the folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_sentences(name, folder, capsys):
    arguments, message = MISTAKES[name]
    assert main(["eval", *(part.format(folder) for part in arguments)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_model_that_is_nowhere_is_said_to_be_no_model(capsys, monkeypatch):
    def unreachable(name, **options):
        raise OSError("no connection")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", unreachable)
    assert main(["eval", "hf:nosuch"]) == 2
    said = capsys.readouterr().err
    assert 'no causal language model "nosuch": there is no such folder here, and' in said
    assert "Hugging Face hub (no connection)" in said


def test_data_prepare_and_show(folder, tmp_path, capsys):
    out = str(tmp_path / "data")
    arguments = ["data", "prepare", str(folder / "texts"), "--out", out, "--validation", "3,4.txt"]
    assert main(arguments) == 0
    assert main(["data", "show", out, "--verify"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "validation          2" in printed
    assert "held out   3.txt, 4.txt" in printed or "held out   3, 4.txt" in printed
    assert "checksums agree" in printed
    assert main([*arguments, "--seed", "5"]) == 2
    assert "was prepared with seed 0 (now 5)" in capsys.readouterr().err
    assert main(["data", "show", str(tmp_path)]) == 2
    assert "holds no token data" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_refused_for_any_model(folder, tmp_path, capsys):
    """Only ids beyond the vocabulary were noticed, and losses of unrelated ids were reported."""
    texts = [file.read_text() for file in (folder / "texts").iterdir()]
    other = train_bpe(texts, 270)
    config = GPT2Config(vocab_size=270, n_positions=128, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    other.save(tmp_path / "model")
    assert evaluate(folder, f"hf:{tmp_path}/model", "--data", folder / "data", "--lengths", "32") == 2
    assert "was packed with a different tokenizer than" in " ".join(capsys.readouterr().err.split())


def test_a_model_with_a_known_window_stands_beside_an_input_cut_to_it(folder, tmp_path, capsys):
    """The cut costs nothing at any length, so it is printed first; the use of context says whether more can help."""
    options = ("--data", folder / "data", "--lengths", "64,128", "--last", 8, "--windows", 6)
    config = preset("tiny", num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    config.max_position_embeddings = 32
    DapeForCausalLM(config).save_pretrained(tmp_path / "short")
    ByteTokenizer().save(tmp_path / "short")
    assert evaluate(folder, f"hf:{tmp_path}/short", *options) == 0
    printed = " ".join(capsys.readouterr().out.split())
    tokens = open_data(folder / "data").validation
    model = DapeForCausalLM.from_pretrained(tmp_path / "short")
    cut = losses_by_length(model, tokens, [8, 16, 32, 128], last=8, windows=6)
    assert (
        f"has a window of 32 tokens. Inputs cut to it have perplexity {math.exp(cut.at(32).value):.2f}"
        in printed
    )
    assert "with all 128 tokens the loss changes by" in printed
    assert f"loss is {cut.at(8).value:.3f} with 8, {cut.at(16).value:.3f} with 16" in printed
    # Random weights make nothing of their window, and nobody is told that a flat curve is a success.
    assert "no measurable gain" in printed
    # A model whose window is not known has none to be cut to.
    assert evaluate(folder, f"hf:{folder}/gpt2", *options) == 0
    assert "has a window" not in capsys.readouterr().out
