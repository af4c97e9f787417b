"""Kinds other than language: the proposition, environments of runs, times at one pace, maps of the same text."""

from __future__ import annotations

from pathlib import Path

import torch
from small_papers import write_papers

from dape.cli import main
from dape.lab.accuracies import Accuracies, tables
from dape.lab.kinds.construction import answers, construction_runs, difference_conv
from dape.lab.kinds.tasks import grid
from dape.lab.kinds.timing import at_one_pace
from dape.lab.paper import Paper
from dape.lab.records import Results, load_results
from dape.lab.stats import Estimate
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
    chance = build_task("associative_recall").random_accuracy
    for run, rows in construction_runs({"lengths": [12, 96], "samples": 64, "sharpness": 50.0}):
        for row in rows:
            if run["method"] == "dape1x2-nope":
                assert row["value"] == 1.0
            else:
                assert row["value"] < 10 * chance


def tasks_settings(**changes) -> dict:
    settings = {"tasks": ["even_pairs"], "methods": ["kerple", "alibi"], "seeds": [0]}
    protocol = {"steps": 2, "batch_size": 4, "samples": 4, "train_lengths": [4], "test_lengths": [5, 6]}
    return {**settings, "protocol": protocol, **changes}


def task_papers(folder: Path) -> tuple[Path, Path]:
    """Papers with the experiment `mine` on a task, and its file."""
    settings = (
        'tasks = ["even_pairs"]\nmethods = ["kerple", "alibi"]\nseeds = [0]\n'
        "protocol = { steps = 2, batch_size = 4, samples = 4, train_lengths = [4], test_lengths = [5, 6] }\n"
    )
    papers = write_papers(folder, mine=f"[scale.smoke]\n{settings}")
    file = papers / "test" / "mine" / "experiment.toml"
    file.write_text(file.read_text().replace('"language"', '"tasks"'))
    return papers, file


def test_lengths_of_tasks_can_be_ranges() -> None:
    protocol = {
        "test_lengths": {"first": 50, "last": 500, "step": 90},
        "train_lengths": {"first": 1, "last": 3},
    }
    (run,) = grid(tasks_settings(methods=["kerple"], protocol=protocol))
    assert run.protocol.test_lengths == (50, 140, 230, 320, 410, 500)
    assert run.protocol.train_lengths == (1, 2, 3)


def test_some_tasks_are_trained_longer_and_with_more_seeds() -> None:
    settings = tasks_settings(
        tasks=["even_pairs", "reverse_string"],
        seeds_of={"reverse_string": [0, 1]},
        protocol_of={"reverse_string": {"steps": 7}},
    )
    runs = [(run.task, run.seed, run.protocol.steps) for run in grid(settings) if run.method == "kerple"]
    assert runs == [("even_pairs", 0, 2), ("reverse_string", 0, 7), ("reverse_string", 1, 7)]


def test_task_results_of_earlier_settings_stay_until_they_are_replaced(tmp_path, capsys) -> None:
    papers, file = task_papers(tmp_path)
    options = ["--papers", str(papers), "--work", str(tmp_path / "work"), "--scale", "smoke"]
    path = tmp_path / "work/smoke/results/test/mine.json"

    def steps_of() -> dict[str, int]:
        runs = load_results(path)["runs"]
        return {run["method"]: run["settings"]["protocol"]["steps"] for run in runs}

    assert main(["reproduce", "mine", *options]) == 0
    file.write_text(file.read_text().replace("steps = 2", "steps = 3"))
    assert main(["reproduce", "mine", *options, "--only", "*-alibi-*"]) == 0
    assert steps_of() == {"kerple": 2, "alibi": 3}
    assert load_results(path)["missing"] == ["even_pairs-kerple-layers5-seed0"]
    assert main(["reproduce", "mine", *options]) == 0
    assert steps_of() == {"kerple": 3, "alibi": 3}
    assert load_results(path).complete
    assert "1 already done" in capsys.readouterr().out


