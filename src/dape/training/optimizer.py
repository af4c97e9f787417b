"""The optimizer and its schedule: AdamW, warm-up, cosine; decay for weight matrices alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dape.positions import PositionEncoding
from dape.scores import ScoreProcessor
from dape.training.settings import LoopSettings

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def undecayed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Positional, convolution and 1-D parameters: pulling those towards zero would shape what is compared."""
    owned = {
        parameter
        for module in model.modules()
        if isinstance(module, PositionEncoding | ScoreProcessor)
        for parameter in module.parameters()
    }
    return owned | {parameter for parameter in model.parameters() if parameter.dim() < 2}


def build_optimizer(
    model: nn.Module,
    settings: LoopSettings,
    device: torch.device,
    rate_factors: Mapping[nn.Parameter, float] | None = None,
) -> AdamW:
    """AdamW over the trainable parameters. rate_factors: of parameters that learn faster or slower than the others."""
    factors, undecayed = rate_factors or {}, undecayed_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter in undecayed else settings.weight_decay
            groups.setdefault((-decay, factors.get(parameter, 1.0)), []).append(parameter)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    described = [
        {"params": members, "weight_decay": -decay, "rate_factor": factor}
        for (decay, factor), members in sorted(groups.items(), key=lambda item: item[0])
    ]
    return AdamW(
        described, lr=settings.learning_rate, betas=settings.betas, fused=device.type in FUSED_DEVICES
    )


def learning_rate_at(step: int, settings: LoopSettings) -> float:
    """The rate of a step, counted from 1: linear up to the warm-up's end, then half a cosine down."""
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    after = max(1, settings.steps - settings.warmup_steps)
    fraction = min(1.0, (step - settings.warmup_steps) / after)
    final, height = settings.final_learning_rate, settings.learning_rate - settings.final_learning_rate
    return final + height * 0.5 * (1 + math.cos(math.pi * fraction))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_factor", 1.0)


def clip_gradient(model: nn.Module, limit: float) -> Tensor:
    """Scale the gradient down to the limit, if there is one; returns its norm before."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.clip_grad_norm_(parameters, limit or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
