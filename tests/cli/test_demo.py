"""`dape demo`, its parts on tiny models: what is printed is what was measured, and the page has it too."""

import io
import re

import pytest
import torch
from rich.console import Console

from dape.cli import demo
from dape.data import prepare
from dape.models import DapeConfig, DapeForCausalLM


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Three untrained models with one tokenizer, and a folder of files that repeat themselves."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.py").write_text(f"def function_{number}(value): return value + {number}\n" * 30)
    prepare(str(text), tmp_path / "data", tokenizer="bytes", progress=False)
    tokenizer = demo.load_tokenizer(tmp_path / "data" / "tokenizer")
    for name in demo.MODELS:
        torch.manual_seed(0)
        config = DapeConfig(
            method=name,
            vocab_size=tokenizer.vocab_size,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        DapeForCausalLM(config).save_pretrained(tmp_path / "models" / name)
        tokenizer.save(tmp_path / "models" / name)
    for name, value in {"WINDOW": 16, "LENGTHS": (16, 32, 64), "LAST": 4, "WINDOWS": 6}.items():
        monkeypatch.setattr(demo, name, value)
    live = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "train_length": 16,
        "batch_size": 4,
        "steps": 4,
    }
    monkeypatch.setattr(demo, "LIVE", {**demo.LIVE, **live, "warmup_steps": 1, "log_every": 1})
    repair = {"steps": 3, "batch_size": 2, "windows": 6, "last": 4, "lengths": "16,32"}
    monkeypatch.setattr(demo, "REPAIR", {**demo.REPAIR, **repair})
    monkeypatch.setattr(demo, "prepared", lambda options: tmp_path / "data")
    return demo.DemoOptions(models=tmp_path / "models", text=text, out=tmp_path / "out")


def test_reading_training_and_retrofit_are_on_the_page(options):
    console, page = Console(file=io.StringIO(), width=100), demo.Page()
    for part in demo.PARTS[1:]:
        part(options, console, page)
    printed = console.file.getvalue()
    demo.write_page(page, options.out / "index.html")
    html = (options.out / "index.html").read_text()
    for part in page.parts:
        _, rows = part["table"]
        for cell in rows[0]:
            assert cell in printed
            assert cell.replace("−", "−") in html
        assert part["sentences"]
    reading, training, repair = page.parts
    assert [row[0] for row in reading["table"][1]] == list(demo.MODELS)
    assert [row[0] for row in training["table"][1]] == ["kerple", "dape1x3-kerple"]
    assert [row[0] for row in repair["table"][1]][:3] == [
        "base, cut to 16",
        "base trained on, cut to 16",
        "base",
    ]
    assert html.count("data:image/svg+xml;base64,") == 2


def test_an_example_of_what_was_copied_is_in_the_text(options):
    import numpy as np

    tokenizer = demo.load_tokenizer(options.models / demo.CONVOLVED)
    tokens = demo.held_out(tokenizer, options.text)
    from dape.evaluation import losses_by_length

    model = demo.load_model(options.models / demo.CONVOLVED)
    losses = losses_by_length(model, tokens, demo.LENGTHS, last=demo.LAST, windows=demo.WINDOWS)
    [sentence] = demo.copied(tokenizer, tokens, dict.fromkeys(demo.MODELS, losses))
    now, before = re.findall(r"«(.*?)»", sentence, re.DOTALL)
    assert now == before
    assert np.isfinite(losses.losses[16]).all()


def test_without_the_models_it_says_where_they_are(options, tmp_path):
    elsewhere = demo.DemoOptions(models=tmp_path / "nowhere", text=options.text, out=options.out)
    with pytest.raises(ValueError, match="in the repository's folder models/"):
        demo.reading(elsewhere, Console(file=io.StringIO()), demo.Page())


def test_bars_rise_with_what_they_show():
    assert demo.sparkline([10.0, 10.0, 100.0]) == "▅▅█"
    assert demo.curve([7.4, 4.0, 2.1]) == "█▃▁"
    assert demo.curve([]) == ""
