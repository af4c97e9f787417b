"""Sweeps and merged comparisons: what differs is trained, and what is paired has the same target tokens."""

from pathlib import Path

import pytest
from builders import SMALL_RUN, write_texts

import dape
from dape.lab.compare import CompareConfig
from dape.lab.comparison import Comparison, merge
from dape.lab.experiment import check_distinct
from dape.training import recipe


def differences(found) -> set[str]:
    return set(found.table("difference").index)


def test_losses_on_other_tokens_are_not_paired(tmp_path: Path, monkeypatch) -> None:
    """Other lengths give other windows, another tokenizer other tokens, another text of the same name other targets."""
    monkeypatch.setattr(Comparison, "save", lambda *_: None)
    corpus = write_texts(tmp_path / "text")
    shared = {**SMALL_RUN, "corpus": corpus, "steps": 2, "windows": 6, "last": 4, "equal_time": False}

    def compared(name: str, **changes: object):
        return dape.compare(["kerple"], out=str(tmp_path / name), **{"lengths": [8, 16], **shared, **changes})

    first = compared("first")
    assert differences(merge([first, compared("other", learning_rate=1e-3)], ["a", "b"])) == {"kerple (b)"}
    others = {
        "longer": compared("longer", lengths=[8, 64]),
        "fewer": compared("fewer", last=2),
        "bpe": compared("bpe", tokenizer="bpe:270"),
    }
    for file in Path(corpus).iterdir():
        file.write_text(file.read_text()[::-1])
    others["reversed"] = compared("reversed")
    for name, other in others.items():
        merged = merge([first, other], ["a", name])
        assert differences(merged) == set(), name
        # Changes with the length are of each by itself.
        assert set(merged.table("change").index) == {"kerple (a)", f"kerple ({name})"}


def sweep(*over: str, **changes: object) -> CompareConfig:
    return recipe("tiny", CompareConfig, methods="kerple", over=over, **{"steps": 1000, **changes})


def test_a_sweep_derives_what_depends_on_its_options() -> None:
    runs = sweep("steps=100,1000").runs()
    assert [run.config.warmup_steps for run in runs] == [6, 60]
    assert [run.label for run in runs] == ["kerple, steps 100", "kerple, steps 1000"]
    rates = [run.config.final_learning_rate for run in sweep("learning_rate=5e-5,1e-3").runs()]
    assert rates == [5e-5, 1e-4]
    assert sweep("steps=200", "warmup-steps=7").runs()[0].config.warmup_steps == 7
    given = sweep("steps=100,500", warmup_steps=50).runs()
    assert [run.config.warmup_steps for run in given] == [50, 50]


def test_variants_that_are_one_training_are_refused() -> None:
    with pytest.raises(ValueError, match="differ by nothing that changes the result"):
        check_distinct(sweep("weight_decay=0.1,0.1").runs())


def test_from_python_models_with_other_tokens_are_not_compared(tmp_path: Path, text: str) -> None:
    runs = []
    for name in ("bytes", "bpe:270"):
        paths = {"corpus": text, "out": str(tmp_path / name), "data": str(tmp_path / f"d{name}")}
        runs.append(dape.train("kerple", tokenizer=name, **paths, **SMALL_RUN, steps=2))
    found = dape.evaluate(*runs, lengths=[8, 16], last=4, windows=6, names=["bytes", "bpe"])
    assert differences(found) == set()
    assert differences(dape.evaluate(runs[0], runs[0], lengths=[8, 16], last=4, names=["a", "b"])) == {"b"}
