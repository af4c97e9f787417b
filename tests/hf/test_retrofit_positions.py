"""Positions of retrofitted models count tokens, by any mask; what cannot be counted is refused.

That padded, packed and decoded rows equal each row alone is checked on models that tests/fuzz.py draws.
"""

import itertools

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import dape

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256
}  # fmt: skip
METHODS = ["fire[threshold=4]", "kerple", "dape1x3-rope[scaling=yarn,factor=2]", "dape1x3", "fox"]
TOKENS = 24


def bases():
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "mistral": MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    }


@pytest.fixture(scope="module", params=itertools.product(bases(), METHODS), ids="-".join)
def model(request):
    kind, method = request.param
    torch.manual_seed(0)
    model = dape.retrofit(bases()[kind].eval(), method, zero_init=False).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def ids(batch=1, count=TOKENS, seed=1):
    return torch.randint(1, 60, (batch, count), generator=torch.Generator().manual_seed(seed))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def alone(model, x):
    return model(x, use_cache=False).logits


@torch.no_grad()
def test_a_mask_by_query_counts_from_the_first_visible_key(model):
    window = getattr(model.config, "sliding_window", None) or TOKENS
    shown = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - window)
    shown[:, :5] = False
    x = ids()
    for mask in (shown, shown.long(), torch.zeros(shown.shape).masked_fill(~shown, -1e9)):
        together = model(x, attention_mask=mask[None, None], use_cache=False).logits
        same(together[:, 5:], alone(model, x[:, 5:]))


@torch.no_grad()
def test_positions_that_cannot_be_known_are_refused():
    model = dape.retrofit(bases()["llama"].eval(), "fire[threshold=4]")
    x, caches = ids(), [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(x[:, :10], past_key_values=cache)
    mask = torch.ones(1, 1, 4, 14, dtype=torch.bool).tril(10)
    with pytest.raises(ValueError, match="FIRE reads the number of tokens before each query"):
        model(x[:, 10:14], attention_mask=mask, past_key_values=caches[0])
    for layer in caches[1].layers:
        layer.keys, layer.values = layer.keys[:, :, 4:], layer.values[:, :, 4:]
    with pytest.raises(ValueError, match="position_ids go up to 13, but there are 4 tokens after 6"):
        model(x[:, 10:14], position_ids=torch.arange(10, 14)[None], past_key_values=caches[1])


@torch.no_grad()
def test_rotations_by_length_are_those_of_each_row():
    method = "rope[scaling=dynamic,factor=4,original_length=16]"
    model = dape.retrofit(bases()["llama"].eval(), method).double()
    x, mask = ids(2, TOKENS + 16), torch.ones(2, TOKENS + 16, dtype=torch.long)
    mask[0, :16] = 0
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    together = model(x, attention_mask=mask, position_ids=counted, use_cache=False).logits
    same(together[:1, 16:], alone(model, x[:1, 16:]))
    same(together[1:], alone(model, x[1:]))
    with pytest.raises(ValueError, match="without position_ids padding counts as well"):
        model(x, attention_mask=mask, use_cache=False)
    packed = torch.cat([torch.arange(30), torch.arange(10)])[None]
    with pytest.raises(ValueError, match="packed documents do not say"):
        model(x[:1], position_ids=packed, use_cache=False)
