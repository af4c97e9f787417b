"""Retrofitting: nothing changes at first, everything that transformers does goes on working, and it can be undone."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    StaticCache,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.nemotron import modeling_nemotron

import dape
from dape.retrofitting.attach import adapter_parameters, set_trainable

TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "initializer_range": 0.2
}  # fmt: skip
WINDOWS = {
    kind: {"sliding_window": 6}
    for kind in ["mistral", "phi3", "gemma2", "gemma3_text", "ministral", "gpt_oss"]
}
WINDOWS |= {
    key: {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
    for key in ["qwen2", "qwen3"]
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1
}  # fmt: skip
# What tiny models of a type need beside SIZES. Types that no test here names are decided by the same self-test.
PLAIN = "cohere cohere2 gpt2 gpt_neox granite llama mistral nemotron olmo olmo2 olmo3 phi phi3 qwen2 qwen3 smollm3 starcoder2"
FAMILIES = {key: {} for key in PLAIN.split()} | dict.fromkeys(["gemma", "glm4", "ministral"], HEAD)
FAMILIES |= {key: {**HEAD, "query_pre_attn_scalar": 8} for key in ["gemma2", "gemma3_text"]}
FAMILIES |= {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {**HEAD, **LOCAL_EXPERTS},
    "llama4_text": {
        **HEAD,
        **LOCAL_EXPERTS,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 32,
    },
    "mixtral": LOCAL_EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**HEAD, **EXPERTS},
}
OUTSIDE = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}


# Before version 5.16 of transformers this one keeps its attention to itself.
if "ALL_ATTENTION_FUNCTIONS" not in vars(modeling_nemotron):
    OUTSIDE["nemotron"] = {name: SIZES[name] for name in SIZES if name != "vocab_size"}
    del FAMILIES["nemotron"]


def small(kind="llama", **changes):
    sizes = {**SIZES, **TOKENS, **FAMILIES.get(kind, {}), **changes}
    if kind == "gpt2":
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **TOKENS}
    if kind in OUTSIDE:
        sizes = {"vocab_size": 50, **OUTSIDE[kind]}
    # Before version 5.21, the default implementation drops soft caps.
    options = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes), **options).eval()


def disturbed(model):
    """The retrofitted model with additions that do something."""
    for value in adapter_parameters(model).values():
        torch.nn.init.normal_(value, std=0.3)
    return model


def batch():
    ids = torch.randint(3, 50, (2, 17))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


@pytest.mark.parametrize("method", ["selfextend[group=2]", "selfextend", "dape1x3-selfextend"])
def test_near_tokens_see_the_models_own_rotation_and_far_ones_do_not(method):
    model = small("llama", max_position_embeddings=64, rope_theta=50.0)
    short, long = torch.randint(3, 50, (1, 32)), torch.randint(3, 50, (1, 60))
    before, far = model(short).logits, model(long).logits
    dape.retrofit(model, method)
    torch.testing.assert_close(model(short).logits, before, rtol=0, atol=1e-5)
    now = model(long).logits
    torch.testing.assert_close(now[:, :32], far[:, :32], rtol=0, atol=1e-5)
    assert not torch.allclose(now[:, 40:], far[:, 40:], atol=1e-4)
    first = model(long[:, :50], use_cache=True)
    rest = model(long[:, 50:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, now[:, 50:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
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


def test_an_implementation_that_drops_soft_caps_is_not_what_a_retrofit_is_compared_with(monkeypatch):
    model = small("gemma2")
    ids = batch()[0]
    capped = model(ids).logits
    # As before version 5.21 of transformers.
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    dropping = lambda *given, softcap, **options: sdpa(*given, **options)  # noqa: E731 (a name for a line)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", dropping)
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    model.set_attn_implementation("sdpa")
    assert (model(ids).logits - capped).abs().max() > 1e-4
    with pytest.raises(ValueError, match=r"drops its soft cap of 50.*set_attn_implementation\(\"eager\"\)"):
        dape.retrofit(model)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    torch.testing.assert_close(dape.retrofit(model)(ids).logits, capped, rtol=0, atol=1e-5)


REPLACING = [
    "nope", "kerple", "dape1x3-kerple", "fox", "dape1x3-fox", "selective-rope", "cope", "t5",
    "talking-alibi", "rope[scaling=ntk,factor=4]"
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, method) for kind in ("llama", "gpt2") for method in REPLACING),
        *((kind, "dape1x3-fox") for kind in FAMILIES if kind not in ("llama", "gpt2")),
    ],
)
def test_replaced_positions_are_causal_and_cached(kind, method):
    ids, _ = batch()
    model = small(kind, **WINDOWS.get(kind, {}))
    before = model(ids).logits
    dape.retrofit(model, method)
    assert not torch.allclose(model(ids).logits, before, atol=1e-3)
    if kind == "gpt2":  # whose learned positions no longer limit the length
        assert model(torch.ones(1, 100, dtype=torch.long)).logits.shape == (1, 100, 50)
    caches, close = [DynamicCache(config=model.config)], {"rtol": 1e-4, "atol": 1e-4}
    disturbed(model)
    # Experts of transformers compute in float32, and its rotary tables are in float32.
    if kind in ("llama", "gpt2"):
        model.double()
        caches.append(StaticCache(config=model.config, max_cache_len=30))
        close = {"rtol": 1e-5, "atol": 1e-5}
    full = model(ids, use_cache=False).logits
    other = ids.clone()
    other[:, 10] = (other[:, 10] + 1) % 50
    changed = model(other, use_cache=False).logits
    torch.testing.assert_close(changed[:, :10], full[:, :10], **close)
    assert not torch.allclose(changed[:, 11:], full[:, 11:], atol=1e-3)
    for cache in caches:
        parts = ids.split((4, 1, 1, 7, 4), 1)
        decoded = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
        torch.testing.assert_close(torch.cat(decoded, 1), full, **close)
    dape.remove_retrofit(model)
    torch.testing.assert_close(model.float()(ids).logits, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_models_outside_the_interface_say_so(kind):
    with pytest.raises(ValueError, match=f'cannot retrofit "{kind}": .*does not go through transformers'):
        dape.retrofit(small(kind))


def test_kerple_in_a_model_without_rotation_is_kerple():
    """Against the definition: rotation off, the bias added, by hand in one layer."""
    model = dape.retrofit(small(num_hidden_layers=1), "kerple")
    layer, ids = model.model.layers[0], torch.randint(3, 50, (1, 9))
    x = layer.input_layernorm(model.model.embed_tokens(ids))
    projections = layer.self_attn.q_proj, layer.self_attn.k_proj
    q, k = (project(x).view(1, 9, -1, 8).transpose(1, 2) for project in projections)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    bias = layer.self_attn.position_encoding.at(distance.clamp(min=0), causal=True)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5 + bias
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    shown = model(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(shown, weights)


@pytest.mark.parametrize("kind", ["llama", "cohere", "phi", "llama4_text"])
@pytest.mark.parametrize(("scaling", "own"), [("linear", "linear"), ("ntk", None)])
def test_stretched_rotation_is_that_of_transformers(kind, scaling, own):
    """Linear scaling is in every model's own options; a factor of 1 changes nothing, however features are paired."""
    model, ids = small(kind), torch.randint(3, 50, (2, 17))
    plain = model(ids).logits
    one = dape.retrofit(model, f"rope[scaling={scaling},factor=1]")
    torch.testing.assert_close(one(ids).logits, plain, rtol=0, atol=1e-5)
    if own:
        dape.remove_retrofit(model)
        stretched = {**model.config.rope_parameters, "rope_type": own, "factor": 4.0}
        theirs = small(kind, rope_parameters=stretched)
        theirs.load_state_dict(model.state_dict())
        ours = dape.retrofit(model, f"rope[scaling={scaling},factor=4]")
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_canon_layers_before_the_attention(kind):
    """At first nothing changes; then nothing leaks, and padding and other documents are not mixed in."""
    base = small(kind, **WINDOWS.get(kind, {}))
    ids, mask = batch()
    before = base(ids).logits
    model = dape.retrofit(base, "dape1x3[canon=a]")
    torch.testing.assert_close(model(ids).logits, before)
    disturbed(model)
    whole = model(ids).logits
    assert not torch.allclose(whole, before, atol=1e-2)
    for count in (1, 4, 16):
        torch.testing.assert_close(model(ids[:, :count]).logits, whole[:, :count])
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(padded[:1, 5:], model(ids[:1, 5:]).logits)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="read hidden states of earlier tokens"):
        model(ids[:, 6:], past_key_values=cache)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 19)
    torch.testing.assert_close(dape.remove_retrofit(model)(ids).logits, before)
    with pytest.raises(ValueError, match="leave window out and canon at a"):
        dape.retrofit(model, "dape1x3[canon=c]")


