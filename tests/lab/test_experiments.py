"""The experiments as shipped: complete, consistent, and shared where they can be; mistakes are told in a sentence."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import made_up
import pytest
from small_papers import without_results, write_papers

from dape.cli import main
from dape.lab.claims import verdicts_of
from dape.lab.execute import make_plan
from dape.lab.experiments import (
    SCALES,
    Corpus,
    Workspace,
    cut_files,
    find_papers,
    load_corpora,
    load_experiments,
)
from dape.lab.folders import with_claims
from dape.lab.records import STEP, TIME, load_results

PAPERS = find_papers(Path(__file__).parents[2] / "papers")
EXPERIMENTS = load_experiments(PAPERS)
CORPORA = load_corpora(PAPERS)
NAMES = (
    "nope_rope baselines length_1024 same_tokens model_size effect leakage same_cost kernel_size che time_cost "
    "data_adaptive visualisation recall headline step_time"
)


def plan_of(experiment, scale: str, corpora=CORPORA):
    return make_plan(experiment, Workspace(Path("work"), scale, PAPERS, corpora))


def grid(name: str, scale: str):
    return plan_of(next(e for e in EXPERIMENTS if e.name == name), scale).items


def test_every_table_of_the_paper_has_its_folder() -> None:
    assert {e.name for e in EXPERIMENTS if e.paper == "dape_v2"} == set(NAMES.split())


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: f"{e.paper}/{e.name}")
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_can_be_planned(experiment, scale: str) -> None:
    if experiment.paper == "beyond" and scale not in experiment.scales:
        pytest.skip("goes beyond the paper, which has no such setting")
    assert scale in experiment.scales
    if experiment.kind in ("language", "maps"):
        items = plan_of(experiment, scale).items
        assert items
        assert all(item.train_length in item.lengths for item in items if experiment.kind == "language")


def test_once_all_is_trained_every_claim_has_what_it_compares(tmp_path: Path) -> None:
    """A claim that names a training that no grid has would be "not run" for ever."""
    language = {e.name for e in EXPERIMENTS if e.kind == "language"}
    for file in PAPERS.glob("*.toml"):
        shutil.copy(file, tmp_path)
    for experiment in EXPERIMENTS:
        shipped = PAPERS / experiment.paper
        folder = tmp_path / experiment.paper / experiment.name
        folder.mkdir(parents=True)
        shutil.copy(shipped / experiment.name / "experiment.toml", folder)
        for file in shipped.glob("*.*"):
            shutil.copy(file, folder.parent)
        if experiment.name not in language or "laptop" not in experiment.scales:
            continue
        plan = plan_of(experiment, "laptop")
        losses = {
            (item.corpus.name, item.train_length, item.method, item.variant): dict.fromkeys(item.lengths, 2.0)
            for item in plan.items
        }
        views = (STEP, TIME) if plan.timed else (STEP,)
        seeds = sorted({item.seed for item in plan.items})
        made = made_up.language(
            losses, views=views, seeds=seeds, scale="laptop", settings={"last": 16, "windows": 32}
        )
        (folder / "results.json").write_text(json.dumps(made), "utf-8")
    verdicts = [v for path in with_claims(tmp_path) for v in verdicts_of(path)]
    judged = [v for v in verdicts if v.claim.experiment in language and v.claim.scale != "paper"]
    assert len(judged) > 60
    # Losses were made up without slices.
    missing = {v.sentence for v in judged if v.verdict.startswith("not run")}
    assert missing == {"Not run: losses by recall."}


# Trained briefly, at 64 or 128 tokens, before the rule below.
SHORT = {
    *("depth", "large_kernels", "longer_training", "longer_windows", "randomized_positions", "rope_scaling"),
    *(
        "square_kernels",
        "baselines",
        "data_adaptive",
        "effect",
        "kernel_size",
        "leakage",
        "model_size",
        "nope_rope",
    ),
    *("same_cost", "same_tokens"),
}


def test_what_is_scored_is_at_most_a_quarter_of_the_training_length() -> None:
    """So that at 1× every target has most of the window before it."""
    language = [e for e in EXPERIMENTS if e.kind == "language" and "laptop" in e.scales]
    wide = {
        e.name
        for e in language
        for i in plan_of(e, "laptop").items
        if 4 * i.evaluation["last"] > i.train_length
    }
    assert wide == SHORT
    defaults = tomllib.loads((PAPERS / "scales.toml").read_text("utf-8"))["laptop"]
    assert 4 * defaults["last"] <= min(defaults["train_lengths"])


def test_main_comparisons_have_two_seeds_and_sixteen_times_the_length() -> None:
    for name in ("baselines", "kernel_size", "effect"):
        items = grid(name, "laptop")
        assert {item.seed for item in items} >= {0, 1}
        assert {item.train_length for item in items} == {64, 128}
        for item in items:
            assert max(item.lengths) >= 16 * item.train_length
            assert item.evaluation["windows"] >= 128
    for name in ("headline", "effect"):
        experiment = next(e for e in EXPERIMENTS if e.name == name)
        assert plan_of(experiment, "laptop").timed


def test_experiments_share_what_they_have_in_common() -> None:
    def named(name: str, method: str) -> set[str]:
        return {item.id for item in grid(name, "laptop") if item.method == method}

    assert named("effect", "kerple") <= named("baselines", "kerple")
    assert named("kernel_size", "dape1x3-kerple") == named("baselines", "dape1x3-kerple")
    assert named("data_adaptive", "cope") <= named("baselines", "cope")
    assert named("visualisation", "dape-kerple") <= named("baselines", "dape-kerple")
    assert not named("leakage", "dape1x3-kerple") & named("baselines", "dape1x3-kerple")


def test_windows_are_the_same_for_all_cells_of_a_corpus_at_a_scale() -> None:
    for scale in SCALES:
        items = [
            item
            for e in EXPERIMENTS
            if e.kind == "language" and scale in e.scales
            for item in plan_of(e, scale).items
        ]
        asked = {(item.corpus.name, str(item.evaluation)) for item in items}
        assert len(asked) == len({corpus for corpus, _ in asked})


def test_the_headline_scores_at_most_a_quarter_of_the_training_length_on_three_seeds() -> None:
    items = grid("headline", "laptop")
    latex = [item for item in items if item.corpus.name == "latex13"]
    assert {item.seed for item in latex} == {0, 1, 2}
    assert len({item.method for item in latex}) == 6
    assert len(latex) == 18
    books = [item for item in items if item.corpus.name == "books13"]
    assert sorted({(item.method, item.seed) for item in books}) == [
        (method, seed) for method in ("dape-kerple", "dape1x3-kerple", "kerple", "rope") for seed in (0, 1)
    ]
    for scale in SCALES:
        for item in grid("headline", scale):
            assert 4 * item.evaluation["last"] <= item.train_length
    # The pilot comes first.
    assert [(item.method, item.seed) for item in items[:2]] == [("kerple", 0), ("dape1x3-kerple", 0)]
    for item in items:
        assert item.evaluation["windows"] == 256
    assert all(len(item.corpus.hold_out) >= 12 for item in latex)


def test_same_tokens_means_the_same_number_a_step() -> None:
    for scale in SCALES:
        tokens = {c.train_length * c.train["batch_size"] * c.steps for c in grid("same_tokens", scale)}
        assert len(tokens) == 1


def test_the_most_telling_comes_first() -> None:
    items = grid("baselines", "laptop")
    first = items[0]
    assert (first.corpus.name, first.train_length, first.seed) == ("latex", 128, 0)
    assert [item.wave for item in items] == sorted(item.wave for item in items)
    assert items[-1].seed == max(item.seed for item in items) > 0


def test_a_block_may_have_corpora_lengths_and_seeds_of_its_own(tmp_path) -> None:
    blocks = (
        '[[grid]]\nmethods = ["kerple"]\n'
        '[[grid]]\nmethods = ["rope"]\ncorpora = ["novels"]\ntrain_lengths = [16]\nseeds = [7]\n'
    )
    papers = write_papers(tmp_path, blocks=blocks + "[scale.laptop]\n")
    (experiment,) = load_experiments(papers)
    items = plan_of(experiment, "laptop", load_corpora(papers)).items
    found = [(c.method, c.corpus.name, c.train_length, c.seed) for c in items]
    assert found == [("kerple", "library", 8, 0), ("rope", "novels", 16, 7)]


def test_equal_time_keeps_the_share_of_the_warm_up() -> None:
    item = grid("baselines", "laptop")[0]
    shorter = item.for_steps(item.steps // 2)
    assert shorter.view == TIME
    assert shorter.train["warmup_steps"] == item.train["warmup_steps"] // 2
    assert shorter.id != item.id
    # The fastest stands for itself.
    assert item.for_steps(item.steps).id == item.id


def test_a_cell_is_known_by_what_it_computes() -> None:
    items = {
        (c.method, c.variant, c.seed, c.train_length, c.corpus.name): c for c in grid("same_cost", "laptop")
    }
    assert len({item.id for item in items.values()}) == len(items)
    one = next(iter(items.values()))
    from dataclasses import replace

    assert replace(one, variant="called otherwise", lengths=(64,)).id == one.id
    assert replace(one, train={**one.train, "checkpoint_every": 7}).id == one.id
    assert replace(one, train={**one.train, "weight_decay": 0.2}).id != one.id
    assert replace(one, corpus=replace(one.corpus, hold_out=("algebra",))).id != one.id


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[[grid]]\nmethods = ["kerple"]\n[scale.laptop]\nseed = [1]', 'no key "seed"; did you mean "seeds"'),
        ('[[grid]]\nmethods = ["kerple"]\n[scale.desktop]', 'unknown scale "desktop"'),
        ("[[grid]]\nmethods = []\n[scale.laptop]", "names no methods"),
        ('[[grid]]\nmethod = ["kerple"]\n[scale.laptop]', 'did you mean "methods"'),
        ('[[grid]]\nmethods = ["kerpel"]\n[scale.laptop]', 'unknown method "kerpel"'),
        ('[[grid]]\nmethods = ["kerple", "kerple"]\n[scale.laptop]', "names a training twice"),
        ('[[grid]]\nmethods = ["kerple"]\n[scale.laptop]\ncorpora = ["songs"]', 'no corpus "songs"'),
        (
            '[[grid]]\nmethods = ["kerple"]\n[scale.laptop]\nlengths = [4]',
            "must lie between last=8 and room=256",
        ),
        ('[[grid]]\nmethods = ["kerple"]\ntrain = {corpus = "x"}\n[scale.laptop]', "said by the corpus"),
        ("[scale.laptop", "experiment.toml"),
    ],
)
def test_mistakes_are_told(tmp_path, capsys, content: str, sentence: str) -> None:
    papers = write_papers(tmp_path, mine=content)
    assert main(["reproduce", "mine", "--papers", str(papers), "--work", str(tmp_path / "w")]) == 2
    assert sentence in capsys.readouterr().err


def test_a_wrong_name_is_told(capsys) -> None:
    assert main(["reproduce", "baseline", "--papers", str(PAPERS)]) == 2
    assert "did you mean baselines" in capsys.readouterr().err


def test_a_missing_corpus_gets_a_sentence_with_how_to_obtain_it(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("DAPE_CORPORA", raising=False)
    papers = without_results(PAPERS, tmp_path)
    assert main(["reproduce", "baselines", "--papers", str(papers), "--work", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in ("latex", "stacks-project", "--corpora", "DAPE_CORPORA"))
    monkeypatch.setenv("DAPE_CORPORA", str(tmp_path))
    assert main(["reproduce", "baselines", "--papers", str(papers), "--work", str(tmp_path)]) == 2
    assert f"there is no folder {tmp_path / 'latex'}" in capsys.readouterr().err


def test_files_are_cut_at_line_ends_and_every_nth_part_is_held_out(tmp_path) -> None:
    source = tmp_path / "texts" / "novels"
    source.mkdir(parents=True)
    text = "".join(f"line {number}, and what it says\n" for number in range(60))
    (source / "one.txt").write_text(text)
    (source / "two.txt").write_text("short\n" * 40)
    corpus = Corpus("novels", "two novels", "Write them.", part=100, every=3)
    where = corpus.locate(tmp_path / "texts", tmp_path / "work")
    parts = sorted((tmp_path / "work" / "novels").glob("one-*.txt"))
    assert len(parts) > 10
    assert "".join(part.read_text() for part in parts) == text
    assert all(part.read_text().endswith("\n") and len(part.read_text()) >= 100 for part in parts)
    every = sorted(path.stem for path in Path(where["corpus"]).glob("*.txt"))
    assert where["validation"].split(",") == every[1::3]
    # Made once, and anew when the text has changed.
    before = parts[0].stat().st_mtime_ns
    assert corpus.locate(tmp_path / "texts", tmp_path / "work") == where
    assert parts[0].stat().st_mtime_ns == before
    (source / "one.txt").write_text(text[:900])
    cut_files(source, tmp_path / "work" / "novels", 100)
    assert len(sorted((tmp_path / "work" / "novels").glob("one-*.txt"))) < len(parts)


def test_what_was_trained_is_known_by_the_names_it_has() -> None:
    """A training's name must not change with the code, or everything would be trained again."""
    finished = [
        e
        for e in EXPERIMENTS
        if e.kind == "language"
        and (file := e.folder / "results.json").exists()
        and load_results(file).complete
    ]
    wanted = {item.id for e in finished for item in plan_of(e, "laptop").items}
    assert len(wanted) > 100
    there = {path.stem for path in (PAPERS / "evaluations" / "laptop").glob("*.json")}
    assert wanted <= there
