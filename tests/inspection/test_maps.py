"""The maps are the attention itself, pooled exactly, in memory that does not grow with T²."""

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import dape
from dape import devices
from dape.inspection.figure import shade
from dape.models import DapeForCausalLM, preset

METHODS = [
    "rope", "kerple", "dape-kerple", "dape1x3-fire", "dape1x3-rope", "dape1x3-cope", "t5", "dape3x3-kerple",
    "dape1x3-kerple[leak_future=true]", "dape1x3-fire[leak_future=true]"
]  # fmt: skip


def tiny(method: str) -> DapeForCausalLM:
    return DapeForCausalLM(preset("tiny", method, hidden_size=32, num_hidden_layers=2)).eval()


def softmax(parts: list[np.ndarray]) -> np.ndarray:
    return torch.softmax(torch.tensor(np.sum(parts, 0)).nan_to_num(nan=-torch.inf), -1).numpy()


@pytest.mark.parametrize("method", METHODS)
def test_maps_are_those_of_the_model(method):
    """Its weights, to which the parts add up; the change is what f moves."""
    model, ids = tiny(method), torch.randint(0, 256, (37,))
    found = dape.inspect(model, ids, rows_per_tile=5)
    shown = model(ids[None], output_attentions=True, use_cache=False).attentions
    for inspected, weights in zip(found.layers, shown, strict=True):
        weights, maps = weights[0].detach().numpy(), inspected.maps
        np.testing.assert_allclose(np.nan_to_num(maps["weights"]), weights, atol=1e-6)
        np.testing.assert_allclose(inspected.sink, weights[:, :, 0].mean(-1), rtol=1e-4)
        before = [maps[name] for name in ("scores", "bias") if name in maps]
        parts = [*before, maps["processed"]] if "processed" in maps else before
        np.testing.assert_allclose(softmax(parts), weights, atol=1e-6)
        moved = np.abs(weights - softmax(before)).sum(-1).mean(-1) / 2
        np.testing.assert_allclose(inspected.change, moved, atol=1e-6)
        assert np.isnan(maps["scores"][:, *np.triu_indices(37, 1)]).all()
    changes = {(layer.layer, head): layer.change[head] for layer in found.layers for head in layer.heads}
    assert changes[found.most_changed()] == max(changes.values())


def test_copying_is_the_weight_on_what_the_next_token_repeats():
    model, ids = tiny("dape1x3-kerple"), torch.randperm(256)[:12].repeat(2)
    found = dape.inspect(model, ids, rows_per_tile=5)
    shown = model(ids[None], output_attentions=True, use_cache=False).attentions
    for layer in range(2):
        expected = shown[layer][0][:, range(13, 23), range(2, 12)].mean(-1).detach()
        np.testing.assert_allclose(found.layers[layer].copying, expected, rtol=1e-4)
    assert np.isnan(dape.inspect(model, ids[:12]).layers[0].copying).all()


@pytest.mark.parametrize("method", ["talking-alibi", "mta-rope", "kerple"])
def test_entropy_of_weights_that_are_mixed_after_the_softmax(method):
    """Some are negative, of which the entropy was minus infinity."""
    model, ids = tiny(method), torch.randint(0, 256, (24,))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    found = dape.inspect(model, ids, rows_per_tile=5)
    shown = model(ids[None], output_attentions=True, use_cache=False).attentions
    for layer in range(2):
        sizes = shown[layer][0].detach().abs()
        shares = sizes / sizes.sum(-1, keepdim=True)
        expected = torch.distributions.Categorical(probs=shares).entropy().mean(-1)
        np.testing.assert_allclose(found.layers[layer].entropy, expected, rtol=1e-3)
    negative = any((layer.maps["weights"] < 0).any() for layer in found.layers)
    assert negative == (method != "kerple")


def test_negative_weights_are_drawn_as_they_are():
    values = np.array([[0.5, np.nan], [1.3, -0.3]])
    np.testing.assert_array_equal(shade("weights", values), values)
    np.testing.assert_allclose(shade("weights", np.array([0.01, 1.0])), [-2.0, 0.0])


def test_a_model_in_training_mode_is_shown_as_it_is_evaluated():
    """It was run with dropout and randomized positions, and its maps were of neither."""
    config = preset("tiny", "kerple", hidden_size=32, num_hidden_layers=2, randomized_positions=512)
    config.attention_dropout = 0.3
    model, ids = DapeForCausalLM(config), torch.randint(0, 256, (20,))
    expected = dape.inspect(model.eval(), ids)
    found = dape.inspect(model.train(), ids)
    assert model.training
    for layer in range(2):
        ours, theirs = (inspected.layers[layer].maps["weights"] for inspected in (found, expected))
        np.testing.assert_array_equal(ours, theirs)


def test_capped_scores_are_capped_once():
    """A processor that adds nothing changes nothing, where the model caps its scores."""
    config = Gemma2Config(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, attn_logit_softcapping=5.0, sliding_window=64,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data.mul_(40)
    found = dape.inspect(dape.retrofit(model, "dape1x3"), torch.arange(3, 15))
    assert np.nanmax(np.abs(found.map(0, 0, "scores"))) == pytest.approx(5.0, rel=0.2)
    assert np.nanmax(np.abs(found.map(0, 0, "processed"))) < 1e-5
    assert max(found.layers[0].change) < 1e-6


def test_pixels_are_means_over_visible_pairs():
    model, ids = tiny("dape1x3-kerple"), torch.randint(0, 256, (37,))
    fine, coarse = dape.inspect(model, ids), dape.inspect(model, ids, resolution=8, rows_per_tile=5)
    edges = coarse.edges
    assert (edges[0], edges[-1], len(edges)) == (0, 37, 9)
    for r in range(8):
        for c in range(r + 1):
            block = fine.map(0, 1, "processed")[edges[r] : edges[r + 1], edges[c] : edges[c + 1]]
            assert coarse.map(0, 1, "processed")[r, c] == pytest.approx(np.nanmean(block), rel=1e-4, abs=1e-6)
        assert np.isnan(coarse.map(0, 1, "processed")[r, r + 1 :]).all()


@pytest.mark.parametrize(("rows", "resolution"), [(1, 8), (5, 37), (7, 9), (37, 36)])
def test_tiles_change_no_pixel(rows, resolution):
    model, ids = tiny("dape1x3-kerple"), torch.randint(0, 256, (37,))
    whole = dape.inspect(model, ids, resolution=resolution)
    tiled = dape.inspect(model, ids, resolution=resolution, rows_per_tile=rows)
    for name in ("scores", "bias", "processed", "weights"):
        np.testing.assert_allclose(tiled.map(1, 2, name), whole.map(1, 2, name), rtol=1e-4, atol=1e-5)


def test_more_than_the_memory_holds_is_refused_before_anything_is_computed(monkeypatch):
    assert (devices.free_memory(torch.device("cpu")) or 10**8) > 10**7
    monkeypatch.setattr(devices, "free_memory", lambda device: 5 * 10**6)
    with pytest.raises(ValueError, match=r"300 tokens needs about 0\.\d GB .* look at fewer tokens"):
        dape.inspect(tiny("dape1x3-kerple"), [1] * 300)
