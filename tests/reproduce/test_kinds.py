"""Kinds other than language: the proposition, results taken over, times at one pace, maps of the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_papers import write_papers

from dape.cli import main
from dape.reproduce.construction import answers, construction_records, difference_conv
from dape.reproduce.kinds.tasks import task_runs
from dape.reproduce.kinds.timing import at_one_pace
from dape.scores import PlainScores
from dape.tasks import build_task


def test_two_taps_of_minus_one_and_one_take_differences() -> None:
    conv = difference_conv()
    scores = torch.randn(2, 1, 9, 9, dtype=torch.float64)
    found = conv(scores)
    before = torch.cat([torch.zeros(2, 1, 9, 1, dtype=torch.float64), scores[..., :-1]], -1)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    torch.testing.assert_close(found[..., visible], (scores - before)[..., visible], rtol=0, atol=1e-14)


def test_what_followed_a_token_is_recalled_by_construction() -> None:
    # The paper's example: the word that followed the first token follows it again.
    ids = torch.tensor([[3, 7, 1, 4, 2, 5, 3]])
    assert answers(ids, 8, difference_conv(), 50.0)[0, -1] == 7
    assert answers(ids, 8, PlainScores(), 50.0)[0, -1] != 7
    records = construction_records({"lengths": [12, 96], "samples": 64, "sharpness": 50.0})
    chance = build_task("associative_recall").random_accuracy
    for record in records:
        if record["method"] == "dape1x2-nope":
            assert record["accuracy"] == 1.0
        else:
            assert record["accuracy"] < 10 * chance


def tasks_settings(**changes) -> dict:
    settings = {"tasks": ["even_pairs"], "methods": ["kerple", "alibi"], "seeds": [0]}
    protocol = {"steps": 2, "batch_size": 4, "samples": 4, "train_lengths": [4], "test_lengths": [5, 6]}
    return {**settings, "protocol": protocol, **changes}


def test_lengths_of_tasks_can_be_ranges() -> None:
    protocol = {
        "test_lengths": {"first": 50, "last": 500, "step": 90},
        "train_lengths": {"first": 1, "last": 3},
    }
    (run,) = task_runs(tasks_settings(methods=["kerple"], protocol=protocol))
    assert run.protocol.test_lengths == (50, 140, 230, 320, 410, 500)
    assert run.protocol.train_lengths == (1, 2, 3)


def test_task_results_with_the_same_settings_are_taken_over(tmp_path, monkeypatch) -> None:
    settings = (
        'results = "results/che"\ntasks = ["even_pairs"]\nmethods = ["kerple", "alibi"]\nseeds = [0]\n'
        "protocol = { steps = 2, batch_size = 4, samples = 4, train_lengths = [4], test_lengths = [5, 6] }\n"
    )
    papers = write_papers(tmp_path, mine=f"[scale.smoke]\n{settings}")
    file = papers / "test" / "mine" / "experiment.toml"
    file.write_text(file.read_text().replace('"language"', '"tasks"'))
    command = "tasks run even_pairs --steps 2 --batch-size 4 --samples 4 --train-lengths 4 --test-lengths 5,6"
    out = ["--out", str(tmp_path / "results" / "che")]
    # One with the settings wanted, one with others, which must be trained anew.
    assert main([*command.split(), "--method", "kerple", *out]) == 0
    assert main([*command.replace("--samples 4", "--samples 8").split(), "--method", "alibi", *out]) == 0
    from dape.tasks import runs

    trained, original = [], runs.execute
    monkeypatch.setattr(
        runs, "execute", lambda run, *a, **k: trained.append(run.method) or original(run, *a, **k)
    )
    options = ["--papers", str(papers), "--work", str(tmp_path / "work"), "--scale", "smoke"]
    assert main(["reproduce", "mine", *options]) == 0
    assert trained == ["alibi"]
    found = json.loads((tmp_path / "work/smoke/results/test/mine.json").read_text())
    assert found["complete"]
    assert found["adopted"]["runs"] == 1
    source = json.loads((tmp_path / "results/che/results.json").read_text())
    ours = [r["accuracy"] for r in found["records"] if r["method"] == "kerple"]
    assert ours == pytest.approx(
        [r["accuracy"] for r in source["records"] if r["method"] == "kerple"], abs=1e-6
    )
    assert {(s["method"], s["layers"]) for s in found["scores"]} == {("kerple", 5), ("alibi", 5)}


def test_times_have_the_ratios_that_were_measured_side_by_side() -> None:
    rows = [
        {"method": "a", "milliseconds": 30.0, "spread": 3.0, "ratio": 0.75},
        {"method": "base", "milliseconds": 80.0, "spread": 4.0, "ratio": 1.0},
    ]
    slow, base = at_one_pace([{"length": 8, "ratio_to": "base", **row} for row in rows])
    assert (slow["milliseconds"], slow["spread"]) == (60.0, 6.0)
    assert (base["milliseconds"], base["spread"]) == (80.0, 4.0)


def test_steps_of_several_lengths_have_the_same_tokens_and_one_base(tmp_path) -> None:
    scale = (
        '[scale.laptop]\nmethods = ["kerple", "rope"]\nlengths = [8, 32]\ntokens = 32\nrounds = { tiny = 2 }\n'
        'base = "rope"\n'
    )
    papers = write_papers(tmp_path, steps=scale)
    file = papers / "test" / "steps" / "experiment.toml"
    file.write_text(file.read_text().replace('"language"', '"timing"'))
    arguments = ["reproduce", "steps", "--papers", str(papers), "--work", str(tmp_path), "--scale", "laptop"]
    assert main(arguments) == 0
    path = papers / "test" / "steps" / "results.json"
    found = json.loads(path.read_text())
    shapes = [(r["length"], r["batch"], r["method"]) for r in found["records"]]
    assert shapes == [(8, 4, "kerple"), (8, 4, "rope"), (32, 1, "kerple"), (32, 1, "rope")]
    assert {(r["ratio_to"], r["ratio_length"]) for r in found["records"]} == {("rope", 8)}
    assert [r["ratio"] == 1 for r in found["records"]].count(True) == 1
    # A length more is timed, with all of its size; nothing is if nothing is missing.
    assert main(arguments) == 0
    assert json.loads(path.read_text())["records"] == found["records"]
    file.write_text(file.read_text().replace("[8, 32]", "[8, 32, 16]"))
    assert main(arguments) == 0
    assert [r["length"] for r in json.loads(path.read_text())["records"]] == [8, 8, 32, 32, 16, 16]


def test_maps_of_all_methods_are_of_the_same_text_and_pictures_are_there(tmp_path) -> None:
    papers = Path(__file__).parents[2] / "papers"
    options = ["--papers", str(papers), "--work", str(tmp_path), "--scale", "smoke"]
    assert main(["reproduce", "visualisation", *options]) == 0
    folder = tmp_path / "smoke" / "results" / "dape_v2"
    found = json.loads((folder / "visualisation.json").read_text())
    heads = [(r["method"], r["length"], r["layer"], r["head"]) for r in found["records"]]
    assert len(set(heads)) == len(heads) == 2 * 2 * 1 * 2
    assert all(0 < r["sink_share"] <= 1 and r["entropy"] >= 0 for r in found["records"])
    assert all(len(r["sink_shares"]) == 2 for r in found["records"])
    assert found["pictures"]
    for name in found["pictures"]:
        assert (folder / "pictures-smoke" / name).read_bytes().startswith(b"\x89PNG")