def test_beams_and_earlier_queries_generate():
    ids, mask = batch()
    fox = disturbed(dape.retrofit(small(), "fox"))
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "num_beams": 3}
    cached = fox.generate(ids, **options)
    assert torch.equal(cached, fox.generate(ids, **options, use_cache=False))
    mta = dape.retrofit(small(), "mta")
    assert not mta.generation_config.use_cache
    assert mta.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False).shape == (2, 20)
    assert dape.remove_retrofit(mta).generation_config.use_cache


def test_a_refused_model_is_as_it_was():
    model = small()
    before, names = model(torch.ones(1, 5, dtype=torch.long)).logits, set(model.state_dict())
    with pytest.raises(ValueError, match="does not divide"):
        dape.retrofit(model, "mta[head_group=3]")
    assert set(model.state_dict()) == names
    assert not model._forward_pre_hooks
    assert torch.equal(model(torch.ones(1, 5, dtype=torch.long)).logits, before)


def test_attention_that_does_more_is_refused_with_the_reason():
    model = small()

    def rescaled(module, args, kwargs, output):
        return (output[0] * (1.5 if model.config._attn_implementation == "dape" else 1.0), *output[1:])

    model.model.layers[0].self_attn.register_forward_hook(rescaled, with_kwargs=True)
    with pytest.raises(ValueError, match="its attention does more than softmax"):
        dape.retrofit(model)


