"""Retrofitted folders load by plain transformers with trust_remote_code=True, with and without this package."""

import copy
import json
import logging
import pickle

import pytest
import torch
from builders import llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import dape
from dape.models.export import export

METHODS = ["dape1x3-kerple", "dape1x3", "fox"]


def retrofitted(method):
    model = dape.retrofit(llama(vocab_size=61, num_key_value_heads=2, eos_token_id=None), method)
    with torch.no_grad():
        for value in dape.retrofitting.adapter_parameters(model).values():
            value.add_(0.1 * torch.randn_like(value))
    return model


WAYS = {
    "export": export,
    "save_pretrained": lambda model, path: model.save_pretrained(path),
    "a copy's save_pretrained": lambda model, path: copy.deepcopy(model).save_pretrained(path),
    "a pickled copy's": lambda model, path: pickle.loads(pickle.dumps(model)).save_pretrained(path),
}


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_a_folder_loads_as_what_it_is(method, saved, tmp_path):
    model = retrofitted(method)
    WAYS[saved](model, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, dtype=torch.float64)
    ids = torch.arange(20)[None]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], list(config["auto_map"])) == ("llama", ["AutoModelForCausalLM"])
    assert type(again) is LlamaForCausalLM
    torch.testing.assert_close(again(ids).logits, model.double()(ids).logits)
    assert torch.equal(dape.load_retrofitted(tmp_path, dtype=torch.float64)(ids).logits, again(ids).logits)


def test_what_the_retrofit_was_removed_from_saves_as_the_base(tmp_path):
    model = dape.remove_retrofit(retrofitted("dape1x3-kerple"))
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not list(tmp_path.glob("dape*"))


@pytest.mark.parametrize("method", ["rope[scaling=yarn,factor=8,original_length=32]", "dape1x3-kerple"])
def test_what_plain_transformers_drops_is_reported(method, tmp_path, caplog):
    """A scaling alone adds no weights, and its loss without the code would be silent."""
    model = retrofitted(method)
    model.save_pretrained(tmp_path)
    ids = torch.arange(60)[None]
    torch.testing.assert_close(dape.load_retrofitted(tmp_path)(ids).logits, model(ids).logits)
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    try:
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    finally:
        logger.propagate = before
    assert (plain(ids).logits - model(ids).logits).abs().max() > 1e-4
    name = "stretched_by_dape_retrofit" if "yarn" in method else "score_processor"
    assert any(name in record.getMessage() for record in caplog.records)
    own = dape.remove_retrofit(model).state_dict()
    assert own.keys() == plain.state_dict().keys()


def test_code_in_folders_leaves_models_that_are_loaded_as_they_are(tmp_path):
    """Each copy of the code is an implementation of its own."""
    model, ids = retrofitted("dape1x3-kerple"), torch.arange(20)[None]
    expected = model(ids).logits
    export(model, tmp_path / "one", with_code=True)
    export(model, tmp_path / "two", with_code=True)
    copies = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True)
        for name in ("one", "two")
    ]
    for again in (*copies, model):
        torch.testing.assert_close(again(ids).logits, expected)
    retrofitted("dape1x3")
