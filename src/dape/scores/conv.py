"""Score convolution: heads are channels, each query's row of scores is an image one pixel high."""

from __future__ import annotations

from typing import Literal

from torch import nn

from dape.ops.score_conv_attention import ConvWeights
from dape.ops.score_conv_attention.types import Residual
from dape.scores.base import ScoreProcessor

Padding = Literal["same", "causal"]


class KeyConv(nn.Conv2d):
    """A convolution along the keys; called for its weights alone, since edges of visibility are the op's business."""

    zero_init = False

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.zero_init:
            for parameter in self.parameters():
                nn.init.zeros_(parameter)


class ScoreConv(ScoreProcessor):
    """S + B + project(LeakyReLU(expand([S ; B]))), two 1×k convolutions along the keys (Zheng et al. 2024).

    kernel_size 1 is DAPE, 3 and more is DAPE V2.

    bias_channels: whether there is an additive bias to read beside the scores (not with NoPE or RoPE).
    padding:   "same": taps reach k//2 keys to the left and k − 1 − k//2 to the right; "causal": k − 1 to the left.
    residual:  "scores+bias" as above, or "scores" for S + project(…) alone.
    leak_future: the paper's cheating experiment; the convolution then reads keys that a query may not see.
    zero_init: start with `project` at zero, so that the module begins as plain attention.
    """

    summary = "two 1×k convolutions over heads and neighbouring keys"

    def __init__(
        self,
        num_heads: int,
        width: int = 32,
        *,
        kernel_size: int = 3,
        bias_channels: bool = True,
        padding: Padding = "same",
        residual: Residual = "scores+bias",
        leak_future: bool = False,
        zero_init: bool = False,
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("width", width), ("kernel_size", kernel_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
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
        self.expand = KeyConv(channels, width, (1, kernel_size))
        self.project = KeyConv(width, num_heads, (1, kernel_size))
        self.project.zero_init = zero_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.expand.reset_parameters()
        self.project.reset_parameters()

    def weights(self) -> ConvWeights:
        assert self.expand.bias is not None
        assert self.project.bias is not None
        return ConvWeights(
            self.expand.weight,
            self.expand.bias,
            self.project.weight,
            self.project.bias,
            self.left,
            self.residual,
            self.leak_future,
            self.negative_slope,
        )

    def check(self, num_heads: int, *, has_bias: bool) -> None:
        if num_heads != self.num_heads:
            raise ValueError(
                f"scores of {num_heads} heads, but this convolution was built for {self.num_heads}"
            )
        if has_bias != self.bias_channels:
            have, need = ("a", "True") if has_bias else ("no", "False")
            raise ValueError(f"there is {have} bias: build the convolution with bias_channels={need}")

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, kernel_size={self.expand.kernel_size[1]}, residual={self.residual}"
        )
