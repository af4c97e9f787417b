"""Ways to draw positions: consecutive, or a sorted sample from a larger range."""

from __future__ import annotations

import torch
from torch import Tensor


def randomized_positions(
    num_tokens: int,
    maximum: int,
    *,
    batch: int = 1,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """[batch, num_tokens] distinct integers below `maximum`, ascending, uniformly drawn (Ruoss et al. 2023).

    A model trained on such positions has met every distance below `maximum`, however short its inputs.
    """
    if maximum < num_tokens:
        raise ValueError(f"cannot draw {num_tokens} different positions below maximum={maximum}")
    rows = [torch.randperm(maximum, generator=generator)[:num_tokens].sort().values for _ in range(batch)]
    return (
        torch.stack(rows).to(device) if rows else torch.empty(0, num_tokens, dtype=torch.long, device=device)
    )
