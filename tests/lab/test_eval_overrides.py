"""EvalOverrides a trained model otherwise than it was trained: RoPE stretched, positions drawn, trained but once."""

import json

import pytest
import torch

from dape.evaluation.evaluator import evaluating
from dape.lab.evaluations import EvalOverrides, checked_overrides, parse_key
from dape.lab.execute import execute, make_plan
from dape.lab.experiments import Workspace, find_papers, load_corpora, load_experiments
from dape.models import DapeForCausalLM, preset
from dape.training import load_run


@pytest.mark.parametrize(
    ("reading", "key"),
    [
        (EvalOverrides(), "256"),
        (EvalOverrides(rope_scaling="ntk"), "256 rope_scaling=ntk"),
        (EvalOverrides(randomized_positions=2048), "256 randomized_positions=2048"),
        (EvalOverrides("yarn", 512), "256 rope_scaling=yarn,randomized_positions=512"),
    ],
)
def test_keys_tell_the_reading(reading, key):
    assert reading.key(256) == key
    assert parse_key(key) == (256, reading)


@pytest.mark.parametrize(
    ("options", "method", "sentence"),
    [
        ({"scaling": "ntk"}, "rope", 'at_evaluation has no key "scaling": it takes rope_scaling'),
        ({"rope_scaling": "more"}, "rope", 'rope_scaling="more": choose one of none, linear, ntk'),
        ({"rope_scaling": "ntk"}, "dape1x3-kerple", "dape1x3-kerple has no RoPE that could be scaled"),
        (
            {"randomized_positions": 32},
            "rope",
            "randomized_positions=32 at the evaluation, but inputs have 64",
        ),
    ],
)
def test_a_reading_that_cannot_be_is_refused(options, method, sentence):
    with pytest.raises(ValueError, match=sentence):
        checked_overrides(options, method, (16, 64))


def test_scaling_goes_with_the_length():
    assert EvalOverrides("linear").position_options(512, 128) == {"scaling": "linear", "factor": 4.0}
    assert EvalOverrides("yarn").position_options(64, 128) == {
        "scaling": "yarn",
        "factor": 1.0,
        "original_length": 128,
    }
    assert EvalOverrides().position_options(512, 128) == {}


def test_drawn_positions_reach_the_model():
    model = DapeForCausalLM(preset("tiny", "rope", hidden_size=32, num_hidden_layers=1)).eval()
    ids = torch.randint(0, 256, (2, 13)).numpy()
    positions = torch.tensor([[0, 3, 4, 9, 11, 12, 20, 25, 26, 27, 30, 40]])
    with evaluating(model, positions=lambda num_tokens: positions[:, :num_tokens]) as evaluator:
        losses = evaluator.losses(ids, 4)
    window = torch.from_numpy(ids)
    logits = model(window[:, :-1], position_ids=positions, use_cache=False).logits[:, -4:]
    expected = torch.nn.functional.cross_entropy(logits.mT, window[:, -4:], reduction="none")
    torch.testing.assert_close(torch.from_numpy(losses), expected, rtol=1e-5, atol=1e-5)


def test_one_training_is_read_in_many_ways(tmp_path):
    papers = find_papers()
    workspace = Workspace(tmp_path, "smoke", papers, load_corpora(papers), in_process=True)
    (experiment,) = load_experiments(papers, ["rope_scaling"])
    items = make_plan(experiment, workspace).items
    trainings = []
    (results,) = execute(
        [experiment],
        workspace,
        lambda view, count, left: lambda job, outcome: trainings.append((job.name, outcome)),
    )
    assert results.complete
    assert {name for name, outcome in trainings if outcome == ""} == {item.id for item in items}
    assert len({item.id for item in items}) == 3
    nll = {(r["method"], r["variant"], r["eval_length"]): r["value"] for r in results.lines("loss")}
    for method in ("rope", "dape1x3-rope"):
        assert len({nll[method, variant, 16] for variant in ("unscaled", "linear", "ntk", "yarn")}) == 1
        assert len({nll[method, variant, 64] for variant in ("unscaled", "linear", "ntk", "yarn")}) == 4
    # The scaled model is the trained one with other options, as anybody can load it.
    rope = next(item for item in items if item.method == "rope" and item.variant == "linear")
    scaled = load_run(tmp_path / "runs" / rope.id).model(scaling="linear", factor=4.0)
    assert scaled.config.position_options == {"scaling": "linear", "factor": 4.0}
    scores = json.loads((tmp_path / "evaluations" / f"{rope.id}.json").read_text())
    assert "64 rope_scaling=linear" in scores["windows"]
