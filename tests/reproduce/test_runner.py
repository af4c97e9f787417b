"""Running: any folder at smoke scale, nothing trained twice, what is done is kept, one failure alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_papers import without_results, write_papers

from dape.cli import main
from dape.evaluate import evaluate_by_length
from dape.reproduce import find_papers, load_experiments
from dape.reproduce.corpora import load_corpora
from dape.reproduce.grid import TIME, cells_of
from dape.training import load_run

PAPERS = find_papers(Path(__file__).parents[2] / "papers")
EXPERIMENTS = [e for e in load_experiments(PAPERS) if "smoke" in e.scales]
RECORD = {
    "corpus",
    "method",
    "variant",
    "train_length",
    "eval_length",
    "seed",
    "view",
    "steps",
    "nll",
    "nll_se",
}
RECORD |= {"ppl", "windows", "train_seconds", "seconds_per_step"}
FIELDS = {
    "language": RECORD,
    "tasks": {"task", "method", "variant", "layers", "seed", "length", "accuracy", "samples"},
    "timing": {"method", "size", "length", "batch", "milliseconds", "spread", "ratio_to"},
    "maps": {"method", "layer", "head", "length", "sink_share", "entropy"},
}


def results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: f"{e.paper}/{e.name}")
def test_every_folder_runs_at_smoke_scale(experiment, tmp_path) -> None:
    name = f"{experiment.paper}/{experiment.name}"
    assert (
        main(["reproduce", name, "--scale", "smoke", "--papers", str(PAPERS), "--work", str(tmp_path)]) == 0
    )
    found = results(tmp_path / "smoke" / "results" / f"{name}.json")
    assert (found["experiment"], found["scale"], found["kind"]) == (experiment.name, "smoke", experiment.kind)
    assert (found["complete"], found["missing"], found["failures"]) == (True, [], [])
    assert found["records"]
    assert all(set(record) >= FIELDS[experiment.kind] for record in found["records"])
    assert {"torch", "cpu", "commit"} <= set(found["environment"])
    numbers = [record.get("nll", 0.0) for record in found["records"]]
    assert all(math.isfinite(number) for number in numbers)


def run(papers: Path, work: Path, *names: str, code: int = 0) -> None:
    options = ["--papers", str(papers), "--work", str(work), "--scale", "smoke"]
    assert main(["reproduce", *names, *options]) == code


def small(folder: Path, **experiments: str) -> Path:
    """Experiments of a test's own at the smoke scale, which runs in this process."""
    papers = write_papers(folder, **experiments)
    scales = papers / "scales.toml"
    scales.write_text(scales.read_text().replace("laptop", "smoke"))
    return papers


def test_a_shared_training_is_done_once(tmp_path) -> None:
    papers = small(
        tmp_path,
        one='[[grid]]\nmethods = ["kerple", "alibi"]\n[scale.smoke]',
        two='[[grid]]\nmethods = ["kerple"]\nvariant = "as before"\nlengths = [8, 16]\n[scale.smoke]',
    )
    work = tmp_path / "work"
    run(papers, work, "one")
    model = next((work / "smoke" / "runs").glob("*kerple*")) / "model" / "model.safetensors"
    before = model.stat().st_mtime_ns
    run(papers, work, "two")
    assert model.stat().st_mtime_ns == before
    assert len(list((work / "smoke" / "runs").iterdir())) == 2
    one, two = (results(work / "smoke" / "results" / "test" / f"{name}.json") for name in ("one", "two"))
    assert [r["eval_length"] for r in two["records"]] == [8, 16]
    assert {r["variant"] for r in two["records"]} == {"as before"}
    assert one["records"][0]["windows"] == two["records"][0]["windows"]
    assert one["documents"] == two["documents"]


def test_records_are_what_an_evaluation_gives(tmp_path) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["dape1x3-kerple"]\nlengths = [8, 256]\n[scale.smoke]')
    run(papers, tmp_path / "work", "one")
    found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
    trained = load_run(next((tmp_path / "work" / "smoke" / "runs").iterdir()))
    scores = evaluate_by_length(trained.model(), trained.data().validation, [8, 256], last=8, windows=8)
    for record, score in zip(found["records"], scores, strict=True):
        assert record["nll"] == pytest.approx(score.nll, abs=2e-6)
        assert record["nll_se"] == pytest.approx(score.nll_se, abs=2e-6)
        assert record["windows"] == pytest.approx(score.windows.tolist(), abs=1e-4)
    assert found["documents"]["library"] == scores[0].documents.tolist()
    assert found["records"][0]["train_seconds"] == round(trained.metrics()[-1]["seconds"], 1)


def test_only_what_is_missing_is_evaluated(tmp_path, monkeypatch) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["kerple"]\n[scale.smoke]')
    run(papers, tmp_path / "work", "one")
    file = papers / "test" / "one" / "experiment.toml"
    file.write_text(file.read_text().replace("[scale.smoke]", "[scale.smoke]\nmultiples = [1, 2, 4]"))
    evaluated = []
    from dape.reproduce import worker

    original = worker.score
    monkeypatch.setattr(worker, "score", lambda *a: evaluated.append(a[3]) or original(*a))
    monkeypatch.setattr(worker, "train", lambda *a, **k: pytest.fail("it is trained"))
    run(papers, tmp_path / "work", "one")
    assert evaluated == [16]
    found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
    assert [r["eval_length"] for r in found["records"]] == [8, 16, 32]


