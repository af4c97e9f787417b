"""Retrofitting: nothing changes at first, everything that transformers does goes on working, and it can be undone."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dape
from dape.retrofitting.attach import ARCHITECTURES, adapter_parameters

TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
WINDOWS = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "phi3": {"sliding_window": 6},
}


def small(kind="llama", **changes):
    sizes = {**SIZES, **TOKENS, **changes}
    if kind == "gpt2":
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes)).eval()


def disturbed(model):
    """The retrofitted model with convolutions that do something."""
    for value in adapter_parameters(model).values():
        torch.nn.init.normal_(value, std=0.3)
    return model


def batch():
    ids = torch.randint(3, 50, (2, 17))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_outputs_are_unchanged_at_first_and_after_removal(kind, windows):
    if windows and kind not in WINDOWS:
        pytest.skip("this architecture has no sliding window")
    model = small(kind, **(WINDOWS[kind] if windows else {}))
    ids, mask = batch()
    before = model(ids, attention_mask=mask).logits
    said = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    names = set(model.state_dict())
    dape.retrofit(model)
    after = model(ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(after[real], before[real], rtol=0, atol=1e-5)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False), said)
    disturbed(model)
    assert not torch.allclose(model(ids, attention_mask=mask).logits[real], before[real], atol=1e-3)
    dape.remove_retrofit(model)
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3"])
def test_decoding_with_any_cache_equals_the_whole_at_once(kind):
    model = disturbed(dape.retrofit(small(kind, **WINDOWS.get(kind, {})))).double()
    ids, _ = batch()
    full = model(ids, use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=30)):
        parts, seen = [], 0
        for size in (4, 1, 1, 7, 4):
            parts.append(model(ids[:, seen : seen + size], past_key_values=cache, use_cache=True).logits)
            seen += size
        # Sinks of precision are rotary tables, which some models keep in float32.
        torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-5, atol=1e-5)


def test_a_padded_row_equals_the_row_alone():
    model = disturbed(dape.retrofit(small("qwen2", **WINDOWS["qwen2"])))
    ids, mask = batch()
    together = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(together[0, 5:], model(ids[:1, 5:]).logits[0], rtol=1e-4, atol=1e-5)
    right = mask.flip(-1)
    torch.testing.assert_close(
        model(ids, attention_mask=right).logits[0, :12], model(ids[:1, :12]).logits[0], rtol=1e-4, atol=1e-5
    )


def test_masks_that_a_caller_makes_are_taken():
    model = disturbed(dape.retrofit(small()))
    ids, _ = batch()
    causal = torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    plain = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, attention_mask=causal, use_cache=False).logits, plain)
    additive = torch.zeros(2, 1, 17, 17).masked_fill(~causal, torch.finfo(torch.float32).min)
    torch.testing.assert_close(model(ids, attention_mask=additive, use_cache=False).logits, plain)
    causal[:, :, 9, 4] = False
    with pytest.raises(ValueError, match="keys with a gap between them"):
        model(ids, attention_mask=causal)


def test_packed_documents_do_not_see_each_other():
    model = disturbed(dape.retrofit(small()))
    ids, _ = batch()
    packed = torch.cat([torch.arange(9), torch.arange(8)])[None]
    together = model(ids[:1], position_ids=packed, use_cache=False).logits
    torch.testing.assert_close(
        together[:, 9:], model(ids[:1, 9:], use_cache=False).logits, rtol=1e-4, atol=1e-5
    )


def test_weights_are_shown_when_asked_for():
    model = disturbed(dape.retrofit(small()))
    ids, mask = batch()
    shown = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert [weights.shape for weights in shown] == [(2, 4, 17, 17)] * 2
    torch.testing.assert_close(shown[1][1].sum(-1), torch.ones(4, 17))
    assert (shown[0].triu(1) == 0).all()
    assert (shown[0][0, :, :, :5] == 0).all()


@pytest.mark.parametrize("alone", [True, False])
def test_training_moves_what_it_should(alone):
    model = dape.retrofit(small(), "dape1x5", width=8, freeze_base=alone).train()
    ids, _ = batch()
    before = {name: value.clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == (set(adapter_parameters(model)) if alone else set(before))


def test_gradient_checkpointing_changes_no_gradient():
    model, grads = disturbed(dape.retrofit(small())).train(), []
    ids, _ = batch()
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_an_adapter_is_small_and_loads_onto_its_base(tmp_path):
    small().save_pretrained(tmp_path / "base")
    model = disturbed(
        dape.retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "dape1x5", width=8)
    )
    folder = dape.save_adapter(model, tmp_path / "adapter")
    assert sorted(path.name for path in folder.iterdir()) == [
        "dape_adapter.json",
        "dape_adapter.safetensors",
    ]
    ids, mask = batch()
    expected = model(ids, attention_mask=mask).logits
    onto = dape.load_adapter(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder, freeze_base=True
    )
    torch.testing.assert_close(onto(ids, attention_mask=mask).logits, expected)
    assert {n for n, p in onto.named_parameters() if p.requires_grad} == set(adapter_parameters(onto))
    by_reference = dape.load_retrofitted(folder)
    torch.testing.assert_close(by_reference(ids, attention_mask=mask).logits, expected)


def test_a_whole_retrofitted_model_is_saved_and_loaded(tmp_path):
    model = disturbed(dape.retrofit(small("qwen3")))
    model.save_pretrained(tmp_path)
    again = dape.load_retrofitted(tmp_path)
    ids, mask = batch()
    torch.testing.assert_close(again(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_half_precision():
    model = dape.retrofit(small().half())
    ids, _ = batch()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model(ids).logits.dtype == torch.float16


def test_the_adapter_of_a_seven_billion_llama():
    """The figures in docs/retrofit.md."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())
    base = sum(p.numel() for p in model.parameters())
    dape.retrofit(model)
    added = sum(p.numel() for p in adapter_parameters(model).values())
    # A layer: 32·32·3 + 32 and 32·32·3 + 32.
    assert (base, added) == (6_738_415_616, 32 * (2 * (32 * 32 * 3 + 32)))
    text = (Path(__file__).parents[2] / "docs/retrofit.md").read_text()
    assert f"{added:,}" in text
    assert f"{base:,}" in text


