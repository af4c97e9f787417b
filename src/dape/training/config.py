"""Everything that a run is: one dataclass, by recipe, from a file, or from the command line."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from dape.data.preparation import parse_validation
from dape.methods import parse_layers
from dape.models import PRESETS, DapeConfig, preset
from dape.positions import POSITIONS
from dape.settings import setting
from dape.training.settings import LoopSettings


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model, by method and size."""

    method: str = setting(
        "dape1x3-kerple", help="Position encoding and score processor; `dape methods` lists them."
    )
    preset: str = setting(
        "tiny", help="Size of the model, and the recipe that goes with it: tiny, 125m, 350m, 2.7b, 6.7b."
    )
    num_layers: int | None = setting(None, help="Layers, where other than the preset's.", low=1, high=10_000)
    hidden_size: int | None = setting(None, help="Width, where other than the preset's.", low=1, high=2**20)
    num_heads: int | None = setting(None, help="Heads, where other than the preset's.", low=1, high=2**16)
    score_width: int = setting(32, help="Channels between the two convolutions.", low=1, high=2**16)
    dropout: float = setting(0.0, help="Dropout of what every layer adds.", low=0, below=1)
    randomized_positions: int | None = setting(
        None, help="Train on positions drawn from this many places, instead of 0, 1, 2, …", low=1, high=2**31
    )
    position_options: Annotated[dict[str, Any], tyro.conf.Suppress] = setting(
        default_factory=dict,
        help="Options of the position encoding, such as scaling and factor of RoPE (in a file or in Python; --position-option).",
    )
    score_options: Annotated[dict[str, Any], tyro.conf.Suppress] = setting(
        default_factory=dict,
        help="Further options of the score convolution (in a file or in Python; --score-option).",
    )
    backend: str = setting(
        "auto", help="Of the attention; auto takes the fastest that can run.", fixes_run=False
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text, its tokens, and how much of it makes a step."""

    corpus: str = setting(
        "stdlib",
        help="stdlib (this Python's library sources), a file, folder or glob, or hf:NAME[:SPLIT][:FIELD].",
    )
    tokenizer: str = setting(
        "bytes",
        help="bytes, bpe:VOCAB (trained on the training split), a tokenizer.json, or a Hugging Face name.",
    )
    validation: str = setting(
        "0.1",
        help="Documents held out: a fraction, or their names, separated by commas.",
        test=parse_validation,
    )
    field: str = setting("text", help="Where a JSON line or a parquet row has its text.")
    data: str | None = setting(
        None,
        help="Folder of packed tokens, made if absent; by default one beside the run, shared by runs on the same text.",
        fixes_run=False,
    )
    train_length: int = setting(64, help="Tokens in a training window.", low=1, high=2**24)
    batch_size: int = setting(16, help="Windows in a step, all processes together.", low=1, high=2**24)


# Fields of this order in --help: model, data, loop, run.
@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopSettings, DataSettings, ModelSettings):
    """All of `dape train`. The defaults suit the tiny preset; `recipe` has those of the others."""

    out: str | None = setting(
        None,
        help="The run's folder; by default runs/METHOD-PRESET-LENGTH-SEED. A run that is there is continued.",
        writes="folder",
        fixes_run=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model_config(vocab_size=256)

    @property
    def warmup_percent(self) -> int:
        return PAPER_WARMUP_PERCENT if self.preset in LEARNING_RATES else super().warmup_percent

    def model_config(self, vocab_size: int) -> DapeConfig:
        """The Hugging Face configuration of this run's model."""
        sizes = {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
        }
        return preset(
            self.preset,
            self.method,
            vocab_size=vocab_size,
            score_width=self.score_width,
            hidden_dropout=self.dropout,
            randomized_positions=self.randomized_positions,
            position_options=self.encoding_options(),
            score_options=dict(self.score_options),
            backend=self.backend,
            **{name: size for name, size in sizes.items() if size is not None},
        )

    def encoding_options(self) -> dict[str, Any]:
        """Options of the position encoding, those that follow the training length included."""
        encodings = {POSITIONS[layer.position] for layer in parse_layers(self.method)}
        # Layers with different encodings have no options in common.
        own = encodings.pop().trained_at(self.train_length) if len(encodings) == 1 else {}
        return {**own, **self.position_options}

    def held_out(self) -> float | list[str]:
        """What `prepare` takes as validation."""
        return parse_validation(self.validation)

    def resolved(self) -> TrainConfig:
        """The same with folders filled in, as absolute paths."""
        out = self.out or f"runs/{self.method}-{self.preset}-{self.train_length}-{self.seed}"
        text = json.dumps([self.corpus, self.tokenizer, self.validation, self.field])
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(self.corpus).name}-{self.tokenizer}").strip("-")
        name = f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        data = self.data or Path(out).parent / "data" / name
        return replace(self, out=str(Path(out).absolute()), data=str(Path(data).absolute()))


# What the paper trains with; final learning rate a tenth. Above 350m: GPT-3's learning rates.
PAPER_WARMUP_PERCENT = 1
PAPER = {
    "steps": 50_000,
    "batch_size": 256,
    "train_length": 512,
    "tokenizer": "gpt2",
    "checkpoint_every": 1000,
}
LEARNING_RATES = {"125m": 6e-4, "350m": 3e-4, "2.7b": 1.6e-4, "6.7b": 1.2e-4}


def recipe(size: str = "tiny", **changes: Any) -> TrainConfig:
    """The recipe of a preset, with whatever is to be changed: the paper's, or small settings for tiny."""
    if size not in PRESETS:
        raise ValueError(f'unknown preset "{size}": choose one of {", ".join(PRESETS)}')
    settings: dict[str, Any] = {"preset": size}
    if size in LEARNING_RATES:
        rate = LEARNING_RATES[size]
        precision = "fp16" if torch.cuda.is_available() else "fp32"
        settings |= {**PAPER, "learning_rate": rate, "final_learning_rate": rate / 10, "precision": precision}
    return TrainConfig(**{**settings, **changes})
