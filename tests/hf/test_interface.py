"""attn_implementation="dape": models of transformers through our op, exactly, whatever they pass to the interface."""

import pytest
import torch
import transformers as hf

import dape.hf
from dape.models import DapeConfig, DapeForCausalLM, interface

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
T5 = {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}

MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "gemma2, soft caps and windows": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**DECODER, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8)
    ),
    "gpt-oss, sinks and windows": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**DECODER, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "modernbert, windows": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**SMALL, local_attention=6, pad_token_id=0, global_attn_every_n_layers=2)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "mt5": lambda: hf.MT5ForConditionalGeneration(hf.MT5Config(**T5)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**T5)),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**IMAGE), add_pooling_layer=False),
    "deit": lambda: hf.DeiTModel(hf.DeiTConfig(**IMAGE), add_pooling_layer=False),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "relative_attention_bias" in parameter_name or "sinks" in parameter_name:
                parameter.normal_()
    return model


def given(model):
    generator = torch.Generator().manual_seed(1)
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=generator)}
    ids = torch.randint(3, 99, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    more = {"decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def output(model, arguments):
    out = model(**arguments)
    values = out.logits if "logits" in out else out.last_hidden_state
    if "attention_mask" in arguments and not model.config.is_encoder_decoder:
        values = values[arguments["attention_mask"].bool()]
    return values


def results(model, arguments):
    model.zero_grad()
    out = output(model, arguments)
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager_attention(name):
    model = made(name)
    arguments = given(model)
    model.set_attn_implementation("eager")
    expected, gradients = results(model, arguments)
    model.set_attn_implementation("dape")
    for _ in range(2):  # from the second pass on, T5's bias comes by distance
        found, own = results(model, arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert own.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(own[parameter], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", [*[name for name in MODELS if "windows" in name and "bert" not in name], "llama", "t5"]
)
def test_generation_is_that_of_eager_attention(name):
    model = made(name)
    ids = given(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    model.set_attn_implementation("eager")
    rows = [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]
    alone = [model.generate(row, **options)[0, -5:] for row in rows]
    model.set_attn_implementation("dape")
    for cache in ("dynamic", "static"):
        found = model.generate(ids, attention_mask=mask, **options, cache_implementation=cache)
        torch.testing.assert_close(found[:, -5:], torch.stack(alone))


def test_t5s_bias_by_distance_is_no_tensor_of_all_pairs():
    model = made("t5")
    dape.hf.use_distances(model)
    model.set_attn_implementation("dape")
    with interface.recording(interface.INPUTS) as calls:
        results(model, given(model))
    shapes = [None if call.bias is None else tuple(call.bias.values.shape) for call in calls]
    assert shapes == [(4, 21), (4, 21), (4, 13), None, (4, 13), None]
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert table.grad.abs().sum() > 0


def test_t5_generates_with_hooks_left_and_another_implementation():
    model = made("t5")
    arguments = given(model)
    model.set_attn_implementation("dape")
    expected = output(model, arguments)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(output(model, arguments), expected)


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention"])
def test_our_models_point_to_the_backends(name, tmp_path):
    message = f'attn_implementation="{name}" is not for models of dape.*DapeConfig\\(backend='
    with pytest.raises(ValueError, match=message):
        DapeForCausalLM._from_config(DapeConfig(**SMALL), attn_implementation=name)
    model = DapeForCausalLM(DapeConfig(**SMALL))
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(name)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    for accepted in ("eager", "dape"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=accepted)
    made("bert").save_pretrained(tmp_path / "bert")
    bert = hf.AutoModelForMaskedLM.from_pretrained(tmp_path / "bert", attn_implementation="dape")
    assert bert.config._attn_implementation == "dape"
