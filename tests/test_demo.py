"""`python -m dev.demo`, its parts on tiny models: what is printed is what was measured, and the page has it too."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from dape.data import Tokens, load_tokenizer, prepare
from dape.data.tokenizers import ByteTokenizer
from dape.evaluation.by_length import WindowLosses
from dape.evaluation.windows import same_targets
from dape.models import DapeConfig, DapeForCausalLM
from dape.pages import environment
from dev import demo
from dev.recalled import recalled_word


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Three untrained models with one tokenizer, and a folder of files that repeat themselves."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.py").write_text(f"def function_{number}(value): return value + {number}\n" * 30)
    prepare(str(text), tmp_path / "data", tokenizer="bytes", progress=False)
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name in demo.MODELS:
        torch.manual_seed(0)
        config = DapeConfig(method=name, vocab_size=tokenizer.vocab_size, **sizes)
        DapeForCausalLM(config).save_pretrained(tmp_path / "models" / name)
        tokenizer.save(tmp_path / "models" / name)
    live = {
        "num_layers": 1, "hidden_size": 16, "num_heads": 2, "train_length": 16, "batch_size": 4, "steps": 4
    }  # fmt: skip
    repair = {"steps": 3, "batch_size": 2, "windows": 6, "last": 4, "lengths": "16,32"}
    for name, value in {
        "WINDOW": 16, "LENGTHS": (16, 32, 64), "LAST": 4, "WINDOWS": 6, "LIVE_LENGTHS": (16, 32),
        "LIVE": {**demo.LIVE, **live, "warmup_steps": 1, "log_every": 1}, "SCRATCH": {**demo.LIVE, **live, "warmup_steps": 1},
        "REPAIR": {**demo.REPAIR, **repair},
        "packed": lambda options: tmp_path / "data",
    }.items():  # fmt: skip
        monkeypatch.setattr(demo, name, value)
    return demo.DemoOptions(models=tmp_path / "models", text=text, out=tmp_path / "out")


def test_reading_training_and_retrofit_are_on_the_page(options):
    console = Console(file=io.StringIO(), width=80)
    parts = [part(options, console) for part in demo.PARTS[1:]]
    printed = console.file.getvalue()
    html = environment("dev").get_template("demo.html.j2").render(parts=parts)
    for part in parts:
        for cell in part.table.rows[0].cells:
            assert cell.text in printed
            assert cell.text in html
        assert part.sentences
    names = [[row.label for row in part.table.rows] for part in parts]
    assert names[:2] == [[*demo.MODELS], ["kerple", "dape1x3-kerple"]]
    assert names[2][:3] == ["base, cut to 16", "base trained on, cut to 16", "base"]
    assert html.count("data:image/svg+xml;base64,") == 2
    assert "already trained" not in printed


def test_models_of_the_second_part_can_be_trained_from_scratch(options):
    folders = demo.from_scratch(options, Console(file=io.StringIO()))
    assert list(folders) == list(demo.MODELS)
    for folder in folders.values():
        assert demo.shipped_model(folder).config.hidden_size == 16


def test_the_example_is_the_whole_word_that_longer_input_helped_most():
    text = (
        "def first_name(): pass\ndef other_name(): pass\n" + "# filler\n" * 3 + "other_name(first_name())\n"
    )
    tokens = Tokens.of([np.array(ByteTokenizer().encode(text))])
    windows, length = same_targets(tokens, len(text) - 1, 25, 1), len(text) - 1
    losses = np.full((1, 25), 0.01)
    # Half of other_name is as improbable as before; of "name" alone, first_name is the whole word.
    losses[0, 3] = 5.0
    by_length = WindowLosses(windows, 25, {25: losses + 3, length: losses})
    found = recalled_word(ByteTokenizer().decode, tokens, {"a": by_length}, "a")
    assert found.word == "first_name"
    assert found.line == "other_name(first_name"
    assert found.distance == text.rindex("first_name") - text.index("first_name")
    low, high = found.probability["a"]
    # Of the nine letters after the first.
    assert found.beginning == "f"
    assert high == pytest.approx(np.exp(-0.09))
    assert low < 1e-9


def test_without_the_models_it_says_where_they_are(options, tmp_path):
    elsewhere = demo.DemoOptions(models=tmp_path / "nowhere", text=options.text, out=options.out)
    with pytest.raises(ValueError, match="in the repository's folder models/"):
        demo.read_on(elsewhere, Console(file=io.StringIO()))


def test_the_first_part_shows_both_models_at_every_length(capsys, tmp_path):
    assert demo.main(["--quick", "--steps", "2", "--out", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "plain attention" in printed
    assert "with the 1×3 convolution" in printed
    assert "try more --steps" in printed


@pytest.mark.slow
def test_the_convolution_recalls(capsys, tmp_path):
    assert demo.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "convolution moves the score there: 100 %" in " ".join(capsys.readouterr().out.split())
