"""Optimizer groups, schedule, precision, initial weights, options."""

import subprocess
import sys

import pytest
import torch
import toy

from dape import devices
from dape.models import DapeConfig, DapeForCausalLM
from dape.training import LoopSettings, TrainConfig, fit, initialise, recipe
from dape.training.config import read_config
from dape.training.loop import build_optimizer, learning_rate_at
from dape.training.parallel import check_precision

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
CPU = torch.device("cpu")


def build(method: str, seed: int = 0) -> DapeForCausalLM:
    model = DapeForCausalLM(DapeConfig(method=method, **SIZES))
    initialise(model, seed)
    return model


@pytest.mark.parametrize(
    "method", ["kerple", "dape1x3-kerple", "dape-t5", "dape1x3-fire", "transformer-xl", "cope"]
)
def test_only_weight_matrices_decay(method):
    model = build(method)
    decayed, undecayed = build_optimizer(model, LoopSettings(weight_decay=0.3), CPU).param_groups
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    spared = {names[parameter] for parameter in undecayed["params"]}
    ours = {name for name in names.values() if ".encodings." in name or ".scores." in name}
    expected = ours | {name for name, value in model.named_parameters() if value.dim() == 1}
    assert spared == expected
    assert {names[p] for p in decayed["params"]} == set(names.values()) - expected


def test_the_learning_rate_rises_then_follows_a_cosine():
    settings = LoopSettings(steps=110, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.2)
    rates = [learning_rate_at(step, settings) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.6)  # halfway down
    assert rates[-1] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_methods_start_from_the_same_shared_weights():
    models = [build(method) for method in ("nope", "kerple", "dape1x3-kerple", "dape1x5-kerple", "dape-t5")]
    first = models[0].state_dict()
    assert all(".encodings." not in name and ".scores." not in name for name in first)
    for model in models:
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in first.items())
    kerple, convolved = models[1].state_dict(), models[2].state_dict()
    assert all(torch.equal(convolved[name], value) for name, value in kerple.items())


def test_initial_weights_follow_the_seed_and_the_models_own_distribution():
    one, same, other = build("kerple", 1), build("kerple", 1), build("kerple", 2)
    weights = [model.model.layers[0].mlp.up.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert weights[0].std().item() == pytest.approx(one.config.initializer_range, rel=0.1)
    layers = [layer.mlp.up.weight for layer in one.model.layers]
    assert not torch.equal(*layers)


def test_fp16_trains_close_to_fp32_and_resumes_with_its_scale(tmp_path):
    full, half = (toy.train(tmp_path / name, precision=name) for name in ("fp32", "fp16"))
    assert half.final_loss == pytest.approx(full.final_loss, rel=1e-2)
    assert half.final_loss != full.final_loss
    stop = lambda record: record["step"] == 6  # noqa: E731 (a name for a line)
    fit(toy.task(), toy.settings(precision="fp16"), tmp_path / "cut", on_step=stop, progress=False)
    assert toy.train(tmp_path / "cut", precision="fp16").final_loss == half.final_loss


def test_a_precision_that_kills_the_process_is_refused(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(devices, "PROBE", "import os; os.abort()")
    devices.cpu_multiplies.cache_clear()
    with pytest.raises(ValueError, match="bf16 matrix product ends the process on this CPU"):
        check_precision("bf16", CPU)
    devices.cpu_multiplies.cache_clear()


def test_the_probe_of_a_precision_is_a_program_that_runs():
    program = devices.PROBE.format(dtype="float16")
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 17, "batch_size": 16}, "accumulate=17 exceeds batch_size=16"),
        ({"randomized_positions": 63}, "randomized_positions=63 is less than train_length="),
        ({"num_heads": 3}, "num_attention_heads=3 does not divide hidden_size=128"),
    ],
)
def test_mistakes_are_sentences(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes).model_config(vocab_size=256)


def test_the_papers_recipe_goes_with_its_presets():
    paper = recipe("125m")
    assert (paper.steps, paper.batch_size, paper.train_length) == (50_000, 256, 512)
    assert (paper.learning_rate, paper.final_learning_rate, paper.warmup_steps) == (
        6e-4,
        pytest.approx(6e-5),
        500,
    )
    assert recipe("350m").learning_rate == 3e-4
    assert recipe("125m", steps=1000).warmup_steps == 10
    assert recipe("tiny") == TrainConfig()


