"""From Python: compare, train, evaluate and inspect give what the commands give; the notebook runs."""

from pathlib import Path

import pytest
from builders import SMALL_RUN

import dape
from dape.cli import main
from dape.training import load_run

SMALL = {**SMALL_RUN, "steps": 4}


def test_compare_train_evaluate_and_inspect(tmp_path: Path, text: str) -> None:
    how = {"lengths": [8, 32], "last": 4, "windows": 6}
    methods = ["kerple", "dape1x3-kerple"]
    found = dape.compare(methods, corpus=text, equal_time=False, out=tmp_path / "out", **how, **SMALL)
    assert {"loss", "train_seconds"} <= set(found.frame["metric"])
    assert found.table().shape == (2, 2)
    assert "perplexity" in repr(found)
    # Text that the models write, and their loss curves, are in the report.
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Generated text" in page
    assert "Training loss" in page

    run = dape.train("kerple", corpus=text, out=str(tmp_path / "run"), data=str(tmp_path / "data"), **SMALL)
    assert run.trained
    both = dape.evaluate(run, next((tmp_path / "out" / "runs").glob("*dape1x3*")), **how)
    ours, theirs = (comparison.table().loc["kerple"].tolist() for comparison in (both, found))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert "lower perplexity than" in both.verdict()
    ids = run.data().validation.document(0)[:16].tolist()
    assert dape.inspect(run.model(), ids).plot().axes


def test_the_same_settings_give_the_same_run_from_python_and_from_the_command_line(tmp_path, text) -> None:
    ours = dape.train("alibi", corpus=text, out=str(tmp_path / "a"), data=str(tmp_path / "data"), **SMALL)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    paths = ["--corpus", text, "--out", str(tmp_path / "b"), "--data", str(tmp_path / "data")]
    assert main(["train", "--method", "alibi", *paths, *words]) == 0
    theirs = load_run(tmp_path / "b")
    assert [record["loss"] for record in ours.metrics()] == [record["loss"] for record in theirs.metrics()]
