"""Settings of a run (loop, model and data) in one dataclass; recipes and configuration files."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from dape.data.corpora import default_tokenizer, default_validation
from dape.data.preparation import parse_validation
from dape.data.tokenizers import bpe_size
from dape.data.tokens import read_manifest
from dape.devices import check_fits, device_name, find_device
from dape.files import parse_text
from dape.methods import LAYERS, parse_layers
from dape.positions import POSITIONS
from dape.settings import (
    COUNT,
    SEED,
    TOKENS,
    SettingError,
    check,
    check_choice,
    setting,
    type_hints,
    type_problem,
)

if TYPE_CHECKING:
    from dape.models import DapeConfig

Precision = Literal["fp32", "bf16", "fp16"]
Distributed = Literal["none", "ddp", "fsdp"]

FINAL_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Optimizer, schedule, precision, checkpoints and processes of a training run.

    Settings with `fixes_run=False` may change when a run is continued: they decide where and how it computes, not what.
    """

    steps: int = setting(1000, help="Optimizer steps.", **COUNT)
    learning_rate: float = setting(
        2e-3, help="Peak learning rate, reached after the warm-up.", above=0, high=1000
    )
    final_learning_rate: float = setting(
        None,
        help="Final learning rate of the cosine schedule. Default: 1e-4, or the learning rate if less.",
        low=0,
        high=1000,
    )
    warmup_steps: int = setting(
        None,
        help="Steps over which the learning rate rises linearly from zero. Default: 6 % of the steps, 1 % in the "
        "recipes of the paper.",
        low=0,
        high=10**9,
    )
    betas: tuple[float, float] = setting((0.9, 0.95), help="Betas of AdamW.", low=0, below=1)
    weight_decay: float = setting(
        0.1,
        help="Weight decay of matrices; positional, convolution and 1-D parameters have none.",
        low=0,
        high=1000,
    )
    clip: float = setting(
        1.0, help="Maximum gradient norm over all parameters; 0 disables clipping.", low=0, high=1e9
    )
    precision: Precision = setting(
        "fp32", help="Precision of the forward pass; weights and optimizer state stay in float32."
    )
    accumulate: int = setting(
        1,
        help="Micro-batches per process and step, to save memory (gradient accumulation).",
        low=1,
        high=2**24,
        fixes_run=False,
    )
    compile: bool = setting(False, help="Run the model through torch.compile.", fixes_run=False)
    checkpoint_every: int = setting(
        200,
        help="Steps between checkpoints; one is also written at the end and on Ctrl-C or SIGTERM.",
        **COUNT,
        fixes_run=False,
    )
    keep_checkpoints: int = setting(
        2, help="Number of checkpoints to keep.", low=1, high=10**6, fixes_run=False
    )
    log_every: int = setting(
        10,
        help="Steps between writes of metrics.jsonl, which has a line for every step.",
        **COUNT,
        fixes_run=False,
    )
    validate_every: int = setting(
        200,
        help="Steps between losses on held-out text, also of the last step: in metrics.jsonl as validation_loss, on "
        "the display and in the trackers; 0 for none. Not counted as training time.",
        low=0,
        high=10**9,
        fixes_run=False,
    )
    explosion: float = setting(
        3.0,
        help="Stop when the smoothed loss exceeds this many times the first loss.",
        above=0,
        high=1e9,
        fixes_run=False,
    )
    seed: int = setting(0, help="Seed of initial weights, data order and dropout.", **SEED)
    distributed: Distributed = setting(
        "none",
        help="Under torchrun: ddp replicates the model, fsdp shards it over the processes.",
        fixes_run=False,
    )
    device: str = setting(
        "auto", help="auto takes the GPU if there is one.", test=device_name, fixes_run=False
    )
    track: str | None = setting(
        None,
        help="Also send metrics to trackers, separated by commas: tensorboard, wandb, trackio, mlflow, or module:Class.",
        listed=str,
        fixes_run=False,
    )
    track_project: str = setting(
        "dape", help="Project of the runs in wandb and trackio, experiment in mlflow.", fixes_run=False
    )

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            self._set(betas=tuple(self.betas))
        self.derive()
        check(self)
        if self.warmup_steps > self.steps:
            problem = (
                f" exceeds steps={self.steps}: the learning rate would never reach {self.learning_rate:g}"
            )
            raise SettingError("warmup_steps", self.warmup_steps, problem)
        if self.final_learning_rate > self.learning_rate:
            problem = f" exceeds learning_rate={self.learning_rate:g}"
            raise SettingError("final_learning_rate", self.final_learning_rate, problem)

    def derive(self) -> None:
        """Fill in defaults that depend on other settings."""
        if self.warmup_steps is None and isinstance(self.steps, int):
            self._set(warmup_steps=max(1, round(self.steps * self.warmup_percent() / 100)))
        if self.final_learning_rate is None and isinstance(self.learning_rate, float | int):
            self._set(final_learning_rate=min(FINAL_LEARNING_RATE, self.learning_rate))

    def warmup_percent(self) -> int:
        """Default warm-up in percent of the steps."""
        return 6

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