SAVED = [
    "dape1x5", "dape1x3-kerple", "fox", "talking", "dape1x3-rope[scaling=linear,factor=2]",
    "dape1x3[normaliser=ssmax]", "dape1x3[canon=a]", "dape1x3-fox[canon=a]"
]  # fmt: skip


@pytest.mark.parametrize("zero_init", [True, False])
@pytest.mark.parametrize("method", SAVED)
def test_any_method_is_saved_and_loaded(method, zero_init, tmp_path):
    small("qwen3").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = disturbed(dape.retrofit(base, method, zero_init=zero_init))
    ids, mask = batch()
    expected = model(ids, attention_mask=mask).logits
    folder = dape.save_adapter(model, tmp_path / "adapter")
    files = {"dape_adapter.json", "dape_adapter.safetensors", "checksums.json"}
    assert {path.name for path in folder.iterdir()} == files
    model.save_pretrained(tmp_path / "whole")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    onto = dape.load_adapter(base, folder)
    set_trainable(onto, "added")
    assert {n for n, p in onto.named_parameters() if p.requires_grad} == set(adapter_parameters(onto))
    for again in (onto, dape.load_retrofitted(folder), dape.load_retrofitted(tmp_path / "whole")):
        assert set(again.state_dict()) == set(model.state_dict())
        torch.testing.assert_close(again(ids, attention_mask=mask).logits, expected)


def test_masks_that_a_caller_makes_are_taken():
    model = disturbed(dape.retrofit(small()))
    ids, _ = batch()
    causal = torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    plain = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, attention_mask=causal, use_cache=False).logits, plain)
    additive = torch.zeros(2, 1, 17, 17).masked_fill(~causal, torch.finfo(torch.float32).min)
    torch.testing.assert_close(model(ids, attention_mask=additive, use_cache=False).logits, plain)
    additive[..., 3] -= 0.5
    with pytest.raises(ValueError, match="pass offsets of the scores as a bias"):
        model(ids, attention_mask=additive, use_cache=False)
    causal[:, :, 9, 4] = False
    with pytest.raises(ValueError, match="the mask has gaps"):
        model(ids, attention_mask=causal)


@pytest.mark.parametrize("alone", [True, False])
def test_training_moves_what_it_should(alone):
    model = dape.retrofit(small(), "dape1x5", width=8).train()
    set_trainable(model, "added" if alone else "all")
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


def edited(folder, **changes):
    path = folder / "dape_adapter.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (folder / "checksums.json").unlink()
    return folder


def adapter(tmp_path, **options):
    return dape.save_adapter(dape.retrofit(small(), **options), tmp_path / "adapter")


def onto(path, saved, present):
    folder = adapter(path, method=saved)
    dape.load_adapter(dape.retrofit(small(), saved), folder)
    dape.load_adapter(dape.retrofit(small(), present), folder)


def hidden():
    model = dape.retrofit(small())
    model.set_attn_implementation("sdpa")
    model(torch.ones(1, 3, dtype=torch.long))


def filled():
    """A cache of three tokens."""
    cache = DynamicCache(config=small().config)
    small()(torch.ones(1, 3, dtype=torch.long), past_key_values=cache, use_cache=True)
    return cache


