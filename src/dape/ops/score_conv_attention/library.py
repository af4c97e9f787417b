"""What the backends with a hand-written backward share: how two custom ops become one differentiable function."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.library import CustomOpDef


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