class TrainingStopped(ValueError):
    """Training cannot continue; the message has the step, the reason and advice."""


@dataclass(frozen=True)
class FitResult:
    """Result of a training.

    steps:   total number of steps, those before a resumption included.
    seconds: spent in steps, over all resumptions; checkpoints and start-up are not counted.
    stopped_early: None, or what stopped it before the last step (SIGTERM, SIGINT, on_step).
    notes:   messages of the run, such as a damaged checkpoint that was set aside.
    """

    steps: int
    final_loss: float
    seconds: float
    tokens: int
    stopped_early: str | None = None
    notes: tuple[str, ...] = ()

    def complete(self) -> FitResult:
        """This result; raises TrainingStopped if training was stopped before its last step."""
        if self.stopped_early:
            raise TrainingStopped(
                f"training stopped by {self.stopped_early} after step {self.steps}; rerun the same command to continue"
            )
        return self


class Diverged(TrainingStopped):
    """The loss is not finite, or has grown to many times the first loss."""


class DiskFull(TrainingStopped):
    """The disk is full: a checkpoint or the metrics could not be written; earlier checkpoints are intact."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model, by method and size."""

    method: str = setting(
        "dape1x3-kerple", help="Position encoding and score processor; `dape methods` lists them."
    )
    preset: str = setting(
        "tiny", help="Size of the model, and the recipe that goes with it: tiny, 125m, 350m, 2.7b, 6.7b."
    )
    num_layers: int | None = setting(None, help="Layers. Default: the preset's.", low=1, high=10_000)
    hidden_size: int | None = setting(None, help="Width. Default: the preset's.", low=1, high=2**20)
    num_heads: int | None = setting(None, help="Heads. Default: the preset's.", low=1, high=2**16)
    score_width: int = setting(32, help="Hidden channels between the two convolutions.", low=1, high=2**16)
    dropout: float = setting(0.0, help="Dropout of every layer's residual branches.", low=0, below=1)
    randomized_positions: int | None = setting(
        None,
        help="Train on random increasing positions below this number, instead of 0, 1, 2, …",
        low=1,
        high=2**31,
    )
    position_options: dict[str, Any] = setting(
        default_factory=dict,
        help="Options of the position encoding, such as scaling and factor of RoPE (in a file or in Python; on the command line, in brackets after the method).",
        hidden=True,
    )
    score_options: dict[str, Any] = setting(
        default_factory=dict, help="Further options of the score convolution, likewise.", hidden=True
    )
    backend: str = setting(
        "auto", help="Backend of the attention op; auto takes the fastest that can run.", fixes_run=False
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text, its tokenizer, and the size of a step."""

    corpus: str = setting(
        None,
        help="python (long source files of installed packages), stdlib (this Python's library sources), a file, folder or "
        "glob, or hf:NAME[:SPLIT][:FIELD]. Default: that of --data, else python.",
    )
    tokenizer: str = setting(
        None,
        help="bytes, bpe:VOCAB (trained on the training split), a tokenizer.json, or a Hugging Face name. Default: that of "
        "--data, else bpe:2048 for python and bytes for other text.",
    )
    validation: str = setting(
        None,
        help="Documents held out: a fraction, or names of documents or folders/, separated by commas. Default: those of "
        "--data, else three whole packages of python, a tenth of other text.",
        test=parse_validation,
    )
    field: str = setting(None, help="Field of a JSON line, or column of a parquet file, that holds the text.")
    data: str | None = setting(
        None,
        help="Folder of packed tokens, created if absent; by default one next to the run, shared by runs on the same text. "
        "An existing folder suffices: it records its corpus, tokenizer and held-out documents, and does not need the text.",
        fixes_run=False,
    )
    train_length: int = setting(64, help="Tokens in a training window.", **TOKENS)
    batch_size: int = setting(16, help="Batch size: windows per step, over all processes.", **TOKENS)


# Defaults of the settings that determine the tokens, if neither the user nor packed data gives them; in this order, as
# functions of the corpus.
DATA_DEFAULTS: dict[str, Callable[[str], str]] = {
    "corpus": lambda corpus: "python",
    "tokenizer": default_tokenizer,
    "validation": default_validation,
    "field": lambda corpus: "text",
}


def packed_recipe(folder: str | None) -> dict[str, str]:
    """Corpus, tokenizer, validation and field of packed data, as options; empty if there is none."""
    if not isinstance(folder, str) or not (Path(folder) / "manifest.json").exists():
        return {}
    recipe = read_manifest(folder)["recipe"]
    held_out = recipe["validation"]
    validation = ",".join(held_out) if isinstance(held_out, list) else f"{held_out:g}"
    return {**{name: recipe[name] for name in DATA_DEFAULTS}, "validation": validation}


# Order of the fields in --help: model, data, loop, run.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopSettings, DataSettings, ModelSettings):
    """All settings of `dape train`. The defaults suit the tiny preset; `recipe` has those of the others."""

    out: str | None = setting(
        None,
        help="Folder of the run; by default runs/METHOD-PRESET-LENGTH-SEED. An existing run is continued.",
        writes="folder",
        fixes_run=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > self.batch_size:
            problem = f" exceeds batch_size={self.batch_size}: every micro-batch needs a window"
            raise SettingError("accumulate", self.accumulate, problem)
        if self.randomized_positions is not None and self.randomized_positions < self.train_length:
            problem = (
                f" is less than train_length={self.train_length}: the positions of a window are distinct"
            )
            raise SettingError("randomized_positions", self.randomized_positions, problem)
        parse_layers(self.method)

    def derive(self) -> None:
        super().derive()
        packed = packed_recipe(self.data)
        for name, default in DATA_DEFAULTS.items():
            if getattr(self, name) is None:
                self._set(**{name: packed.get(name) or default(self.corpus)})

    def warmup_percent(self) -> int:
        return 1 if self.preset in LEARNING_RATES else super().warmup_percent()

    def model_config(self, vocab_size: int) -> DapeConfig:
        """The Hugging Face configuration of this run's model."""
        from dape.models import preset

        sizes = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
        }
        method, options = self.method_and_options()
        return preset(
            self.preset,
            method,
            vocab_size=vocab_size,
            score_width=self.score_width,
            hidden_dropout=self.dropout,
            randomized_positions=self.randomized_positions,
            position_options=options,
            score_options=dict(self.score_options),
            backend=self.backend,
            max_position_embeddings=self.train_length,
            **{name: size for name, size in sizes.items() if size is not None},
        )

    def method_and_options(self) -> tuple[str, dict[str, Any]]:
        """The method and the options of its encodings, with those that depend on the training length."""
        layers, derived = parse_layers(self.method), []
        for layer in layers:
            given = {**dict(layer.options), **self.position_options}
            options = POSITIONS[layer.position].trained_at(self.train_length, given)
            derived.append({name: value for name, value in options.items() if name not in given})
        if all(options == derived[0] for options in derived):
            return self.method, {**derived[0], **self.position_options}
        # A model's options are those of every layer: layers that differ have their own in the name.
        names = [
            replace(layer, options=tuple(sorted({**dict(layer.options), **options}.items()))).name
            for layer, options in zip(layers, derived, strict=True)
        ]
        return LAYERS.join(names), dict(self.position_options)

    def resolved(self) -> TrainConfig:
        """The same settings with default folders filled in, as absolute paths."""
        out = self.out or f"runs/{self.method}-{self.preset}-{self.train_length}-{self.seed}"
        text = json.dumps([self.corpus, self.tokenizer, self.validation, self.field])
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(self.corpus).name}-{self.tokenizer}").strip("-")
        name = f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        data = self.data or Path(out).parent / "data" / name
        return replace(self, out=str(Path(out).absolute()), data=str(Path(data).absolute()))


