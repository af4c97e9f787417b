"""The demonstration's driver, on a tiny model: every arm runs, is not run again, and is reported."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dape.data import ByteTokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def driver(monkeypatch):
    spec = importlib.util.spec_from_file_location("stories15m_run", ROOT / "results/stories15m/run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {
        "LENGTH": 16,
        "TRAIN_LENGTH": 32,
        "LENGTHS": (16, 32, 64),
        "WINDOWS": 3,
        "LAST": 8,
        "POSITIONS": (0, 8, 16, 64),
        "CHUNKS": 2,
        "ROWS": 4,
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SETTINGS", replace(module.SETTINGS, steps=2, warmup_steps=1))
    monkeypatch.setattr(module, "TUNING", module.TUNING | {"train_length": 32})
    monkeypatch.setattr(module, "TEACHING", {"match_steps": 2, "teacher_length": 16})
    return module


def test_arms_run_once_and_are_reported(driver, tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    ByteTokenizer().save(tmp_path / "base")
    stories = tmp_path / "stories.txt"
    stories.write_text("<|endoftext|>".join(f"Cat {n} sat on a mat and saw {n} dogs." for n in range(20)))
    monkeypatch.setattr(driver, "story_tokens", lambda path, model: driver.np.arange(400, dtype="int32") % 90)
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["run.py", "train", str(tmp_path / "base"), str(stories), "--seeds", "0"]
    monkeypatch.setattr("sys.argv", [*arguments, "--work", str(tmp_path / "work"), "--out", str(out)])
    assert driver.main() == 0
    results = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert len(results) == 4 + 6
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert driver.main() == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.json")} == before
    driver.report(out)
    text = (out / "README.md").read_text()
    kerple = results["dape1x3-kerple-seed0"]
    mean = sum(kerple["by_length"]["64"]) / 3
    assert f"{2.718281828459045**mean:.2f}" in text
    assert "rope → dape1x3-kerple" in (out / "perplexity.svg").read_text()
    assert "kerple seed 1" in text


def test_a_training_that_was_stopped_is_not_reported(driver, tmp_path):
    """One arm had stopped after 27 of 600 steps, and was averaged with one that had not."""
    settings = {"steps": 600, "batch_size": 2, "train_length": 512}
    result = {"arm": "trained on", "seed": 0, "settings": settings, "tokens": 27 * 1024}
    (tmp_path / "trained-on-seed0.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match="trained on 27,648 of 614,400 tokens"):
        driver.report(tmp_path)
