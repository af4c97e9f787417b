"""Training a retrofitted model on by our loop: distillation from the base, text that the base samples."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from dape.retrofitting.attach import adapter_parameters
from dape.retrofitting.rates import ADDED_RATE
from dape.training.run import LanguageModelling


class Tuning(LanguageModelling):
    """Language modelling at the base's own length; what was added learns `added_rate` times as fast.

    teacher: the base, whose distribution of the next token is learned in the share `distill` of the loss
             (Kullback–Leibler divergence), the rest being the text's own next token.
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
        teacher: nn.Module | None = None,
        distill: float = 0.0,
    ) -> None:
        super().__init__(model, ids, train_length=train_length, batch_size=batch_size, seed=seed)
        self.added_rate, self.teacher, self.distill = added_rate, teacher, distill

    def rate_factors(self) -> dict[nn.Parameter, float]:
        return dict.fromkeys(adapter_parameters(self.model).values(), self.added_rate)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        if self.teacher is None or not self.distill:
            return super().loss(model, batch)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
        with torch.no_grad():
            taught = self.teacher.to(inputs.device)(input_ids=inputs, use_cache=False).logits
        divergence = F.kl_div(
            logits.log_softmax(-1),
            taught.flatten(0, 1).float().log_softmax(-1),
            reduction="batchmean",
            log_target=True,
        )
        return self.distill * divergence + (1 - self.distill) * F.cross_entropy(logits, targets.flatten())


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    count: int,
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
    batch_size: int = 16,
    progress: Callable[[int], object] | None = None,
) -> np.ndarray:
    """Token ids [count, length] that the model writes by itself, beginning with its first token.

    progress: hears how many rows are done.
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
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            written.append(token)
        rows.append(torch.cat(written, 1).cpu().numpy())
    return np.concatenate(rows)


def _first_tokens(model: PreTrainedModel, count: int, generator: torch.Generator) -> Tensor:
    """[count, 1]: the token that texts begin with, or any where the model names none."""
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(model.config.get_text_config(), name, None)
        token = token[0] if isinstance(token, list) else token
        if token is not None:
            return torch.full((count, 1), token, device=model.device)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (count, 1), generator=generator, device=model.device)
