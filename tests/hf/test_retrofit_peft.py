"""PEFT and retrofitting, in any order."""

import pytest
import torch
from builders import llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import dape
from dape.loading import load_causal_lm
from dape.retrofitting import adapter_parameters

peft = pytest.importorskip("peft")


def lora(**changes):
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False, **changes)


def trained(model):
    return {name for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["dape1x3", "dape1x3-kerple"])
def test_lora_then_retrofit_is_saved_as_one_and_merged(method, tmp_path):
    ids = torch.randint(3, 50, (1, 9))
    llama(vocab_size=50).save_pretrained(tmp_path / "base")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.get_peft_model(loaded, lora()).eval()
    before = model(ids).logits
    dape.retrofit(model, method)
    assert torch.allclose(model(ids).logits, before, atol=1e-5) == (method == "dape1x3")
    assert all(any(part in name for name in trained(model)) for part in ("lora_", "score_processor"))
    for value in model.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.2)
    expected = model.eval()(ids).logits
    model.save_pretrained(tmp_path / "one")
    for load in (dape.load_retrofitted, load_causal_lm):
        again = load(tmp_path / "one").eval()
        torch.testing.assert_close(again(ids).logits, expected)
    # The folder is PEFT's as well: what it saves again is whole.
    again.save_pretrained(tmp_path / "two")
    torch.testing.assert_close(load_causal_lm(tmp_path / "two").eval()(ids).logits, expected)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    torch.testing.assert_close(plain.eval()(ids).logits, expected, rtol=1e-4, atol=1e-4)
    dape.remove_retrofit(merged)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["dape1x3-kerple", "fox"])
def test_retrofit_then_lora_is_saved_as_one_and_merged(method, tmp_path):
    ids = torch.randint(3, 50, (1, 9))
    dape.retrofit(llama(vocab_size=50), method).save_pretrained(tmp_path / "retrofitted")
    retrofitted = dape.load_retrofitted(tmp_path / "retrofitted")
    added = " ".join(adapter_parameters(retrofitted))
    kept = [name for name in ("score_processor", "position_encoding") if f".{name}." in added]
    model = peft.get_peft_model(retrofitted, lora(modules_to_save=kept))
    assert all("lora_" in name or "modules_to_save" in name for name in trained(model))
    for value in model.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.2)
    expected = model.eval()(ids).logits
    model.save_pretrained(tmp_path / "peft")
    again = load_causal_lm(tmp_path / "peft").eval()
    torch.testing.assert_close(again(ids).logits, expected)
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_modules_that_peft_saves_has_the_trained_numbers(tmp_path):
    ids = torch.randint(3, 50, (1, 9))
    llama(vocab_size=50).save_pretrained(tmp_path / "base")
    kept = ["score_processor", "position_encoding"]
    # LoRA that begins as nothing: the model is the retrofitted one.
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=kept)
    model = peft.get_peft_model(dape.retrofit(llama(vocab_size=50), "dape1x3-kerple"), config)
    for name, value in model.named_parameters():
        if "modules_to_save" in name:
            torch.nn.init.normal_(value, std=0.3)
    dape.save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    again = dape.load_retrofitted(tmp_path / "adapter").eval()
    torch.testing.assert_close(again(ids).logits, model.eval()(ids).logits)
    model.add_adapter("second", config)
    with pytest.raises(ValueError, match="several adapters"):
        dape.save_adapter(model, tmp_path / "both", base=str(tmp_path / "base"))
