"""A comparison from text to report: nothing trained twice, nothing lost, one failure alone."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dape.cli import main
from dape.compare.runs import Job, run_jobs, steps_done, why
from dape.compare.scores import load_scores
from dape.evaluate import evaluate_by_length, paired_difference
from dape.files import exclusive
from dape.report import RECORD_FIELDS
from dape.training import load_run
from dape.training.run import build_model

# Heads of width 3: what rotates pairs of channels cannot be built, and must not stop the others.
OPTIONS = (
    "--num-layers 1 --hidden-size 12 --num-heads 4 --train-length 8 --batch-size 2 --windows 6 --last 4 --lengths 8,16,32 "
    "--validation 0.5"
)


def options(folder: Path, *more: str) -> list[str]:
    corpus = str(folder / "text")
    return ["compare", "--corpus", corpus, "--out", str(folder / "out"), *OPTIONS.split(), *more]


def write_corpus(folder: Path) -> Path:
    text = folder / "text"
    text.mkdir()
    for number in range(12):
        words = " ".join(f"{number * word % 17} and {word}" for word in range(60))
        (text / f"{number}.txt").write_text(words)
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any]]:
    """Three methods, of which one cannot be built, two at a time, by steps and by time; made once for all workers."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "compared"
    with exclusive(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            write_corpus(folder)
            methods = "alibi,rope,dape1x3-kerple"
            code = main(options(folder, "--methods", methods, "--steps", "6", "--jobs", "2"))
            (folder / "code").write_text(str(code))
    return (
        folder,
        int((folder / "code").read_text()),
        json.loads((folder / "out" / "results.json").read_text()),
    )


def test_a_failed_method_does_not_sink_the_others(compared) -> None:
    _, code, results = compared
    assert code == 1
    assert [(row["method"], row["view"]) for row in results["failures"]] == [("rope", "equal-step")]
    assert "3" in results["failures"][0]["error"]
    assert {record["method"] for record in results["records"]} == {"alibi", "dape1x3-kerple"}
    assert {record["view"] for record in results["records"]} == {"equal-step", "equal-time"}


def test_records_are_those_of_the_runs(compared) -> None:
    folder, _, results = compared
    assert all(list(record) and set(record) == set(RECORD_FIELDS) for record in results["records"])
    run = load_run(folder / "out" / "runs" / "dape1x3-kerple-seed0-6steps")
    scores = evaluate_by_length(run.model(), run.data().validation, [8, 16, 32], last=4, windows=6)
    records = [
        row for row in results["records"] if (row["method"], row["view"]) == ("dape1x3-kerple", "equal-step")
    ]
    for score, record in zip(scores, records, strict=True):
        assert (record["eval_length"], record["tokens"], record["steps"]) == (
            score.eval_length,
            score.tokens,
            6,
        )
        assert record["nll"] == pytest.approx(score.nll, rel=1e-6)
        assert record["nll_se"] == pytest.approx(score.nll_se, rel=1e-4)
    assert records[0]["train_seconds"] == run.metrics()[-1]["seconds"]


def test_pairs_and_changes_are_of_the_same_tokens(compared) -> None:
    folder, _, results = compared
    alibi, dape = (
        load_scores(folder / "out" / "scores" / f"{method}-seed0-6steps.json")
        for method in ("alibi", "dape1x3-kerple")
    )
    pairs = [row for row in results["pairs"] if row["view"] == "equal-step"]
    assert [(row["method"], row["baseline"]) for row in pairs] == [("dape1x3-kerple", "alibi")] * 3
    for row, ours, base in zip(pairs, dape, alibi, strict=True):
        assert (row["difference"], row["difference_se"]) == paired_difference(ours, base)
    changes = [row for row in results["changes"] if (row["view"], row["method"]) == ("equal-step", "alibi")]
    assert changes[0]["change"] == changes[0]["change_se"] == 0
    assert (changes[2]["change"], changes[2]["change_se"]) == paired_difference(alibi[2], alibi[0])


def test_methods_share_data_order_and_initial_weights(compared) -> None:
    folder, _, _ = compared
    runs = [
        load_run(folder / "out" / "runs" / f"{method}-seed0-6steps") for method in ("alibi", "dape1x3-kerple")
    ]
    # Seed and data decide which windows make up a step.
    settings = [asdict(run.config) | {"method": "", "out": ""} for run in runs]
    assert settings[0] == settings[1]
    alibi, dape = (build_model(run.config, 256).state_dict() for run in runs)
    shared = set(alibi) & set(dape)
    assert {name for name in alibi if "position" not in name} <= shared
    assert all(torch.equal(alibi[name], dape[name]) for name in shared)


def test_files_agree(compared) -> None:
    folder, _, results = compared
    with open(folder / "out" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["nll"]) for row in rows] == [record["nll"] for record in results["records"]]
    assert "rope" in (folder / "out" / "report.html").read_text("utf-8")
    assert (folder / "out" / "figures" / "perplexity-equal-time.pdf").exists()
    assert results["command"].startswith("dape compare --steps 6 --methods alibi,rope,dape1x3-kerple")
    assert results["environment"]["jobs"] == 2


