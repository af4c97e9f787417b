"""The language model: a Hugging Face citizen whose decoding equals its prefill, padded or not."""

import pytest
import torch
from builders import decoder
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, MistralConfig, StaticCache

from dape import POSITIONS
from dape.models import DapeConfig, DapeForCausalLM, export, preset
from dape.training import TrainConfig

METHODS = [prefix + name for name in POSITIONS for prefix in ("", "dape1x3-")] + ["dape3x3-kerple"]
# One of each kind of positions and of cache; conformance has them all, layer by layer.
KINDS = [
    "rope", "sinusoidal", "dape1x3-fire", "dape1x3-t5", "cope", "transformer-xl", "dape1x3-fox",
    "mta-kerple"
]  # fmt: skip


def tiny(method="dape1x3-kerple", dtype=torch.float64, **changes) -> DapeForCausalLM:
    model = decoder(method, **changes).to(dtype)
    for encoding in model.model.encodings:
        for parameter in encoding.parameters():
            torch.nn.init.uniform_(parameter, 0.1, 1.0)
    return model


@pytest.mark.parametrize("method", KINDS)
def test_generation_of_padded_rows_equals_repeated_full_forwards_of_each_alone(method):
    model, ids = tiny(method), torch.randint(1, 40, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids * mask, **options)
    for row, hidden in enumerate([0, 3]):
        alone = ids[row : row + 1, hidden:]
        for _ in range(4):
            logits = model(alone, use_cache=False).logits[:, -1]
            alone = torch.cat([alone, logits.argmax(-1, keepdim=True)], 1)
        assert torch.equal(together[row, -4:], alone[0, -4:])


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded(method, tmp_path):
    model, ids = tiny(method), torch.randint(0, 40, (1, 6))
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert isinstance(again, DapeForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).method == model.config.method
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["fox", "mta-kerple"])
def test_what_was_loaded_outlives_a_reset(method):
    """transformers marks loaded parameters and initialises modules afterwards; FoX sets its offsets one by one."""
    model = tiny(method)
    for module in (model.model.encodings[0], model.model.layers[0].attention.scores):
        parameters = list(module.parameters())
        for parameter in parameters:
            torch.nn.init.uniform_(parameter)
            parameter._is_hf_initialized = True
        loaded = [parameter.clone() for parameter in parameters]
        model._init_weights(module)
        torch.testing.assert_close(parameters, loaded, rtol=0, atol=0)


def test_training_draws_randomized_positions_and_evaluation_does_not():
    model, ids = tiny(randomized_positions=500), torch.randint(0, 40, (2, 8))
    torch.testing.assert_close(model(ids).logits, model(ids).logits, rtol=0, atol=0)
    model.train()
    assert not torch.allclose(model(ids).logits, model(ids).logits)
    for given in ({"use_cache": True}, {"past_key_values": DynamicCache(config=model.config)}):
        with pytest.raises(ValueError, match=r"randomized_positions=500 .* pass use_cache=False"):
            model(ids, **given)
    said = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(said, model.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))


HOLES = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 1], [1] * 8])


@pytest.mark.parametrize("mask", [None, HOLES], ids=["no mask", "holes"])
@pytest.mark.parametrize("use_cache", [None, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("method", ["dape1x3-t5", "fox"])
def test_gradient_checkpointing_changes_no_gradient(method, use_reentrant, use_cache, mask):
    ids, grads = torch.randint(0, 40, (2, 8)), []
    model = tiny(method).train()
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.zero_grad()
        model(ids, labels=ids, attention_mask=mask, use_cache=use_cache).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_loss_hidden_states_weights_and_kept_logits():
    model, ids = tiny(), torch.randint(0, 40, (2, 8))
    out = model(ids, labels=ids, output_hidden_states=True, output_attentions=True, use_cache=False)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected, check_dtype=False)
    assert len(out.hidden_states) == 3
    for weights in out.attentions:
        assert weights.shape == (2, 4, 8, 8)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 8, dtype=torch.float64))
        assert (weights.triu(1) == 0).all()
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, out.logits[:, -3:])
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, out.logits)


def test_the_initialisation_is_the_papers():
    model = DapeForCausalLM(preset("tiny", "dape1x3-kerple", hidden_size=256, num_hidden_layers=4))
    std = (2 / (5 * 256)) ** 0.5
    layer = model.model.layers[1]
    assert layer.attention.query.weight.std().item() == pytest.approx(std, rel=0.05)
    assert model.model.embed.weight.std().item() == pytest.approx(std, rel=0.05)
    assert layer.mlp.down.weight.std().item() == pytest.approx(2 / 4 / 16, rel=0.05)
    assert layer.attention.out.weight.std().item() == pytest.approx(2 / 4 / 16, rel=0.05)
    assert (layer.attention.query.bias == 0).all()
    # PyTorch's own default for the convolutions: uniform within 1/√fan_in.
    bound = (1 / (8 * 3)) ** 0.5
    assert layer.attention.scores.expand.weight.abs().max().item() == pytest.approx(bound, rel=0.05)


