"""Generated tasks in the training loop, runs, results and reports, and the commands around them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from dape.cli import main
from dape.cli.tasks import parse_lengths
from dape.evaluation.table import means, read_table
from dape.lab import solving
from dape.lab.solving import GeneratedTask, answers_by_length, build_solver
from dape.lab.tasks import TaskRun, paper_accuracy, paper_table, score
from dape.methods import parse_option
from dape.tasks import IGNORED, TASKS, build_task

TINY = ["--steps", "3", "--batch-size", "4", "--samples", "4", "--layers", "1"]
SHORT = ["--train-lengths", "1:6", "--test-lengths", "4,7,9"]


def tiny_model(task, method="dape1x3-kerple", **changes):
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seed": 0} | changes
    return build_solver(task, method, **sizes)


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
    answers = answers_by_length(task, Answerer(task, solved(task)), lengths, 16)
    assert [*answers] == lengths
    assert all((right == asked).all() for right, asked in answers.values())


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


def test_run_writes_results_and_is_not_repeated(tmp_path, capsys):
    out = tmp_path / "tasks"
    command = ["tasks", "run", "parity_check", "reverse_string", "--method", "kerple", "dape1x3-kerple"]
    command += [*TINY, *SHORT, "--out", str(out)]
    assert main(command) == 0
    table = read_table(out / "results.csv.gz")
    assert set(table["corpus"]) == {"parity_check", "reverse_string"}
    assert table["run"].nunique() == 4
    shares = means(table[table["corpus"] == "parity_check"], "accuracy")
    assert list(shares.columns) == [4, 7, 9]
    own = table[(table["corpus"] == "parity_check") & (table["method"] == "kerple")]
    assert score(own).value == pytest.approx(shares.loc["kerple", [7, 9]].mean())
    # No model is kept.
    assert not list((out / "runs").iterdir())
    readme = (out / "README.md").read_text()
    assert "(50.1)" in readme  # the paper's parity_check with Kerple
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()

    before = (out / "results.csv.gz").read_bytes()
    assert main(command) == 0
    assert "4 runs, 4 already done" in capsys.readouterr().out
    assert (out / "results.csv.gz").read_bytes() == before
    assert main([*command, "--steps", "4"]) == 2
    assert "kerple, seed 0 with other settings: use another --out" in capsys.readouterr().err
    assert main(["tasks", "table", str(out)]) == 0
    assert "(50.1)" in capsys.readouterr().out
    # The runs of an earlier command stay.
    assert main(["tasks", "run", "bucket_sort", "--method", "kerple", *TINY, *SHORT, "--out", str(out)]) == 0
    assert read_table(out / "results.csv.gz")["run"].nunique() == 5


def test_several_jobs_give_what_one_gives(tmp_path):
    command = ["tasks", "run", "copy", "--method", "nope", *TINY, "--seed", "0", "1"]
    command += ["--train-lengths", "8", "--test-lengths", "8,12"]
    tables = []
    for jobs in ("1", "2"):
        assert main([*command, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
        table = read_table(tmp_path / jobs / "results.csv.gz")
        tables.append(table[table["metric"] == "accuracy"].reset_index(drop=True))
    pd.testing.assert_frame_equal(*tables)


def task_run(**changes):
    tiny = {
        "num_layers": 1, "batch_size": 4, "samples": 4, "train_lengths": (3, 4), "test_lengths": (4, 6),
        "steps": 3
    }  # fmt: skip
    protocol = replace(build_task("even_pairs").protocol, **{**tiny, **changes})
    return TaskRun("kerple", task="even_pairs", protocol=protocol)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    run = task_run()
    run.work(tmp_path / "whole")

    def killed(*arguments, **options):
        raise RuntimeError("killed")

    monkeypatch.setattr(solving, "answers_by_length", killed)
    with pytest.raises(RuntimeError, match="killed"):
        run.work(tmp_path / "again")
    monkeypatch.undo()
    kept = tmp_path / "again" / "runs" / run.training / "metrics.jsonl"
    assert len(kept.read_text().splitlines()) == 3
    run.work(tmp_path / "again")
    first, second = (run.done(tmp_path / name) for name in ("whole", "again"))
    timed = first["metric"] == "train_seconds"
    pd.testing.assert_frame_equal(first[~timed], second[~timed])


def test_the_training_is_known_by_what_it_depends_on():
    run = task_run()
    for change in ({"batch_size": 8}, {"train_lengths": (5,)}, {"num_heads": 4}, {"hidden_size": 32}):
        assert task_run(**change).training != run.training
    tested = task_run(samples=6, test_lengths=(4, 5, 6))
    assert tested.training == run.training
    assert tested.id != run.id


def test_grid_of_layers_and_seeds_and_randomized_positions(tmp_path, capsys):
    task = "associative_recall[keys=9,values=5]"
    command = ["tasks", "run", task, "--method", "rope", "dape1x2-nope", "--seed", "0", "1"]
    command += ["--steps", "2", "--batch-size", "2", "--samples", "4", "--layers", "1", "2"]
    command += ["--train-lengths", "9", "--test-lengths", "9,12"]
    assert main([*command, "--randomized-positions", "32", "--out", str(tmp_path)]) == 0
    table = read_table(tmp_path / "results.csv.gz")
    assert table["run"].nunique() == 8
    readme = (tmp_path / "README.md").read_text()
    assert "dape1x2-nope, 2 layers, keys 9, values 5, positions from 32 |" in readme
    assert re.search(r"\d ± \d", readme)


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
        (["run", "parity_check[keys=3]"], 'no option "keys"'),
        (["run", "associative_recall", "--test-lengths", "120"], "lengths up to 96"),
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
    assert parse_option("keys=64") == ("keys", 64)
    assert parse_option("answer=all") == ("answer", "all")


def test_paper_values_are_those_of_the_file_of_all_its_tables():
    """The package's copy, for `dape tasks table`; that file is compared with the paper itself."""
    tables = json.loads((Path(__file__).parents[2] / "papers/dape_v2/printed.json").read_text("utf-8"))
    (table,) = (table for table in tables["tables"] if table["experiments"] == ["che"])
    assert table["columns"] == paper_table()["methods"]
    assert {row["task"]: row["values"] for row in table["rows"]} == paper_table()["accuracy"]
    encoders = {name for name in TASKS if TASKS[name].model == "encoder"}
    assert set(paper_table()["accuracy"]) == encoders - {"binary_multiplication"}
    assert paper_accuracy("missing_duplicate_string", "dape1x3-kerple") == 99.65
    assert paper_accuracy("copy", "rope") is None