def test_a_failure_does_not_sink_the_others_and_is_tried_again(tmp_path, capsys) -> None:
    # Heads of width 3 cannot be rotated.
    papers = small(tmp_path, one='[[grid]]\nmethods = ["rope", "kerple"]\n[scale.smoke]')
    for _ in range(2):
        run(papers, tmp_path / "work", "one", code=1)
        found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
        assert [failure["method"] for failure in found["failures"]] == ["rope"]
        assert {record["method"] for record in found["records"]} == {"kerple"}
        assert not found["complete"]
        assert len(found["missing"]) == 1
    assert "failed" in capsys.readouterr().out


def test_fuller_results_are_not_replaced_by_a_beginning(tmp_path, monkeypatch) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["kerple", "alibi"]\n[scale.smoke]')
    work = tmp_path / "work"
    run(papers, work, "one")
    file = work / "smoke" / "results" / "test" / "one.json"
    whole = file.read_bytes()
    from dape.reproduce import runner

    # The same again in an empty folder, interrupted after the first training.
    for folder in ("runs", "scores"):
        (work / "smoke" / folder).rename(work / folder)
    original = runner.note

    def interrupted(*arguments: Any) -> None:
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "note", interrupted)
    options = ["--papers", str(papers), "--work", str(work), "--scale", "smoke"]
    assert main(["reproduce", "one", *options]) == 130
    assert file.read_bytes() == whole
    # With nothing there before, the beginning is written.
    file.unlink()
    assert main(["reproduce", "one", *options]) == 130
    assert {record["method"] for record in results(file)["records"]} == {"kerple", "alibi"}


def test_trainings_are_processes_of_their_own_at_larger_scales(tmp_path, capsys) -> None:
    papers = write_papers(tmp_path, one='[[grid]]\nmethods = ["kerple", "alibi"]\n[scale.laptop]')
    command = ["reproduce", "one", "--papers", str(papers), "--work", str(tmp_path / "work"), "--jobs", "2"]
    assert main(command) == 0
    assert "equal steps: 2 trainings\n" in capsys.readouterr().out
    found = results(papers / "test" / "one" / "results.json")
    assert found["complete"]
    assert found["command"] == "dape reproduce one --scale laptop"
    assert found["environment"]["jobs"] == 2
    # What trainings were evaluated to is kept beside the results: on another machine, without the runs, it counts.
    command[command.index("--work") + 1] = str(tmp_path / "elsewhere")
    assert main(command) == 0
    assert "equal steps: 2 trainings, 2 already done" in capsys.readouterr().out
    assert results(papers / "test" / "one" / "results.json")["records"] == found["records"]
    # So is where each was made, which is not where the results are written.
    (score, _) = sorted((papers / "scores" / "laptop").glob("*.json"))
    content = results(score)
    score.write_text(json.dumps({**content, "environment": {**content["environment"], "cpu": "an abacus"}}))
    assert main([*command, "--jobs", "1"]) == 0
    where = results(papers / "test" / "one" / "results.json")["environment"]
    assert sorted(where["cpu"]) == sorted([found["environment"]["cpu"], "an abacus"])
    assert where["jobs"] == 2
    assert not list((tmp_path / "work" / "laptop" / "runs").glob("*/checkpoints"))


def test_the_list_says_how_far_everything_is(tmp_path, capsys) -> None:
    papers = without_results(PAPERS, tmp_path)
    assert main(["reproduce", "--list", "--papers", str(papers), "--work", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(f"dape_v2/{e.name}" in shown for e in EXPERIMENTS if e.paper == "dape_v2")
    baselines = next(e for e in EXPERIMENTS if e.name == "baselines")
    assert f"0/{len(cells_of(baselines, 'laptop', load_corpora(PAPERS)))} " in shown


def test_what_was_complete_is_not_when_the_experiment_asks_for_more(tmp_path, capsys) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["kerple"]\n[scale.smoke]\n')
    options = ["--list", "--papers", str(papers), "--work", str(tmp_path / "work"), "--scale", "smoke"]
    run(papers, tmp_path / "work", "one")
    capsys.readouterr()
    assert main(["reproduce", *options]) == 0
    assert "incomplete" not in capsys.readouterr().out
    file = papers / "test" / "one" / "experiment.toml"
    file.write_text(file.read_text() + '[[scale.smoke.also]]\nmethods = ["kerple"]\nseeds = [5]\n')
    assert main(["reproduce", *options]) == 0
    assert "incomplete" in capsys.readouterr().out


def test_what_cannot_run_takes_nothing_from_equal_time(tmp_path) -> None:
    first, others = '["kerple", "alibi"]', '["kerple", "alibi", "t5", "nope", "fire"]'
    papers = small(
        tmp_path,
        one=f"[[grid]]\nmethods = {first}\n[scale.smoke]\n"
        f'equal_time = {{ methods = {first}, corpora = ["library"] }}',
        two=f"[[grid]]\nmethods = {others}\n[scale.smoke]",
    )
    path = tmp_path / "work" / "smoke" / "results" / "test" / "one.json"
    run(papers, tmp_path / "work", "one", "two")
    before = [row for row in results(path)["records"] if row["view"] == TIME]
    assert before
    file = papers / "test" / "one" / "experiment.toml"
    more = file.read_text().replace(f"methods = {first}\n", f"methods = {others}\n")
    file.write_text(more.replace("[scale.smoke]", '[scale.smoke]\ncorpora = ["library", "novels"]'))
    run(papers, tmp_path / "work", "one", code=2)
    assert [row for row in results(path)["records"] if row["view"] == TIME] == before
