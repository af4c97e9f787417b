"""How a loop trains: the settings that every task shares, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dape.devices import device_name
from dape.settings import SettingError, check, setting

Precision = Literal["fp32", "bf16", "fp16"]
Distributed = Literal["none", "ddp", "fsdp"]
CheckpointFormat = Literal["whole", "sharded"]

FINAL_LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Optimizer, schedule, precision, checkpoints and processes of a training run.

    What does not fix a run may change when it is continued: where and how it computes, not what.
    """

    # Warm-up, in percent of the steps, where none is given.
    WARMUP_PERCENT: ClassVar[int] = 6

    steps: int = setting(1000, help="Optimizer steps in all.", low=1, high=10**9)
    learning_rate: float = setting(
        2e-3, help="Highest learning rate, reached after the warm-up.", above=0, high=1000
    )
    final_learning_rate: float = setting(
        None,
        help="Learning rate of the last step, to which a cosine leads. Default: 1e-4, or the learning rate if less.",
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
    betas: tuple[float, float] = setting(
        (0.9, 0.95), help="AdamW's decay rates of the two moments.", low=0, below=1
    )
    weight_decay: float = setting(
        0.1,
        help="Decay of weight matrices; positional, convolution and 1-D parameters have none.",
        low=0,
        high=1000,
    )
    clip: float = setting(
        1.0, help="Largest norm of the gradient, all parameters together; 0 for no limit.", low=0, high=1e9
    )
    precision: Precision = setting(
        "fp32", help="Arithmetic of the forward pass; weights and optimizer stay in float32."
    )
    accumulate: int = setting(
        1,
        help="Pieces that a process's part of the batch is cut into, to save memory.",
        low=1,
        high=2**24,
        fixes_run=False,
    )
    compile: bool = setting(False, help="Run the model through torch.compile.", fixes_run=False)
    checkpoint_every: int = setting(
        200,
        help="Steps between checkpoints; one is also written at the end and on Ctrl-C or SIGTERM.",
        low=1,
        high=10**9,
        fixes_run=False,
    )
    keep_checkpoints: int = setting(
        2, help="How many checkpoints to keep.", low=1, high=10**6, fixes_run=False
    )
    checkpoint_format: CheckpointFormat = setting(
        "whole",
        help="""whole: one safetensors file, gathered; sharded: each process writes its part (for models too large
        for one process). Either continues on any number of processes.""",
        fixes_run=False,
    )
    log_every: int = setting(
        10,
        help="Steps between writes of metrics.jsonl; every step has its line all the same.",
        low=1,
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
    seed: int = setting(0, help="Of initial weights, data order and dropout.", low=0, high=2**63 - 1)
    distributed: Distributed = setting(
        "none",
        help="Under torchrun: ddp copies the model to every process, fsdp shares it out.",
        fixes_run=False,
    )
    device: str = setting(
        "auto", help="auto takes the GPU if there is one.", test=device_name, fixes_run=False
    )
    tensorboard: bool = setting(
        False, help="Write TensorBoard events into the run's folder.", fixes_run=False
    )
    wandb: str | None = setting(None, help="Send metrics to this Weights & Biases project.", fixes_run=False)

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            self._set(betas=tuple(self.betas))
        self.derive()
        check(self)
        if self.warmup_steps > self.steps:
            problem = f" of steps={self.steps}: the learning rate would never reach {self.learning_rate:g}"
            raise SettingError("warmup_steps", self.warmup_steps, problem)
        if self.final_learning_rate > self.learning_rate:
            problem = f" is more than learning_rate={self.learning_rate:g}, from which it should lead down"
            raise SettingError("final_learning_rate", self.final_learning_rate, problem)

    def derive(self) -> None:
        """Fill in what follows from other settings and was not given."""
        if self.warmup_steps is None and isinstance(self.steps, int):
            self._set(warmup_steps=max(1, round(self.steps * self.warmup_percent / 100)))
        if self.final_learning_rate is None and isinstance(self.learning_rate, float | int):
            self._set(final_learning_rate=min(FINAL_LEARNING_RATE, self.learning_rate))

    @property
    def warmup_percent(self) -> int:
        return self.WARMUP_PERCENT

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class FitResult:
    """How training went.

    steps:   of the whole run, those before a resumption included.
    seconds: spent in steps, over all resumptions; checkpoints and start-up are not counted.
    stopped_early: None, or what stopped it before the last step (SIGTERM, SIGINT, on_step).
    notes:   what was said on the way, such as a damaged checkpoint that was passed over.
    """

    steps: int
    final_loss: float
    seconds: float
    tokens: int
    stopped_early: str | None = None
    notes: tuple[str, ...] = ()


class TrainingStopped(ValueError):
    """Training cannot go on; the message says at which step, why, and what to try."""


class Diverged(TrainingStopped):
    """The loss is not a number any more, or many times what it was at the start."""


class DiskFull(TrainingStopped):
    """There was no room for a checkpoint or the metrics; earlier checkpoints are intact."""
