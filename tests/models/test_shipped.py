"""The models that the repository ships: small, loaded by plain transformers, and as their cards say."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dape.evaluation import losses_by_length
from dev.demo import DemoOptions, held_out

FOLDERS = sorted((Path(__file__).parents[2] / "models").glob("*/"))
NAMES = ["dape1x3-kerple", "kerple", "rope"]


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


def test_all_are_tried() -> None:
    assert [folder.name for folder in FOLDERS] == NAMES


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_a_folder_is_a_model_of_transformers(folder: Path, monkeypatch, tmp_path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) < 9e6
    card = (folder / "README.md").read_text()
    for needed in ("license:", "BSD-3-Clause", "| perplexity |", "held out"):
        assert needed in card
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def add(first, second):\n    return first", return_tensors="pt").input_ids
    written = load(folder).generate(ids, max_new_tokens=4, do_sample=False)
    assert written.shape[1] == ids.shape[1] + 4
    assert tokenizer.decode(written[0]).startswith("def add(")


def test_longer_input_helps_the_convolution_and_breaks_rope(tmp_path) -> None:
    """Loss of the same held-out tokens after 128 and after 1,024 tokens of input."""
    tokens = held_out(DemoOptions(models=FOLDERS[0].parent, out=tmp_path))
    change = {}
    for folder in FOLDERS:
        losses = losses_by_length(load(folder), tokens, (128, 1024), last=32, windows=12).losses
        change[folder.name] = float(losses[1024].mean() - losses[128].mean())
    assert change["dape1x3-kerple"] < min(0, change["kerple"])
    assert change["rope"] > 1, change
