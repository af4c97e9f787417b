"""Experiments: runs have an identity, execute once, resume, and give one table."""

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from builders import SMALL_RUN

from dape.cli import main
from dape.evaluation.metrics import METRICS
from dape.evaluation.table import difference, mean, read_table, recall_slices
from dape.lab import equal_time
from dape.lab.compare import CompareConfig
from dape.lab.experiment import LAUNCHERS, Local, Process, Slurm, run_experiment, run_jobs
from dape.lab.runs import Evaluation, Job, Run, job_of, spec_of
from dape.training import TrainConfig, load_run

SMALL = {**SMALL_RUN, "steps": 4}


def runs(text: str, methods=("kerple", "dape1x3-kerple"), seeds=(0,), lengths=(8, 16), **how) -> list[Run]:
    evaluation = Evaluation(**{"last": 4, "windows": 6, "longest": 64} | how)
    pairs = itertools.product(methods, seeds)
    configs = [TrainConfig(method=method, seed=seed, corpus=text, **SMALL) for method, seed in pairs]
    return [Run(config, lengths=lengths, evaluation=evaluation) for config in configs]


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


def test_slices_of_the_tokens_add_up_to_all(text: str, tmp_path: Path) -> None:
    (run,) = runs(text, ["alibi"])
    table = run_experiment([run], tmp_path, in_process=True).table
    rows = table[(table["length"] == 16) & (table["metric"] == "loss")]
    assert rows[rows["slice"] != "all"]["count"].sum() == rows[rows["slice"] == "all"]["count"].sum() == 24
    assert set(recall_slices(table, 64)) <= {"recall<=8", "recall<=16", "recall<=32", "recall<=64"}
    trained, known = (
        load_run(tmp_path / "runs" / run.training),
        mean(table, "alibi", 0, metric="parameters").value,
    )
    assert known == sum(parameter.numel() for parameter in trained.model().parameters())


def test_a_new_metric_is_one_entry(text: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(METRICS, "margin", lambda logits, targets: logits.amax(-1) - logits.mean(-1))
    (run,) = runs(text, ["nope"])
    table = run_experiment([replace(run, metrics=("loss", "margin"))], tmp_path, in_process=True).table
    assert mean(table, "nope", 16, metric="margin").value > 0
    with pytest.raises(ValueError, match='unknown metric "perplexity"'):
        replace(run, metrics=("perplexity",))


def test_a_failure_stops_no_other_run(text: str, tmp_path: Path) -> None:
    config = TrainConfig(method="kerple", corpus=f"{text}/none.txt", **SMALL)
    broken = Run(config, lengths=(8,), corpus="none")
    fine = runs(text, ["alibi"])
    outcome = run_experiment([broken, *fine], tmp_path, results=tmp_path / "r.csv.gz", in_process=True)
    assert set(outcome.table["method"]) == {"alibi"}
    ((job, reason),) = outcome.failures
    assert job is broken
    assert "none.txt" in reason


def test_identity_is_that_of_what_decides_the_result(text: str) -> None:
    (run,) = runs(text, ["kerple"])
    config = replace(run.config, device="cpu", checkpoint_every=7, out="x")
    same = replace(run, config=config, lengths=(8, 32))
    assert (same.id, same.training) == (run.id, run.training)
    other = replace(run, config=replace(run.config, learning_rate=1e-3))
    assert other.training != run.training
    windows = replace(run, evaluation=replace(run.evaluation, windows=5))
    assert windows.training == run.training
    assert windows.id != run.id
    # A named corpus is the same wherever it lies.
    configs = (replace(run.config, corpus=path) for path in ("a/x", "b/x"))
    here, there = (replace(run, corpus="books", config=config) for config in configs)
    assert here.id == there.id
    assert replace(here, corpus="").id != replace(there, corpus="").id
    assert job_of(spec_of(run)) == run
    assert json.loads(spec_of(run))["config"]["method"] == "kerple"
    with pytest.raises(ValueError, match="is not a kind of run"):
        job_of(json.dumps({"kind": "pathlib:Path"}))
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


def test_rope_is_stretched_at_the_evaluation_without_another_training(text, tmp_path, monkeypatch) -> None:
    trained = count_trainings(monkeypatch)
    (plain,) = runs(text, ["rope"])
    # RoPE needs an even width of heads.
    scaled = replace(plain, label="rope, ntk", evaluation=replace(plain.evaluation, rope_scaling="ntk"))
    table = run_experiment([plain, scaled], tmp_path, in_process=True).table
    assert trained == ["rope"]
    assert difference(table, "rope, ntk", "rope", at=8).value == 0
    assert difference(table, "rope, ntk", "rope", at=16).value != 0


class Code(Local):
    """Starts Python code in place of workers."""

    def __init__(self, code: str) -> None:
        self.code, self.started = code, []

    def start(self, job: Job, at_once: int) -> Process:
        command = [sys.executable, "-c", self.code, job.id]
        self.started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return Process(self.started[-1])


def test_a_crash_is_a_failure_of_that_run_alone(text: str, tmp_path: Path) -> None:
    jobs = runs(text, ["alibi"], seeds=(0, 1, 2))
    launcher = Code("import os, sys; os.kill(os.getpid(), 11) if 'seed1' in sys.argv[-1] else None")
    heard: dict = {}
    watch = lambda job, said: heard.update({job.config.seed: said})  # noqa: E731 (a name for a line)
    run_jobs(jobs, tmp_path, at_once=2, watch=watch, launcher=launcher)
    assert (heard[0], heard[2]) == ("", "")
    assert "SIGSEGV" in heard[1]


def test_interrupted_runs_save_and_end_before_it_returns(text: str, tmp_path: Path) -> None:
    note = tmp_path / "saved"
    launcher = Code(f"import sys; sys.stdin.read(); open({str(note)!r} + sys.argv[1], 'w')")

    def interrupt(job: Job, said: str | None) -> None:
        raise KeyboardInterrupt

    jobs = runs(text, ["alibi"], seeds=(0, 1, 2))
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, tmp_path, at_once=2, watch=interrupt, launcher=launcher)
    assert [process.returncode for process in launcher.started] == [0, 0]
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_evaluations_of_one_training_never_run_at_once(text: str, tmp_path: Path) -> None:
    (plain,) = runs(text, ["rope"])
    jobs = [plain, *(replace(plain, evaluation=replace(plain.evaluation, windows=n)) for n in (3, 4))]
    running: list[str] = []
    most = []

    class Counted(Code):
        def start(self, job: Job, at_once: int) -> Process:
            running.append(job.id)
            most.append(len(running))
            return super().start(job, at_once)

    def watch(job: Job, said: str | None) -> None:
        if said is not None:
            running.remove(job.id)

    run_jobs(jobs, tmp_path, at_once=3, watch=watch, launcher=Counted("pass"))
    assert most == [1, 1, 1]


