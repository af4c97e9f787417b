"""Key and value shift (Xu et al. 2024, arXiv 2411.19574): keys and values mixed with those of the token before."""

from __future__ import annotations

import torch
from torch import Tensor

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor, StageConv, linear_stage


class KeyShift(ScoreProcessor):
    """k'ⱼ = a kⱼ + b kⱼ₋₁ and v'ⱼ = c vⱼ + d vⱼ₋₁ with four learnable scalars per head; the first token has no other.

    As a program: logits B + a S[i, j] + b S[i, j − 1], and weights c P[i, j] + d P[i, j + 1] for the values as they are.
    With an encoding that rotates, keys are shifted first, as in the paper, and kept unrotated in caches. A retrofit of a
    model that rotates by itself shifts rotated keys. The partial key offset of modded-nanogpt is another method: it
    replaces the keys by those of the token before, on the features that do not rotate.

    keys, values: which of the two are shifted.
    zero_init:    start without a shift, (a, b) = (c, d) = (1, 0). By default each pair is the softmax of two normal
                  numbers, as in the authors' code for Baichuan-M1; the paper draws a and c uniformly between 0 and 1,
                  and b = 1 − a, d = 1 − c. Both have scalars per key-value head; here they are per query head.
    """

    summary = "keys and values mixed with the previous token's"
    reference = "Xu et al. 2024, arXiv 2411.19574"

    def __init__(
        self, num_heads: int, *, keys: bool = True, values: bool = True, zero_init: bool = False
    ) -> None:
        super().__init__()
        if not (keys or values):
            raise ValueError("keys=False and values=False shift nothing: use plain scores")
        self.num_heads, self.before_rotation = num_heads, keys
        self.keys = _pair(num_heads, zero_init, own=1) if keys else None
        self.values = _pair(num_heads, zero_init, own=0) if values else None

    def program(self) -> ScoreProgram:
        pre = linear_stage(self.keys, 1, self.num_heads)
        post = linear_stage(self.values, 0, self.num_heads)
        return ScoreProgram(pre, post, "bias" if pre else "scores+bias")


def _pair(num_heads: int, zero_init: bool, *, own: int) -> StageConv:
    """Two taps per head that sum to 1; `own` is the index of the token's own."""
    conv = StageConv(num_heads, num_heads, (1, 2), groups=num_heads, bias=False)
    taps: Tensor = (
        torch.eye(2)[own].expand(num_heads, 2) if zero_init else torch.randn(num_heads, 2).softmax(-1)
    )
    with torch.no_grad():
        conv.weight.copy_(taps[:, None, None])
    return conv