FILES = {
    "options.toml": 'method = "rope"\nlearning-rate = 1e-3\nbetas = [0.8, 0.9]\nvalidation = 0.2\n',
    "options.yaml": "method: rope\nlearning_rate: 1e-3\nbetas: [0.8, 0.9]\nvalidation: 0.2\n",
    "options.json": '{"method": "rope", "learning_rate": 0.001, "betas": [0.8, 0.9], "validation": "0.2"}',
}


@pytest.mark.parametrize("name", FILES)
def test_options_are_read_from_files(tmp_path, name):
    file = tmp_path / name
    file.write_text(FILES[name])
    found = {"method": "rope", "learning_rate": 1e-3, "betas": (0.8, 0.9), "validation": "0.2"}
    assert read_config(file) == found


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "x="), ("a.yaml", "[1"), ("a.ini", "x"), ("a.yaml", "- 1")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        read_config(tmp_path / name)


def test_the_threshold_of_fire_follows_the_training_length():
    def threshold(method, **changes):
        return TrainConfig(method=method, **changes).model_config(256).position_options.get("threshold")

    assert threshold("dape1x3-fire", train_length=512) == 256
    assert threshold("fire", train_length=64) == 32
    assert threshold("fire", train_length=64, position_options={"threshold": 100.0}) == 100.0
    assert threshold("kerple", train_length=64) is None
    assert threshold("fire[threshold=100]", train_length=64) is None  # that of the name holds


@pytest.mark.parametrize(
    ("method", "lengths"),
    [
        ("rope[scaling=yarn,factor=8]", [64, 64]),
        ("rope[scaling=yarn,factor=8,original_length=16]/nope", [16, None]),
        ("dape-rope[scaling=llama3,factor=8]/rope", [64, 0]),
        ("rope[scaling=dynamic,factor=2]/fire", [64, None]),
    ],
)
def test_a_stretched_rope_starts_from_the_training_length(method, lengths):
    config = TrainConfig(method=method, train_length=64, hidden_size=32, num_heads=4, num_layers=2)
    with torch.device("meta"):
        model = DapeForCausalLM(config.model_config(256))
    of_layer = [model.model.encodings[number] for number in model.model.encoding_index]
    assert [getattr(encoding, "original_length", None) for encoding in of_layer] == lengths
    assert all(encoding.threshold == 32 for encoding in of_layer if hasattr(encoding, "threshold"))


def test_validation_changes_nothing_of_the_training(tmp_path):
    """The toy model has dropout: a number drawn too many would show."""
    from dape.training.display import read_metrics

    without = toy.train(tmp_path / "without", validate_every=0)
    often = toy.train(tmp_path / "often", validate_every=3, accumulate=2)
    pieces = toy.train(tmp_path / "pieces", validate_every=0, accumulate=2)
    assert often.final_loss == pieces.final_loss
    assert toy.train(tmp_path / "whole", validate_every=5).final_loss == without.final_loss
    records = read_metrics(tmp_path / "often" / "metrics.jsonl")
    steps = [record["step"] for record in records if "validation_loss" in record]
    assert steps == sorted({*range(3, toy.STEPS + 1, 3), toy.STEPS})
    assert not any("validation_loss" in one for one in read_metrics(tmp_path / "without" / "metrics.jsonl"))


def test_packed_data_alone_say_what_they_are(tmp_path):
    from dape.data import prepare

    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"text {n}\n" * 20)
    prepare(str(tmp_path), tmp_path / "data", tokenizer="bpe:300", validation=["3", "7"], progress=False)
    config = TrainConfig(data=str(tmp_path / "data"))
    assert (config.corpus, config.tokenizer, config.validation) == (str(tmp_path), "bpe:300", "3,7")
    assert TrainConfig(data=str(tmp_path / "absent")).corpus == "python"
    assert TrainConfig(data=str(tmp_path / "data"), tokenizer="bytes").tokenizer == "bytes"
