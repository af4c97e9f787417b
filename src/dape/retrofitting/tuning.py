"""Continued training of a retrofitted model: next tokens, layer matching, distillation, skipped positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dape.retrofitting.attach import added_parameters
from dape.retrofitting.matching import LayerMatching
from dape.retrofitting.settings import ADDED_RATE
from dape.training.loop import derive_seed
from dape.training.run import LanguageModelling


class Tuning(LanguageModelling):
    """Language modelling in which added parameters learn `added_rate` times as fast.

    teacher: the base. The loss is `distill` times the Kullback–Leibler divergence from its next-token distribution,
             plus 1 − `distill` times the cross-entropy of the text.
    match_steps: number of initial steps that match each attention layer to the base's separately (`LayerMatching`).
    skip_length: positions of a window run up to so many tokens, with one gap (`skipped_positions`).
    """

    def __init__(
        self,
        model: nn.Module,
        ids: np.ndarray,
        *,
        train_length: int,
        batch_size: int,
        seed: int = 0,
        added_rate: float = ADDED_RATE,
        teacher: PreTrainedModel | None = None,
        distill: float = 0.0,
        match_steps: int = 0,
        skip_length: int | None = None,
    ) -> None:
        super().__init__(model, ids, train_length=train_length, batch_size=batch_size, seed=seed)
        if teacher is None and (distill or match_steps):
            raise ValueError(f"distill={distill} and match_steps={match_steps} need the base as a teacher")
        self.added_rate, self.skip_length = added_rate, skip_length
        self.teacher, self.distill, self.match_steps = teacher, distill, match_steps
        self.restarts = (match_steps,)
        self.step = 0

    def batch(self, step: int) -> Tensor:
        self.step = step
        return super().batch(step)

    def rate_factors(self) -> dict[nn.Parameter, float]:
        return dict.fromkeys(added_parameters(self.model), self.added_rate)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        teacher, options = self.teacher, {}
        if teacher is not None:
            nn.Module.to(teacher, inputs.device)
            if self.step < self.match_steps:
                return LayerMatching(model, teacher).loss(inputs)
        if self.skip_length is not None:
            draw = np.random.default_rng(derive_seed("skips", self.seed, self.step))
            positions = skipped_positions(len(inputs), self.train_length, self.skip_length, draw)
            # Without a mask, transformers takes a gap for the start of another document.
            options = {"position_ids": positions.to(inputs.device), "attention_mask": torch.ones_like(inputs)}
        logits = model(input_ids=inputs, use_cache=False, **options).logits.flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten())
        if teacher is None or not self.distill:
            return loss
        with torch.no_grad():
            taught = teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
        divergence = F.kl_div(
            logits.log_softmax(-1), taught.log_softmax(-1), reduction="batchmean", log_target=True
        )
        return self.distill * divergence + (1 - self.distill) * loss


def parameter_groups(
    model: nn.Module, learning_rate: float, *, added_rate: float = ADDED_RATE, weight_decay: float = 0.01
) -> list[dict[str, Any]]:
    """Parameter groups of a retrofitted model for any optimizer, such as Trainer's `optimizers`.

    added_rate: factor of the learning rate for added parameters, which have no weight decay; vectors have none either,
                at the usual rate.
    """
    added = added_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for value in model.parameters():
        if value.requires_grad:
            decays = value.dim() > 1 and value not in added
            rate, decay = added_rate if value in added else 1.0, weight_decay if decays else 0.0
            groups.setdefault((rate * learning_rate, decay), []).append(value)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def skipped_positions(rows: int, length: int, longest: int, draw: np.random.Generator) -> Tensor:
    """Positions [rows, length] below `longest`, with one gap per row, its place and size drawn (PoSE, Zhu et al. 2023)."""
    gap, place = draw.integers(0, longest - length + 1, (rows, 1)), draw.integers(1, length, (rows, 1))
    index = np.arange(length)
    return torch.from_numpy(index + np.where(index >= place, gap, 0))
