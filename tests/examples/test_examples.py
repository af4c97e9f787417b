"""The examples run, at tiny sizes, and are short."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "gpt": "text.txt --steps 8 --length 16 --batch 4 --width 16 --layers 1 --heads 2 --tokens 3",
    "bert_classifier": "--steps 3 --batch 4",
    "vit": "--steps 3 --batch 8 --width 16 --layers 1 --heads 2",
    "t5_bias": "--length 64",
    "retrofit": "--length 32 --steps 3 --texts text.txt",
    "own_encoding": "text.txt --steps 2 --tokens 2 --length 16 --batch 2 --width 16 --layers 1 --heads 2",
}
SHOWN = {
    "gpt": r"8 × the training length: loss \d",
    "bert_classifier": r"logits change by \d\.\de-0[789] at first|logits change by 0",
    "vit": r"accuracy on images of 48 × 48: \d",
    "t5_bias": r"gradients of the bias differ by at most",
    "retrofit": r"(?s)base .*dape1x3-kerple .*saved",
    "own_encoding": r"(?s)checked: a state dict carries everything.*8 × the training length",
}


@pytest.mark.parametrize("name", TINY)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "text.txt").write_text(" ".join(f"{i} squared is {i * i}." for i in range(400)))
    from dape import POSITIONS

    monkeypatch.setattr(sys, "argv", [name])
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](TINY[name].split())
    POSITIONS.pop("gaussian", None)
    assert re.search(SHOWN[name], capsys.readouterr().out)
    if name == "t5_bias":
        assert result < 1e-3


def test_every_example_is_short_and_tried():
    programs = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert programs.keys() == TINY.keys()
    assert all(len(path.read_text("utf-8").splitlines()) < 120 for path in programs.values())


def test_the_lines_for_nanogpt_run():
    import torch

    code = re.search(r"```python\n(.*?)```", (EXAMPLES / "nanogpt.md").read_text("utf-8"), re.DOTALL)
    assert code is not None

    class Some:
        n_head, n_embd = 4, 32

    q, k, v = torch.randn(3, 2, 4, 20, 8)
    names = {"self": Some(), "config": Some(), "q": q, "k": k, "v": v}
    exec(compile(code[1], "nanogpt.md", "exec"), names)
    assert names["y"].shape == q.shape


@pytest.mark.parametrize("name", ["first_steps", "compare"])
def test_a_notebook_runs_and_its_outputs_are_there(name, tmp_path, monkeypatch):
    """Without a kernel, which takes longer to start than the cells take."""
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in code) >= 3
    names: dict = {}
    for cell in code:
        lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
        exec(compile("\n".join(lines).replace("STEPS = 120", "STEPS = 2"), name, "exec"), names)
