"""Losses of target tokens under any causal language model, in memory that grows with the length alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Number of logits in memory at a time (128 MB of float32).
LOGITS = 1 << 25
# Input tokens of one forward pass, unless a single window has more.
BATCH_TOKENS = 1 << 13
# Reduction of logits [B, T, vocabulary] and targets [B, T].
Measure = Callable[[Tensor, Tensor], Tensor]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses [B, T] from logits [B, T, vocabulary], in float32 or finer."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


class Evaluator:
    """A model as a function from windows to values of their targets; use it inside `evaluating(model)`.

    positions: returns the position_ids [1, T] for inputs of T tokens; by default the model counts from 0.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_tokens: int = BATCH_TOKENS,
        positions: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.model, self.batch_tokens = model, batch_tokens
        self.positions: Callable[[int], Tensor] | None = None
        self.device = next(model.parameters()).device
        accepted = inspect.signature(model.forward).parameters
        self.options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        self.keeps = "logits_to_keep" in accepted
        self.vocab_size, self.head = _head(model)
        body = getattr(model, "base_model", model)
        self.spares = "last_rows" in inspect.signature(body.forward).parameters
        if self.head is not None and not self._head_is_all():
            self.head = None
        self.positions = positions

    def batch_size(self, length: int, last: int) -> int:
        """Number of windows per forward pass."""
        rows = last if self.keeps else length
        room = LOGITS // (rows * self.vocab_size) if self.head is None else self.batch_tokens
        return max(1, min(self.batch_tokens // length, room))

    @torch.no_grad()
    def values(self, ids: np.ndarray, last: int, measures: Sequence[Measure] = (token_losses,)) -> np.ndarray:
        """Every measure of the last `last` tokens of each window [n, last, measures], of ids [n, length + 1]."""

        def measure(logits: Tensor, targets: Tensor) -> Tensor:
            return torch.stack([one(logits, targets) for one in measures], -1)

        window = torch.from_numpy(ids).to(self.device)
        if int(ids.max()) >= self.vocab_size:
            raise ValueError(
                f"token {int(ids.max())} is outside the model's vocabulary of {self.vocab_size}: "
                f"the data was made with another tokenizer"
            )
        inputs, targets = window[:, :-1], window[:, -last:]
        compute = self._by_head if self.head is not None else self._by_logits
        try:
            return compute(inputs, targets, measure).cpu().numpy()
        except IndexError as error:
            raise ValueError(_too_long(self.model, inputs.shape[1])) from error

    def _by_logits(self, inputs: Tensor, targets: Tensor, measure: Measure) -> Tensor:
        keep = {"logits_to_keep": targets.shape[1]} if self.keeps else {}
        return measure(
            _logits(self.model(inputs, **self._options(inputs), **keep))[:, -targets.shape[1] :], targets
        )

    def _by_head(self, inputs: Tensor, targets: Tensor, measure: Measure) -> Tensor:
        """Apply the output layer separately, to as many rows at a time as fit."""
        assert self.head is not None
        rows = targets.shape[1]
        hidden = self._hidden(inputs, rows)[:, -rows:]
        step = max(1, LOGITS // (len(targets) * self.vocab_size))
        parts = [
            measure(self.head(hidden[:, start : start + step]), targets[:, start : start + step])
            for start in range(0, rows, step)
        ]
        return torch.cat(parts, dim=1)

    def _hidden(self, inputs: Tensor, rows: int) -> Tensor:
        """Hidden states [B, T or rows, hidden]; models that can, skip the other rows in the last layer."""
        last = {"last_rows": rows} if self.spares else {}
        output = cast(Any, self.model).base_model(inputs, **self._options(inputs), **last)
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def _options(self, inputs: Tensor) -> dict[str, Any]:
        if self.positions is None:
            return self.options
        return {**self.options, "position_ids": self.positions(inputs.shape[1]).to(inputs.device)}

    @torch.no_grad()
    def _head_is_all(self) -> bool:
        """Whether logits are exactly the output layer of the hidden states (some models cap them)."""
        assert self.head is not None
        probe = torch.arange(8, device=self.device)[None] % self.vocab_size
        try:
            whole, parts = _logits(self.model(probe, **self.options)), self.head(self._hidden(probe, 8))
        except (AttributeError, TypeError):
            return False
        return whole.shape == parts.shape and torch.equal(whole, parts)


@contextlib.contextmanager
def evaluating(model: nn.Module, **options: Any) -> Iterator[Evaluator]:
    """Context with an evaluator of the model, which is in evaluation mode meanwhile."""
    training = model.training
    model.eval()
    try:
        yield Evaluator(model, **options)
    finally:
        model.train(training)


def _head(model: nn.Module) -> tuple[int, nn.Module | None]:
    """Vocabulary size, and the output layer of a transformers model."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if head is not None and getattr(model, "base_model", model) is not model:
        return int(head.weight.shape[0]), head
    config = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if size is None:
        raise ValueError(f"a {type(model).__name__} has no config.vocab_size")
    return int(size), None


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.logits


def _too_long(model: nn.Module, length: int) -> str:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    known = "" if limit is None else f" (it has embeddings for {limit} positions)"
    return f"the model cannot take an input of {length} tokens{known}: evaluate shorter lengths"
