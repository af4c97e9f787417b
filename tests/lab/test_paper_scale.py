"""The published settings: configurations that build, parameters that count, orders that run at reduced width."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dape.cli import main
from dape.lab.execute import make_plan
from dape.lab.experiments import Workspace, find_papers, load_corpora, load_experiments
from dape.lab.runner import GPUS, torchrun_command
from dape.lab.worker import work
from dape.models import DapeForCausalLM
from dape.training import TrainConfig

PAPERS = find_papers(Path(__file__).parents[2] / "papers")
WORKSPACE = Workspace(Path("work"), "paper", PAPERS, load_corpora(PAPERS))
RUNS = {
    item.id: item
    for experiment in load_experiments(PAPERS)
    if experiment.kind in ("language", "maps") and experiment.paper == "dape_v2"
    for item in make_plan(experiment, WORKSPACE).items
}
# Appendix F, and GPT-3's table for the larger ones: layers, width, heads, learning rate.
SIZES = {"125m": (12, 768, 12, 6e-4), "350m": (24, 1024, 16, 3e-4), "2.7b": (32, 2560, 32, 1.6e-4)}
GPT2_VOCABULARY = 50257


@pytest.mark.parametrize("size", SIZES)
def test_settings_are_the_published_ones(size: str) -> None:
    items = [item for item in RUNS.values() if item.train["preset"] == size]
    assert items
    layers, width, heads, rate = SIZES[size]
    for item in items:
        config = TrainConfig(**item.train)
        assert (config.steps, config.betas, config.precision) == (50_000, (0.9, 0.95), "fp16")
        assert (config.learning_rate, config.final_learning_rate) == (rate, pytest.approx(rate / 10))
        assert config.warmup_steps == config.steps // 100
        assert config.distributed != "none"
        assert config.score_width in (10, 21, 32, 64)
        model = config.model_config(GPT2_VOCABULARY)
        assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads) == (
            layers,
            width,
            heads,
        )
        # 32 windows on each of 8 GPUs, or as many tokens.
        tokens = config.batch_size * config.train_length
        assert config.batch_size == 256 or tokens == 128 * 256


@pytest.mark.parametrize("size", SIZES)
def test_models_of_the_published_sizes_build_on_the_meta_device(size: str) -> None:
    layers, width, _, _ = SIZES[size]
    methods = {item.method: item for item in RUNS.values() if item.train["preset"] == size}
    for item in methods.values():
        with torch.device("meta"):
            model = DapeForCausalLM(TrainConfig(**item.train).model_config(GPT2_VOCABULARY))
        counted = sum(parameter.numel() for parameter in model.parameters())
        body = counted - 2 * GPT2_VOCABULARY * width
        # Attention 4 width², MLP 8 width², Transformer-XL's projection of places 1 width² in each layer; biases,
        # norms, other encodings and convolutions are the rest.
        squares = 13 if item.method == "transformer-xl" else 12
        assert body == pytest.approx(squares * layers * width**2, rel=0.02), item.method


@pytest.mark.parametrize("method", sorted({item.method for item in RUNS.values()}))
def test_two_steps_at_reduced_width(method: str, tmp_path) -> None:
    item = next(item for item in RUNS.values() if item.method == method)
    text = tmp_path / "texts" / item.corpus.name
    text.mkdir(parents=True)
    for number in range(12):
        (text / f"{number}.txt").write_text(
            " ".join(f"{number * word % 31} and {word}" for word in range(90))
        )
    reduced = {"hidden_size": 48, "num_layers": 1, "num_heads": 12, "preset": "tiny", "tokenizer": "bytes"}
    reduced |= {"steps": 2, "warmup_steps": 1, "batch_size": 2, "precision": "fp32", "distributed": "none"}
    item = replace(item, train={**item.train, **reduced})
    where = item.corpus.locate(tmp_path / "texts", tmp_path / "corpora") | {"validation": "0,1"}
    train = {**item.train, **where, "data": str(tmp_path / "data"), "out": str(tmp_path / "run")}
    evaluation = {"last": 128, "windows": 2, "room": item.train_length, "lengths": [item.train_length]}
    spec = {"kind": "language", "train": train, "evaluation": evaluation, "jobs": 1}
    work({**spec, "result": str(tmp_path / "scores.json")})
    content = json.loads((tmp_path / "scores.json").read_text())
    assert content["training"]["steps"] == 2
    assert len(content["windows"][str(item.train_length)]) == 2


def test_commands_for_torchrun(tmp_path, capsys) -> None:
    options = ["--scale", "paper", "--papers", str(PAPERS), "--work", str(tmp_path / "work")]
    assert main(["reproduce", "baselines", *options, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    commands = [line for line in shown.splitlines() if line.startswith("torchrun")]
    assert len(commands) == 36
    assert "--nproc-per-node=8" in commands[0]
    assert 'the corpus "books3"' in shown
    assert "withdrawn" in shown
    specs = [Path(shlex.split(line)[-1]) for line in commands]
    assert {spec.stem for spec in specs} <= set(RUNS)
    for spec in specs:
        TrainConfig(**json.loads(spec.read_text())["train"])


def test_without_a_gpu_it_says_so(tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    options = ["--scale", "paper", "--papers", str(PAPERS), "--work", str(tmp_path)]
    assert main(["reproduce", "leakage", *options]) == 2
    assert "3 trainings of the paper's scale need GPUs" in capsys.readouterr().err
    # The nodes of a cluster have them: there only the text is missing.
    assert main(["reproduce", "leakage", *options, "--launcher", "slurm[partition=gpu]"]) == 2
    said = capsys.readouterr().err
    assert "need GPUs" not in said
    assert "arxiv" in said
    assert (
        main(["reproduce", "step_time", "--scale", "paper", "--papers", str(PAPERS), "--work", str(tmp_path)])
        == 2
    )
    assert "step_time times steps of the paper's models, for which it needs a GPU" in capsys.readouterr().err


def test_an_order_runs_on_several_processes(tmp_path) -> None:
    """As the commands say, but for the number of processes and the width; evaluated by the first of them alone."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(
            " ".join(f"{number * word % 31} and {word}" for word in range(90))
        )
    item = next(item for item in RUNS.values() if item.train["distributed"] == "fsdp")
    train = {**item.train, "preset": "tiny", "num_layers": 1, "hidden_size": 48, "num_heads": 12, "steps": 2}
    train |= {
        "warmup_steps": 1,
        "batch_size": 4,
        "tokenizer": "bytes",
        "precision": "fp32",
        "train_length": 32,
    }
    train |= {
        "corpus": str(text),
        "validation": "0,1",
        "data": str(tmp_path / "data"),
        "out": str(tmp_path / "run"),
    }
    order = {
        "kind": "language",
        "train": train,
        "jobs": 1,
        "threads": 0,
        "result": str(tmp_path / "scores.json"),
        "failure": str(tmp_path / "f"),
    }
    order["evaluation"] = {"last": 32, "windows": 2, "room": 64, "lengths": [32, 64]}
    (tmp_path / "order.json").write_text(json.dumps(order))
    words = shlex.split(torchrun_command(tmp_path / "order.json").replace(f"={GPUS}", "=2"))
    assert words[0] == "torchrun"
    launcher = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(launcher, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads((tmp_path / "scores.json").read_text())
    assert (content["training"]["steps"], list(content["windows"])) == (2, ["32", "64"])
