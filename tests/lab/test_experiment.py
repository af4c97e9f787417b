"""Experiments: runs have an identity, execute once, resume, and give one table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from dape.evaluation.metrics import METRICS
from dape.evaluation.table import difference, join, mean, read_table, recall_slices
from dape.lab.experiment import run_experiment
from dape.lab.runs import Evaluation, Job, Run, job_of, spec_of
from dape.training import TrainConfig, load_run

SMALL = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "train_length": 8, "batch_size": 2}
SMALL |= {"validation": "0.5", "steps": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        words = " ".join(f"{number * word % 17} and {word}" for word in range(60))
        (folder / f"{number}.txt").write_text(words)
    return str(folder)


def runs(text: str, methods=("kerple", "dape1x3-kerple"), seeds=(0,), lengths=(8, 16), **how) -> list[Run]:
    options = {"last": 4, "windows": 6, "longest": 64} | how
    return [
        Run(
            TrainConfig(method=method, seed=seed, corpus=text, **SMALL),
            lengths=lengths,
            evaluation=Evaluation(**options),
        )
        for method in methods
        for seed in seeds
    ]


def count_trainings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    trained: list[str] = []
    from dape.lab import runs as module

    real = module.train
    monkeypatch.setattr(
        module, "train", lambda config, **options: (trained.append(config.method), real(config, **options))[1]
    )
    return trained


def test_trains_once_and_adds_only_what_is_missing(text: str, tmp_path: Path, monkeypatch) -> None:
    trained = count_trainings(monkeypatch)
    results = tmp_path / "results.csv.gz"
    common = {"results": results, "in_process": True}
    first = run_experiment(runs(text), tmp_path, **common)
    assert trained == ["kerple", "dape1x3-kerple"]
    assert not first.failures
    found = difference(first.table, "dape1x3-kerple", "kerple", at=16)
    assert (found.known, found.seeds) == (True, 1)
    pd.testing.assert_frame_equal(read_table(results), first.table, check_exact=False, rtol=1e-9)
    before = results.read_bytes()
    run_experiment(runs(text), tmp_path, **common)
    assert results.read_bytes() == before
    # Another length is evaluated, another seed is trained, nothing else.
    more = run_experiment(runs(text, seeds=(0, 1), lengths=(8, 16, 32)), tmp_path, **common)
    assert trained == ["kerple", "dape1x3-kerple"] * 2
    assert sorted(more.table["length"].unique()) == [0, 8, 16, 32]
    assert difference(more.table, "dape1x3-kerple", "kerple", at=32).seeds == 2
    kept = first.table.merge(more.table, how="left", indicator=True, on=list(first.table.columns[:9]))
    assert (kept["_merge"] == "both").all()
    # The table alone is the record of what is finished.
    run_experiment(runs(text, seeds=(0, 1), lengths=(8, 16, 32)), tmp_path / "elsewhere", **common)
    assert len(trained) == 4


def test_values_are_those_of_the_model(text: str, tmp_path: Path) -> None:
    from dape.evaluation import evaluate_by_length

    (run,) = runs(text, ["alibi"])
    table = run_experiment([run], tmp_path, in_process=True).table
    trained = load_run(tmp_path / "runs" / run.training)
    (loss,) = evaluate_by_length(trained.model(), trained.data().validation, [64], last=4, windows=6)
    (again,) = evaluate_by_length(trained.model(), trained.data().validation, [16], last=4, windows=6)
    assert not (loss.ends == again.ends).all()  # other windows without room for 64
    from dape.evaluation.windows import same_targets

    windows = same_targets(trained.data().validation, 64, 4, 6)
    ids = torch.from_numpy(windows.ids(trained.data().validation, 16))
    with torch.no_grad():
        logits = trained.model()(ids[:, :-1]).logits[:, -4:].double()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -4:].flatten())
    assert mean(table, "alibi", 16).value == pytest.approx(expected.item(), rel=1e-5)
    # Slices of the tokens add up to all.
    rows = table[(table["length"] == 16) & (table["metric"] == "loss")]
    assert rows[rows["slice"] != "all"]["count"].sum() == rows[rows["slice"] == "all"]["count"].sum() == 24
    assert set(recall_slices(table, 64)) <= {"recall<=8", "recall<=16", "recall<=32", "recall<=64"}
    known = mean(table, "alibi", 0, metric="parameters").value
    assert known == sum(parameter.numel() for parameter in trained.model().parameters())


def test_a_new_metric_is_one_entry(text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(METRICS, "margin", lambda logits, targets: logits.amax(-1) - logits.mean(-1))
    (run,) = runs(text, ["nope"])
    table = run_experiment([replace(run, metrics=("loss", "margin"))], tmp_path, in_process=True).table
    assert mean(table, "nope", 16, metric="margin").value > 0
    with pytest.raises(ValueError, match='unknown metric "perplexity"'):
        replace(run, metrics=("perplexity",))


def test_a_failure_stops_no_other_run(text: str, tmp_path: Path) -> None:
    broken = Run(
        TrainConfig(method="kerple", corpus=f"{text}/none.txt", **SMALL), lengths=(8,), corpus="none"
    )
    fine = runs(text, ["alibi"])
    outcome = run_experiment([broken, *fine], tmp_path, results=tmp_path / "r.csv.gz", in_process=True)
    assert set(outcome.table["method"]) == {"alibi"}
    ((job, reason),) = outcome.failures
    assert job is broken
    assert "none.txt" in reason


def test_identity_is_that_of_what_decides_the_result(text: str) -> None:
    (run,) = runs(text, ["kerple"])
    same = replace(
        run, config=replace(run.config, device="cpu", checkpoint_every=7, out="x"), lengths=(8, 32)
    )
    assert (same.id, same.training) == (run.id, run.training)
    other = replace(run, config=replace(run.config, learning_rate=1e-3))
    assert other.training != run.training
    windows = replace(run, evaluation=replace(run.evaluation, windows=5))
    assert windows.training == run.training
    assert windows.id != run.id
    # A named corpus is the same wherever it lies.
    here, there = (
        replace(run, corpus="books", config=replace(run.config, corpus=path)) for path in ("a/x", "b/x")
    )
    assert here.id == there.id
    assert replace(here, corpus="").id != replace(there, corpus="").id
    assert job_of(spec_of(run)) == run
    assert json.loads(spec_of(run))["config"]["method"] == "kerple"
    with pytest.raises(ValueError, match="the same run"):
        run_experiment([run, replace(run)], "unused", in_process=True)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"last": 9}, "must lie between last=9"),
        ({"longest": 12}, "longest=12"),
        ({"rope_scaling": "ntk"}, "kerple has no RoPE that could be scaled"),
        ({"randomized_positions": 12}, "randomized_positions=12 at the evaluation, but inputs have 16"),
    ],
)
def test_impossible_evaluations_are_refused_before_the_training(text: str, how: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        runs(text, ["kerple"], **how)


def test_rope_is_stretched_at_the_evaluation_without_another_training(
    text: str, tmp_path, monkeypatch
) -> None:
    trained = count_trainings(monkeypatch)
    (plain,) = runs(text, ["rope"])
    # RoPE needs an even width of heads.
    scaled = replace(plain, label="rope, ntk", evaluation=replace(plain.evaluation, rope_scaling="ntk"))
    table = run_experiment([plain, scaled], tmp_path, in_process=True).table
    assert trained == ["rope"]
    assert difference(table, "rope, ntk", "rope", at=8).value == 0
    assert difference(table, "rope, ntk", "rope", at=16).value != 0


def test_another_kind_of_run_is_not_any_class() -> None:
    with pytest.raises(ValueError, match="is not a kind of run"):
        job_of(json.dumps({"kind": "pathlib:Path"}))
    assert issubclass(Run, Job)
    assert join([]).empty
