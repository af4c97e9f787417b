"""Score convolution: heads are channels, the scores of queries and keys an image."""

from __future__ import annotations

from typing import Literal, SupportsIndex, cast

from torch import Tensor, nn

from dape.ops.score_attention import ConvWeights
from dape.ops.score_attention.types import Residual
from dape.scores.base import ScoreProcessor

Padding = Literal["same", "causal"]


class KeyConv(nn.Conv2d):
    """A convolution along keys (and queries); called for its weights alone, since edges of visibility are the op's business."""

    zero_init = False

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_init:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)


class ScoreConv(ScoreProcessor):
    """S + B + project(LeakyReLU(expand([S ; B]))), two 1×k convolutions along the keys (Zheng et al. 2024).

    kernel_size 1 is DAPE, 3 and more is DAPE V2.

    query_kernel_size: more than 1 convolves over so many queries as well, a query's own and those before it. Rows
               then need earlier queries, which a cache of keys and values lacks.
    depth:     how many convolutions there are; those between `expand` and `project` keep the width.
    bias_channels: whether there is an additive bias to read beside the scores (not with NoPE or RoPE).
    padding:   "same": taps reach k//2 keys to the left and k − 1 − k//2 to the right; "causal": k − 1 to the left.
    residual:  "scores+bias" as above, or "scores" for S + project(…) alone.
    leak_future: the paper's cheating experiment; the convolution then reads keys that a query may not see.
    zero_init: start with `project` at zero, so that the module begins as plain attention.
    """

    summary = "convolutions over heads and neighbouring keys, two of 1×k in the paper"

    def __init__(
        self,
        num_heads: int,
        width: int = 32,
        *,
        kernel_size: int = 3,
        query_kernel_size: int = 1,
        depth: int = 2,
        bias_channels: bool = True,
        padding: Padding = "same",
        residual: Residual = "scores+bias",
        leak_future: bool = False,
        zero_init: bool = False,
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        sizes = {"num_heads": num_heads, "width": width, "kernel_size": kernel_size}
        for name, value in (sizes | {"query_kernel_size": query_kernel_size}).items():
            if not isinstance(value, SupportsIndex) or value < 1:
                raise ValueError(f"{name}={value} must be a whole number, at least 1")
        if not isinstance(depth, SupportsIndex) or depth < 2:
            raise ValueError(
                f"depth={depth} must be a whole number, at least 2: a convolution that expands, one that projects"
            )
        reach = {"same": kernel_size // 2, "causal": kernel_size - 1}
        if padding not in reach:
            raise ValueError(f'padding="{padding}", expected "same" or "causal"')
        if residual not in ("scores+bias", "scores"):
            raise ValueError(f'residual="{residual}", expected "scores+bias" or "scores"')
        self.num_heads, self.bias_channels = num_heads, bias_channels
        self.left = reach[padding]
        self.residual: Residual = residual
        self.leak_future, self.negative_slope = leak_future, negative_slope
        channels = num_heads * (2 if bias_channels else 1)
        kernel = (query_kernel_size, kernel_size)
        self.expand = KeyConv(channels, width, kernel)
        self.middle = nn.ModuleList(KeyConv(width, width, kernel) for _ in range(depth - 2))
        self.project = KeyConv(width, num_heads, kernel)
        self.project.zero_init = zero_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for conv in (self.expand, *self.middle, self.project):
            cast(KeyConv, conv).reset_parameters()

    def weights(self) -> ConvWeights:
        expand, *middle, project = (
            (cast(Tensor, conv.weight), cast(Tensor, conv.bias))
            for conv in (self.expand, *self.middle, self.project)
        )
        return ConvWeights(
            *expand,
            *project,
            self.left,
            self.residual,
            self.leak_future,
            self.negative_slope,
            tuple(middle),
        )

    @property
    def earlier_rows(self) -> int:
        return (2 + len(self.middle)) * (self.expand.kernel_size[0] - 1)

    def check(self, num_heads: int, *, has_bias: bool) -> None:
        if num_heads != self.num_heads:
            raise ValueError(
                f"scores of {num_heads} heads, but this convolution was built for {self.num_heads}"
            )
        if has_bias != self.bias_channels:
            have, need = ("a", "True") if has_bias else ("no", "False")
            raise ValueError(f"there is {have} bias: build the convolution with bias_channels={need}")

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, residual={self.residual}"
