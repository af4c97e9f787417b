"""Sweeps and merged comparisons: what differs is trained, and what is paired has the same target tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compare import write_corpus
from test_plugins import SMALL

import dape
from dape.cli import main
from dape.lab.compare import by_recipe, load_comparison, merge
from dape.lab.curves import label_of
from dape.lab.execute import make_plan


def differences(found) -> set[str]:
    chosen = found.frame.query("metric == 'difference'")
    return {label_of(row) for row in chosen.to_dict("records")}


def test_losses_on_other_tokens_are_not_paired(tmp_path: Path) -> None:
    """Other lengths give other windows, another tokenizer other tokens, another text of the same name other targets."""
    corpus = write_corpus(tmp_path) / "text"
    shared = {"corpus": str(corpus), "num_layers": 1, "hidden_size": 16, "num_heads": 4, "train_length": 8}
    shared |= {"batch_size": 2, "steps": 2, "validation": "0.5", "windows": 6, "last": 4, "equal_time": False}

    def compared(name: str, **changes: object):
        return dape.compare(["kerple"], out=str(tmp_path / name), **{"lengths": [8, 16], **shared, **changes})

    first = compared("first")
    assert differences(merge([first, compared("again")], ["a", "b"])) == {"kerple (b)"}
    others = {
        "longer": compared("longer", lengths=[8, 64]),
        "fewer": compared("fewer", last=2),
        "bpe": compared("bpe", tokenizer="bpe:270"),
    }
    for file in corpus.iterdir():
        file.write_text(file.read_text()[::-1])
    others["reversed"] = compared("reversed")
    for name, other in others.items():
        merged = merge([first, other], ["a", name])
        assert differences(merged) == set(), name
        # Changes with the length are of each by itself.
        changes = merged.frame.query("metric == 'change'")
        assert set(changes["variant"]) == {"a", name}


def test_a_sweep_over_tokenizers_has_no_differences_between_them(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path) / "text")
    shared = ["--methods", "kerple", "--corpus", corpus, *SMALL.split(), "--out", str(tmp_path / "swept")]
    assert main(["sweep", *shared, "--over", "tokenizer=bytes,bpe:270"]) == 0
    found = load_comparison(tmp_path / "swept")
    assert len(found.table()) == 2
    assert differences(found) == set()


def test_a_sweep_over_steps_derives_its_warm_up(tmp_path: Path) -> None:
    config = by_recipe(steps=1000, out=str(tmp_path))
    blocks = [{"methods": ["kerple"], "train": {"steps": n}, "variant": f"steps {n}"} for n in (100, 1000)]
    blocks += [{"methods": ["kerple"], "train": {"learning_rate": 5e-5}, "variant": "slow"}]
    blocks += [{"methods": ["kerple"], "train": {"steps": 200, "warmup_steps": 7}, "variant": "own"}]
    items = make_plan(config.experiment(blocks), config.workspace()).items
    assert [item.train["warmup_steps"] for item in items] == [6, 60, 60, 7]
    assert [item.train["final_learning_rate"] for item in items] == [1e-4, 1e-4, 5e-5, 1e-4]
    given = by_recipe(steps=1000, warmup_steps=50, out=str(tmp_path))
    items = make_plan(given.experiment(blocks), given.workspace()).items
    assert [item.train["warmup_steps"] for item in items] == [50, 50, 50, 7]


def test_variants_that_are_one_training_are_refused(tmp_path: Path) -> None:
    config = by_recipe(out=str(tmp_path))
    blocks = [{"methods": ["kerple"], "train": {"accumulate": n}, "variant": f"{n} parts"} for n in (1, 4)]
    with pytest.raises(ValueError, match="differ by nothing that changes the trained model"):
        make_plan(config.experiment(blocks), config.workspace())
    blocks = [{"methods": ["kerple"], "train": {"train_length": 32}, "variant": "short"}]
    with pytest.raises(ValueError, match="train sets train_length, which the grid sets"):
        make_plan(config.experiment(blocks), config.workspace())


def test_from_python_models_with_other_tokens_are_not_compared(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path) / "text")
    options = {"corpus": corpus, "num_layers": 1, "hidden_size": 16, "num_heads": 4, "train_length": 8}
    options |= {"batch_size": 2, "steps": 2, "validation": "0.5"}
    runs = [
        dape.train(
            "kerple",
            tokenizer=name,
            out=str(tmp_path / name[:3]),
            data=str(tmp_path / f"d{name[:3]}"),
            **options,
        )
        for name in ("bytes", "bpe:270")
    ]
    found = dape.evaluate(*runs, lengths=[8, 16], last=4, windows=6, names=["bytes", "bpe"])
    assert differences(found) == set()
    assert differences(dape.evaluate(runs[0], runs[0], lengths=[8, 16], last=4, names=["a", "b"])) == {
        "kerple (b)"
    }
