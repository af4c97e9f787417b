"""The committed results of the suite's training tasks: complete, and those that the page shows."""

from itertools import product
from pathlib import Path

from dape.evaluation.probes import TRAINED
from dape.evaluation.table import read_table
from dape.lab.tasks import score_table

FOLDER = Path(__file__).parents[2] / "results/tasks/suite"
METHODS = ["kerple", "rope", "alibi", "fox", "dape-kerple", "dape1x3-kerple"]


def test_every_task_has_every_method_and_two_seeds():
    table = read_table(FOLDER / "results.csv.gz")
    tasks = table["corpus"].unique().tolist()
    assert set(tasks) <= set(TRAINED)
    assert len(tasks) >= 4
    runs = table[["corpus", "method", "seed"]].drop_duplicates().itertuples(index=False, name=None)
    assert set(runs) == set(product(tasks, METHODS, (0, 1)))


def test_the_page_has_the_scores_of_the_records():
    text = (FOLDER / "README.md").read_text("utf-8")
    assert score_table(read_table(FOLDER / "results.csv.gz")).markdown() in text
