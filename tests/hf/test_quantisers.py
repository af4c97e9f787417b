"""Quantisers take the linear layers, all of them, and no more: encodings and score convolutions keep every bit."""

import copy

import pytest
import torch
import transformers
from builders import decoder as tiny
from builders import llama as small_llama
from torch import nn
from transformers import LlamaForCausalLM

import dape
from dape.models import DapeForCausalLM
from dape.retrofitting import set_trainable

pytestmark = pytest.mark.filterwarnings("ignore")  # of the quantisers and what they import

METHODS = ["dape1x3-fire", "transformer-xl", "mta-fox"]
# Modules that must stay, by their names in our models and in retrofitted ones.
OURS = {"encodings", "scores", "score_processor", "position_encoding"}


def with_weight(model):
    """The model with encodings and convolutions that matter to its output."""
    for name, value in model.named_parameters():
        if OURS & set(name.split(".")):
            nn.init.uniform_(value, 0.05, 0.6)
    return model


def decoder(method):
    """Sizes that blocks of four bits divide."""
    return with_weight(tiny(method, hidden_size=128))


def llama():
    return small_llama(hidden_size=128, intermediate_size=128)


def divergence(found, told):
    """Nats a token."""
    found, told = found.float().log_softmax(-1), told.float().log_softmax(-1)
    return nn.functional.kl_div(found, told, log_target=True, reduction="none").sum(-1).mean().item()


def kind(module):
    """What a quantiser changes of a layer: its class, or its weight's."""
    weight = getattr(module, "weight", None)
    return type(module), type(weight), getattr(weight, "dtype", None)


def check(model, quantised, *, at_most):
    """Every linear layer but the head is quantised, ours are as they were, and the outputs agree."""
    others = dict(quantised.named_modules())
    changed = {name for name, module in model.named_modules() if kind(others[name]) != kind(module)}
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert changed - {"lm_head"} == linear - {"lm_head"}
    stayed = dict(quantised.named_parameters())
    for name, value in model.named_parameters():
        if OURS & set(name.split(".")):
            assert torch.equal(stayed[name], value), name
    ids = torch.randint(1, 40, (2, 24), generator=torch.Generator().manual_seed(1))
    assert divergence(quantised(ids).logits, model(ids).logits) < at_most
    assert quantised.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 26)


MODELS = {method: lambda method=method: decoder(method) for method in METHODS}
MODELS |= {f"llama, {m}": lambda m=m: with_weight(dape.retrofit(llama(), m)) for m in ("dape1x3-fire", "fox")}


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_quantisation(name):
    model = MODELS[name]()
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    check(model, quantised, at_most=2e-3)


# Int4WeightOnlyConfig itself needs a GPU.
TORCHAO = {
    "int8": ("Int8WeightOnlyConfig", (), 5e-4),
    "int4": ("IntxWeightOnlyConfig", (torch.int4,), 5e-2),
    "int8, dynamic": ("Int8DynamicActivationInt8WeightConfig", (), 2e-3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", TORCHAO)
def test_torchao(name, way):
    quantization = pytest.importorskip("torchao.quantization")
    config, arguments, at_most = TORCHAO[way]
    model = MODELS[name]()
    quantised = copy.deepcopy(model)
    quantization.quantize_(quantised, getattr(quantization, config)(*arguments))
    check(model, quantised, at_most=at_most)


@pytest.mark.parametrize("method", METHODS)
def test_torchao_while_loading(method, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    decoder(method).save_pretrained(tmp_path)
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantised = DapeForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    check(DapeForCausalLM.from_pretrained(tmp_path), quantised, at_most=5e-4)


BITS = {8: 5e-4, 4: 5e-2}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", BITS)
def test_bitsandbytes(method, bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    decoder(method).save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    quantised = DapeForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    check(DapeForCausalLM.from_pretrained(tmp_path), quantised, at_most=BITS[bits])


def test_a_quantised_model_is_retrofitted_and_trained(tmp_path):
    """As QLoRA does: the base in few bits, what is added in full precision.

    Eight bits: on a CPU, a layer of four that was once evaluated hands no gradient back, in anybody's model.
    """
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    model = with_weight(dape.retrofit(base, "dape1x3-fire"))
    set_trainable(model, "added")
    ids = torch.randint(1, 40, (2, 24))
    model(ids, labels=ids).loss.backward()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert {part for name in trained for part in OURS & set(name.split("."))} == {
        "score_processor",
        "position_encoding",
    }
    for name, value in trained.items():
        assert value.dtype == torch.float32, name
        assert value.grad.abs().sum() > 0, name
