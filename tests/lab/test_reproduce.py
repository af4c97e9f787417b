"""Running: any folder at smoke scale, nothing trained twice, what is done is kept, one failure alone."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from small_papers import without_results, write_papers

from dape.cli import main
from dape.evaluation import evaluate_by_length, losses_by_length, recall_slices
from dape.lab.execute import make_plan
from dape.lab.experiments import Workspace, find_papers, load_corpora, load_experiments
from dape.lab.records import STEP, TIME, Results, load_results
from dape.training import load_run

PAPERS = find_papers(Path(__file__).parents[2] / "papers")
EXPERIMENTS = [e for e in load_experiments(PAPERS) if "smoke" in e.scales]
METRICS = {
    "language": {"loss"},
    "tasks": {"accuracy"},
    "timing": {"milliseconds", "ratio"},
    "maps": {"sink_share", "entropy"},
}


def results(path: Path) -> Results:
    return load_results(path)


def records(path: Path, metric: str = "loss", **about: Any) -> list[dict[str, Any]]:
    """Lines of the results, about all of this."""
    lines = [{**line, "run": 0} for line in load_results(path).lines(metric)]
    return [line for line in lines if all(line.get(name) == value for name, value in about.items())]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: f"{e.paper}/{e.name}")
def test_every_folder_runs_at_smoke_scale(experiment, tmp_path) -> None:
    name = f"{experiment.paper}/{experiment.name}"
    assert (
        main(["reproduce", name, "--scale", "smoke", "--papers", str(PAPERS), "--work", str(tmp_path)]) == 0
    )
    found = results(tmp_path / "smoke" / "results" / f"{name}.json")
    assert (found["experiment"], found["scale"], found["kind"]) == (experiment.name, "smoke", experiment.kind)
    assert (found["missing"], found["failures"]) == ([], [])
    assert found["rows"]
    assert {row["metric"] for row in found["rows"]} >= METRICS[experiment.kind]
    assert {"torch", "cpu", "commit"} <= set(found["environment"])
    assert found.frame["value"].map(math.isfinite).all()


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
    assert [r["eval_length"] for r in two.lines()] == [8, 16]
    assert {r["variant"] for r in two["runs"]} == {"as before"}
    assert one["rows"][0]["windows"] == two["rows"][0]["windows"]
    assert one["documents"] == two["documents"]


def test_records_are_what_an_evaluation_gives(tmp_path) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["dape1x3-kerple"]\nlengths = [8, 256]\n[scale.smoke]')
    run(papers, tmp_path / "work", "one")
    found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
    trained = load_run(next((tmp_path / "work" / "smoke" / "runs").iterdir()))
    scores = evaluate_by_length(trained.model(), trained.data().validation, [8, 256], last=8, windows=8)
    for record, score in zip(found.lines(), scores, strict=True):
        assert record["value"] == pytest.approx(score.nll, abs=2e-6)
        assert record["error"] == pytest.approx(score.nll_se, abs=2e-6)
        assert record["windows"] == pytest.approx(score.windows.tolist(), abs=1e-4)
    assert found["documents"]["library"] == scores[0].documents.tolist()


def test_losses_are_sliced_by_recall(tmp_path) -> None:
    """The slices that `dape eval --slices recall` gives, with sums by document that add up to the losses of all tokens."""
    papers = small(tmp_path, one='[[grid]]\nmethods = ["dape1x3-kerple"]\nlengths = [8, 256]\n[scale.smoke]')
    run(papers, tmp_path / "work", "one")
    found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
    trained = load_run(next((tmp_path / "work" / "smoke" / "runs").iterdir()))
    tokens = trained.data().validation
    losses = losses_by_length(trained.model(), tokens, [8, 256], last=8, windows=8)
    wanted = recall_slices(tokens, losses, base=8)
    for metric, mean in (("loss", wanted.loss), ("change", wanted.change)):
        for name in ("hit", "new", "other"):
            (row,) = (row for row in found.lines(metric, name) if row["eval_length"] == 256)
            assert (row["value"], row["error"]) == pytest.approx(mean(256, name), abs=1e-5)
            assert row["count"] == sum(row["tokens"]) == wanted.tokens(256, name) > 0
    hit, other = (found.lines("loss", name)[-1] for name in ("hit", "other"))
    (whole,) = (row for row in found.lines("loss") if row["eval_length"] == 256)
    total = sum(hit["windows"]) + sum(other["windows"])
    assert total / (hit["count"] + other["count"]) == pytest.approx(whole["value"], abs=1e-4)
    assert set(found.slices["slice"]) == {"hit", "new", "other"}


def test_scores_without_slices_are_kept_and_evaluated_again_where_recall_is_asked_for(tmp_path) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["kerple", "alibi"]\n[scale.smoke]')
    work = tmp_path / "work"
    run(papers, work, "one")
    path, scores = work / "smoke" / "results" / "test" / "one.json", work / "smoke" / "evaluations"
    before = results(path).lines("loss")
    for file in scores.glob("*.json"):
        content = json.loads(file.read_text())
        del content["recall"]
        file.write_text(json.dumps(content))
    run(papers, work, "one")
    assert results(path).lines("loss", "hit") == []
    file = papers / "test" / "one" / "experiment.toml"
    file.write_text(
        file.read_text().replace("[scale.smoke]", '[scale.smoke]\nrecall = { methods = ["kerple"] }')
    )
    run(papers, work, "one")
    found = results(path)
    assert found.lines("loss") == before
    assert {row["method"] for row in found.lines("loss", "hit")} == {"kerple"}


def test_only_what_is_missing_is_evaluated(tmp_path, monkeypatch) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["kerple"]\n[scale.smoke]')
    run(papers, tmp_path / "work", "one")
    file = papers / "test" / "one" / "experiment.toml"
    file.write_text(file.read_text().replace("[scale.smoke]", "[scale.smoke]\nmultiples = [1, 2, 4]"))
    evaluated = []
    from dape.lab import evaluations
    from dape.lab.kinds import language

    original = evaluations.token_losses
    monkeypatch.setattr(evaluations, "token_losses", lambda *a: evaluated.append(a[3]) or original(*a))
    monkeypatch.setattr(language, "train", lambda *a, **k: pytest.fail("it is trained"))
    run(papers, tmp_path / "work", "one")
    assert evaluated == [16]
    found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
    assert [r["eval_length"] for r in found.lines()] == [8, 16, 32]


def test_a_failure_does_not_sink_the_others_and_is_tried_again(tmp_path, capsys) -> None:
    # Heads of width 3 cannot be rotated.
    papers = small(tmp_path, one='[[grid]]\nmethods = ["rope", "kerple"]\n[scale.smoke]')
    for _ in range(2):
        run(papers, tmp_path / "work", "one", code=1)
        found = results(tmp_path / "work" / "smoke" / "results" / "test" / "one.json")
        assert [failure["method"] for failure in found["failures"]] == ["rope"]
        assert {run["method"] for run in found["runs"]} == {"kerple"}
        assert not found.complete
        assert len(found["missing"]) == 1
    assert "failed" in capsys.readouterr().out


def test_fuller_results_are_not_replaced_by_a_beginning(tmp_path, monkeypatch) -> None:
    papers = small(tmp_path, one='[[grid]]\nmethods = ["kerple", "alibi"]\n[scale.smoke]')
    work = tmp_path / "work"
    run(papers, work, "one")
    file = work / "smoke" / "results" / "test" / "one.json"
    whole = file.read_bytes()
    from dape.lab import execute

    # The same again in an empty folder, interrupted after the first training.
    for folder in ("runs", "evaluations"):
        (work / "smoke" / folder).rename(work / folder)
    original = execute.note

    def interrupted(*arguments: Any) -> None:
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "note", interrupted)
    options = ["--papers", str(papers), "--work", str(work), "--scale", "smoke"]
    assert main(["reproduce", "one", *options]) == 130
    assert file.read_bytes() == whole
    # With nothing there before, the beginning is written.
    file.unlink()
    assert main(["reproduce", "one", *options]) == 130
    assert {run["method"] for run in results(file)["runs"]} == {"kerple", "alibi"}


def test_trainings_are_processes_of_their_own_at_larger_scales(tmp_path, capsys) -> None:
    papers = write_papers(tmp_path, one='[[grid]]\nmethods = ["kerple", "alibi"]\n[scale.laptop]')
    command = ["reproduce", "one", "--papers", str(papers), "--work", str(tmp_path / "work"), "--jobs", "2"]
    assert main(command) == 0
    assert "equal steps: 2 runs\n" in capsys.readouterr().out
    found = results(papers / "test" / "one" / "results.json")
    assert found.complete
    assert found["command"] == "dape reproduce one --scale laptop"
    assert found["environment"]["jobs"] == 2
    # What trainings were evaluated to is kept beside the results: on another machine, without the runs, it counts.
    command[command.index("--work") + 1] = str(tmp_path / "elsewhere")
    assert main(command) == 0
    assert "equal steps: 2 runs, 2 already done" in capsys.readouterr().out
    assert results(papers / "test" / "one" / "results.json")["rows"] == found["rows"]
    # So is where each was made, which is not where the results are written.
    (score, _) = sorted((papers / "evaluations" / "laptop").glob("*.json"))
    content = json.loads(score.read_text())
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
    plan = make_plan(baselines, Workspace(tmp_path, "laptop", PAPERS, load_corpora(PAPERS)))
    assert f"0/{len(plan.items)} " in shown
    # Equal-time runs count as well, before their steps are known.
    headline = next(e for e in EXPERIMENTS if e.name == "headline")
    plan = make_plan(headline, Workspace(tmp_path, "laptop", papers, load_corpora(PAPERS)))
    assert plan.timed
    assert f"0/{len(plan.items) + sum(map(len, plan.timed))} " in shown


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
    before = records(path, view=TIME)
    assert before
    file = papers / "test" / "one" / "experiment.toml"
    more = file.read_text().replace(f"methods = {first}\n", f"methods = {others}\n")
    file.write_text(more.replace("[scale.smoke]", '[scale.smoke]\ncorpora = ["library", "novels"]'))
    run(papers, tmp_path / "work", "one", code=2)
    assert records(path, view=TIME) == before


def test_only_the_runs_that_are_asked_for_in_their_order(tmp_path, capsys) -> None:
    methods = '["kerple", "alibi", "t5"]'
    papers = small(
        tmp_path,
        one=f"[[grid]]\nmethods = {methods}\n[scale.smoke]\nequal_time = {{ methods = {methods} }}",
    )
    work = tmp_path / "work"
    run(papers, work, "one", "--only", "*, t5, *seed 0", "*, kerple, *seed 0")
    lines = [line for line in capsys.readouterr().out.splitlines() if "[" in line]
    assert [re.findall("t5|kerple|alibi", line) for line in lines[:2]] == [["t5"], ["kerple"]]
    found = results(work / "smoke" / "results" / "test" / "one.json")
    assert [(one["method"], one["view"]) for one in found["runs"]] == [("kerple", STEP), ("t5", STEP)]
    assert len(found["missing"]) == 4
    assert not list(work.rglob("pace"))
    run(papers, work, "one", "--only", "*alibi*", "--dry-run")
    assert capsys.readouterr().out.splitlines() == [
        "# library, alibi, length 8, seed 0, 3 steps",
        "# library, alibi, length 8, seed 0, equal-time, steps by the measured pace",
    ]
    run(papers, work, "one", "--only", "*sinusoidal*", code=2)
    assert 'matches none of the 6 runs: it is compared with whole labels, such as "library, kerple' in (
        capsys.readouterr().err
    )
    run(papers, work, "one")
    assert results(work / "smoke" / "results" / "test" / "one.json")["missing"] == []


def test_from_a_grid_to_verdict_and_readme(tmp_path, capsys) -> None:
    """All the way, at a scale of seconds: trained, evaluated, judged, written down, on one page."""
    papers = write_papers(tmp_path, one='[[grid]]\nmethods = ["kerple", "dape1x3-kerple"]\n[scale.laptop]')
    (papers / "test" / "claims.py").write_text(
        "from dape.lab.claims import claim\nfrom dape.lab.rules import lower\n\n"
        '@claim("one", "4")\ndef better(data):\n    """It is better."""\n'
        '    return lower(data, "dape1x3-kerple", "kerple")\n'
    )
    options = ["--papers", str(papers), "--work", str(tmp_path / "work")]
    assert main(["reproduce", "one", *options]) == 0
    capsys.readouterr()
    assert main(["reproduce", "--claims", *options]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"[✓✗?] (holds|does not hold|undecided)  § 4  better", shown)
    assert main(["reproduce", "one", "--report", *options]) == 2
    assert "--report is of all experiments: leave out one" in capsys.readouterr().err
    assert main(["reproduce", "--report", *options, "--out", str(tmp_path / "page.html")]) == 0
    readme = (papers / "test" / "one" / "README.md").read_text("utf-8")
    losses = results(papers / "test" / "one" / "results.json").frame
    kerple = losses[(losses["method"] == "kerple") & (losses["eval_length"] == 8)]["value"].item()
    assert f"| kerple | {math.exp(kerple):.2f} |" in readme.replace("**", "")
    assert "It is better." in readme
    assert "It is better." in (tmp_path / "page.html").read_text("utf-8")
