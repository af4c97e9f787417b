"""The committed results of training tasks: complete, and those that the pages show."""

from itertools import product
from pathlib import Path

import pytest

from dape.evaluation.probes import TRAINED
from dape.evaluation.table import read_table
from dape.lab.tasks import SHORT, SHOWN, best_first, score_table

TASKS = Path(__file__).parents[2] / "results/tasks"
METHODS = ["kerple", "rope", "alibi", "fox", "dape-kerple", "dape1x3-kerple"]


def test_every_task_has_every_method_and_two_seeds():
    table = read_table(TASKS / "suite/results.csv.gz")
    tasks = table["corpus"].unique().tolist()
    assert set(tasks) <= set(TRAINED)
    assert len(tasks) >= 4
    runs = table[["corpus", "method", "seed"]].drop_duplicates().itertuples(index=False, name=None)
    assert set(runs) == set(product(tasks, METHODS, (0, 1)))


@pytest.mark.parametrize("name", ["suite", "methods"])
def test_the_page_has_the_scores_of_the_records(name):
    text = (TASKS / name / "README.md").read_text("utf-8")
    assert score_table(read_table(TASKS / name / "results.csv.gz")).markdown() in text


def test_many_methods_are_rows_best_first():
    table = read_table(TASKS / "methods/results.csv.gz")
    tasks = ["recall_many_keys", "copy", "facts", "flip_flop"]
    shown, names = score_table(table), best_first(table)
    # Those that are newer than the trainings are not in it.
    assert set(names) <= {SHORT.get(name, name) for name in SHOWN}
    assert list(shown.heads) == tasks
    assert [row.label for row in shown.rows] == [*names, "constant"]
    mean = {row.label: sum(cell.value for cell in row.cells) for row in shown.rows[:-1]}
    assert sorted(mean, key=mean.get, reverse=True) == names
