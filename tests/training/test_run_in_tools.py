"""The folder that `dape train` leaves, in other people's tools as it is."""

import pytest
import torch
from test_run import SMALL, corpus  # noqa: F401  # a fixture
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, pipeline

from dape import cli
from dape.checksums import verify_checksums


@pytest.fixture(scope="module", params=["bytes", "bpe:300"])
def run(request, corpus, tmp_path_factory):  # noqa: F811  # the fixture
    out = tmp_path_factory.mktemp("runs") / "small"
    words = ["train", *SMALL, "--tokenizer", request.param, "--corpus", str(corpus), "--out", str(out)]
    assert cli.main([*words, "--steps", "2", "--validation", "2.txt"]) == 0
    return out


def test_model_tokenizer_and_generation_agree_on_special_tokens(run):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    assert tokenizer.eos_token_id is not None
    for name in ("eos_token_id", "pad_token_id"):
        told = {getattr(source, name) for source in (model.config, model.generation_config, tokenizer)}
        assert len(told) == 1
    assert len(tokenizer) == model.config.vocab_size


def test_a_pipeline_takes_batches(run):
    write = pipeline("text-generation", model=str(run), tokenizer=str(run), device="cpu")
    write.tokenizer.padding_side = "left"
    prompts = ["the cat", "the cat sat on"]
    together = write(prompts, batch_size=2, max_new_tokens=4, do_sample=False)
    alone = [write(prompt, max_new_tokens=4, do_sample=False) for prompt in prompts]
    assert together == alone


def test_collators_pad(run):
    tokenizer = AutoTokenizer.from_pretrained(run)
    rows = [tokenizer("the cat"), tokenizer("the cat sat")]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert (batch["labels"] == -100).sum() == (batch["attention_mask"] == 0).sum() > 0
    loss = AutoModelForCausalLM.from_pretrained(run)(**batch).loss
    assert torch.isfinite(loss)


def test_a_card_says_what_was_trained(run):
    for folder in (run, run / "model"):
        card = (folder / "README.md").read_text()
        assert card.startswith("---\nlibrary_name: transformers\n")
        assert "| training length | 16 tokens |" in card
        assert "| method | `dape1x3-kerple` |" in card


def test_a_card_takes_the_evaluation_by_length(run, capsys):
    """Given again, the new table replaces the old one; the model stays one that is whole."""
    for lengths in ("16", "16,32"):
        words = ["--lengths", lengths, "--windows", "4", "--card"]
        assert cli.main(["eval", str(run), *words]) == 0
    for folder in (run, run / "model"):
        card = (folder / "README.md").read_text()
        assert card.count("Perplexity by input length") == 1
        assert "| tokens | 16 | 32 |\n|---|---|---|\n| perplexity | " in card
        assert "from_pretrained(FOLDER" in card
    verify_checksums(run / "model")
    capsys.readouterr()
    assert cli.main(["eval", "hf:nosuch", "--card"]) == 2
    assert "--card writes into run folders: hf:nosuch is not a run folder" in capsys.readouterr().err
