"""Quantisers, adapters, offloading and sharding take our encodings as they are: whole, in full precision."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from builders import decoder, llama
from processes import copies
from torch import nn

import dape
from dape import POSITIONS
from dape.models import DapeForCausalLM

METHODS = [prefix + name for name in POSITIONS for prefix in ("", "dape1x3-")]


@pytest.mark.parametrize("method", METHODS)
def test_no_encoding_or_convolution_holds_a_linear_layer_or_a_scalar(method):
    model = decoder(method)
    for owner in (*model.model.encodings, *(layer.attention.scores for layer in model.model.layers)):
        assert not any(isinstance(part, nn.Linear | nn.Embedding) for part in owner.modules())
    assert all(parameter.dim() for parameter in model.model.encodings.parameters())


@pytest.mark.parametrize("method", ["dape1x3-fire", "transformer-xl"])
def test_adapters_of_all_linear_layers_leave_them(method):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    model = peft.get_peft_model(decoder(method), config)
    adapted = {name for name, value in model.named_parameters() if value.requires_grad}
    assert all("lora_" in name for name in adapted)
    assert any("attention.query" in name for name in adapted)
    ids = torch.randint(0, 40, (2, 8))
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (2, 10)
    assert not any("encodings" in name or "scores" in name for name in adapted)


def retrofitted_llama(method):
    return dape.retrofit(llama(), method)


@pytest.mark.parametrize("build", [decoder, retrofitted_llama], ids=["decoder", "retrofitted"])
@pytest.mark.parametrize("method", ["dape1x3-kerple", "dape3x3-fire"])
def test_adapters_of_the_convolutions_get_gradients_and_change_the_output(build, method):
    peft = pytest.importorskip("peft")
    ids = torch.randint(0, 40, (2, 12))
    targets = {"task_type": "CAUSAL_LM", "target_modules": ["expand", "project"]}
    config = peft.LoraConfig(r=2, init_lora_weights=False, **targets)
    model = peft.get_peft_model(build(method), config).eval()
    model(input_ids=ids, labels=ids).loss.backward()
    adapters = {name: value for name, value in model.named_parameters() if "lora_" in name}
    # Two layers of two convolutions, two factors each.
    assert len(adapters) == 8
    for name, value in adapters.items():
        assert value.grad is not None, name
        assert value.grad.abs().sum() > 0, name
    with_adapters = model(input_ids=ids).logits
    merged = model.merge_and_unload()(input_ids=ids).logits
    torch.testing.assert_close(merged, with_adapters, rtol=1e-3, atol=1e-4)


def test_fully_sharded_models_are_the_model():
    """Two processes, each with half of every parameter, give the gradients of one, for every method.

    context_parallel, which gives each process a part of the tokens, is refused.
    """
    assert f"{len(METHODS)} methods" in copies(Path(__file__).parent / "sharded.py", world=2)


@pytest.mark.parametrize("method", ["dape1x3-kerple", "rope"])
def test_heads_split_between_processes_are_refused(method):
    """As tensor parallelism leaves the projections of each process: with some of the heads."""
    model = decoder(method)
    for layer in model.model.layers:
        for name in ("query", "key", "value"):
            getattr(layer.attention, name).weight.data = getattr(layer.attention, name).weight.data[:16]
            getattr(layer.attention, name).bias.data = getattr(layer.attention, name).bias.data[:16]
    with pytest.raises(ValueError, match=r"2 of 4 heads, .* tensor parallelism"):
        model(torch.randint(0, 40, (1, 8)))


ALL, PART = "all on the disk", "a layer and the encodings on the disk"


@pytest.mark.parametrize(
    ("method", "where"),
    [*((f"dape1x3-{name}", ALL) for name in POSITIONS), *(("mta-t5", x) for x in (ALL, PART)), ("fox", PART)],
)
@pytest.mark.filterwarnings("ignore")
def test_weights_are_offloaded_to_the_disk(method, where, tmp_path):
    """Which fills a module's parameters right before each call and empties them right after."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = decoder(method), torch.randint(40, (2, 12))
    want = model(ids, output_attentions=True)
    if where == ALL:
        accelerate.disk_offload(model, str(tmp_path / "offloaded"), execution_device=torch.device("cpu"))
    else:
        model.save_pretrained(tmp_path / "model")
        positions = dict.fromkeys(["model.embed", "model.layers.0", "lm_head"], "cpu")
        positions |= dict.fromkeys(["model.encodings", "model.layers.1", "model.norm"], "disk")
        model = DapeForCausalLM.from_pretrained(
            tmp_path / "model", device_map=positions, offload_folder=str(tmp_path / "offloaded")
        )
    found = model(ids, output_attentions=True)
    torch.testing.assert_close(found.logits, want.logits)
    assert len(found.attentions) == len(want.attentions) == 2
    torch.testing.assert_close(found.attentions[1], want.attentions[1])
    assert model.generate(ids, max_new_tokens=2).shape == (2, 14)


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_what_is_pushed_to_the_hub_has_the_code(way, tmp_path, monkeypatch):
    from transformers.utils import hub

    if not hasattr(hub, "hf_api"):
        pytest.skip("this version of transformers reaches the hub otherwise: no stand-in for it here")
    api = MagicMock()
    api.create_repo.return_value.repo_id = "me/model"
    monkeypatch.setattr(hub, "hf_api", lambda: api)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", lambda: api)
    card = MagicMock(save=lambda path: Path(path).write_text("card"))
    for module in (hub, sys.modules["transformers.modeling_utils"]):
        monkeypatch.setattr(module, "create_and_tag_model_card", lambda *a, **b: card)
    model = decoder()
    if way == "push_to_hub":
        model.push_to_hub("me/model")
    else:
        model.save_pretrained(tmp_path / "model", push_to_hub=True)
    sent = {one.path_in_repo for one in api.create_commit.call_args.kwargs["operations"]}
    assert {"config.json", "model.safetensors", "dape_from_package.py"} <= sent