GAP = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]).bool()[None, None]
REFUSALS = {
    "gaps": (lambda: tiny()(torch.ones(1, 4, dtype=torch.long), attention_mask=GAP), "the mask has gaps"),
    "masks of heads": (lambda: tiny()(torch.ones(1, 4, dtype=torch.long), attention_mask=GAP.expand(1, 4, 4, 4)), "one mask for all heads"),
    "heads": (lambda: DapeConfig(hidden_size=512, num_attention_heads=7), "num_attention_heads=7 does not divide hidden_size=512"),
    "groups": (lambda: tiny(num_key_value_heads=3), "num_key_value_heads=3 does not divide num_heads=4"),
    "method": (lambda: DapeConfig(method="dape1x3-kerpel"), "did you mean dape1x3-kerple"),
    "typo": (lambda: DapeConfig(hidden_sise=12), 'unknown option "hidden_sise"; did you mean hidden_size'),
    "preset": (lambda: preset("126m"), 'unknown preset "126m": choose one of tiny, 125m'),
    "score option": (lambda: tiny("kerple", score_options={"padding": "same"}), "has no option padding"),
    "no input": (lambda: tiny()(), "either input_ids or inputs_embeds"),
    "mask shape": (lambda: tiny()(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4, 4)), r"expected \[batch, tokens\]"),
    "mask length": (lambda: tiny()(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 3)), "covers 3 tokens, but there are 4"),
    "padding between": (lambda: tiny("dape3x3-kerple")(HOLES, attention_mask=HOLES), "padding between tokens, across which dape3x3-kerple would convolve"),
    "position shape": (lambda: tiny()(torch.ones(1, 4, dtype=torch.long), position_ids=torch.zeros(1, 3, dtype=torch.long)), "expected \\[batch, 4 tokens\\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_with_its_values(case):
    call, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call()


FOREIGN = {
    **dict.fromkeys(["num_layers", "width", "sliding_window", "attention_chunk_size"], 2),
    "layer_types": ["sliding_attention"],
    "per_layer_config": {0: {"sliding_window": 4}},
    "dropout": 0.1,
    "padding": "causal",
    "rope_theta": 5e5,
    "qkv_bias": False,
    "norm_eps": 1e-3,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_options_without_effect_are_refused(name):
    with pytest.raises(ValueError, match=f'unknown option "{name}"; .*num_hidden_layers'):
        preset("tiny", **{name: FOREIGN[name]})


def test_options_of_transformers_are_kept_through_the_disk(tmp_path):
    given = {"torch_dtype": "float32", "num_labels": 3, "problem_type": "regression"}
    given |= {"tokenizer_class": "ByT5Tokenizer"}
    given |= {"loss_type": "ForCausalLM", "quantization_config": {"quant_method": "none"}, "auto_map": {}}
    given |= {"output_attentions": True, "attn_implementation": "eager", "temperature": 0.7, "max_length": 30}
    config = preset("tiny", **given)
    # As a tool adds it.
    config.some_tool_version = "2.0"
    config.save_pretrained(tmp_path)
    loaded = DapeConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert (loaded.num_labels, loaded.tokenizer_class, loaded.some_tool_version) == (
        3,
        "ByT5Tokenizer",
        "2.0",
    )
    assert DapeConfig(**config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("method", ["kerple", "fox", "data-alibi", "mta-fox", "mta-rope"])
def test_a_cache_under_autocast_changes_nothing(method):
    """States of tokens, finer than the keys that they are kept with, are not rounded."""
    model, ids = tiny(method, torch.float32), torch.randint(0, 40, (1, 16))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model(ids, use_cache=False).logits
        cache = model(ids[:, :10], use_cache=True).past_key_values
        rest = model(ids[:, 10:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 10:], atol=0.02, rtol=0.02)


def test_a_cache_that_drops_tokens_is_refused():
    model, ids = tiny(), torch.randint(0, 40, (1, 9))
    windowed = MistralConfig(sliding_window=4, num_hidden_layers=2)
    for cache in (DynamicCache(config=windowed), StaticCache(config=windowed, max_cache_len=20)):
        model(ids[:, :3], past_key_values=cache)
        with pytest.raises(ValueError, match="a cache must keep every token"):
            [model(token, past_key_values=cache) for token in ids[:, 3:].split(1, 1)]


def test_positions_that_do_not_continue_the_cache_are_refused():
    model, ids = tiny(), torch.randint(0, 40, (1, 4))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="do not continue those of the cached tokens"):
        model(ids[:, :2], past_key_values=cache, position_ids=torch.tensor([[9, 20]]), use_cache=True)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="4 keys, but 8 are expected"):
        model(ids, past_key_values=cache, use_cache=True)


EARLIER_QUERIES = ["dape3x3-kerple", "mta-rope", "mta3x4-fox", "dape2x2-cope/kerple"]


@pytest.mark.parametrize("method", EARLIER_QUERIES)
def test_a_kernel_over_several_queries_generates_the_same_with_any_cache(method):
    """Chunks, caches and padding of models with such kernels are drawn by tests/fuzz.py."""
    model, ids = tiny(method), torch.randint(1, 40, (2, 9))
    mask = torch.tensor([[0, 0] + [1] * 7, [1] * 9])
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, "attention_mask": mask}
    static = {"cache_implementation": "static", "disable_compile": True}
    for beams, further in ((1, {}), (3, {}), (1, static)):
        uncached = model.generate(ids, use_cache=False, num_beams=beams, **options)
        assert torch.equal(model.generate(ids, num_beams=beams, **options, **further), uncached)