# Options without weights of their own change outputs as well.
OTHER = r"was made with method='.*', the model is retrofitted with"
REFUSALS = {
    "cross-attention": (lambda _: dape.retrofit(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, add_cross_attention=True))), "it has cross-attention"),
    "embeddings": (lambda _: dape.retrofit(small(), "sinusoidal"), "is added to token embeddings, and a retrofit changes attention alone"),
    "rotated share": (lambda _: dape.retrofit(small(), "rope[fraction=0.5]"), "decided by the model"),
    "training": (lambda _: set_trainable(small(), "some"), 'trains="some", expected one of all, attention, added'),
    "gaps": (lambda _: dape.retrofit(small(), "kerple")(torch.ones(1, 3, dtype=torch.long), position_ids=torch.tensor([[0, 2, 4]])), "position_ids leave gaps"),
    "earlier queries": (lambda _: dape.retrofit(small(), "mta")(torch.ones(1, 1, dtype=torch.long), past_key_values=filled()), "pass use_cache=False"),
    "not a model": (lambda _: dape.retrofit(torch.nn.Linear(2, 2)), 'cannot retrofit "Linear"'),
    "twice": (lambda _: dape.retrofit(dape.retrofit(small())), "already retrofitted"),
    "nothing to remove": (lambda _: dape.remove_retrofit(small()), "no score processor of ours"),
    "version": (lambda path: dape.load_adapter(small(), edited(adapter(path), format=7)), "has format 7, this version of dape reads format 2"),
    "type": (lambda path: dape.load_adapter(small("qwen2"), adapter(path)), "belongs to a llama model, not to a qwen2"),
    "shape": (lambda path: dape.load_adapter(small(num_hidden_layers=3), adapter(path)), r"made for layers of \[4, 4\] heads, the model has \[4, 4, 4\]"),
    "width": (lambda path: dape.load_adapter(dape.retrofit(small(), width=8), adapter(path)), "was made with width=32, the model is retrofitted with 8"),
    "no base": (lambda path: dape.load_retrofitted(adapter(path)), "does not say where its base is"),
    "no adapter": (lambda path: dape.load_adapter(small(), path), "holds no adapter"),
    "no folder": (lambda path: dape.load_retrofitted(path / "nosuch"), r"there is no folder .*nosuch; download a model"),
    "no base there": (lambda path: dape.load_retrofitted(dape.save_adapter(dape.retrofit(small()), path / "a", base=str(path / "no" / "base"))), r"needs its base: no model .*no/base.: there is no such folder here, and"),
    "another rotation": (lambda _: dape.retrofit(small(rope_theta=50.0), "selfextend[base=10000]"), "its rotation is not base=10000 on halves of 1 of the features"),
    "other padding": (lambda path: onto(path, "dape1x3", "dape1x3[padding=causal]"), OTHER),
    "other residual": (lambda path: onto(path, "dape1x3-kerple", "dape1x3-kerple[residual=scores]"), OTHER),
    "other factor": (lambda path: onto(path, "dape1x3-rope[scaling=yarn,factor=8]", "dape1x3-rope[scaling=yarn,factor=2]"), OTHER),
    "other positions": (lambda path: onto(path, "dape1x3", "dape1x3-nope"), OTHER),
    "hidden scores": (lambda _: hidden(), 'attn_implementation="sdpa" hides the scores'),
    "whole heads": (lambda _: dape.retrofit(small())(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.ones(1, 4, 3, 3, dtype=torch.bool)), "one mask for all heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_mistakes_are_one_sentence(case, tmp_path):
    call, message = REFUSALS[case]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(tmp_path)


# Every registered processor that can begin as the identity, with the first kernels of its list.
PROCESSORS = [
    method.name.removesuffix("-nope")
    for method in dape.all_methods()
    if method.position == "nope"
    and method.processor not in ("plain", "diff")
    and method.kernel not in ((1, 5), (1, 7))
]


@pytest.mark.parametrize("normaliser", ["softmax", "sink", "ssmax"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_processor_and_normaliser_changes_nothing_at_first(processor, normaliser):
    model, (ids, mask) = small(), batch()
    before = model(ids, attention_mask=mask).logits
    dape.retrofit(model, f"{processor}[normaliser={normaliser}]")
    real = mask.bool()
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[real], before[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", ["linear", "ntk", "dynamic", "yarn", "llama3"])
def test_a_scaling_alone_stretches_eight_times_from_the_models_own_length(scaling, tmp_path):
    model = small("llama", max_position_embeddings=16).eval()
    needs = "" if scaling in ("linear", "ntk") else ",original_length=16"
    ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = dape.retrofit(model, f"dape1x3-rope[scaling={scaling},factor=8{needs}]")(ids).logits
    dape.remove_retrofit(model)
    dape.retrofit(model, f"dape1x3-rope[scaling={scaling}]")
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(dape.load_retrofitted(tmp_path)(ids).logits, expected)
