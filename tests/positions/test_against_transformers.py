"""Encodings that others have written too agree with theirs."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from dape.positions import ALiBi, RoPE
from dape.positions.t5 import buckets

WIDTH = 32
SHORT = [1 + 0.05 * feature for feature in range(WIDTH // 2)]
LONG = [1 + 0.7 * feature for feature in range(WIDTH // 2)]
PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Our options, and what theirs has beside the type, the factor and the length.
ROPES = {
    "plain": ({}, {}),
    "base": ({"base": 500.0}, {"rope_theta": 500.0}),
    "linear": ({"scaling": "linear", "factor": 4.0}, {}),
    "yarn": ({"scaling": "yarn", "factor": 4.0, "original_length": 256}, {}),
    "llama3": ({"scaling": "llama3", "factor": 8.0, "original_length": 256}, PUBLISHED),
    **{
        f"dynamic {n}": (
            {"scaling": "dynamic", "factor": 2.0, "original_length": n},
            {"max_position_embeddings": n},
        )
        for n in (512, 1024)
    },
    **{
        f"longrope {n}": (
            {"scaling": "longrope", "factor": 8.0, "original_length": n, "short": SHORT, "long": LONG},
            {"short_factor": SHORT, "long_factor": LONG},
        )
        for n in (256, 1024)
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_rotates_as_llama_does(name):
    ours, theirs = ROPES[name]
    named = {"scaling": "rope_type", "factor": "factor"}
    named["original_length"] = "original_max_position_embeddings"
    theirs = {new: ours[old] for old, new in named.items() if old in ours} | theirs
    if "max_position_embeddings" in theirs:
        del theirs["original_max_position_embeddings"]
    config = LlamaConfig(
        hidden_size=WIDTH * 2,
        num_attention_heads=2,
        max_position_embeddings=theirs.pop("max_position_embeddings", 1024),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **theirs},
    )
    q, k = torch.randn(2, 2, 50, WIDTH), torch.randn(2, 2, 50, WIDTH)
    positions = torch.arange(50)[None] + torch.tensor([[0], [700]])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    rope = RoPE(WIDTH, **ours)
    # Theirs computes angles in float32: up to 1024 · 2⁻²⁴ of an angle's error.
    # Theirs reads one length for all rows.
    lengths = positions.max().view(1, 1) + 1
    torch.testing.assert_close(rope.rotate(q, positions, lengths), expected_q, rtol=1e-4, atol=5e-4)
    torch.testing.assert_close(rope.rotate(k, positions, lengths), expected_k, rtol=1e-4, atol=5e-4)


def test_ntk_scaling_keeps_the_highest_frequency_and_interpolates_the_lowest():
    length = torch.tensor(1024)
    ropes = RoPE(WIDTH), RoPE(WIDTH, scaling="ntk", factor=8.0)
    plain, scaled = (rope.frequencies(length) for rope in ropes)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / 8.0)
    # The same as a larger base, which is how others write it.
    torch.testing.assert_close(scaled, RoPE(WIDTH, base=10000 * 8 ** (32 / 30)).frequencies(length))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (16, 64), (64, 1000)])
def test_t5_buckets(causal, num_buckets, max_distance):
    distance = torch.arange(0 if causal else -3000, 3000)
    expected = T5Attention._relative_position_bucket(
        -distance, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    got = buckets(distance, num_buckets=num_buckets, max_distance=max_distance, causal=causal)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 71])
def test_alibi_slopes(num_heads):
    tokens = 9
    theirs = build_alibi_tensor(torch.ones(1, tokens), num_heads, torch.float32).view(num_heads, tokens)
    # Theirs is slope · key; relative to the last token that is −slope · distance.
    expected = theirs - theirs[:, -1:]
    got = ALiBi(num_heads).at(torch.arange(tokens - 1, -1, -1), causal=True)
    torch.testing.assert_close(got.float(), expected)
