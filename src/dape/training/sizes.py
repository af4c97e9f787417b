"""Whether a training fits the memory, by a lower bound that needs no model to be built."""

from __future__ import annotations

import os

import torch

from dape.data.tokenizers import bpe_size
from dape.devices import check_fits, find_device
from dape.training.config import TrainConfig


def check_memory(
    config: TrainConfig,
    *,
    device: torch.device | None = None,
    world: int | None = None,
    weights_alone: bool = False,
) -> None:
    """Raise if not even the weights with their moments, and the activations of one piece of a batch, fit."""
    world = int(os.environ.get("WORLD_SIZE", 1)) if world is None else world
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
        advice="take a smaller model or batch, or more pieces (--accumulate)",
        device=device or find_device(config.device),
    )
