"""Score programs: the processing of q·k into attention weights, as one value.

A program is a list of stages over the score image (heads are channels, queries rows, keys columns), a residual, a
normaliser, and stages over the weights after it. Backends, inspection, caches and retrofits depend on this value
alone.

Shapes: H heads, C input channels of the first stage (2H if it reads the bias, else H), kq×k kernel size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Residual = Literal["scores+bias", "scores", "bias", "none"]
Normaliser = Literal["softmax", "stickbreaking", "entmax"]
# Tensors [H] of the normaliser.
VECTORS = ("sink", "length_scale", "length_offset", "length_power")


@dataclass(frozen=True)
class Stage:
    """A convolution over the score image, then LeakyReLU.

    weight: [out, in / groups, kq, k]. Row kq − 1 belongs to the query itself, the rows before it to earlier queries.
    offset: [out], added before the activation, or None.
    left:   number of taps to the left of a key; the rest reach right.
    groups: as in torch.nn.Conv2d.
    slope:  negative slope of the LeakyReLU; 1 makes the stage linear.
    """

    weight: Tensor
    offset: Tensor | None = None
    left: int = 0
    groups: int = 1
    slope: float = 1.0

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1] * self.groups

    @property
    def kernel_size(self) -> int:
        return self.weight.shape[3]

    @property
    def query_kernel_size(self) -> int:
        return self.weight.shape[2]

    @property
    def right(self) -> int:
        """Number of taps to the right of a key."""
        return self.kernel_size - 1 - self.left


@dataclass(frozen=True)
class ScoreProgram:
    """Processing of scores S and bias B into attention weights.

        X      = S, or [S ; B] over heads (as many channels as the first stage reads), 0 where not visible
        logits = residual + pre(X) where visible, else −∞
        P      = exp(logits) / (Σ exp(logits) + exp(sink)), the logits scaled first, see length_scale; or, by
                 `normaliser`, βⱼ Π (1 − βₗ) over the keys l after j, β = σ(logits), or 1.5-entmax(logits)
        weights = post(P) where visible, else 0

    pre:      stages before the softmax; with none, logits = S + B.
    post:     stages on the weights after it.
    residual: added to the result of `pre`: "scores+bias", "scores", "bias" or "none".
    sink:     [H], the logit of an additional key with value zero, or None.
    length_scale: [H], s: logits are multiplied by b + s · log(n + shift)^p, n the number of visible keys; None for 1.
    length_offset, length_power: [H], b and p; None for 0 and 1.
    length_shift: number added to n, which a power needs to be positive.
    normaliser: "softmax", "stickbreaking" or "entmax".
    softcap:  S is replaced by softcap · tanh(S / softcap) first.
    leak_future: the paper's leakage experiment: `pre` reads keys that the mask hides from the query.

    Channels of a grouped first stage that reads the bias are ordered group by group: the scores of a group's heads,
    then their bias.
    """

    pre: tuple[Stage, ...] = ()
    post: tuple[Stage, ...] = ()
    residual: Residual = "scores+bias"
    sink: Tensor | None = None
    length_scale: Tensor | None = None
    length_offset: Tensor | None = None
    length_power: Tensor | None = None
    length_shift: float = 0.0
    softcap: float | None = None
    leak_future: bool = False
    normaliser: Normaliser = "softmax"

    @property
    def is_plain(self) -> bool:
        """Whether this is softmax(S + B)."""
        if len(self.pre) + len(self.post) or self.softcap is not None or self.normalises:
            return False
        return self.residual == "scores+bias"

    @property
    def is_pair(self) -> bool:
        """Whether this is the paper's two convolutions of 1×k, for which kernels have faster passes."""
        if len(self.pre) != 2 or self.post or self.normalises or self.softcap is not None or self.leak_future:
            return False
        expand, project = self.pre
        for stage in self.pre:
            same = (stage.kernel_size, stage.left) == (expand.kernel_size, expand.left)
            if not same or stage.query_kernel_size != 1 or stage.groups != 1 or stage.offset is None:
                return False
        return project.slope == 1 and self.residual in ("scores+bias", "scores")

    @property
    def normalises(self) -> bool:
        """Whether the normaliser is not a plain softmax."""
        return self.sink is not None or self.length_scale is not None or self.normaliser != "softmax"

    @property
    def earlier_rows(self) -> int:
        """Number of queries before its own on which a row of the weights depends."""
        # Loops without calls: this and `signature` are read in every layer and step.
        rows = 0
        for stage in self.pre + self.post:
            rows += stage.weight.shape[2] - 1
        return rows

    @property
    def signature(self) -> tuple:
        """All properties except the values, hashable: they decide whether a backend can run the program."""
        pre: list[tuple] = []
        post: list[tuple] = []
        for side, stages in ((pre, self.pre), (post, self.post)):
            for stage in stages:
                has_offset = stage.offset is not None
                side += ((*stage.weight.shape, has_offset, stage.left, stage.groups, stage.slope),)
        return (
            tuple(pre), tuple(post), self.residual, self.sink is not None, self.length_scale is not None,
            self.length_offset is not None, self.length_power is not None, self.length_shift, self.softcap,
            self.leak_future, self.normaliser,
        )  # fmt: skip

    def reads_bias(self, num_heads: int) -> bool:
        """Whether the bias is a channel of the first stage."""
        return len(self.pre) > 0 and self.pre[0].inputs == 2 * num_heads

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All tensors by name, such as "pre.0.weight"."""
        named: list[tuple[str, Tensor]] = []
        for side, stages in (("pre", self.pre), ("post", self.post)):
            for index, stage in enumerate(stages):
                named += ((f"{side}.{index}.weight", stage.weight),)
                if stage.offset is not None:
                    named += ((f"{side}.{index}.offset", stage.offset),)
        vectors = (self.sink, self.length_scale, self.length_offset, self.length_power)
        for name, vector in zip(VECTORS, vectors, strict=True):
            if vector is not None:
                named += ((name, vector),)
        return named

    def length_factor(self, num_visible: Tensor) -> Tensor:
        """Factor of the logits of queries that see `num_visible` [B or 1, Tq] keys, [B or 1, H, Tq]; needs length_scale."""
        assert self.length_scale is not None
        dtype = torch.promote_types(self.length_scale.dtype, torch.float32)
        growth = torch.log(num_visible.clamp(min=1).to(dtype) + self.length_shift)[:, None]
        if self.length_power is not None:
            growth = growth ** self.length_power[:, None]
        factor = self.length_scale[:, None] * growth
        return factor if self.length_offset is None else factor + self.length_offset[:, None]

    def with_tensors(self, tensors: dict[str, Tensor]) -> ScoreProgram:
        """The same program with other tensors, named as by `tensors`."""

        def renewed(side: str, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
            names = (f"{side}.{index}" for index in range(len(stages)))
            return tuple(
                replace(stage, weight=tensors[f"{name}.weight"], offset=tensors.get(f"{name}.offset"))
                for name, stage in zip(names, stages, strict=True)
            )

        vectors: dict[str, Any] = {name: tensors.get(name) for name in VECTORS}
        return replace(self, pre=renewed("pre", self.pre), post=renewed("post", self.post), **vectors)

    def to(self, dtype: torch.dtype) -> ScoreProgram:
        """The same program in another dtype (differentiable)."""
        return self.with_tensors({name: tensor.to(dtype) for name, tensor in self.tensors()})

    def check(self, num_heads: int, *, has_bias: bool) -> None:
        """Raise if the stages do not fit each other or the number of heads."""
        for name, kind in (("residual", Residual), ("normaliser", Normaliser)):
            if (given := getattr(self, name)) not in get_args(kind):
                raise ValueError(f'{name}="{given}", expected one of {", ".join(get_args(kind))}')
        if self.sink is not None and self.normaliser != "softmax":
            raise ValueError(f'a sink is another term of the softmax, got normaliser="{self.normaliser}"')
        if not self.pre and self.residual != "scores+bias":
            raise ValueError(f'residual="{self.residual}" without stages in pre would drop the scores')
        if self.leak_future and (self.post or not self.pre):
            raise ValueError("leak_future=True is for stages before the softmax alone")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise ValueError(f"softcap={self.softcap} must be positive and finite")
        if (self.length_offset is not None or self.length_power is not None) and self.length_scale is None:
            raise ValueError("length_offset and length_power need a length_scale, got length_scale=None")
        if self.length_power is not None and self.length_shift <= 0:
            raise ValueError(f"length_shift={self.length_shift} must be positive for a length_power")
        for name in VECTORS:
            if (vector := getattr(self, name)) is not None and tuple(vector.shape) != (num_heads,):
                raise ValueError(f"{name} has shape {tuple(vector.shape)}, expected [{num_heads} heads]")
        if self.pre:
            channels = self.pre[0].inputs
            # Not `in`, which takes a size that a graph leaves open for another number.
            if channels != num_heads and channels != 2 * num_heads:
                raise ValueError(
                    f"pre[0] reads {channels} channels, but the scores have {num_heads} heads: build it with "
                    f"num_heads={num_heads}"
                )
            if channels == 2 * num_heads and not has_bias:
                raise ValueError(
                    f"pre[0] reads {channels} channels, scores and bias, but bias=None: build it with bias_channels=False"
                )
            _check_chain("pre", self.pre, channels, num_heads)
        _check_chain("post", self.post, num_heads, num_heads)


def _check_chain(side: str, stages: tuple[Stage, ...], inputs: int, num_heads: int) -> None:
    for index, stage in enumerate(stages):
        name = f"{side}[{index}]"
        shape = tuple(stage.weight.shape)
        if len(shape) != 4 or min(shape) < 1:
            raise ValueError(f"{name}.weight has shape {shape}, expected [out, in / groups, queries, keys]")
        if stage.groups < 1 or stage.outputs % stage.groups:
            raise ValueError(
                f"{name}: groups={stage.groups}, which does not divide its {stage.outputs} outputs"
            )
        if stage.inputs != inputs:
            raise ValueError(f"{name} reads {stage.inputs} channels, but gets {inputs}")
        if num_heads % stage.groups:
            raise ValueError(f"{name} has groups={stage.groups}, which does not divide {num_heads} heads")
        if stage.offset is not None and (shape := tuple(stage.offset.shape)) != (stage.outputs,):
            raise ValueError(f"{name}.offset has shape {shape}, expected {(stage.outputs,)}")
        if not 0 <= stage.left < stage.kernel_size:
            raise ValueError(f"{name}.left={stage.left} is outside its kernel of {stage.kernel_size} keys")
        if not 0 <= stage.slope < float("inf"):
            raise ValueError(f"{name}.slope={stage.slope} must be finite and not negative")
        inputs = stage.outputs
    if inputs != num_heads:
        raise ValueError(f"the last stage of {side} gives {inputs} channels, expected the {num_heads} heads")


def conv_program(
    expand_weight: Tensor,
    expand_bias: Tensor,
    project_weight: Tensor,
    project_bias: Tensor,
    left: int,
    residual: Residual = "scores+bias",
    leak_future: bool = False,
    negative_slope: float = 0.01,
    middle: tuple[tuple[Tensor, Tensor], ...] = (),
) -> ScoreProgram:
    """The program of DAPE and DAPE V2: S + B + project(LeakyReLU(expand([S ; B]))), given the weights.

    middle: further convolutions between the two, (weight, bias) each.
    """
    stages = [
        Stage(weight, bias, left, slope=negative_slope)
        for weight, bias in ((expand_weight, expand_bias), *middle)
    ]
    stages.append(Stage(project_weight, project_bias, left))
    return ScoreProgram(tuple(stages), residual=residual, leak_future=leak_future)


PLAIN = ScoreProgram()
