"""The committed results of the suite's training tasks: complete, and those that the page shows."""

from pathlib import Path

from dape.evaluation.probes import TRAINED
from dape.lab.accuracies import Accuracies, mean_table
from dape.lab.records import load_results

FOLDER = Path(__file__).parents[2] / "results/tasks/suite"
METHODS = ["kerple", "rope", "alibi", "fox", "dape-kerple", "dape1x3-kerple"]


def test_every_task_has_every_method_and_two_seeds():
    runs = load_results(FOLDER / "results.json")["runs"]
    tasks = dict.fromkeys(run["corpus"] for run in runs)
    assert set(tasks) <= set(TRAINED)
    assert len(tasks) >= 4
    found = sorted((run["corpus"], run["method"], run["seed"]) for run in runs)
    assert found == sorted((task, method, seed) for task in tasks for method in METHODS for seed in (0, 1))


def test_the_page_has_the_scores_of_the_records():
    text = (FOLDER / "README.md").read_text("utf-8")
    assert mean_table(Accuracies(load_results(FOLDER / "results.json"))).markdown() in text
