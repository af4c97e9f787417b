"""Generated tasks in the training loop, runs, results and reports, and the commands around them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dape.cli import main
from dape.cli.options import named, parse_option
from dape.cli.tasks import parse_lengths
from dape.lab import solving
from dape.lab.accuracies import Accuracies, by_multiple, paper_accuracy, paper_table, spans
from dape.lab.kinds.tasks import TaskRun, train_and_test
from dape.lab.records import load_results
from dape.lab.solving import GeneratedTask, accuracy_by_length, build_model
from dape.tasks import IGNORED, TASKS, build_task

TINY = ["--steps", "3", "--batch-size", "4", "--samples", "4", "--layers", "1"]
SHORT = ["--train-lengths", "1:6", "--test-lengths", "4,7,9"]


def tiny_model(task, method="dape1x3-kerple", **changes):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seed": 0} | changes
    return build_model(task, method, **sizes)


class Answerer(nn.Module):
    """Says what `answers` says of each row of ids, as logits."""

    def __init__(self, task, answers):
        super().__init__()
        self.task, self.answers, self.unused = task, answers, nn.Parameter(torch.zeros(()))

    def forward(self, ids, positions=None, position_ids=None, use_cache=None):
        rows = [self.answers(row) for row in ids.tolist()]
        labels = torch.tensor(rows).clamp(min=0)
        logits = nn.functional.one_hot(labels, self.task.num_labels).float()
        return logits if self.task.model == "encoder" else type("Output", (), {"logits": logits})


def solved(task):
    """Labels of a row of ids, by the solver."""

    def answers(row):
        if task.model == "decoder":
            return task.solve(row)
        inputs = [token for token in row if token != task.empty]
        return [IGNORED] * len(inputs) + task.solve(inputs)

    return answers


@pytest.mark.parametrize("name", TASKS)
def test_a_model_that_knows_the_solver_scores_everything(name):
    task = build_task(name)
    lengths = [length for length in (1, 2, 11, 24, 60) if length >= task.minimum_length]
    accuracy = accuracy_by_length(task, Answerer(task, solved(task)), lengths, 16)
    assert accuracy == dict.fromkeys(lengths, 1.0)


@pytest.mark.parametrize("name", ["parity_check", "bucket_sort", "stack_manipulation", "passkey"])
def test_a_constant_model_scores_the_stated_accuracy(name):
    task = build_task(name)
    constant = Answerer(task, lambda row: [1] * len(row))
    accuracy = accuracy_by_length(task, constant, [80], 1000)[80]
    assert accuracy == pytest.approx(task.constant_accuracy, abs=0.05)


@pytest.mark.parametrize("position_range", [None, 64])
@pytest.mark.parametrize("name", ["reverse_string", "associative_recall"])
def test_batches_are_functions_of_seed_and_step_and_their_parts_make_the_whole(name, position_range):
    task = build_task(name)
    training = GeneratedTask(task, tiny_model(task).eval(), 6, (9, 12), 5, position_range)
    batch, again, other = training.batch(3), training.batch(3), training.batch(4)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert not torch.equal(batch["ids"], other["ids"])
    whole = training.loss(training.model, batch)
    parts = [training.shard(batch, rank, 2) for rank in range(2)]
    share = sum(training.loss(training.model, part) * training.size(part) for part in parts)
    assert sum(map(training.size, parts)) == training.size(batch)
    torch.testing.assert_close(share / training.size(batch), whole)


def test_lengths_are_drawn_evenly():
    task = build_task("parity_check")
    training = GeneratedTask(task, tiny_model(task), 1, (2, 3, 4, 5))
    widths = [training.batch(step)["ids"].shape[1] - 1 for step in range(800)]
    assert np.bincount(widths)[2:] / 800 == pytest.approx(np.full(4, 0.25), abs=0.07)


def test_methods_start_from_the_same_shared_weights():
    task = build_task("even_pairs")
    plain, convolved = tiny_model(task, "kerple"), tiny_model(task)
    ours = dict(convolved.named_parameters())
    shared = [name for name, _ in plain.named_parameters() if "encodings" not in name]
    assert len(shared) > 10
    assert all(torch.equal(dict(plain.named_parameters())[name], ours[name]) for name in shared)


def test_run_writes_results_and_is_not_repeated(tmp_path, capsys):
    out = tmp_path / "tasks"
    command = ["tasks", "run", "parity_check", "reverse_string", "--method", "kerple", "dape1x3-kerple"]
    command += [*TINY, *SHORT, "--out", str(out)]
    assert main(command) == 0
    results = load_results(out / "results.json")
    assert [run["corpus"] for run in results["runs"]] == ["parity_check"] * 2 + ["reverse_string"] * 2
    lines = results.lines("accuracy")
    assert {line["eval_length"] for line in lines} == {4, 7, 9}
    for mean in results.lines("mean_accuracy"):
        beyond = [x["value"] for x in lines if x["run"] == mean["run"] and x["eval_length"] > 6]
        assert mean["value"] == pytest.approx(np.mean(beyond))
    assert not (out / "unfinished").exists()
    readme = (out / "README.md").read_text()
    assert "(50.1)" in readme  # the paper's parity_check with Kerple
    assert (
        f"dape tasks run parity_check reverse_string --method kerple dape1x3-kerple {' '.join(TINY)}"
        in readme
    )
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()

    before = (out / "results.json").read_bytes()
    assert main(command) == 0
    assert "4 runs, 4 already done" in capsys.readouterr().out
    assert (out / "results.json").read_bytes() == before
    assert main([*command, "--steps", "4"]) == 2
    assert "with protocol.steps 3, not 4: use another --out" in capsys.readouterr().err
    assert main(["tasks", "table", str(out)]) == 0
    assert "(50.1)" in capsys.readouterr().out


def test_several_jobs_give_what_one_gives(tmp_path):
    command = ["tasks", "run", "copy", "--method", "nope", *TINY, "--seed", "0", "1"]
    command += ["--train-lengths", "8", "--test-lengths", "8,12"]
    records = []
    for jobs in ("1", "2"):
        assert main([*command, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
        lines = load_results(tmp_path / jobs / "results.json").lines("accuracy")
        records.append(sorted((line["name"], line["eval_length"], line["value"]) for line in lines))
    assert records[0] == records[1]


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    protocol = parse_protocol(steps=3)
    run = TaskRun("even_pairs", "kerple", 0, protocol)
    whole = train_and_test(run, tmp_path / "whole")

    def killed(*arguments, **options):
        raise RuntimeError("killed")

    monkeypatch.setattr(solving, "answers_by_length", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train_and_test(run, tmp_path / "again")
    monkeypatch.undo()
    steps_before = (tmp_path / "again" / "metrics.jsonl").read_bytes()
    resumed = train_and_test(run, tmp_path / "again")
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == steps_before
    assert resumed["rows"] == whole["rows"]
    assert resumed["run"]["train_loss"] == whole["run"]["train_loss"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 8}, "has batch_size=4, now batch_size=8"),
        ({"train_lengths": (5,)}, r"has train_lengths=\[3, 4\], now train_lengths=\[5\]"),
        ({"num_heads": 4}, "has num_heads=8, now num_heads=4"),
        ({"hidden_size": 32}, "has hidden_size=64, now hidden_size=32"),
    ],
)
def test_an_interrupted_run_does_not_go_on_with_other_settings(tmp_path, monkeypatch, change, sentence):
    """It went on, and recorded the new ones."""

    def killed(*arguments, **options):
        raise RuntimeError("killed")

    monkeypatch.setattr(solving, "answers_by_length", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train_and_test(TaskRun("even_pairs", "rope", 0, parse_protocol(steps=3)), tmp_path / "run")
    monkeypatch.undo()
    other = TaskRun("even_pairs", "rope", 0, parse_protocol(steps=3, **change))
    with pytest.raises(ValueError, match=sentence):
        train_and_test(other, tmp_path / "run")
    # What does not change the training may differ.
    tested = TaskRun("even_pairs", "rope", 0, parse_protocol(steps=3, samples=6, test_lengths=(4, 5, 6)))
    assert len(train_and_test(tested, tmp_path / "run")["rows"]) == 4


def parse_protocol(**changes):
    from dataclasses import replace

    tiny = {"num_layers": 1, "batch_size": 4, "samples": 4, "train_lengths": (3, 4), "test_lengths": (4, 6)}
    return replace(build_task("even_pairs").protocol, **{**tiny, **changes})


def test_grid_of_layers_and_seeds_and_randomized_positions(tmp_path, capsys):
    command = ["tasks", "run", "associative_recall", "--method", "rope", "dape1x2-nope", "--seed", "0", "1"]
    command += ["--steps", "2", "--batch-size", "2", "--samples", "4", "--layers", "1", "2"]
    command += ["--option", "keys=9", "values=5", "--train-lengths", "9", "--test-lengths", "9,12"]
    assert main([*command, "--randomized-positions", "32", "--out", str(tmp_path)]) == 0
    results = load_results(tmp_path / "results.json")
    assert len(results["runs"]) == 8
    assert {run["settings"]["position_range"] for run in results["runs"]} == {32}
    readme = (tmp_path / "README.md").read_text()
    assert "### associative_recall, 2 layers\n" in readme
    assert "| dape1x2-nope (keys=9, values=5, positions from 32) |" in readme
    assert re.search(r"\d ± \d", readme)


def test_notes_of_the_folder_stand_in_its_readme(tmp_path, capsys):
    (tmp_path / "notes.md").write_text("An honest paragraph.\n")
    command = ["tasks", "run", "counting", "--method", "nope", *TINY, "--out", str(tmp_path)]
    assert main([*command, "--train-lengths", "4", "--test-lengths", "4,5"]) == 0
    assert "\nAn honest paragraph.\n" in (tmp_path / "README.md").read_text()


def test_bench_measures_the_tasks_named(tmp_path, capsys):
    records = tmp_path / "bench.json"
    command = ["bench", "tasks", "parity_check", "associative_recall", "--batch-size", "4", "--length", "40"]
    assert main([*command, "--long-length", "60", "--rounds", "1", "--json", str(records)]) == 0
    assert [record["task"] for record in json.loads(records.read_text())] == [
        "parity_check",
        "associative_recall",
    ]


def test_list_names_every_task(capsys):
    assert main(["tasks", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in TASKS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "parity"], "did you mean parity_check"),
        (["run", "parity_check", "--method", "kerpl"], 'unknown method "kerpl"; did you mean kerple'),
        (["run", "parity_check", "--method", "cope"], '"cope" has no meaning where the future is visible'),
        (["run", "parity_check", "--test-lengths", "0,3"], "the shortest has 1 tokens"),
        (["run", "parity_check", "--test-lengths", "9:3"], "first ≤ last"),
        (["run", "parity_check", "--test-lengths", "long"], "neither first:last"),
        (["run", "parity_check", "--option", "keys=3"], 'no option "keys"'),
        (["run", "associative_recall", "--option", "keys"], "not of the form name=value"),
        (["run", "associative_recall", "--test-lengths", "120"], "lengths up to 96"),
        (["run", "parity_check", "--steps", "0"], "steps=0"),
        (["run", "parity_check", "--jobs", "0"], "jobs=0"),
        (
            ["run", "reverse_string", *SHORT, "--randomized-positions", "17"],
            '--randomized-positions 17 is too few for "reverse_string": at its longest length input and output '
            "take 18 positions, so give at least 18",
        ),
        (
            ["run", "copy", "--train-lengths", "20", "--test-lengths", "8", "--randomized-positions", "19"],
            "least 20",
        ),
        (["run"], "name a task"),
        (["walk"], "the actions are list, show, run, table"),
        (["shwo"], "did you mean show? the actions are"),
        (["table", "nowhere"], "no results in nowhere"),
    ],
)
def test_mistakes_get_a_sentence(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tasks", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_lengths_and_options_are_read_and_written():
    assert parse_lengths("41:500:51") == tuple(range(41, 501, 51))
    assert parse_lengths("48,12") == (12, 48)
    assert parse_lengths("7") == (7,)
    assert spans(parse_lengths("41:500:51")) == "41…500 by 51"
    assert spans((12, 24, 48, 96)) == "12, 24, 48, 96"
    assert parse_option("keys=64") == ("keys", 64)
    assert parse_option("answer=all") == ("answer", "all")
    assert named([["keys=64", "pairs=8"], ["pairs=9"]]) == {"keys": 64, "pairs": 9}


def test_paper_values():
    assert set(paper_table()["accuracy"]) == {
        name for name in TASKS if TASKS[name].model == "encoder" and name != "binary_multiplication"
    }
    assert len(paper_table()["methods"]) == 11
    assert paper_accuracy("missing_duplicate_string", "dape1x3-kerple") == 99.65
    assert paper_accuracy("copy", "rope") is None


def test_paper_values_are_those_of_the_file_of_all_its_tables():
    """The package's copy, for `dape tasks table`; that file is compared with the paper itself."""
    tables = json.loads((Path(__file__).parents[2] / "papers" / "dape_v2" / "paper.json").read_text("utf-8"))
    (table,) = (table for table in tables["tables"] if table["experiments"] == ["che"])
    assert table["columns"] == paper_table()["methods"]
    assert {row["task"]: row["values"] for row in table["rows"]} == paper_table()["accuracy"]


def test_demo_shows_both_models_at_every_length(capsys):
    assert main(["demo", "--quick", "--steps", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "plain attention" in printed
    assert "with the 1×3 convolution" in printed
    assert "try more --steps" in printed


@pytest.mark.slow
def test_demo_shows_what_it_says(capsys):
    assert main(["demo", "--quick"]) == 0
    assert "convolution moves the score there: 100 %" in " ".join(capsys.readouterr().out.split())


def test_many_tasks_get_a_heat_map_of_lengths(tmp_path):
    tasks, lengths = (
        ["flip_flop", "copy", "reverse", "sort"],
        ["--train-lengths", "4,6", "--test-lengths", "6,12"],
    )
    assert main(["tasks", "run", *tasks, "--method", "kerple", *TINY, *lengths, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "README.md").read_text()
    assert "](lengths.png)" in text
    assert "paper" not in text
    data = Accuracies(load_results(tmp_path / "results.json"))
    found = by_multiple(data, "kerple")
    assert list(found) == [(task, multiple) for task in tasks for multiple in ("1×", "2×")]
    (solver,) = [s for s in data.rows if s.task == "sort"]
    assert found["sort", "2×"] == data.accuracy(solver, [12]).value
