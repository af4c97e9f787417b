"""Retrofits of models that are no decoders: they begin by changing nothing, learn, and are saved and removed."""

import pytest
import torch
from test_interface import given, made, output

import dape
from dape.retrofitting import adapter_parameters
from dape.retrofitting.attach import retrofitted_layers

# Of each model, its self-attention layers.
LAYERS = {"bert": 2, "modernbert, windows": 2, "vit": 2, "deit": 2, "t5": 4}


@pytest.mark.parametrize("name", LAYERS)
def test_a_processor_begins_as_nothing_and_learns(name):
    model = made(name)
    arguments = given(model)
    before = output(model, arguments).detach()
    dape.retrofit(model, "dape1x3", width=8)
    assert len(retrofitted_layers(model)) == LAYERS[name]
    torch.testing.assert_close(output(model, arguments), before, rtol=1e-5, atol=1e-6)
    output(model, arguments).square().mean().backward()
    for parameter in adapter_parameters(model).values():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    output(model, arguments).square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in adapter_parameters(model).values())
    assert not torch.allclose(output(model, arguments), before)
    dape.remove_retrofit(model)
    torch.testing.assert_close(output(model, arguments), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_an_encoding_is_saved_with_the_model(name, tmp_path):
    model = made(name).float()
    dape.retrofit(model, "dape1x3-kerple", width=8)
    arguments = {n: v.float() if v.is_floating_point() else v for n, v in given(model).items()}
    for parameter in adapter_parameters(model).values():
        parameter.data.add_(0.1 * torch.rand_like(parameter))
    expected = output(model, arguments)
    model.save_pretrained(tmp_path / "whole")
    again = dape.load_retrofitted(tmp_path / "whole").eval()
    assert type(again) is type(model)
    torch.testing.assert_close(output(again, arguments), expected)
    dape.save_adapter(model, tmp_path / "adapter")
    base = made(name).float()
    dape.load_adapter(base, tmp_path / "adapter")
    torch.testing.assert_close(output(base, arguments), expected)


def test_an_image_has_distances_in_two_dimensions():
    model = made("deit")
    dape.retrofit(model, "kerple")
    encoding = retrofitted_layers(model)[0].position_encoding
    distance = encoding.distances(18, torch.device("cpu"))
    assert not distance[:2].any()
    assert not distance[:, :2].any()
    patch = 2 + torch.arange(16).view(4, 4)
    assert distance[patch[0, 0], patch[3, 0]] == 3
    assert distance[patch[0, 0], patch[3, 3]] == pytest.approx(18**0.5)
    before = output(made("deit"), given(model))
    torch.testing.assert_close(output(model, given(model)), before, rtol=0.2, atol=0.05)


def test_t5s_convolution_reads_its_bias():
    model = made("t5")
    dape.retrofit(model, "dape1x3", width=8)
    layer = retrofitted_layers(model)[0]
    assert layer.score_processor.program().reads_bias(layer.n_heads)
    with pytest.raises(ValueError, match='"nope" adds no bias that would replace its own'):
        dape.retrofit(made("t5"), "nope")


@pytest.mark.parametrize("name", ["bert", "vit", "t5"])
@pytest.mark.parametrize("method", ["dape1x3-fox", "cope", "selfextend", "dape1x3[canon=a]", "stickbreaking"])
def test_a_method_for_decoders_alone_is_refused(method, name):
    model = made(name)
    before = output(model, given(model))
    with pytest.raises(
        ValueError,
        match=r"bidirectional, and .* no meaning where the future is visible|adds no bias that would replace",
    ):
        dape.retrofit(model, method)
    torch.testing.assert_close(output(model, given(model)), before)
