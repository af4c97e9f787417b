"""SmolLM2's driver on a tiny model, and its page against its records."""

import importlib.util
import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from builders import llama

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results/smollm2"


@pytest.fixture
def driver():
    spec = importlib.util.spec_from_file_location("smollm2_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arms_are_measured_and_recalibrated(driver, tmp_path, monkeypatch, capsys):
    llama(vocab_size=90, num_hidden_layers=1).save_pretrained(tmp_path / "base")
    changed = {"LENGTH": 64, "TRAIN_LENGTH": 16, "STEPS": 2, "LENGTHS": (16, 32), "LAST": 8, "WINDOWS": 2}
    for name, value in changed.items():
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(driver, "SETTINGS", replace(driver.SETTINGS, steps=2, warmup_steps=1))
    monkeypatch.setattr(driver, "topics", lambda folder: driver.np.arange(800, dtype="int32") % 90)
    options = Namespace(paths=[tmp_path / "base"], work=tmp_path / "work", out=tmp_path)
    arms = []
    for arm in driver.ARMS:
        driver.one(Namespace(**vars(options), arm=arm))
        arms.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    differences = [arm.get("difference_at_512") for arm in arms]
    assert differences[0] is None
    assert differences[1] < 1e-5 < differences[2]
    (tmp_path / "forward.json").write_text(json.dumps({"length": 64, "arms": arms}))
    driver.recalibrate(options)
    driver.report(options)
    assert "the same after 2 steps" in (tmp_path / "README.md").read_text()


def test_the_page_is_that_of_the_records(driver, tmp_path):
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    driver.report(Namespace(out=tmp_path))
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()
