"""Training and testing of models on generated tasks: the task for the training loop, its models, accuracy by length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dape.positions import randomized_positions
from dape.tasks.base import IGNORED, Task, generator_for
from dape.training import initialise

# Independent random streams.
TRAINING, TESTING = 0, 1
# Tokens in one forward pass of a test.
TOKENS_AT_ONCE = 16_384


def build_solver(
    task: Task, method: str, *, seed: int, num_layers: int, hidden_size: int, num_heads: int
) -> nn.Module:
    """Build a model for the task; modules that methods share start equal for a seed."""
    from dape.models import DapeConfig, DapeForCausalLM, Encoder

    if task.model == "encoder":
        model: nn.Module = Encoder(
            task.vocab_size, task.num_labels, method=method, num_layers=num_layers, hidden_size=hidden_size,
            num_heads=num_heads, intermediate_size=4 * hidden_size,
        )  # fmt: skip
    else:
        config = DapeConfig(
            method=method, vocab_size=task.vocab_size, num_hidden_layers=num_layers, hidden_size=hidden_size,
            num_attention_heads=num_heads,
        )  # fmt: skip
        model = DapeForCausalLM(config)
    initialise(model, seed)
    return model


def logits_of(task: Task, model: nn.Module, ids: Tensor, positions: Tensor | None) -> Tensor:
    """Logits [B, T, labels] of a model for the task."""
    if task.model == "encoder":
        return model(ids, positions=positions)
    return model(ids, position_ids=positions, use_cache=False).logits


@dataclass(frozen=True)
class GeneratedTask:
    """A generated task for `dape.training.fit`: each step draws a new batch of one random length.

    position_range: draw positions below this maximum (Ruoss et al. 2023), once per batch; None for 0, 1, 2, …
    settings: of the model and the task, as JSON data; an interrupted training continues with the same ones alone.
    """

    task: Task
    model: nn.Module
    batch_size: int
    lengths: Sequence[int]
    seed: int = 0
    position_range: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        own = {"batch_size": self.batch_size, "train_lengths": list(self.lengths), "seed": self.seed}
        return {**own, "position_range": self.position_range, **self.settings}

    def batch(self, step: int) -> dict[str, Tensor]:
        generator = generator_for(TRAINING, self.seed, step)
        length = int(generator.choice(np.asarray(self.lengths)))
        examples = self.task.examples(self.batch_size, length, generator)
        batch = {"ids": torch.from_numpy(examples.ids), "labels": torch.from_numpy(examples.labels)}
        positions = draw_positions(examples.ids.shape[1], self.position_range, generator)
        return batch if positions is None else {**batch, "positions": positions}

    def shard(self, batch: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
        """Every world-th row; positions are those of all rows."""
        return {
            name: value if name == "positions" else value[rank::world].contiguous()
            for name, value in batch.items()
        }

    def size(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross entropy over all labels, those after a termination token included."""
        logits = logits_of(self.task, model, batch["ids"], batch.get("positions"))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def draw_positions(
    num_tokens: int, position_range: int | None, generator: np.random.Generator
) -> Tensor | None:
    """Randomized positions [1, num_tokens], or None for consecutive ones."""
    if position_range is None:
        return None
    source = torch.Generator().manual_seed(int(generator.integers(2**62)))
    return randomized_positions(num_tokens, position_range, generator=source)


@torch.inference_mode()
def answers_by_length(
    task: Task,
    model: nn.Module,
    lengths: Iterable[int],
    samples: int,
    *,
    seed: int = 0,
    position_range: int | None = None,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By length, the numbers of right and of all answers in each of `samples` inputs, drawn by seed and length alone."""
    model.eval()
    device = next(model.parameters()).device
    result = {}
    for length in lengths:
        generator = generator_for(TESTING, seed, length)
        examples = task.examples(samples, length, generator)
        positions = draw_positions(examples.ids.shape[1], position_range, generator)
        positions = None if positions is None else positions.to(device)
        rows = max(1, TOKENS_AT_ONCE // examples.ids.shape[1])
        batches = torch.from_numpy(examples.ids).split(rows)
        answers = [logits_of(task, model, ids.to(device), positions).argmax(-1).cpu() for ids in batches]
        result[length] = (examples.right(torch.cat(answers).numpy()).sum(1), examples.counted.sum(1))
    return result
