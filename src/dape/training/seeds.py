"""Randomness by name: seeds that are functions of what they are for, and initial weights drawn by them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import cast

import torch
from torch import nn


def derive_seed(*parts: object) -> int:
    """A 63-bit seed for whatever the parts name; other parts, another seed."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_generators(*parts: object) -> None:
    """Seed torch's global generators, so that what follows is a function of the parts."""
    seed = derive_seed(*parts)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw all parameters anew, each module's by a seed of its own name.

    Modules that two models share by name and shape then start equal, whatever else they contain: methods
    are compared from the same embeddings, projections, MLPs and head. The global generators are left alone.
    """
    draw = cast(Callable[[nn.Module], None], getattr(model, "_init_weights", _reset))
    with torch.random.fork_rng(devices=[]):
        # Children before parents, which may set their children anew.
        for name, module in reversed(list(model.named_modules())):
            torch.default_generator.manual_seed(derive_seed("initial", seed, name))
            draw(module)


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