def test_layers_take_methods_in_turn():
    model = tiny(["rope", "dape1x3-nope", "t5"], num_hidden_layers=5)
    assert model.config.method == "rope/dape1x3-nope/t5"
    names = [type(model.model.encoding(layer)).__name__ for layer in range(5)]
    assert names == ["RoPE", "NoPE", "T5Bias", "RoPE", "NoPE"]
    plain = [layer.attention.scores.program().is_plain for layer in model.model.layers]
    assert plain == [True, False, True, True, False]
    again = DapeForCausalLM(DapeConfig.from_dict(model.config.to_dict())).double()
    again.load_state_dict(model.state_dict())
    ids = torch.randint(0, 40, (1, 9))
    assert torch.equal(again(ids).logits, model(ids).logits)
    shared = tiny("t5/kerple", num_hidden_layers=4)
    assert shared.model.encoding(0) is shared.model.encoding(2)
    assert shared.model.encoding(1) is not shared.model.encoding(3)
    with pytest.raises(ValueError, match='"sinusoidal" is added to the embeddings'):
        tiny("rope/sinusoidal")


def test_the_model_leaves_the_start_of_encodings_and_processors_to_them():
    """Whatever a processor is made of, a linear layer that starts as the identity for instance."""
    model = tiny("talking-kerple")
    for layer in model.model.layers:
        assert torch.equal(layer.attention.scores.before.weight[:, :, 0, 0].float(), torch.eye(4))
    ids = torch.randint(0, 40, (1, 9))
    plain = tiny("kerple")
    plain.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("option", ["head_norm", "head_gate"])
def test_options_of_the_attention_block_change_its_output(option):
    model, ids = tiny("mta-rope", **{option: True}), torch.randint(0, 40, (1, 9))
    plain = tiny("mta-rope")
    plain.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(plain(ids).logits, model(ids).logits)


def by_length(scaling):
    """Options of a RoPE scaling that depends on the input's length, from 8 tokens."""
    options = {"scaling": scaling, "factor": 2.0, "original_length": 8}
    if scaling == "longrope":
        options |= {"short": [1.0, 1.1, 1.2, 1.3], "long": [1.0, 2.0, 3.0, 4.0]}
    return options


@torch.no_grad()
def test_a_padded_row_that_outgrows_its_cached_keys_is_refused():
    model, ids = tiny("rope", position_options=by_length("longrope")), torch.randint(0, 40, (2, 14))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    cache = model(ids[:, :12], attention_mask=mask[:, :12], use_cache=True).past_key_values
    step = model(ids[:, 12:13], attention_mask=mask[:, :13], past_key_values=cache).logits
    alone = model(ids[:1, 5:13], use_cache=False).logits[:, -1:]
    torch.testing.assert_close(step[:1], alone, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="those cached at 8 tokens do not serve 9: pass the whole input"):
        model(ids[:, 13:], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_keys_that_a_longer_input_would_rotate_otherwise_are_not_taken_from_a_cache(scaling):
    model, ids = tiny("dape1x3-rope", position_options=by_length(scaling)), torch.randint(0, 40, (1, 12))
    short = model(ids[:, :6], use_cache=True).past_key_values
    within = model(ids[:, 6:8], past_key_values=short, use_cache=True).logits
    torch.testing.assert_close(within, model(ids[:, :8]).logits[:, 6:], rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="those cached at 8 tokens do not serve 9: pass the whole input"):
        model(ids[:, 8:9], past_key_values=short, use_cache=True)
    if scaling == "longrope":
        cache = model(ids[:, :10], use_cache=True).past_key_values
        rest = model(ids[:, 10:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(rest, model(ids).logits[:, 10:], rtol=1e-10, atol=1e-10)
    said = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    assert said.shape == (1, 15)


def test_a_trained_model_names_its_training_length(tmp_path):
    config = TrainConfig(train_length=48).model_config(vocab_size=40)
    assert config.max_position_embeddings == 48
    config.save_pretrained(tmp_path)
    assert DapeConfig.from_pretrained(tmp_path).max_position_embeddings == 48
    assert DapeConfig().max_position_embeddings is None


def test_an_export_has_a_model_card_and_keeps_the_one_that_is_there(tmp_path):
    model = tiny("dape1x3-kerple")
    card = export(model, tmp_path / "new") / "README.md"
    assert "| method | `dape1x3-kerple` |" in card.read_text("utf-8")
    assert "`dape` has to be installed" in card.read_text("utf-8")
    whole = export(model, tmp_path / "whole", with_code=True) / "README.md"
    assert "The folder holds the code." in whole.read_text("utf-8")
    card.write_text("mine")
    export(model, tmp_path / "new")
    assert card.read_text() == "mine"
