"""How a loop trains: the settings that every task shares, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
Distributed = Literal["none", "ddp", "fsdp"]
CheckpointFormat = Literal["whole", "sharded"]

# A run continues in its folder only with these unchanged: they decide what every step computes.
FIXED_WITHIN_A_RUN = (
    "steps",
    "learning_rate",
    "final_learning_rate",
    "warmup_steps",
    "betas",
    "weight_decay",
    "clip",
    "precision",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Optimizer, schedule, precision, checkpoints and processes of a training run."""

    steps: int = 1000
    """Optimizer steps in all."""
    learning_rate: float = 2e-3
    """Highest learning rate, reached after the warm-up."""
    final_learning_rate: float = 1e-4
    """Learning rate of the last step; a cosine leads there."""
    warmup_steps: int = 60
    """Steps over which the learning rate rises linearly from zero."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.1
    """Decay of weight matrices; positional, convolution and 1-D parameters have none."""
    clip: float = 1.0
    """Largest norm of the gradient, all parameters together; 0 for no limit."""
    precision: Precision = "fp32"
    """Arithmetic of the forward pass; weights and optimizer stay in float32."""
    accumulate: int = 1
    """Pieces that a process's part of the batch is cut into, to save memory."""
    compile: bool = False
    """Run the model through torch.compile."""
    checkpoint_every: int = 200
    """Steps between checkpoints; one is also written at the end and on Ctrl-C or SIGTERM."""
    keep_checkpoints: int = 2
    """How many checkpoints to keep."""
    checkpoint_format: CheckpointFormat = "whole"
    """whole: one safetensors file, gathered; sharded: each process writes its part (for models too large
    for one process). Either continues on any number of processes."""
    log_every: int = 10
    """Steps between writes of metrics.jsonl; every step has its line all the same."""
    explosion: float = 3.0
    """Stop when the smoothed loss exceeds this many times the first loss."""
    seed: int = 0
    """Of initial weights, data order and dropout."""
    distributed: Distributed = "none"
    """Under torchrun: ddp copies the model to every process, fsdp shares it out."""
    device: str = "auto"
    """auto takes the GPU if there is one."""
    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""
    wandb: str | None = None
    """Send metrics to this Weights & Biases project."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        at_least = {"steps": 1, "accumulate": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "log_every": 1}
        at_least |= {"warmup_steps": 0, "weight_decay": 0, "clip": 0, "final_learning_rate": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("learning_rate", "explosion"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be at least 0 and less than 1")
        choices = {
            "precision": ("fp32", "bf16", "fp16"),
            "distributed": ("none", "ddp", "fsdp"),
            "checkpoint_format": ("whole", "sharded"),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(f'{name}="{getattr(self, name)}": choose one of {", ".join(values)}')


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
