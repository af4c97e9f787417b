"""Base class of score processors: modules whose parameters make up a score program."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from dape.ops.score_attention import ScoreProgram, Visible
from dape.ops.score_attention.edges import Edges
from dape.ops.score_attention.reference import normalise, process
from dape.ops.score_attention.types import EVERYTHING
from dape.rebuilding import Rebuildable


class ScoreProcessor(Rebuildable):
    """Maps q·k to attention weights. Implement `program`; everything else is derived from it.

    A constructor asks for what it needs by name: `num_heads`, `bias_channels` (whether the encoding adds a bias that the
    first stage should read), `kernel_size` and `query_kernel_size` (where names may carry sizes, such as dape1x3),
    `width`; what else it takes are options of the method.

    summary:     a line for listings.
    bare_kernel: the kernel (queries, keys) of a name without sizes.
    listed:      the kernels that listings show.
    """

    summary: ClassVar[str] = ""
    bare_kernel: ClassVar[tuple[int, int]] = (1, 1)
    listed: ClassVar[tuple[tuple[int, int], ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("forward", "weights", "attend"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__} defines {name}(), which nothing would call: a score processor says what it does by "
                    f"program() alone, and attention, its weights, caches and pictures are derived from that"
                )

    def program(self) -> ScoreProgram:
        """The program, with this module's parameters as its tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no program()")

    def forward(
        self,
        scores: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = True,
        visible: Visible | None = None,
    ) -> Tensor:
        """Processed scores [B, H, Tq, Tk], ready for the softmax: −∞ where not visible.

        scores: [B, H, Tq, Tk], already scaled; bias: [1 or B, H, Tq, Tk] or None.
        """
        program, edges = self._prepared(scores, bias, causal, visible)
        return process(scores, bias, program, edges)

    def weights(
        self,
        scores: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = True,
        visible: Visible | None = None,
    ) -> Tensor:
        """The attention weights [B, H, Tq, Tk] that come of given scores; arguments as in `forward`."""
        program, edges = self._prepared(scores, bias, causal, visible)
        return normalise(process(scores, bias, program, edges), program, edges)

    def _prepared(
        self, scores: Tensor, bias: Tensor | None, causal: bool, visible: Visible | None
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
    """The weights of a stage. Calling it without an image returns them: what wraps modules can then do its part."""

    def forward(self, image: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:  # type: ignore[override]  # weights, too
        return (self.weight, self.bias) if image is None else super().forward(image)


def stage_tensors(conv: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in / groups, kq, k] and offset [out] of a stage, through whatever was wrapped around it.

    Wrappers such as LoRA change a layer's output, not its weights. A convolution's answers to unit impulses are its
    weights, so those are asked for.
    """
    if isinstance(conv, StageConv):
        return conv()
    base = next(module for module in conv.modules() if isinstance(module, StageConv))
    shape = base.weight.shape[1:]
    impulses = torch.eye(shape.numel(), dtype=base.weight.dtype, device=base.weight.device)
    images = torch.cat([impulses, impulses.new_zeros(1, shape.numel())]).unflatten(1, shape)
    answers = conv(images.repeat(1, base.groups, 1, 1)).flatten(1)
    offset = answers[-1]
    weight = (answers[:-1] - offset).T.reshape(-1, *shape)
    return weight, None if base.bias is None else offset