Config = TypeVar("Config", bound=TrainConfig)
# Settings of the paper; final learning rate a tenth. Above 350m: GPT-3's learning rates.
PAPER = {
    "steps": 50_000,
    "batch_size": 256,
    "train_length": 512,
    "tokenizer": "gpt2",
    "checkpoint_every": 1000,
}
LEARNING_RATES = {"125m": 6e-4, "350m": 3e-4, "2.7b": 1.6e-4, "6.7b": 1.2e-4}


def recipe(size: str = "tiny", kind: type[Config] = TrainConfig, **changes: Any) -> Config:  # type: ignore[assignment]  # mypy: of a type variable
    """Settings of a preset, the paper's or small ones for tiny, with `changes` applied."""
    check_choice("preset", size, ("tiny", *LEARNING_RATES))
    settings: dict[str, Any] = {"preset": size}
    if size in LEARNING_RATES:
        rate = LEARNING_RATES[size]
        precision = "fp16" if torch.cuda.is_available() else "fp32"
        settings |= {**PAPER, "learning_rate": rate, "final_learning_rate": rate / 10, "precision": precision}
    return kind(**{**settings, **changes})


def read_config(path: str | Path) -> dict[str, Any]:
    """Read options by the names of TrainConfig's fields from a TOML, YAML or JSON file."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no configuration file {path}")
    try:
        if path.suffix.lower() not in (".toml", ".yaml", ".yml", ".json"):
            raise ValueError(f'"{path.suffix}" is not a configuration format: use .toml, .yaml or .json')
        content = parse_text(path.read_text("utf-8"), path.suffix.lower())
        if not isinstance(content, dict):
            raise ValueError("expected a table of options")
        return checked(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """The options converted to their fields' types; raises for an unknown name or a wrong type."""
    hints, result = {member.name: type_hints(TrainConfig)[member.name] for member in fields(TrainConfig)}, {}
    for name, value in options.items():
        key = str(name).replace("-", "_")
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            raise ValueError(
                f'there is no option "{name}"' + (f'; did you mean "{near[0]}"?' if near else "")
            )
        result[key] = _converted(value, hints[key])
        if problem := type_problem(result[key], hints[key]):
            raise SettingError(key, value, problem)
    return result


