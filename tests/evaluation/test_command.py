"""`dape eval` and `dape data` from the command line: tables in 80 columns, files, sentences for mistakes."""

import csv
import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dape.cli import main
from dape.data import ByteTokenizer, open_data, prepare, train_bpe
from dape.evaluation import (
    RecallSlices,
    evaluate_by_length,
    losses_by_length,
    paired_difference,
    recall_slices,
    sliding_window,
)
from dape.models import DapeForCausalLM, preset
from dape.training import TrainConfig, train


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
    files = {kind: tmp_path / "out" / f"scores.{kind}" for kind in ("json", "csv", "svg")}
    code = evaluate(
        folder, f"hf:{folder}/gpt2", f"hf:{folder}/dape", "--data", folder / "data", "--lengths", "32,64",
        "--last", 16, "--windows", 6, "--sliding", 32, "--sliding-tokens", 600, "--by-position", 32,
        "--json", files["json"], "--csv", files["csv"], "--plot", files["svg"],
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "gpt2: last 16 tokens of 6 windows" in printed
    assert "sliding window of 32, stride 16" in printed

    drawn = files["svg"].read_text()
    assert "one standard error" in drawn  # paired bars, as in the reports
    assert all(f">{name}</text>" in drawn for name in ("gpt2", "dape"))

    tokens = open_data(folder / "data").validation
    models = [
        GPT2LMHeadModel.from_pretrained(folder / "gpt2"),
        DapeForCausalLM.from_pretrained(folder / "dape"),
    ]
    scores = [evaluate_by_length(model, tokens, [32, 64], last=16, windows=6) for model in models]
    saved = json.loads(files["json"].read_text())
    assert [(r["model"], r["eval_length"]) for r in saved["losses"]] == [
        ("gpt2", 32), ("gpt2", 64), ("dape", 32), ("dape", 64),
    ]  # fmt: skip
    assert [r["nll"] for r in saved["losses"]] == pytest.approx([s.nll for each in scores for s in each])
    last = saved["losses"][3]
    assert last["method"] == "dape1x3-kerple"
    assert (last["change"], last["change_se"]) == pytest.approx(paired_difference(scores[1][1], scores[1][0]))
    assert (last["difference"], last["difference_se"]) == pytest.approx(
        paired_difference(scores[1][1], scores[0][1])
    )
    assert saved["losses"][0]["difference"] is None
    slid = sliding_window(models[0], tokens, 32, max_tokens=600)
    assert saved["sliding"][0]["nll"] == pytest.approx(slid.nll)
    assert [row["start"] for row in saved["by_position"][:6]] == [1, 2, 4, 8, 16, 32]

    with open(files["csv"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["ppl"]) for row in rows] == pytest.approx([r["ppl"] for r in saved["losses"]])
    assert "<svg" in files["svg"].read_text()
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_slices_by_recall(folder, tmp_path, capsys):
    models = (f"hf:{folder}/gpt2", f"hf:{folder}/dape")
    options = ("--data", folder / "data", "--lengths", "32,64", "--last", 16, "--windows", 6)
    sliced, whole = tmp_path / "sliced.json", tmp_path / "whole.json"
    assert evaluate(folder, *models, *options, "--slices", "recall", "--ngram", 2, "--json", sliced) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "hits are tokens whose 2-gram occurred before" in printed
    assert evaluate(folder, *models, *options, "--json", whole) == 0
    found = json.loads(sliced.read_text())
    assert found["losses"] == json.loads(whole.read_text())["losses"]
    tokens = open_data(folder / "data").validation
    losses = losses_by_length(
        DapeForCausalLM.from_pretrained(folder / "dape"), tokens, [32, 64], last=16, windows=6
    )
    expected = recall_slices(tokens, losses, ngram=2).records()
    mine = [record for record in found["recall"] if record["model"] == "dape"]
    assert [(r["eval_length"], r["slice"]) for r in mine] == [
        (r["eval_length"], r["slice"]) for r in expected
    ]
    assert [r["nll"] for r in mine] == pytest.approx([r["nll"] for r in expected])
    # The sums say everything that the records do.
    one, other = (RecallSlices.of_json(content) for content in found["recall_sums"])
    assert other.difference(one, 64, "new") == (mine[-2]["difference"], mine[-2]["difference_se"])
    assert found["recall"][0]["difference"] is None
    rare = (*options, "--slices", "recall", "--ngram", 2, "--max-training-count", 3, "--json", sliced)
    assert evaluate(folder, *models, *rare) == 0
    fewer = [record for record in json.loads(sliced.read_text())["recall"] if record["model"] == "dape"]
    assert 0 < fewer[1]["tokens"] < mine[1]["tokens"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--slices", "recall", "--protocol", "paper"), "it needs --protocol same-targets"),
        (("--ngram", "2"), "--ngram needs --slices recall"),
        (("--max-training-count", "2"), "--max-training-count needs --slices recall"),
        (("--slices", "recall", "--ngram", "0"), "--ngram=0 must be at least 1"),
    ],
)
def test_impossible_slices_say_why(folder, capsys, options, sentence):
    arguments = (f"hf:{folder}/gpt2", "--data", folder / "data", "--lengths", "32,64")
    assert evaluate(folder, *arguments, *options) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_corpus_is_packed_with_the_models_tokenizer(folder, capsys):
    code = evaluate(
        folder, f"hf:{folder}/gpt2", "--corpus", folder / "texts", "--lengths", "16", "--windows", 3
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "last 4 tokens of 3 windows" in printed
    assert "no ±" not in printed


def test_one_document_has_no_standard_errors_and_says_so(folder, capsys):
    book = folder / "texts" / "3.txt"
    assert evaluate(folder, f"hf:{folder}/gpt2", "--corpus", book, "--lengths", "16", "--windows", 3) == 0
    printed = capsys.readouterr().out
    assert "(no ±: standard errors need two documents or more)" in printed
    assert " ± " not in printed


def test_a_run_brings_its_own_data_and_lengths(folder, tmp_path, capsys):
    run = train(
        TrainConfig(
            method="alibi",
            preset="tiny",
            num_layers=1,
            hidden_size=16,
            num_heads=2,
            corpus=str(folder / "texts"),
            validation="0.5",
            train_length=16,
            batch_size=2,
            steps=1,
            seed=7,
            out=str(tmp_path / "run-7"),
        ),
        progress=False,
    )
    capsys.readouterr()
    assert evaluate(folder, run.folder, "--windows", 4, "--json", tmp_path / "x.json") == 0
    records = json.loads((tmp_path / "x.json").read_text())["losses"]
    assert [record["eval_length"] for record in records] == [16, 32, 64, 128, 256]
    assert {(r["model"], r["method"], r["seed"], r["train_length"]) for r in records} == {
        ("run-7", "alibi", 7, 16)
    }
    expected = evaluate_by_length(run.model(), run.data().validation, [16, 256], last=4, windows=4)
    assert (records[0]["nll"], records[4]["nll"]) == pytest.approx([score.nll for score in expected])
    assert "last 4 tokens of 4 windows" in capsys.readouterr().out


MISTAKES = {
    "words": (
        ["hf:{}/gpt2", "--data", "{}/data", "--lengths", "a,b"],
        '--lengths="a,b": expected whole numbers',
    ),
    "twice": (["hf:{}/gpt2", "--data", "{}/data", "--lengths", "16,16"], "contains a duplicate"),
    "both": (["hf:{}/gpt2", "--data", "{}/data", "--corpus", "{}/texts"], "token data or a corpus, not both"),
    "long": (
        ["hf:{}/gpt2", "--data", "{}/data", "--lengths", "64,99999"],
        "or let the context run across documents (--context stream, in Python",
    ),
    "limit": (["hf:{}/gpt2", "--data", "{}/data", "--lengths", "256"], "embeddings for 128 positions"),
    "stride": (["hf:{}/gpt2", "--data", "{}/data", "--stride", "4"], "--stride needs --sliding"),
    "no data": (["hf:{}/gpt2", "--data", "{}/texts"], "holds no token data"),
    "no model": (["hf:{}/texts", "--data", "{}/data"], "no causal language model in the folder"),
    "picture": (
        ["no such model", "--plot", "x.doc"],
        '--plot="x.doc" must end in .svg, .pdf, .png',
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_sentences(name, folder, capsys):
    arguments, message = MISTAKES[name]
    assert main(["eval", *(part.format(folder) for part in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


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


def test_how_often_training_had_an_ngram_needs_the_training_text(folder, capsys):
    arguments = (f"hf:{folder}/gpt2", "--corpus", folder / "texts", "--lengths", "32,64", "--last", 16)
    rare = ("--slices", "recall", "--max-training-count", 0)
    assert evaluate(folder, *arguments, *rare) == 2
    assert "the training data of gpt2 is unknown" in " ".join(capsys.readouterr().err.split())


def test_a_model_with_a_known_window_stands_beside_an_input_cut_to_it(folder, tmp_path, capsys):
    """The cut costs nothing at any length, so it is printed first; the use of context says whether more can help."""
    options = ("--data", folder / "data", "--lengths", "64,128", "--last", 8, "--windows", 6)
    config = preset("tiny", num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    config.max_position_embeddings = 32
    DapeForCausalLM(config).save_pretrained(tmp_path / "short")
    ByteTokenizer().save(tmp_path / "short")
    saved = tmp_path / "short.json"
    assert evaluate(folder, f"hf:{tmp_path}/short", *options, "--json", saved) == 0
    printed = " ".join(capsys.readouterr().out.split())
    [context] = json.loads(saved.read_text())["context"]
    assert [at["eval_length"] for at in context["losses"]] == [8, 16, 32]
    tokens = open_data(folder / "data").validation
    model = DapeForCausalLM.from_pretrained(tmp_path / "short")
    cut = losses_by_length(model, tokens, [64, 128], last=8, windows=6, also=(32,)).at(32)
    assert f"Cut to its window of 32 tokens, any input has perplexity {cut.ppl:.2f}" in printed
    assert context["losses"][2]["nll"] == pytest.approx(cut.nll)
    assert "with all 128 tokens the loss is" in printed
    # Random weights make nothing of their window, and nobody is told that a flat curve is a success.
    assert "not used measurably" in printed
    # A model whose window is not known has none to be cut to.
    assert evaluate(folder, f"hf:{folder}/gpt2", *options) == 0
    assert "Cut to its window" not in capsys.readouterr().out
