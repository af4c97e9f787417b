"""Tokenizers: they round-trip, Hugging Face reads what they save, and the BPE sees the training split only."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from dape.data import ByteTokenizer, load_tokenizer, prepare, train_bpe

TEXTS = ["plain text", "naïve café ∑ 🙂", "  indented\n\n\tand tabs \n", "\x7f\u00a0odd\u2028spaces"]


def trained():
    return train_bpe(["some text to learn from, some more text\n"] * 20, 280)


@pytest.mark.parametrize("make", [ByteTokenizer, trained])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_here_and_in_transformers(make, text, tmp_path):
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size
    np.testing.assert_array_equal(tokenizer.encode_batch([text, "x"])[0], ids)
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert type(loaded) is type(tokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.encode(text) == ids
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("make", [ByteTokenizer, trained])
def test_a_saved_tokenizer_ends_and_pads_texts_with_a_token_that_no_text_has(make, tmp_path):
    tokenizer = make()
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token == theirs.pad_token == "<|endoftext|>"
    assert len(theirs) == tokenizer.vocab_size
    odd = "".join(map(chr, range(1, 0x2FF))) + "ÿĀ\U0001f642"
    assert theirs(odd)["input_ids"] == tokenizer.encode(odd)
    assert theirs.eos_token_id not in tokenizer.encode(odd)
    # Text that spells the token out is text to us; to transformers it is the token, as users of it expect.
    spelled = tokenizer.encode("a<|endoftext|>")
    assert theirs.eos_token_id not in spelled
    assert load_tokenizer(tmp_path).encode("a<|endoftext|>") == spelled
    assert theirs("a<|endoftext|>")["input_ids"] == [*tokenizer.encode("a"), theirs.eos_token_id]
    batch = theirs(["a", "some text"], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == batch["attention_mask"].shape


def test_a_tokenizer_of_others_keeps_its_special_tokens(tmp_path):
    tokenizer = trained()
    tokenizer.backend.add_special_tokens(["</s>"])
    tokenizer.save(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "</s>"
    assert load_tokenizer(tmp_path).vocab_size == tokenizer.vocab_size


def test_specs(tmp_path):
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    tokenizer = trained()
    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert again.encode("some text") == tokenizer.encode("some text")
    with pytest.raises(ValueError, match="has to be trained"):
        load_tokenizer("bpe:512")
    with pytest.raises(ValueError, match='no tokenizer "bqe:300": give bytes, bpe:VOCAB'):
        load_tokenizer("bqe:300")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer in the folder "):
        load_tokenizer(tmp_path / "empty")


def test_a_name_that_is_nowhere_is_looked_for_here_and_on_the_hub(monkeypatch):
    def unreachable(name, **options):
        raise OSError("no connection.\nCheck it.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unreachable)
    sentence = r'no tokenizer "nosuch": there is no such folder here, and it could not be downloaded from the .* hub \(no connection\)$'
    with pytest.raises(ValueError, match=sentence):
        load_tokenizer("nosuch")


def test_bpe_learns_from_the_training_split_only(corpus, tmp_path):
    for path in (corpus / "odd").glob("*.txt"):
        path.write_text("zyxwvut " * 500)
    how = {"tokenizer": "bpe:400", "progress": False}
    data = prepare(str(corpus), tmp_path / "data", validation=["01", "03"], **how)
    assert "zyxwvut" in data.tokenizer.decode([max(data.tokenizer.encode(" zyxwvut"))])
    names = [path.stem for path in (corpus / "odd").glob("*.txt")]
    data = prepare(str(corpus), tmp_path / "other", validation=names, **how)
    assert len(data.tokenizer.encode("zyxwvut")) > 4
    assert data.train.ids.max() < 400


def test_large_vocabularies_have_room(corpus, tmp_path, monkeypatch):
    from dape.data import tokens

    assert tokens.id_type(1 << 16) is np.uint16
    assert tokens.id_type((1 << 16) + 1) is np.uint32
    monkeypatch.setattr("dape.data.preparation.id_type", lambda size: np.uint32)
    data = prepare(str(corpus), tmp_path / "data", progress=False)
    assert data.train.ids.dtype == np.uint32
    assert data.tokenizer.decode(data.train.document(0)).startswith("Document ")
