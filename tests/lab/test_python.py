"""From Python: compare, train, evaluate and inspect give what the commands give; the notebook runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compare import write_corpus

import dape
from dape.cli import main
from dape.lab.compare import by_recipe
from dape.training import TrainConfig, load_run

NOTEBOOK = Path(__file__).parents[2] / "examples" / "compare.ipynb"
SMALL = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "train_length": 8, "batch_size": 2}
SMALL |= {"validation": "0.5", "steps": 4}


def test_compare_train_evaluate_and_inspect(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path) / "text")
    found = dape.compare(
        ["kerple", "dape1x3-kerple"],
        corpus=corpus,
        lengths=[8, 32],
        last=4,
        windows=6,
        equal_time=False,
        out=tmp_path / "out",
        **SMALL,
    )
    assert {"loss", "train_seconds"} <= set(found.frame["metric"])
    assert found.table().shape == (2, 2)
    assert "perplexity" in repr(found)
    # Text that the models write, and their loss curves, are in the report.
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Generated text" in page
    assert "Training loss" in page

    run = dape.train("kerple", corpus=corpus, out=str(tmp_path / "run"), data=str(tmp_path / "data"), **SMALL)
    assert run.trained
    both = dape.evaluate(
        run, next((tmp_path / "out" / "runs").glob("*dape1x3*")), lengths=[8, 32], last=4, windows=6
    )
    assert both.table().loc["kerple"].tolist() == pytest.approx(
        found.table().loc["kerple"].tolist(), rel=1e-5
    )
    assert "lower perplexity than" in both.verdict()
    ids = run.data().validation.document(0)[:16].tolist()
    assert dape.inspect(run.model(), ids).plot().axes


def test_the_same_settings_give_the_same_run_from_python_and_from_the_command_line(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path) / "text")
    ours = dape.train("alibi", corpus=corpus, out=str(tmp_path / "a"), data=str(tmp_path / "data"), **SMALL)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    paths = ["--corpus", corpus, "--out", str(tmp_path / "b"), "--data", str(tmp_path / "data")]
    assert main(["train", "--method", "alibi", *paths, *words]) == 0
    theirs = load_run(tmp_path / "b")
    assert [record["loss"] for record in ours.metrics()] == [record["loss"] for record in theirs.metrics()]
    assert TrainConfig(steps=60).warmup_steps == by_recipe("tiny", steps=60).warmup_steps == 4


def test_the_cells_of_the_notebook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel, which takes longer to start than the cells take."""
    import json

    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = [kind for cell in cells for output in cell.get("outputs", []) for kind in output.get("data", ())]
    assert shown.count("image/png") == 2
    names: dict = {}
    for source in code:
        exec(compile(source.removeprefix("%matplotlib inline\n"), str(NOTEBOOK), "exec"), names)
    assert names["found"].table().shape[0] == 3