def _converted(value: Any, hint: Any) -> Any:
    """A value of a file in its type. YAML reads 2e-3, without a point, as text; a fraction may be meant as text."""
    kinds = {hint, *typing.get_args(hint)}
    if isinstance(value, list):
        return tuple(_converted(item, next(iter(typing.get_args(hint)), Any)) for item in value)
    if float in kinds and isinstance(value, str | int) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    if str in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def check_memory(
    config: TrainConfig,
    *,
    device: torch.device | None = None,
    weights_alone: bool = False,
) -> None:
    """Raise if weights, gradients, moments and the activations of one micro-batch exceed free memory."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    model = config.model_config(vocab_size=256)
    width, layers = model.hidden_size, model.num_hidden_layers
    vocabulary = max(256, bpe_size(config.tokenizer) or 0)
    # Weights, gradients and two moments in float32; attention and MLP have 12 matrices of width × width.
    weights = 16 * (12 * layers * width**2 + 2 * vocabulary * width)
    weights //= world if config.distributed == "fsdp" else 1
    rows = max(1, config.batch_size // (world * config.accumulate))
    activations = 4 * rows * config.train_length * (2 * vocabulary + 8 * layers * width)
    check_fits(
        weights if weights_alone else weights + activations,
        f"a model of {layers} layers of width {width}"
        + ("" if weights_alone else f" with {rows} × {config.train_length} tokens at a time"),
        advice="take a smaller model or batch, or more micro-batches (--accumulate)",
        device=device or find_device(config.device),
    )
