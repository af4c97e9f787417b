"""What the backends with a hand-written backward share: their tensors, and how two ops become one function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import FunctionCtx
from torch.library import CustomOpDef

from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias


@dataclass
class CallTensors:
    """The tensors of a call, as the ops take them, and its sizes.

    w1, b1, w2, b2: the two convolutions; dense, values: the bias, by pairs or by distance; hidden, edges: what the
    first convolution makes of it (tables.py); first, last: the keys that each query sees.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w1: Tensor | None
    b1: Tensor | None
    w2: Tensor | None
    b2: Tensor | None
    dense: Tensor | None
    values: Tensor | None
    hidden: Tensor | None
    edges: Tensor | None
    first: Tensor | None
    last: Tensor | None

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.num_queries, self.head_width = self.q.shape
        self.num_groups, self.num_keys = self.k.shape[1], self.k.shape[2]
        self.offset = self.num_keys - self.num_queries


def make_differentiable(
    forward: CustomOpDef, backward: CustomOpDef, *, num_tensors: int, num_grads: int
) -> None:
    """Register `backward` as the derivative of `forward`, and a refusal as its own.

    forward(*tensors, *options) → (out, lse), where the first `num_grads` of the `num_tensors` tensors
    (some may be None) have gradients; backward(grad_out, out, lse, *tensors, *options) → a list of those.
    """

    def save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.options = inputs[num_tensors:]  # type: ignore[attr-defined]  # a context takes any attribute
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *inputs[:num_tensors])

    def differentiate(ctx: FunctionCtx, grad_out: Tensor, _: Tensor | None) -> tuple:
        out, lse, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]  # declared of the function only
        options = ctx.options  # type: ignore[attr-defined]  # set above
        grads = backward(grad_out, out, lse, *tensors, *options)
        present = [None if x is None else grad for x, grad in zip(tensors, grads, strict=False)]
        return (*present, *[None] * (num_tensors - num_grads + len(options)))

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(_refuse_second_derivative)


def _refuse_second_derivative(ctx: object, *grads: object) -> tuple:
    raise RuntimeError(
        'second derivatives are not implemented by this backend: pass backend="reference", '
        "which differentiates any number of times"
    )


def unsupported_transform(problem: Problem) -> str | None:
    """Why a derivative written for `backward` cannot run inside torch.func.grad, jvp and their like, or None.

    PyTorch would give zero tangents without a word in the forward mode.
    """
    if torch.compiler.is_compiling():
        return None
    bias = problem.bias
    parts = {DistanceBias: ("values",), SeparableBias: ("row", "column")}.get(type(bias), ())
    tensors = [problem.q, problem.k, problem.v, *(getattr(bias, part) for part in parts)]
    tensors += [bias] if isinstance(bias, Tensor) else []
    tensors += [tensor for _, tensor in problem.program.tensors()]
    functorch = torch._C._functorch
    transforms = {level.key() for level in functorch.get_interpreter_stack() or ()}
    if transforms & {functorch.TransformType.Grad, functorch.TransformType.Jvp} or any(
        unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        return (
            "its derivative is written for backward(), not for torch.func or forward mode differentiation; "
            'backend="reference" has them'
        )
    return None
