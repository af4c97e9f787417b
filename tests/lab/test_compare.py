"""A comparison from text to report: nothing trained twice, nothing lost, one failure alone."""

import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from builders import write_texts
from processes import Worker

from dape.cli import main
from dape.evaluation import WindowLosses, losses_by_length
from dape.evaluation.statistics import mean_over_documents
from dape.files import exclusive
from dape.lab.comparison import STEP, TIME, Comparison, load_comparison, merge
from dape.lab.display import last_record
from dape.lab.experiment import Local
from dape.training import load_run

# Heads of width 3: what rotates pairs of channels cannot be built, and must not stop the others.
OPTIONS = (
    "--num-layers 1 --hidden-size 12 --num-heads 4 --train-length 8 --batch-size 2 --windows 6 --last 4 --lengths 8,16,32 "
    "--validation 0.5"
)


def options(folder: Path, *more: str) -> list[str]:
    corpus = str(folder / "text")
    return ["compare", "--corpus", corpus, "--out", str(folder / "out"), *OPTIONS.split(), *more]


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Comparison]:
    """Three methods, of which one cannot be built, two at a time, by steps and by time; made once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "compared"
    with exclusive(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            write_texts(folder / "text")
            given = ["--methods", "alibi,rope,dape1x3-kerple", "--steps", "6", "--jobs", "2"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Local, "start", Worker.start_for)
                (folder / "code").write_text(str(main(options(folder, *given))))
    return folder, int((folder / "code").read_text()), load_comparison(folder / "out")


def losses_of(folder: Path, method: str) -> WindowLosses:
    """Losses of the trained model, evaluated anew."""
    (path,) = (folder / "out" / "runs").glob(f"text-{method}-*-6steps-seed0-*")
    run = load_run(path)
    return losses_by_length(run.model(), run.data().validation, [8, 16, 32], last=4, windows=6)


def test_a_failed_method_does_not_sink_the_others(compared) -> None:
    _, code, found = compared
    assert code == 1
    assert [(one.title, one.view) for one in found.about.failures] == [("rope, seed 0", STEP)]
    assert "head_dim=3" in found.about.failures[0].error
    for view in (STEP, TIME):
        assert set(found.tables[view]["method"]) == {"alibi", "dape1x3-kerple"}


def test_numbers_are_those_of_the_models_on_the_same_tokens(compared) -> None:
    folder, _, found = compared
    ours, base = (losses_of(folder, method) for method in ("dape1x3-kerple", "alibi"))
    curves = {curve.method: curve for curve in found.curves()}
    for point in curves["dape1x3-kerple"].points:
        gap = (ours.losses[point.length] - base.losses[point.length]).mean(1, dtype=np.float64)
        paired = mean_over_documents(gap, np.ones(len(gap)), ours.windows.documents)
        assert point.loss.value == pytest.approx(ours.at(point.length).value, rel=1e-6)
        change = ours.change(8, point.length)
        for shown, expected in ((point.difference, paired), (point.change, change)):
            assert shown.value == pytest.approx(expected.value, rel=1e-5, abs=1e-12)
            assert shown.error == pytest.approx(expected.error, rel=1e-5, abs=1e-12)
    assert found.about.baseline == "alibi"
    table = found.table()
    assert (list(table.index), list(table.columns)) == (["alibi", "dape1x3-kerple"], [8, 16, 32])
    assert table.loc["alibi", 8] == pytest.approx(math.exp(base.at(8).value))
    # A stranger with pandas alone.
    rows = pd.read_csv(folder / "out" / "results.csv.gz").query("metric == 'loss' and slice == 'all'")
    sums = rows.groupby(["method", "length"])[["sum", "count"]].sum()
    assert (sums["sum"] / sums["count"])["alibi", 8] == pytest.approx(base.at(8).value)


def test_all_files_are_written(compared) -> None:
    folder, _, found = compared
    out = folder / "out"
    assert r"\begin{tabular}" in (out / "table.tex").read_text("utf-8")
    assert r"\shortstack[r]{2$\times$ \\ 16}" in found.latex()
    assert (out / "figures" / "perplexity-equal-time.pdf").exists()
    assert found.about.command.startswith("dape compare --steps 6 --methods alibi,rope,dape1x3-kerple")
    assert found.about.environment["jobs"] == 2
    # Checkpoints are gone, models stay.
    assert not list(out.glob("runs/*/checkpoints"))
    assert len(list(out.glob("runs/*/model"))) == len(list(out.glob("evaluations/*.csv.gz")))


def test_given_again_only_what_is_new_runs(compared, capsys, tmp_path: Path) -> None:
    folder, _, found = compared
    out = shutil.copytree(folder / "out", tmp_path / "out")
    arguments = options(folder, "--methods", "alibi,dape1x3-kerple", "--steps", "6", "--no-equal-time")
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 runs, 2 already done" in printed
    again = load_comparison(out)
    pd.testing.assert_frame_equal(again.frame, found.frame)
    assert again.views == [STEP]
    # A path may be longer; it is not broken, so that it can be copied.
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80


def test_the_verdict_is_a_sentence_and_comes_first(compared) -> None:
    folder, _, found = compared
    sentence = found.verdict()
    assert re.fullmatch(
        r"At 4× the training length .* has [\d.]+ % lower perplexity than .* "
        r"\(loss −[\d.]+ \[[−+][\d.]+, [−+][\d.]+\] nats(, the interval holds zero)?; one seed, 6 documents\)\.",
        sentence,
    )
    page = (folder / "out" / "report.html").read_text("utf-8")
    assert page.index(sentence) < page.index("<table")
    assert "over only 6 documents, so they are rough" in page
    assert "One seed: intervals are over documents alone" in page


def test_merged_folders_say_which_is_which(compared) -> None:
    _, _, found = compared
    # The same runs are themselves.
    assert list(merge([found, found], ["one", "two"]).table().index) == ["alibi", "dape1x3-kerple"]
    frame = found.frame.assign(run=found.frame["run"] + "-other", sum=2 * found.frame["sum"])
    other = Comparison({STEP: frame}, replace(found.about, command="dape compare again"))
    both = merge([found, other], ["a", "b"])
    assert set(both.table().index) == {f"{m} ({n})" for m in ("alibi", "dape1x3-kerple") for n in "ab"}
    assert both.about.baseline == "alibi (a)"
    assert both.about.command.endswith("\ndape compare again")
    # The copy's checksums of the target tokens differ, so it is not paired.
    assert set(both.table("difference").index) == {"dape1x3-kerple (a)"}
    with pytest.raises(ValueError, match="no metric"):
        found.table("speed")


def test_lengths_that_no_document_has_are_said_before_training(tmp_path: Path, capsys) -> None:
    write_texts(tmp_path / "text")
    assert main(options(tmp_path, "--methods", "alibi", "--steps", "6", "--lengths", "8,16000")) == 2
    assert "length 16000 needs a document of 16001 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()


def test_half_written_metrics(tmp_path: Path) -> None:
    assert last_record(tmp_path) == {"step": 0}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": 3.5}\n{"st')
    assert last_record(tmp_path) == {"step": 2, "loss": 3.5}


def test_a_folder_that_is_no_comparison_gets_a_sentence(tmp_path: Path, capsys) -> None:
    assert main(["merge", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path} is not a comparison" in capsys.readouterr().err
