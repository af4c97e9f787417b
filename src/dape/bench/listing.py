"""Baseline of the benchmarks: a score program computed eagerly, as in the paper's listing.

Scores and bias of all heads become the channels of one T×T image, its upper triangle is set to zero, padded
convolutions run over it, and the result is added to scores and bias. The image and all maps exist in full.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.program import ScoreProgram, Stage
from dape.ops.score_attention.reference import image_of


def listing_attention(q: Tensor, k: Tensor, v: Tensor, program: ScoreProgram, bias: Tensor) -> Tensor:
    """Causal attention output [B, H, T, D] of a program with a softmax; bias: [1, H, T, T].

    If taps reach right, its last rows depend on the end of the tensor, unlike those of the reference.
    """
    num_tokens = q.shape[2]
    ahead = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    logits = scores + bias
    if program.pre:
        residual = {"scores+bias": logits, "scores": scores, "bias": bias, "none": 0.0}[program.residual]
        image = image_of(scores, bias.repeat(q.shape[0], 1, 1, 1), program).tril()
        logits = residual + _convolved(image, program.pre)
    weights = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    if program.post:
        weights = _convolved(weights, program.post).tril()
    return weights @ v


def _convolved(image: Tensor, stages: tuple[Stage, ...]) -> Tensor:
    for stage in stages:
        padding = (0, stage.left)
        if stage.left != stage.right or stage.query_kernel_size > 1:
            image = F.pad(image, (stage.left, stage.right, stage.query_kernel_size - 1, 0))
            padding = (0, 0)
        image = F.conv2d(image, stage.weight, stage.offset, padding=padding, groups=stage.groups)
        if stage.slope != 1:
            image = F.leaky_relu(image, stage.slope)
    return image
