"""Canon layers: the published formula, no leak, padding and packing exact, the last rows alone, caches."""

import pytest
import torch
from builders import decoder
from transformers import DynamicCache

from dape import Positions, ScoreAttention
from dape.models import DapeConfig, DapeForCausalLM
from dape.models.canon import Canon


def tiny(method):
    return decoder(method, initializer_range=0.5).double()


def test_a_depthwise_causal_convolution_of_four_tokens_is_added():
    """Allen-Zhu 2025: h'ₜ = hₜ + conv1d([hₜ, hₜ₋₁, hₜ₋₂, hₜ₋₃])."""
    canon, x = Canon(5).double(), torch.randn(2, 9, 5, dtype=torch.float64)
    assert canon.weight.abs().max() <= 0.5
    conv = torch.nn.Conv1d(5, 5, 4, groups=5, bias=False, padding=3).double()
    conv.weight.data = canon.weight.data.flip(0).T[:, None].clone()
    torch.testing.assert_close(canon(x, Positions.of(9)), x + conv(x.mT)[..., :9].mT)


@pytest.mark.parametrize("method", ["kerple[canon=a]", "dape1x3-kerple[canon=c]", "rope[canon=ac]/nope"])
def test_nothing_leaks_and_edges_are_exact(method):
    model, ids = tiny(method), torch.randint(1, 40, (1, 9))
    whole = model(ids).logits
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % 40
    torch.testing.assert_close(model(changed).logits[:, :5], whole[:, :5], rtol=0, atol=0)
    for count in (1, 4, 8):
        torch.testing.assert_close(model(ids[:, :count]).logits, whole[:, :count])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[:, :3] = 0
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 3:], whole)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(ids, position_ids=places).logits
    torch.testing.assert_close(packed[:, 4:], model(ids[:, 4:]).logits)
    torch.testing.assert_close(packed[:, :4], whole[:, :4])
    torch.testing.assert_close(
        model.model(ids, last_rows=2).last_hidden_state, model.model(ids).last_hidden_state[:, -2:]
    )


@pytest.mark.parametrize("method", ["kerple[canon=ac]", "dape3x3-rope[canon=c]/nope[canon=a]/kerple"])
def test_a_cache_keeps_the_last_three_tokens(method, tmp_path):
    """Chunks and padding are drawn by tests/fuzz.py; generation with a cache equals generation without, with beams."""
    model, ids = tiny(method), torch.randint(1, 40, (2, 11))
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        cached = model.generate(ids, num_beams=beams, **options)
        assert torch.equal(model.generate(ids, num_beams=beams, use_cache=False, **options), cached)
    with pytest.raises(ValueError, match=r"build it with DynamicCache\(config=model.config\)"):
        model(ids, past_key_values=DynamicCache())
    model.save_pretrained(tmp_path)
    again = DapeForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(again(ids).logits, model(ids).logits)


def test_where_there_are_no_hidden_states_it_is_refused():
    with pytest.raises(ValueError, match="canon=b: Canon layers are at one of a, c, ac"):
        DapeConfig(method="kerple[canon=b]")
    with pytest.raises(ValueError, match="outside the attention: leave it out"):
        ScoreAttention("kerple[canon=a]", num_heads=2, head_dim=4)
