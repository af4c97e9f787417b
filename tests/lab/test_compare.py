"""A comparison from text to report: nothing trained twice, nothing lost, one failure alone."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from rich.console import Console

from dape.cli import main
from dape.evaluation import evaluate_by_length, paired_difference
from dape.files import exclusive
from dape.lab import pace
from dape.lab.compare import CompareConfig, Comparison, by_recipe, load_comparison, merge
from dape.lab.curves import curves
from dape.lab.execute import make_plan, settle
from dape.lab.records import Results, load_results
from dape.lab.runner import LAUNCHERS, Job, Local, Process, Slurm, last_record, run_jobs, why
from dape.lab.tables import OURS, Cell, Row, Table
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
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, Results]:
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
        load_results(folder / "out" / "results.json"),
    )


def run_of(folder: Path, method: str, steps: int = 6) -> Path:
    (found,) = (folder / "out" / "runs").glob(f"text-{method}-*-{steps}steps-seed0-*")
    return found


def test_a_failed_method_does_not_sink_the_others(compared) -> None:
    _, code, results = compared
    assert code == 1
    assert [(row["method"], row["view"]) for row in results["failures"]] == [("rope", "equal-step")]
    assert "3" in results["failures"][0]["error"]
    assert {run["method"] for run in results["runs"]} == {"alibi", "dape1x3-kerple"}
    assert {run["view"] for run in results["runs"]} == {"equal-step", "equal-time"}


def test_rows_are_those_of_the_runs(compared) -> None:
    folder, _, results = compared
    run = load_run(run_of(folder, "dape1x3-kerple"))
    scores = evaluate_by_length(run.model(), run.data().validation, [8, 16, 32], last=4, windows=6)
    frame = results.frame.query("method == 'dape1x3-kerple' and view == 'equal-step' and metric == 'loss'")
    assert frame["eval_length"].tolist() == [8, 16, 32]
    assert set(frame["steps"]) == {6}
    assert frame["value"].tolist() == pytest.approx([score.nll for score in scores], abs=1e-6)
    assert frame["error"].tolist() == pytest.approx([score.nll_se for score in scores], abs=1e-6)
    assert frame["count"].tolist() == [6, 6, 6]
    # Steps times their median: without pauses.
    times = [0.0, *(record["seconds"] for record in run.metrics())]
    step = median(after - before for before, after in pairwise(times))
    assert frame["train_seconds"].tolist()[0] == round(step * (len(times) - 1), 1)


def test_differences_and_changes_are_of_the_same_tokens(compared) -> None:
    folder, _, results = compared
    scores = []
    for method in ("alibi", "dape1x3-kerple"):
        run = load_run(run_of(folder, method))
        lengths = {"lengths": [8, 16, 32], "last": 4, "windows": 6}
        scores.append(evaluate_by_length(run.model(), run.data().validation, **lengths))
    alibi, dape = scores
    frame = results.frame.query("view == 'equal-step'")
    differences = frame[frame["metric"] == "difference"]
    assert set(zip(differences["method"], differences["against"], strict=True)) == {
        ("dape1x3-kerple", "alibi")
    }
    for (_, row), ours, base in zip(differences.iterrows(), dape, alibi, strict=True):
        assert (row["value"], row["error"]) == pytest.approx(paired_difference(ours, base), abs=1e-4)
    changes = frame[(frame["metric"] == "change") & (frame["method"] == "alibi")]
    assert changes[["value", "error"]].iloc[0].tolist() == [0, 0]
    found = tuple(changes[["value", "error"]].iloc[2])
    assert found == pytest.approx(paired_difference(alibi[2], alibi[0]), abs=1e-4)


def test_methods_share_data_order_and_initial_weights(compared) -> None:
    folder, _, _ = compared
    runs = [load_run(run_of(folder, method)) for method in ("alibi", "dape1x3-kerple")]
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
    assert [float(row["value"]) for row in rows] == results.frame["value"].tolist()
    assert r"\begin{tabular}" in (folder / "out" / "table.tex").read_text("utf-8")
    assert "rope" in (folder / "out" / "report.html").read_text("utf-8")
    assert (folder / "out" / "figures" / "perplexity-equal-time.pdf").exists()
    assert results["command"].startswith("dape compare --steps 6 --methods alibi,rope,dape1x3-kerple")
    assert results["environment"]["jobs"] == 2


def test_given_again_only_what_is_new_runs(compared, capsys, tmp_path: Path) -> None:
    folder, _, results = compared
    out = shutil.copytree(folder / "out", tmp_path / "out")
    kept = {path: path.stat().st_mtime_ns for path in (out / "evaluations").glob("*-6steps-*.json")}
    assert len(kept) == 2
    arguments = options(folder, "--methods", "alibi,dape1x3-kerple", "--steps", "6", "--no-equal-time")
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 runs, 2 already done" in printed
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    again = load_results(out / "results.json")
    wanted = results.frame[results.frame["view"] == "equal-step"]
    assert again.frame["value"].tolist() == wanted["value"].tolist()
    # A path may be longer; it is not broken, so that it can be copied.
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80


def test_the_verdict_comes_first(compared) -> None:
    folder, _, _ = compared
    found = load_comparison(folder / "out")
    sentence = found.verdict()
    assert re.fullmatch(
        r"At 4× the training length .* has [\d.]+ % lower perplexity than .* "
        r"\(loss −[\d.]+ ± [\d.]+ nats(, not significant: p = [\d.]+)?; 1 seed, 6 documents\)\.",
        sentence,
    )
    page = (folder / "out" / "report.html").read_text("utf-8")
    assert page.index(sentence.replace(" %", "&nbsp;%")) < page.index("<table")
    assert "only 6 documents carry them" in page


def test_a_narrow_terminal_wraps_names_and_not_numbers() -> None:
    cells = (Cell("9.12"), Cell("+0.009", error="± 0.010"))
    rows = (Row("rope[factor=8,scaling=yarn]", OURS, cells), Row("kerple (steps 150, seed 0)", OURS, cells))
    console = Console(width=40, file=io.StringIO())
    console.print(Table("", ("1×\n64", "change"), rows, corner="method").rich())
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert [line for line in lines if "9.12" in line] == [
        "rope[factor=8,      9.12  +0.009 ± 0.010",
        "kerple (steps 150,  9.12  +0.009 ± 0.010",
    ]


def test_from_python_it_is_a_frame_tables_and_figures(compared, tmp_path: Path) -> None:
    folder, _, results = compared
    found = load_comparison(folder / "out")
    table = found.table()
    assert (list(table.index), list(table.columns)) == (["alibi", "dape1x3-kerple"], [8, 16, 32])
    losses = results.frame.query("method == 'alibi' and view == 'equal-step' and metric == 'loss'")
    assert table.loc["alibi"].tolist() == pytest.approx([math.exp(x) for x in losses["value"]])
    assert r"\textbf" in found.latex()
    assert r"\shortstack[r]{2$\times$ \\ 16}" in found.latex()
    assert found.plot().axes
    assert found.report(tmp_path / "deep" / "page.html").exists()
    # The curves keep their room next to long names.
    drawn = merge([found, found], ["a long name of a folder of a sweep over options", "two"]).plot()
    drawn.canvas.draw()
    assert drawn.axes[0].xaxis.label.get_window_extent().x0 >= 0
    other = Results({**results.content, "settings": {**results.settings, "baseline": "dape1x3-kerple"}})
    assert not any(point.difference.known for curve in curves(other, "equal-step") for point in curve.points)
    merged = merge([Comparison(other), found], ["one", "two"])
    assert merged.results.settings["baseline"] == "dape1x3-kerple (one)"
    both = merge([found, found], ["one", "two"])
    names = {f"alibi ({name})" for name in ("one", "two")}
    assert names <= set(both.table().index)
    with pytest.raises(ValueError, match="no metric"):
        found.table("accuracy")


def test_lengths_that_no_document_has_are_said_before_training(tmp_path: Path, capsys) -> None:
    write_corpus(tmp_path)
    assert main(options(tmp_path, "--methods", "alibi", "--steps", "6", "--lengths", "8,16000")) == 2
    assert "length 16000 needs 16001 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_killed_and_given_again_it_ends_as_if_never_stopped(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    arguments = ["--methods", "kerple", "--steps", "40", "--checkpoint-every", "5", "--log-every", "1"]
    command = [sys.executable, "-m", "dape", *options(tmp_path, *arguments)]

    def steps_done() -> int:
        return max(
            (int(last_record(run)["step"]) for run in (tmp_path / "out" / "runs").glob("*")), default=0
        )

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: steps_done() >= 5 or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # Its worker notices, saves and ends by itself: the folder is free for the next.
    assert main(options(tmp_path, *arguments)) == 0
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "text").symlink_to(tmp_path / "text")
    assert main(options(whole, *arguments, "--corpus", str(tmp_path / "text"))) == 0
    first, second = (load_results(place / "out" / "results.json") for place in (tmp_path, whole))
    assert len(first.frame) == 6
    assert first["rows"] == second["rows"]


def wait_until(condition, seconds: float = 240) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it took too long"
        time.sleep(0.05)


def job(folder: Path, seed: int = 0) -> Job:
    return Job(f"rope-seed{seed}", "rope", "language", {"seed": seed}, folder, folder / f"{seed}.json", 5)


def test_why_a_process_ended(tmp_path: Path) -> None:
    failed = job(tmp_path)
    assert "SIGKILL" in why(failed, -signal.SIGKILL)
    assert "code 3" in why(failed, 3)
    failed.note("failure").parent.mkdir()
    failed.note("failure").write_text("the disk is full\n")
    assert why(failed, 1) == "the disk is full"


class Code(Local):
    """Starts Python code in place of workers."""

    def __init__(self, code: str) -> None:
        self.code, self.started = code, []

    def start(self, job: Job, at_once: int) -> Process:
        command = [sys.executable, "-c", self.code, job.name]
        self.started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return Process(self.started[-1])


def test_a_crash_is_a_failure_of_that_job_alone(tmp_path: Path) -> None:
    jobs = [job(tmp_path, seed) for seed in range(3)]
    launcher = Code("import os, sys; os.kill(os.getpid(), 11) if 'seed1' in sys.argv[-1] else None")
    heard = []
    failed = run_jobs(
        jobs,
        at_once=2,
        watch=lambda job, outcome: heard.append((job.spec["seed"], outcome)),
        launcher=launcher,
    )
    assert list(failed) == [jobs[1]]
    assert "SIGSEGV" in failed[jobs[1]]
    assert {seed for seed, outcome in heard if outcome == ""} == {0, 2}


def test_interrupted_jobs_save_and_end_before_it_returns(tmp_path: Path) -> None:
    note = tmp_path / "saved"
    launcher = Code(f"import sys; sys.stdin.read(); open({str(note)!r} + sys.argv[1], 'w')")

    def interrupt(job: Job, outcome: str | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path, seed) for seed in range(3)], at_once=2, watch=interrupt, launcher=launcher)
    assert [process.returncode for process in launcher.started] == [0, 0]
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("command", ["compare", "tasks", "reproduce"])
def test_every_command_passes_the_launcher_its_options(command, tmp_path, monkeypatch, capsys) -> None:
    built = []

    class Elsewhere:
        has_queue = True

        def __init__(self, folder: Path, options: dict) -> None:
            built.append(options)

        def start(self, job: Job, at_once: int) -> None:
            raise ValueError("nothing runs here")

    monkeypatch.setitem(LAUNCHERS, "elsewhere", Elsewhere)
    given = {
        "compare": options(write_corpus(tmp_path))[1:],
        "tasks": ["run", "even_pairs", "--steps", "2"],
        "reproduce": ["leakage", "--scale", "smoke", "--work", str(tmp_path / "work")],
    }[command]
    folder = ["--out", str(tmp_path / "out")] if command == "tasks" else []
    assert main([command, *given, *folder, "--launcher", "elsewhere[nodes=2,queue=long]"]) == 2
    assert "nothing runs here" in capsys.readouterr().err
    assert built[-1] == {"nodes": 2, "queue": "long"}


@pytest.mark.parametrize(
    ("given", "said"),
    [("slrum", 'unknown launcher "slrum"; did you mean slurm'), ("local[nodes=2]", "nodes is given")],
)
def test_a_launcher_that_cannot_be_is_reported_at_once(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompareConfig(launcher=given)


def test_jobs_are_submitted_through_submitit(tmp_path: Path) -> None:
    """On this machine in place of a cluster: the worker reads its spec, and says why it cannot carry it out."""
    pytest.importorskip("submitit")
    heard = []
    failed = run_jobs(
        [job(tmp_path)],
        at_once=1,
        watch=lambda job, outcome: heard.append(outcome),
        launcher=Slurm(tmp_path, {"timeout_min": 5}, cluster="local"),
    )
    # The spec lacks what a training is.
    assert 'no entry "train"' in next(iter(failed.values()))
    assert heard[-1]


def test_a_submitted_job_is_carried_out(tmp_path: Path) -> None:
    """By submitit's executor for this machine, in place of a cluster."""
    pytest.importorskip("submitit")
    corpus = write_corpus(tmp_path) / "text"
    train = {
        "method": "kerple",
        "corpus": str(corpus),
        "validation": "0.5",
        "out": str(tmp_path / "runs" / "a"),
    }
    train |= {
        "data": str(tmp_path / "data"),
        "num_layers": 1,
        "hidden_size": 12,
        "num_heads": 4,
        "train_length": 8,
    }
    train |= {"batch_size": 2, "steps": 2, "warmup_steps": 1}
    evaluation = {"last": 4, "windows": 6, "room": 32, "lengths": ["8", "32"]}
    spec = {"train": train, "evaluation": evaluation}
    asked = Job("a", "a", "language", spec, tmp_path, tmp_path / "evaluations" / "a.json", 2)
    assert (
        run_jobs([asked], at_once=1, watch=lambda *_: None, launcher=Slurm(tmp_path, cluster="local")) == {}
    )
    assert set(json.loads(asked.result.read_text())["windows"]) == {"8", "32"}