def test_given_again_only_what_is_new_runs(compared, capsys, tmp_path: Path) -> None:
    folder, _, results = compared
    out = shutil.copytree(folder / "out", tmp_path / "out")
    kept = {path: path.stat().st_mtime_ns for path in (out / "scores").glob("*-6steps.json")}
    assert len(kept) == 2
    arguments = options(folder, "--methods", "alibi,dape1x3-kerple", "--steps", "6", "--no-equal-time")
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 runs, 2 already done" in printed
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    again = json.loads((out / "results.json").read_text())
    assert again["records"] == [record for record in results["records"] if record["view"] == "equal-step"]
    # A path may be longer; it is not broken, so that it can be copied.
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80


def test_other_options_do_not_mix(compared, capsys) -> None:
    folder, _, _ = compared
    assert main(options(folder, "--methods", "alibi", "--steps", "6", "--weight-decay", "0.2")) == 2
    assert "holds a comparison with weight_decay=0.1, now weight_decay=0.2" in capsys.readouterr().err
    assert main(options(folder, "--methods", "alibi", "--steps", "6", "--warmup-steps", "3")) == 2
    assert "warmup_steps=3 is asked for" in capsys.readouterr().err


def test_killed_and_given_again_it_ends_as_if_never_stopped(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    arguments = ["--methods", "kerple", "--steps", "40", "--checkpoint-every", "5", "--log-every", "1"]
    command = [sys.executable, "-m", "dape", *options(tmp_path, *arguments)]
    run = tmp_path / "out" / "runs" / "kerple-seed0-40steps"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: steps_done(run) >= 5 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Its worker notices, saves and ends by itself: the folder is free for the next.
    assert main(options(tmp_path, *arguments)) == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "text").symlink_to(tmp_path / "text")
    assert main(options(whole, *arguments, "--corpus", str(tmp_path / "text"))) == 0
    first, second = (json.loads((place / "out" / "results.json").read_text()) for place in (tmp_path, whole))
    assert len(first["records"]) == 3
    for one, other in zip(first["records"], second["records"], strict=True):
        assert {**one, "train_seconds": 0} == {**other, "train_seconds": 0}


def wait_until(condition, seconds: float = 240) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.05)


def test_why_a_process_ended(tmp_path: Path) -> None:
    job = Job("rope", 0, 5, tmp_path, {}, {})
    assert "SIGKILL" in why(job, -signal.SIGKILL)
    assert "code 3" in why(job, 3)
    job.note("failure").parent.mkdir()
    job.note("failure").write_text("the disk is full\n")
    assert why(job, 1) == "the disk is full"


def test_a_crash_is_a_failure_of_that_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job("alibi", seed, 1, tmp_path, {}, {}) for seed in range(3)]
    code = "import os, sys; os.kill(os.getpid(), 11) if 'seed1' in sys.argv[-1] else None"

    def start(job: Job, at_once: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, job.name], stdin=subprocess.PIPE)

    monkeypatch.setattr("dape.compare.runs.start", start)
    heard = []
    failed = run_jobs(jobs, at_once=2, watch=lambda job, outcome: heard.append((job.seed, outcome)))
    assert list(failed) == [jobs[1]]
    assert "SIGSEGV" in failed[jobs[1]]
    assert {seed for seed, outcome in heard if outcome == ""} == {0, 2}


def test_interrupted_jobs_save_and_end_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    note = tmp_path / "saved"
    code = f"import sys; sys.stdin.read(); open({str(note)!r} + sys.argv[1], 'w')"

    def start(job: Job, at_once: int) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code, job.name], stdin=subprocess.PIPE))
        return started[-1]

    def interrupt(job: Job, outcome: str | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dape.compare.runs.start", start)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([Job("alibi", seed, 1, tmp_path, {}, {}) for seed in range(3)], at_once=2, watch=interrupt)
    assert [process.returncode for process in started] == [0, 0]
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_half_written_metrics(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert steps_done(tmp_path) == 2
