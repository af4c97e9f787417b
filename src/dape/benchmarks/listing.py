"""The baseline that everything is measured against: the method computed eagerly, as the paper's listing does it.

Scores and bias of all heads become the channels of one T×T image, its upper triangle is set to zero, two padded
convolutions run over it, and the result is added to scores and bias. The image and both maps exist in full.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.program import Pair


def listing_attention(q: Tensor, k: Tensor, v: Tensor, conv: Pair, bias: Tensor) -> Tensor:
    """Causal attention output [B, H, T, D] for odd kernels; bias: [1, H, T, T].

    Its last k//2 rows depend on where the tensor ends, which those of the reference do not.
    """
    num_tokens, reach = q.shape[2], conv.kernel_size // 2
    scores = q @ k.mT / q.shape[-1] ** 0.5
    image = torch.cat((scores, bias.repeat(q.shape[0], 1, 1, 1)), dim=1).tril()
    hidden = F.conv2d(image, conv.expand_weight, conv.expand_bias, padding=(0, reach))
    refined = F.conv2d(
        F.leaky_relu(hidden, conv.negative_slope), conv.project_weight, conv.project_bias, padding=(0, reach)
    )
    ahead = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).triu(1)
    return (scores + bias + refined).masked_fill(ahead, -torch.inf).softmax(-1) @ v
