"""Base class of score processors: modules whose parameters make up a score program."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from dape.ops.score_attention import ScoreProgram, Stage, Visible
from dape.ops.score_attention.edges import Edges
from dape.ops.score_attention.reference import normalise, process
from dape.ops.score_attention.types import EVERYTHING
from dape.rebuildable import Rebuildable


class ScoreProcessor(Rebuildable):
    """Maps q·k to attention weights. Implement `program`; everything else is derived from it.

    A constructor declares the sizes it needs by name: `num_heads`, `bias_channels` (whether the encoding adds a bias that
    the first stage should read), `kernel_size` and `query_kernel_size` (if method names carry sizes, such as dape1x3),
    `width`, `layer` (its index in the model); its other parameters are options of the method.

    before_rotation: the stage before the softmax is of keys as they are projected, not of rotated ones: with an
                 encoding that rotates, layers convolve the keys and rotate them then.
    heads_per_value: number of neighbouring heads whose outputs are parts of one, for the normalisation of heads.
    norm_scale:  factor of normalised outputs of heads; None for one that depends on the layer, see `Attention`.
    summary:     a line for listings.
    reference:   the paper that it is from.
    bare_kernel: the kernel (queries, keys) of a method name without sizes.
    listed:      the kernels shown in listings.
    """

    before_rotation: bool = False
    heads_per_value: int = 1
    norm_scale: float | None = None
    summary: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    bare_kernel: ClassVar[tuple[int, int]] = (1, 1)
    listed: ClassVar[tuple[tuple[int, int], ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("forward", "weights", "attend"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__} defines {name}(), which nothing would call: a score processor defines "
                    f"program() alone, from which attention, weights, caches and pictures are derived"
                )

    def program(self) -> ScoreProgram:
        """The program, with this module's parameters as its tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no program()")

    def forward(self, scores: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        """Processed scores [B, H, Tq, Tk], ready for the softmax: −∞ where not visible.

        scores: [B, H, Tq, Tk], already scaled; bias: [1 or B, H, Tq, Tk] or None; options: causal and visible, as in
        `dape.attention`.
        """
        program, edges = self._prepared(scores, bias, **options)
        return process(scores, bias, program, edges)

    def weights(self, scores: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        """Attention weights [B, H, Tq, Tk] for the given scores; arguments as in `forward`."""
        program, edges = self._prepared(scores, bias, **options)
        return normalise(process(scores, bias, program, edges), program, edges)

    def _prepared(
        self, scores: Tensor, bias: Tensor | None, causal: bool = True, visible: Visible | None = None
    ) -> tuple[ScoreProgram, Edges]:
        if scores.dim() != 4:
            raise ValueError(
                f"scores have shape {tuple(scores.shape)}, expected [batch, heads, queries, keys]"
            )
        if bias is not None and (
            bias.shape[0] not in (1, scores.shape[0]) or bias.shape[1:] != scores.shape[1:]
        ):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, expected {(1, *scores.shape[1:])} or {tuple(scores.shape)}"
            )
        program = self.program()
        program.check(scores.shape[1], has_bias=bias is not None)
        edges = Edges.of(
            visible or EVERYTHING,
            *scores.shape[2:],
            causal=causal,
            leak_future=program.leak_future,
            device=scores.device,
        )
        return program, edges


class StageConv(nn.Conv2d):
    """Weights of a stage. Called without an image it returns them, so that hooks and wrappers take effect."""

    def forward(self, image: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:  # type: ignore[override]  # weights, too
        return (self.weight, self.bias) if image is None else super().forward(image)


def _hooked(conv: StageConv) -> bool:
    """Whether calling a stage does more than returning its parameters: then a tool replaces or moves them there."""
    return bool(
        conv._forward_pre_hooks
        or conv._forward_hooks
        or conv._backward_pre_hooks
        or conv._backward_hooks
        or "forward" in conv.__dict__
        or modules._global_forward_pre_hooks
        or modules._global_forward_hooks
    )


def stage_tensors(conv: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in / groups, kq, k] and offset [out] of a stage, including wrappers such as LoRA.

    Wrappers change a layer's output, not its weights. The weights are therefore read from the responses to unit
    impulses.
    """
    if type(conv) is StageConv and not _hooked(conv):
        return conv._parameters["weight"], conv._parameters["bias"]  # type: ignore[return-value]  # registered as such
    if isinstance(conv, StageConv):
        return conv()
    base = next(module for module in conv.modules() if isinstance(module, StageConv))
    shape = base.weight.shape[1:]
    impulses = torch.eye(shape.numel(), dtype=base.weight.dtype, device=base.weight.device)
    images = torch.cat([impulses, impulses.new_zeros(1, shape.numel())]).unflatten(1, shape)
    responses = conv(images.repeat(1, base.groups, 1, 1)).flatten(1)
    offset = responses[-1]
    weight = (responses[:-1] - offset).T.reshape(-1, *shape)
    return weight, None if base.bias is None else offset


def linear_stage(conv: nn.Module | None, left: int = 0, groups: int = 1) -> tuple[Stage, ...]:
    """The stage of a convolution without activation; none for None."""
    return () if conv is None else (Stage(*stage_tensors(conv), left, groups),)
