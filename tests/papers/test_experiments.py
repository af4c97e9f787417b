"""Experiments: distinct runs at three scales, tables that belong to them, and a full pass in seconds."""

import pytest

from dape.evaluation.table import read_table
from papers.__main__ import known, main
from papers.experiment import LAPTOP, PAPER, SMOKE
from papers.pages import ledger

NAMES = list(known())
# Runs of experiments that are not all trained yet.
UNFINISHED = {"code": 21, "code_rates": 12, "code_depth": 4, "ingredients": 5}


@pytest.mark.parametrize("name", NAMES)
def test_runs_are_distinct_at_every_scale(name: str) -> None:
    for scale in (SMOKE, LAPTOP, PAPER):
        jobs = known()[name][1].at(scale)
        assert jobs
        assert len({job.id for job in jobs}) == len(jobs)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_all_runs_and_no_others(name: str, tmp_path) -> None:
    paper, one = known()[name]
    path = one.results(paper, LAPTOP, tmp_path)
    if not path.exists():  # an experiment that has not been run
        return
    table, jobs = read_table(path), one.at(LAPTOP)
    left = [job.title for job in jobs if job.missing(table)]
    assert len(left) <= UNFINISHED.get(name, 0), left
    assert set(table["run"]) <= {job.id for job in jobs}
    about = table.drop_duplicates("run").set_index("run")
    for job in jobs:
        if job.id in about.index:
            assert dict(about.loc[job.id, list(job.about)]) == job.about


def test_results_of_a_paper_are_one_file_an_experiment() -> None:
    for paper in ("dape_v2", "beyond"):
        files = {path.name for path in (ledger(paper).folder / "results").iterdir()}
        assert files <= {f"{name}{suffix}.csv.gz" for name in NAMES for suffix in ("", "-paper")}


def test_a_full_pass_at_the_smoke_scale(tmp_path, capsys) -> None:
    """Trains, evaluates, and is resumed without training again; smoke results stay out of the papers."""
    assert main(["run", "kernel_size", "--scale", SMOKE, "--work", str(tmp_path)]) == 0
    table = read_table(tmp_path / SMOKE / "results" / "kernel_size.csv.gz")
    assert set(table["method"]) == {"kerple", "dape-kerple", "dape1x3-kerple"}
    assert main(["run", "kernel_size", "--scale", SMOKE, "--work", str(tmp_path)]) == 0
    assert "3 runs, 3 already done" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["che", "recall", "time_cost", "visualisation"])
def test_other_kinds_of_runs(name: str, tmp_path) -> None:
    paper, one = known()[name]
    outcome = one.run(paper, SMOKE, tmp_path, None)
    assert not outcome.failures
    assert set(outcome.table["run"]) == {job.id for job in one.at(SMOKE)}
    metrics = {"che": "accuracy", "recall": "accuracy", "time_cost": "ratio", "visualisation": "sink_share"}
    assert metrics[name] in set(outcome.table["metric"])


def test_the_command_line(tmp_path, capsys, monkeypatch) -> None:
    """A missing text says how to obtain it, an unknown experiment is an error, the list shows progress."""
    monkeypatch.delenv("DAPE_CORPORA", raising=False)
    assert main(["run", "ingredients", "--work", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "latex13" in said
    assert "stacks-project" in said
    assert main(["run", "nothing"]) == 2
    assert "kernel_size" in capsys.readouterr().out
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NAMES)
    assert any("headline" in line and "29/29" in line for line in lines)