def test_equal_time_follows_the_interleaved_pace_not_the_runs_own_clocks(tmp_path, monkeypatch) -> None:
    """A busy machine slows whichever run is under way: steps come from one measurement of all methods in turns."""
    orders = []

    def measured(order, path, threads) -> None:
        orders.append([train["method"] for train in order["trains"]])
        path.write_text(json.dumps({"alibi": 1.0, "dape1x3-kerple": 1.25}))

    monkeypatch.setattr(pace, "measure_apart", measured)
    config = by_recipe(methods="alibi,dape1x3-kerple", steps=20, seeds="0,1", out=str(tmp_path / "out"))
    plan = make_plan(config.experiment(), config.workspace())
    settle(plan)
    # One measurement serves both seeds: the pace does not depend on them.
    assert orders == [["alibi", "dape1x3-kerple"]]
    steps = [(item.method, item.seed, item.steps) for item in plan.items if item.view == "equal-time"]
    assert steps == [
        (method, seed, n) for seed in (0, 1) for method, n in (("alibi", 20), ("dape1x3-kerple", 16))
    ]


def test_the_pace_is_that_of_the_training_that_is_asked_for(monkeypatch) -> None:
    """In its precision and its micro-batches: they were left out, and on a GPU the CPU would have been timed."""
    seen = []

    def parts(self, batch, size):
        seen.append((self.settings.precision, self.settings.accumulate, self.parallel.device.type, size))
        return torch.zeros(())

    monkeypatch.setattr("dape.training.loop.Loop.backward", parts)
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "train_length": 8, "batch_size": 4}
    config = by_recipe(steps=20, accumulate=2, precision="bf16", device="cpu", **sizes)
    plan = make_plan(config.experiment(), config.workspace())
    monkeypatch.setattr("dape.training.loop.clip_gradient", lambda model, clip: torch.zeros(()))
    found = pace.measure(pace.trains_of(plan.timed[0]), 256, rounds=1)
    assert set(found) == {item.method for item in plan.timed[0]}
    assert set(seen) == {("bf16", 2, "cpu", 32)}


def test_half_written_metrics(tmp_path: Path) -> None:
    assert last_record(tmp_path) == {"step": 0}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": 3.5}\n{"st')
    assert last_record(tmp_path) == {"step": 2, "loss": 3.5}