@pytest.mark.parametrize(
    ("given", "said"),
    [("slrum", 'unknown launcher "slrum"; did you mean slurm'), ("local[nodes=2]", "nodes is given")],
)
def test_a_launcher_that_cannot_be_is_reported_at_once(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompareConfig(launcher=given)


@pytest.mark.parametrize("command", ["compare", "tasks"])
def test_every_command_passes_the_launcher_its_options(command, text, tmp_path, monkeypatch, capsys) -> None:
    built = []

    class Elsewhere:
        has_queue = True

        def __init__(self, folder: Path, options: dict) -> None:
            built.append(options)

        def start(self, job: Job, at_once: int) -> None:
            raise ValueError("nothing runs here")

    monkeypatch.setitem(LAUNCHERS, "elsewhere", Elsewhere)
    small = "--num-layers 1 --hidden-size 12 --num-heads 4 --train-length 8 --lengths 8,16 --validation 0.5"
    given = {
        "compare": ["--corpus", text, *small.split()],
        "tasks": ["run", "even_pairs", "--steps", "2"],
    }[command]
    where = ["--out", str(tmp_path / "out"), "--launcher", "elsewhere[nodes=2,queue=long]"]
    assert main([command, *given, *where]) == 2
    assert "nothing runs here" in capsys.readouterr().err
    assert built[-1] == {"nodes": 2, "queue": "long"}


def test_a_submitted_run_is_carried_out(text: str, tmp_path: Path) -> None:
    """By submitit's executor for this machine, in place of a cluster."""
    pytest.importorskip("submitit")
    (job,) = runs(text, ["kerple"])
    heard = []
    launcher = Slurm(tmp_path, {"timeout_min": 5}, cluster="local")
    run_jobs([job], tmp_path, at_once=1, watch=lambda _, said: heard.append(said), launcher=launcher)
    assert heard[-1] == ""
    assert not job.missing(job.done(tmp_path))


def test_equal_time_follows_the_interleaved_pace_not_the_runs_own_clocks(text, tmp_path, monkeypatch) -> None:
    """A busy machine slows whichever run is under way: steps come from one measurement of all methods in turns."""
    measured = []

    def measure(configs, size, rounds):
        measured.append([config.method for config in configs])
        return [1.0, 1.25]

    monkeypatch.setattr(equal_time, "measure_pace", measure)
    grid = [replace(run, config=replace(run.config, steps=20)) for run in runs(text, seeds=(0, 1))]
    found = equal_time.at_equal_time(grid, tmp_path)
    assert [(run.config.method, run.config.seed, run.steps) for run in found] == [
        (method, seed, n) for method, n in (("kerple", 20), ("dape1x3-kerple", 16)) for seed in (0, 1)
    ]
    assert [run.config.warmup_steps for run in found] == [1] * 4
    # One measurement serves both seeds and every resumption.
    assert equal_time.at_equal_time(grid, tmp_path) == found
    assert measured == [["kerple", "dape1x3-kerple"]]


def test_the_pace_is_that_of_the_training_that_is_asked_for(text, monkeypatch) -> None:
    """In its precision and its micro-batches."""
    seen = []

    def parts(self, batch, size):
        seen.append((self.settings.precision, self.settings.accumulate, self.parallel.device.type, size))
        return torch.zeros(())

    monkeypatch.setattr("dape.training.loop.Loop.backward", parts)
    monkeypatch.setattr("dape.training.loop.clip_gradient", lambda model, clip: torch.zeros(()))
    (run,) = runs(text, ["kerple"])
    config = replace(run.config, accumulate=2, precision="bf16", device="cpu", batch_size=4)
    assert len(equal_time.measure_pace([config], 256, rounds=1)) == 1
    assert set(seen) == {("bf16", 2, "cpu", 32)}


@pytest.mark.parametrize(
    ("pace", "expected"),
    [([0.1, 0.2], [100, 50]), ([0.1, 0.104, 0.107], [100, 100, 93]), ([0.1, 100.0], [100, 1])],
)
def test_equal_time_means_the_time_of_the_fastest(pace: list[float], expected: list[int]) -> None:
    assert equal_time.share_time(pace, [100] * len(pace)) == expected
