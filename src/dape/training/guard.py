"""Watches the loss: not a number, or many times what it was at the start, ends a run with advice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dape.training.metrics import Record
from dape.training.settings import Diverged, LoopSettings

SMOOTHING = 0.9


@dataclass
class Guard:
    """The first loss and the smoothed one; both belong into a checkpoint."""

    first: float | None = None
    smoothed: float = 0.0

    def watch(self, record: Record, settings: LoopSettings) -> None:
        """Take in a step's record; raise Diverged where it says that training has failed."""
        loss = record["loss"]
        # With fp16 the scaler skips a step whose gradient overflowed; only the loss itself is a failure.
        norm = 0.0 if settings.precision == "fp16" else record["gradient_norm"]
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise Diverged(self._sentence(f"the {name} became {value}", record, settings))
        self.first = loss if self.first is None else self.first
        self.smoothed = SMOOTHING * self.smoothed + (1 - SMOOTHING) * loss if self.smoothed else loss
        if self.smoothed > settings.explosion * max(self.first, 0.0) > 0:
            grown = f"the smoothed loss grew to {self.smoothed:.3g}, from {self.first:.3g} at the first step,"
            raise Diverged(self._sentence(grown, record, settings))

    def _sentence(self, what: str, record: Record, settings: LoopSettings) -> str:
        advice = [f"a lower --learning-rate than {settings.learning_rate:g}"]
        advice.append(f"more --warmup-steps than {settings.warmup_steps}")
        if settings.clip == 0 or settings.clip > 1:
            advice.append("--clip 1")
        if settings.precision != "fp32":
            advice.append("--precision fp32")
        return (
            f"{what} at step {int(record['step'])} (learning rate {record['learning_rate']:.3g}, gradient norm "
            f"{record['gradient_norm']:.3g}): try {', or '.join(advice)}"
        )