def test_each_run_on_a_task_has_the_environment_that_trained_it(tmp_path, monkeypatch) -> None:
    """Every command wrote its own commit and machine over those of earlier commands, trained or not."""
    papers, _ = task_papers(tmp_path)
    machines = iter(["an abacus", "a slide rule", "a quipu"])

    def on_another_machine(*only: str) -> Results:
        cpu = next(machines)
        monkeypatch.setattr("dape.lab.environment.processor", lambda: cpu)
        options = ["--papers", str(papers), "--work", str(tmp_path / "work"), "--scale", "smoke"]
        assert main(["reproduce", "mine", *options, *only]) == 0
        return load_results(tmp_path / "work/smoke/results/test/mine.json")

    assert on_another_machine("--only", "*-kerple-*")["environment"]["cpu"] == "an abacus"
    found = on_another_machine()
    machine_of = {run["method"]: run["environment"]["cpu"] for run in found["runs"]}
    assert machine_of == {"kerple": "an abacus", "alibi": "a slide rule"}
    assert found["environment"]["cpu"] == ["an abacus", "a slide rule"]
    assert on_another_machine().content == found.content


def test_times_have_the_ratios_that_were_measured_side_by_side() -> None:
    entries = [
        {"itself": False, "milliseconds": Estimate(30.0, 3.0), "ratio": Estimate(0.75, 0.1)},
        {"itself": True, "milliseconds": Estimate(80.0, 4.0), "ratio": Estimate(1.0, 0.0)},
    ]
    slow, base = at_one_pace(entries)
    assert slow["milliseconds"] == Estimate(60.0, 6.0)
    assert base["milliseconds"] == Estimate(80.0, 4.0)


def test_steps_of_several_lengths_have_the_same_tokens_and_one_base(tmp_path, monkeypatch) -> None:
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
    found = load_results(path)
    shapes = [(r["eval_length"], r["batch_size"], r["method"]) for r in found.lines("ratio")]
    assert shapes == [(8, 4, "kerple"), (8, 4, "rope"), (32, 1, "kerple"), (32, 1, "rope")]
    assert {r["against"] for r in found.lines("ratio")} == {"rope at 8"}
    assert [r["error"] == 0 for r in found.lines("ratio")].count(True) == 1
    # A length more is timed, with all of its size; nothing is if nothing is missing, and no other machine named.
    with monkeypatch.context() as patch:
        patch.setattr("dape.lab.environment.processor", lambda: "an abacus")
        assert main(arguments) == 0
    assert load_results(path).content == found.content
    file.write_text(file.read_text().replace("[8, 32]", "[8, 32, 16]"))
    assert main(arguments) == 0
    lengths = [r["eval_length"] for r in load_results(path).lines("ratio")]
    assert lengths == [8, 8, 32, 32, 16, 16]


def test_maps_of_all_methods_are_of_the_same_text_and_pictures_are_there(tmp_path) -> None:
    papers = Path(__file__).parents[2] / "papers"
    options = ["--papers", str(papers), "--work", str(tmp_path), "--scale", "smoke"]
    assert main(["reproduce", "visualisation", *options]) == 0
    folder = tmp_path / "smoke" / "results" / "dape_v2"
    found = load_results(folder / "visualisation.json")
    sinks, entropies = found.lines("sink_share"), found.lines("entropy")
    heads = [(r["method"], r["eval_length"], r["layer"], r["head"]) for r in sinks]
    assert len(set(heads)) == len(heads) == 2 * 2 * 1 * 2
    assert all(0 < r["value"] <= 1 for r in sinks)
    assert all(r["value"] >= 0 for r in entropies)
    assert all(len(r["windows"]) == 2 for r in sinks)
    assert found["pictures"]
    for name in found["pictures"]:
        assert (folder / "pictures-smoke" / name).read_bytes().startswith(b"\x89PNG")


def test_steps_and_seeds_are_said_of_the_tasks_that_have_them() -> None:
    """Of four tasks, one with two seeds and one with fewer steps."""
    found = Results({"kind": "tasks"})
    trainings = {
        "even_pairs": (5000, 2),
        "parity_check": (5000, 1),
        "odds_first": (5000, 1),
        "copy": (100, 1),
    }
    for task, (steps, seeds) in trainings.items():
        for seed in range(seeds):
            run = {"corpus": task, "method": "kerple", "layers": 1, "seed": seed, "variant": ""}
            row = {"metric": "accuracy", "value": 0.5, "count": 100, "eval_length": 50}
            found.add({**run, "settings": {"protocol": {"steps": steps}}}, [row])
    note = tables(Accuracies(found), "trial", Paper())[0].note
    assert note.endswith(
        "Trained for 5,000 steps and 2 seeds: even pairs; 5,000 steps and 1 seed: parity check, odds first; "
        "100 steps and 1 seed: copy."
    )
