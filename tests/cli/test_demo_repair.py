"""The end of `dape demo`: the RoPE model that the comparison trained, before and after, in a table and a picture."""

import io
import json

import pytest
from rich.console import Console

from dape import cli
from dape.cli import demo
from dape.models import DapeForCausalLM


@pytest.fixture
def options(tmp_path, monkeypatch):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"The cat number {number} sat on the mat. " * 40)
    small = ["--num-layers", "1", "--hidden-size", "16", "--num-heads", "2", "--train-length", "16"]
    schedule = ["--steps", "4", "--warmup-steps", "1", "--batch-size", "4", "--device", "cpu"]
    out = ["--corpus", str(texts), "--out", str(tmp_path / "out" / "runs" / "rope")]
    assert cli.main(["train", "--method", "rope", *small, *schedule, *out]) == 0
    monkeypatch.setattr(demo, "COMPARISON", {"steps": 4, "windows": 4, "last": 8})
    monkeypatch.setattr(demo, "REPAIR", {**demo.REPAIR, "steps": 3, "warmup_steps": 1})
    return demo.DemoOptions(out=str(tmp_path / "out"))


def test_the_model_that_broke_is_repaired(options, tmp_path):
    printed = Console(file=io.StringIO(), width=100)
    assert demo.repair(options, printed) == 0
    folder = tmp_path / "out" / "repair"
    results = json.loads((folder / "repair.json").read_text())
    before, after = results["losses"].values()
    assert [row["eval_length"] for row in before] == [16, 32, 64, 128, 256]
    assert f"{before[-1]['ppl']:.2f}" in printed.file.getvalue()
    assert f"{after[-1]['ppl']:.2f}" in printed.file.getvalue()
    assert "dape1x3-kerple" in (folder / "perplexity.svg").read_text()
    assert DapeForCausalLM.from_pretrained(folder / "model").config.method == "dape1x3-kerple"


def test_without_the_model_it_says_so(options):
    printed = Console(file=io.StringIO(), width=100)
    assert demo.repair(demo.DemoOptions(out=options.out, seed=1), printed) == 1
    assert "nothing to repair" in printed.file.getvalue()
