"""Exported models and adapters: no flipped bit goes unnoticed, no index leads outside, modes are usual."""

import contextlib
import copy
import json
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from builders import decoder
from builders import llama as small_llama
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import dape
from dape.checksums import verify_checksums
from dape.loading import load_base, load_causal_lm, open_for_evaluation, open_for_inspection
from dape.models import DapeForCausalLM, DapeModel, export
from dape.models.byte_tokenizer import byte_tokenizer
from dape.training import TrainConfig
from dape.training.run import Run, make_loadable

SIZES = {
    "vocab_size": 257,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "score_width": 4,
}
TEXT = str(Path(dape.__file__).parent / "settings.py")


@pytest.fixture(scope="module")
def llama():
    return small_llama(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "model"
    return export(decoder(**SIZES), folder, tokenizer=byte_tokenizer())


def flips(folder, count, seed=0):
    """A file and a bit of it, as often in small files as in large ones."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix != ".md")
    for _ in range(count):
        file = draw.choice(files)
        yield file, draw.randrange(8 * file.stat().st_size)


@contextlib.contextmanager
def damaged(file, bit):
    """The file with a bit flipped, inside the block."""
    whole = file.read_bytes()
    content = bytearray(whole)
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    yield
    file.write_bytes(whole)


def test_no_flipped_bit_of_an_adapter_is_silent(exported, llama, tmp_path):
    folder = dape.save_adapter(dape.retrofit(copy.deepcopy(llama)), tmp_path / "adapter")
    dape.load_adapter(copy.deepcopy(llama), folder)
    for file, bit in flips(folder, 60):
        with damaged(file, bit), pytest.raises(ValueError, match=r"damaged|missing|format|outside"):
            dape.load_adapter(copy.deepcopy(llama), folder)
    (tmp_path / "plain").touch()
    usual = (tmp_path / "plain").stat().st_mode
    for path in (exported / "model.safetensors", folder / "dape_adapter.safetensors"):
        assert path.stat().st_mode == usual


@pytest.fixture(scope="module")
def run_folder(exported):
    """A run's folder, which can itself be loaded: its weights lie in model/."""
    make_loadable(exported.parent, exported)
    return exported.parent


# Every way to load a model of ours; folder is that of the run.
ROUTES = {
    "run": lambda folder: Run(folder, TrainConfig()).model(),
    "class": lambda folder: DapeForCausalLM.from_pretrained(folder / "model"),
    "class, subfolder": lambda folder: DapeForCausalLM.from_pretrained(folder, subfolder="model"),
    "class of the body": lambda folder: DapeModel.from_pretrained(folder / "model"),
    "class, run": lambda folder: DapeForCausalLM.from_pretrained(folder),
    "auto": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "model"),
    "auto, run": lambda folder: AutoModelForCausalLM.from_pretrained(folder),
    "eval": lambda folder: open_for_evaluation(f"hf:{folder / 'model'}", corpus=TEXT).__enter__(),
    "eval, run": lambda folder: open_for_evaluation(f"hf:{folder}", corpus=TEXT).__enter__(),
    "retrofit": lambda folder: load_base(str(folder / "model")),
    "inspect": lambda folder: list(open_for_inspection([str(folder / "model")], None)),
}


@pytest.mark.parametrize("route", ROUTES)
def test_no_flipped_bit_of_the_weights_is_silent_on_any_route(route, run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    ROUTES[route](folder)
    weights, draw = folder / "model" / "model.safetensors", random.Random(0)
    for _ in range(4):
        bit = draw.randrange(8 * weights.stat().st_size)
        with damaged(weights, bit), pytest.raises(ValueError, match=r"model.safetensors is damaged"):
            ROUTES[route](folder)


@pytest.mark.parametrize("route", ["auto", "auto, run"])
def test_no_flipped_bit_of_any_file_is_silent_in_plain_transformers(route, run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    for file, bit in flips(folder / "model" if route == "auto" else folder, 80):
        with damaged(file, bit), pytest.raises((ValueError, OSError, TypeError, KeyError)):
            ROUTES[route](folder)


@pytest.mark.parametrize("saved", ["export", "save_pretrained", "PEFT"])
def test_a_damaged_retrofitted_model_is_refused(saved, llama, tmp_path):
    llama.save_pretrained(tmp_path / "base")
    base, folder = LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "model"
    loaders = [dape.load_retrofitted, load_causal_lm]
    if saved == "PEFT":
        peft = pytest.importorskip("peft")
        base = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))
    else:
        loaders.append(partial(AutoModelForCausalLM.from_pretrained, trust_remote_code=True))
    model = dape.retrofit(base)
    if saved == "export":
        export(model, folder)
    else:
        model.save_pretrained(folder)
    weights = folder / ("adapter_model.safetensors" if saved == "PEFT" else "model.safetensors")
    for load in loaders:
        load(folder)
    for load in loaders:
        bit = 8 * weights.stat().st_size - 9
        with damaged(weights, bit), pytest.raises(ValueError, match=rf"{weights.name} is damaged"):
            load(folder)


def test_an_edited_model_loads_if_it_is_saved_or_asked_for(exported, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / "README.md").write_text("A text for people.")
    model = DapeForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(folder)
    assert not DapeForCausalLM.from_pretrained(folder).lm_head.weight.any()
    save_file({"edited": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (DapeForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"checksums.json to take it as it is"):
            load(folder)
        load(folder, verify=False)
    (folder / "checksums.json").unlink()
    DapeForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_that_leads_outside_is_refused(exported, tmp_path, name):
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="lies outside"):
        verify_checksums(folder)


def test_an_export_leaves_itself_and_one_that_is_killed_the_old_model(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    model = decoder("kerple", **SIZES)
    export(model, folder, with_code=True)
    (folder / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(export.__globals__, "write_checksums", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(decoder("rope", **SIZES), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]
    verify_checksums(folder)
    export(model, folder)
    # Code that an export wrote goes with it; files of others stay.
    fresh = export(model, tmp_path / "fresh")
    assert {path.name for path in folder.iterdir()} == {"notes.txt", *(path.name for path in fresh.iterdir())}
    verify_checksums(folder)
