"""Continued training of a retrofitted model: layer matching, distillation, and text sampled from the base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from dape.positions import PositionEncoding
from dape.retrofitting.matching import LayerMatching, Overlapping
from dape.retrofitting.settings import ADDED_RATE
from dape.scores import ScoreProcessor
from dape.training.run import LanguageModelling


class Tuning(LanguageModelling):
    """Language modelling at the base's own length; added parameters learn `added_rate` times as fast.

    teacher: the base. The loss is `distill` times the Kullback–Leibler divergence from its next-token distribution,
             plus 1 − `distill` times the cross-entropy of the text.
    predicted_share: share of a window's positions, drawn anew at each step, whose next token is predicted: the output
             layer over the vocabulary dominates the cost of a small model.
    match_steps: number of initial steps that match each attention layer to the base's separately (`LayerMatching`).
    teacher_length: window length of the teacher; longer training windows are split into `Overlapping` ones.
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
        predicted_share: float = 1.0,
        match_steps: int = 0,
        teacher_length: int | None = None,
    ) -> None:
        super().__init__(model, ids, train_length=train_length, batch_size=batch_size, seed=seed)
        if teacher is None and (distill or match_steps):
            raise ValueError(f"distill={distill} and match_steps={match_steps} need the base as a teacher")
        self.added_rate, self.teacher, self.distill = added_rate, teacher, distill
        self.predicted_share, self.match_steps = predicted_share, match_steps
        self.overlapping = Overlapping(min(train_length, teacher_length or train_length))
        self.step = 0

    def batch(self, step: int) -> Tensor:
        self.step = step
        return super().batch(step)

    def rate_factors(self) -> dict[nn.Parameter, float]:
        new = (m for m in self.model.modules() if isinstance(m, PositionEncoding | ScoreProcessor))
        return dict.fromkeys((value for module in new for value in module.parameters()), self.added_rate)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        teacher = self.teacher
        if teacher is not None:
            nn.Module.to(teacher, inputs.device)
        if teacher is not None and self.step < self.match_steps:
            return LayerMatching(model, teacher, length=self.overlapping.length).loss(inputs)
        if teacher is None or not self.distill:
            return self._language_loss(model, inputs, targets)
        own: dict[str, Any] = {"use_cache": False}
        taught = dict(own)
        if self.predicted_share < 1 or inputs.shape[1] > self.overlapping.length:
            within, index = self.overlapping.positions(self.predicted_share, inputs.shape[1])
            own["logits_to_keep"] = index = index.to(inputs.device)
            taught["logits_to_keep"], targets = within.to(inputs.device), targets[:, index]
        logits = model(input_ids=inputs, **own).logits.flatten(0, 1).float()
        with torch.no_grad():
            teaching = teacher(input_ids=self.overlapping.windows(inputs), **taught).logits
        divergence = F.kl_div(
            logits.log_softmax(-1),
            teaching.flatten(0, 1).float().log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        if self.distill == 1:
            return divergence
        return self.distill * divergence + (1 - self.distill) * F.cross_entropy(logits, targets.flatten())

    def _language_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        options: dict[str, Any] = {"use_cache": False}
        if self.predicted_share < 1:
            count = max(1, round(self.predicted_share * inputs.shape[1]))
            index = torch.randperm(inputs.shape[1])[:count].to(inputs.device)
            options["logits_to_keep"], targets = index, targets[:, index]
        logits = model(input_ids=inputs, **options).logits.flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten())


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    count: int,
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    batch_size: int = 64,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Sample token ids [count, length] from the model, beginning with its first token.

    progress: called with the number of finished rows.
    """
    model.eval()
    generator = torch.Generator(model.device).manual_seed(seed)
    rows: list[np.ndarray] = []
    while (done := sum(len(row) for row in rows)) < count:
        if progress is not None:
            progress(done)
        token = _first_tokens(model, min(batch_size, count - done), generator)
        cache, written = DynamicCache(config=model.config), [token]
        for _ in range(length - 1):
            logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1].float()
            # One random number per row, not one per vocabulary entry: several times cheaper than torch.multinomial.
            reached = (logits / temperature).softmax(-1).cumsum(-1)
            drawn = torch.rand(len(token), 1, generator=generator, device=model.device) * reached[:, -1:]
            token = torch.searchsorted(reached, drawn).clamp(max=reached.shape[-1] - 1)
            written.append(token)
        rows.append(torch.cat(written, 1).cpu().numpy())
    return np.concatenate(rows)


def _first_tokens(model: PreTrainedModel, count: int, generator: torch.Generator) -> Tensor:
    """First tokens [count, 1]: the model's beginning- or end-of-text token, or random ones if it has neither."""
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(model.config.get_text_config(), name, None)
        token = token[0] if isinstance(token, list) else token
        if token is not None:
            return torch.full((count, 1), token, device=model.device)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (count, 1), generator=generator, device=model.device)