def edited(folder, **changes):
    path = folder / "dape_adapter.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def adapter(tmp_path, **options):
    return dape.save_adapter(dape.retrofit(small(), **options), tmp_path / "adapter")


def cut(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-20])
    return folder


REFUSALS = {
    "architecture": (lambda _: dape.retrofit(BartForCausalLM(BartConfig(d_model=16, decoder_layers=1, decoder_attention_heads=2, vocab_size=9))), 'cannot retrofit "bart": pass a causal language model of transformers of one of the types gpt2'),
    "not a model": (lambda _: dape.retrofit(torch.nn.Linear(2, 2)), 'cannot retrofit "Linear"'),
    "method": (lambda _: dape.retrofit(small(), "dape1x3-kerple"), "keeps its own positions"),
    "twice": (lambda _: dape.retrofit(dape.retrofit(small())), "already retrofitted"),
    "nothing to remove": (lambda _: dape.remove_retrofit(small()), "no score convolution"),
    "version": (lambda path: dape.load_adapter(small(), edited(adapter(path), format=7)), "has format 7, this version of dape reads format 1"),
    "type": (lambda path: dape.load_adapter(small("qwen2"), adapter(path)), "belongs to a llama model, not to a qwen2"),
    "shape": (lambda path: dape.load_adapter(small(num_hidden_layers=3), adapter(path)), "made for 2 layers of 4 heads, the model has 3 of 4"),
    "width": (lambda path: dape.load_adapter(dape.retrofit(small(), width=8), adapter(path)), "does not fit the convolutions of this model, first at"),
    "damaged description": (lambda path: dape.load_adapter(small(), cut(adapter(path), "dape_adapter.json")), "dape_adapter.json is damaged: it is not JSON"),
    "damaged weights": (lambda path: dape.load_adapter(small(), cut(adapter(path), "dape_adapter.safetensors")), "dape_adapter.safetensors is damaged"),
    "no base": (lambda path: dape.load_retrofitted(adapter(path)), "does not say where its base is"),
    "whole heads": (lambda _: dape.retrofit(small())(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.ones(1, 4, 3, 3, dtype=torch.bool)), "one mask for all heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_mistakes_are_one_sentence(case, tmp_path):
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_no_adapter_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no adapter"):
        dape.load_adapter(small(), tmp_path)


def test_no_folder_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no folder .*nosuch; a model on the Hugging Face hub"
    ):
        dape.load_retrofitted(tmp_path / "nosuch")


def test_no_base_there(tmp_path):
    folder = dape.save_adapter(
        dape.retrofit(small()), tmp_path / "adapter", base=str(tmp_path / "no" / "base")
    )
    with pytest.raises(
        ValueError, match=r"needs its base: no model .*no/base.: there is no such folder here, and"
    ):
        dape.load_retrofitted(folder)


def test_an_implementation_that_hides_the_scores_is_refused():
    model = dape.retrofit(small())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match='attn_implementation="sdpa" hides the scores'):
        model(torch.ones(1, 3, dtype=torch.long))
    plain = small()
    plain.set_attn_implementation("dape")
    with pytest.raises(ValueError, match="LlamaAttention has no score convolution"):
        plain(torch.ones(1, 3, dtype=torch.long))
