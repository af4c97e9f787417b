"""Score convolution: heads are channels, the scores of queries and keys an image. DAPE and DAPE V2."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from torch import nn

from dape.ops.score_attention import ScoreProgram, Stage
from dape.ops.score_attention.program import Residual
from dape.scores.base import ScoreProcessor, StageConv, stage_tensors
from dape.settings import check_counts

Padding = Literal["same", "causal"]


class ScoreConv(ScoreProcessor):
    """S + B + project(LeakyReLU(expand([S ; B]))), two 1×k convolutions along the keys (Zheng et al. 2024).

    kernel_size 1 is DAPE, 3 and more is DAPE V2.

    query_kernel_size: number of queries that the kernel spans: a query's own and those before it.
    depth:     number of convolutions; those between `expand` and `project` keep the width.
    groups:    number of groups of heads; only heads of a group mix. The width is divided among the groups.
    bias_channels: whether the convolution reads the additive bias as well as the scores (not with NoPE or RoPE, which
               have none).
    padding:   "same": taps reach k//2 keys to the left and k − 1 − k//2 to the right; "causal": k − 1 to the left.
    residual:  "scores+bias" as above, or "scores" for S + project(…) alone.
    leak_future: the paper's leakage experiment: the convolution reads keys that the mask hides from a query.
    zero_init: initialise `project` to zero, so that training starts from plain attention.
    negative_slope: of the LeakyReLU; 1 makes the convolutions linear.
    """

    summary = "S + B + conv(LeakyReLU(conv([S ; B]))) over heads and keys"
    reference = "Zheng et al. 2024, arXiv 2410.04798"
    listed = ((1, 1), (1, 3), (1, 5), (1, 7), (3, 3))

    def __init__(
        self,
        num_heads: int,
        width: int = 32,
        *,
        kernel_size: int = 3,
        query_kernel_size: int = 1,
        depth: int = 2,
        groups: int = 1,
        bias_channels: bool = True,
        padding: Padding = "same",
        residual: Residual = "scores+bias",
        leak_future: bool = False,
        zero_init: bool = False,
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        check_counts(
            num_heads=num_heads,
            width=width,
            kernel_size=kernel_size,
            query_kernel_size=query_kernel_size,
            groups=groups,
        )
        if not isinstance(depth, SupportsIndex) or depth < 2:
            raise ValueError(f"depth={depth} must be a whole number, at least 2")
        for name, size in (("num_heads", num_heads), ("width", width)):
            if size % groups:
                raise ValueError(f"groups={groups} does not divide {name}={size}")
        if residual not in ("scores+bias", "scores"):
            raise ValueError(f'residual="{residual}", expected "scores+bias" or "scores"')
        self.left = left_reach(kernel_size, padding)
        self.residual: Residual = residual
        self.groups, self.leak_future, self.negative_slope = groups, leak_future, negative_slope
        channels = num_heads * (2 if bias_channels else 1)
        kernel = (query_kernel_size, kernel_size)
        self.expand = StageConv(channels, width, kernel, groups=groups)
        self.middle = nn.ModuleList(StageConv(width, width, kernel, groups=groups) for _ in range(depth - 2))
        self.project = StageConv(width, num_heads, kernel, groups=groups)
        if zero_init:
            for parameter in self.project.parameters():
                nn.init.zeros_(parameter)

    def program(self) -> ScoreProgram:
        stages: tuple[Stage, ...] = ()
        for conv in (self.expand, *self.middle):
            stages += (Stage(*stage_tensors(conv), self.left, self.groups, self.negative_slope),)
        stages += (Stage(*stage_tensors(self.project), self.left, self.groups),)
        return ScoreProgram(stages, residual=self.residual, leak_future=self.leak_future)


def left_reach(kernel_size: int, padding: Padding) -> int:
    """Number of taps to the left of a key."""
    reach = {"same": kernel_size // 2, "causal": kernel_size - 1}
    if padding not in reach:
        raise ValueError(f'padding="{padding}", expected "same" or "causal"')
    return reach[padding]
