"""Linear convolution of the scores along the keys, each head separately: a control experiment for DAPE V2."""

from __future__ import annotations

from torch import nn

from dape.ops.score_attention import ScoreProgram
from dape.scores.base import ScoreProcessor, StageConv, linear_stage
from dape.scores.conv import Padding, left_reach
from dape.settings import check_counts


class KeyConv(ScoreProcessor):
    """B + Σₗ wₗ S[i, j − l], one kernel per head. By linearity, q · Σₗ wₗ kⱼ₋ₗ: a convolution of the keys.

    groups:  number of groups of heads that mix; num_heads by default, so none do; 1 mixes all heads, still linearly.
    padding: "same" or "causal", as in ScoreConv.

    Starts as the identity.
    """

    summary = "linear convolution along the keys, each head separately"
    reference = "a control of this library"
    listed = ((1, 3),)

    def __init__(
        self,
        num_heads: int,
        *,
        kernel_size: int = 3,
        query_kernel_size: int = 1,
        groups: int | None = None,
        padding: Padding = "same",
    ) -> None:
        super().__init__()
        self.groups = num_heads if groups is None else groups
        check_counts(
            num_heads=num_heads,
            kernel_size=kernel_size,
            query_kernel_size=query_kernel_size,
            groups=self.groups,
        )
        if num_heads % self.groups:
            raise ValueError(f"groups={groups} does not divide num_heads={num_heads}")
        self.left = left_reach(kernel_size, padding)
        self.conv = identity_conv(num_heads, (query_kernel_size, kernel_size), self.groups, self.left)

    def program(self) -> ScoreProgram:
        return ScoreProgram(linear_stage(self.conv, self.left, self.groups), residual="bias")


def identity_conv(num_heads: int, kernel: tuple[int, int], groups: int, left: int) -> StageConv:
    """Convolution over heads without offset, initialised to the identity."""
    conv = StageConv(num_heads, num_heads, kernel, groups=groups, bias=False)
    nn.init.zeros_(conv.weight)
    heads_per_group = num_heads // groups
    for head in range(num_heads):
        # The last row is the query's own.
        nn.init.ones_(conv.weight.data[head, head % heads_per_group, -1, left])
    return conv
