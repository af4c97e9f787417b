"""One operator for all backends with a hand-written backward: a list of tensors and a plan.

A backend registers two functions under its name. The operator itself is independent of their arguments, so a further
tensor or number concerns the backend alone.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias


@dataclass(frozen=True)
class Arguments:
    """Arguments of a kernel: the present tensors by name, its plan, and the lowest distance."""

    tensors: dict[str, Tensor]
    plan: dict[str, Any]
    lowest: int

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


# Output [B, H, Tq, D] and the log-sum-exp of the logits [B, H, Tq], in float32 or finer.
Forward = Callable[[Arguments], tuple[Tensor, Tensor]]
# (arguments, gradient of the output, output, log-sum-exp) → gradients by name; a tensor may have none.
Backward = Callable[[Arguments, Tensor, Tensor, Tensor], dict[str, Tensor]]

PLAIN_CLASSES = (Tensor, torch.nn.Parameter)
KERNELS: dict[str, tuple[Forward, Backward]] = {}


def run(kernel: str, tensors: dict[str, Tensor | None], plan: dict[str, Any], *, lowest: int = 0) -> Tensor:
    """Attention output [B, H, Tq, D] by the kernel of that name.

    tensors: by name, including "q"; None for absent ones. Floating-point tensors may have gradients.
    plan:    plain numbers, strings and lists of them, the same for all calls of a kind: constants for torch.compile,
             but for floats, which may depend on a size that a graph leaves open.
    lowest:  lowest distance; separate from the plan, because it may depend on a length.
    """
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not _watched(present.values()):
        wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present.values())
        return run_unwatched(kernel, tuple(present), plan, lowest, list(present.values()), wanted)
    numbers: list[float] = []
    text = encode(plan, numbers)
    return _forward(list(present.values()), ",".join(present), kernel, text, numbers, lowest)[0]


def run_unwatched(
    kernel: str,
    names: tuple[str, ...],
    plan: dict[str, Any],
    lowest: int,
    tensors: list[Tensor],
    wanted: bool,
) -> Tensor:
    """The same for tensors that nothing watches; wanted: whether any gradient is."""
    if wanted:
        # Function.apply looks for tensors left over from transforms by calls of Python, one a tensor.
        left_over = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
        apply = _Direct.apply if left_over else super(torch.autograd.Function, _Direct).apply
        return apply((kernel, names, plan, lowest), *tensors)
    return KERNELS[kernel][0](Arguments(dict(zip(names, tensors, strict=True)), plan, lowest))[0]


def in_own_dtype(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast, if it is on, does not change the dtypes that the op and its bias compute in."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _watched(tensors: Iterable[Tensor]) -> bool:
    """Whether a trace, a mode or a tensor of another class must see the operator itself.

    Calling it takes longer than a short decoding step, and a third of a training step's attention at 64 tokens.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    return any(type(x) not in PLAIN_CLASSES for x in tensors)


def watching() -> bool:
    """Whether a trace, a mode, autocast, or a transform such as torch.func.grad may change what a call means."""
    c = torch._C
    return bool(
        c._is_tracing()
        or c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
        or c._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def encode(value: Any, numbers: list[float]) -> str:
    """A plan as a Python literal with … for floats, which are appended to `numbers`.

    By operations that torch.compile can trace: it knows neither json nor the text of a float that it leaves open.
    """
    if isinstance(value, dict):
        return "{" + "".join([f"{key!r}:{encode(item, numbers)}," for key, item in value.items()]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + "".join([encode(item, numbers) + "," for item in value]) + "]"
    if isinstance(value, float):
        numbers.append(value)
        return "..."
    return repr(value)


def decode(text: str, numbers: list[float]) -> dict[str, Any]:
    """The plan that `encode` was given."""
    left = iter(numbers)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        return next(left) if value is ... else value

    return filled(_literal(text))


_literal = functools.lru_cache(maxsize=1024)(ast.literal_eval)


def _arguments(tensors: list[Tensor], names: str, plan: str, numbers: list[float], lowest: int) -> Arguments:
    return Arguments(dict(zip(names.split(","), tensors, strict=True)), decode(plan, numbers), lowest)


@torch.library.custom_op("dape::attention", mutates_args=())
def _forward(
    tensors: list[Tensor], names: str, kernel: str, plan: str, numbers: list[float], lowest: int
) -> tuple[Tensor, Tensor]:
    return KERNELS[kernel][0](_arguments(tensors, names, plan, numbers, lowest))


@_forward.register_fake
def _(tensors: list[Tensor], names: str, kernel: str, plan: str, *rest: object) -> tuple[Tensor, Tensor]:
    q = tensors[names.split(",").index("q")]
    # The log of what is left of a stick is a sum over all keys, whose parts count.
    least = torch.float64 if "'stick':True" in plan else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, least))


@torch.library.custom_op("dape::attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
    wanted: list[bool],
    names: str,
    kernel: str,
    plan: str,
    numbers: list[float],
    lowest: int,
) -> list[Tensor]:
    """Gradients of the wanted tensors, in their order."""
    return _gradients(kernel, _arguments(tensors, names, plan, numbers, lowest), grad_out, out, lse, wanted)


def _gradients(
    kernel: str, arguments: Arguments, grad_out: Tensor, out: Tensor, lse: Tensor, wanted: list[bool]
) -> list[Tensor]:
    with in_own_dtype(out):
        grads = KERNELS[kernel][1](arguments, grad_out, out, lse)
    return [
        grads[name].to(tensor.dtype) if name in grads else torch.zeros_like(tensor)
        for wants, (name, tensor) in zip(wanted, arguments.tensors.items(), strict=True)
        if wants
    ]


@_backward.register_fake
def _(
    grad_out: Tensor, out: Tensor, lse: Tensor, tensors: list[Tensor], wanted: list[bool], *rest: object
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for wants, tensor in zip(wanted, tensors, strict=True) if wants]


def _save(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    tensors, *ctx.rest = inputs  # type: ignore[attr-defined]  # a context takes any attribute
    ctx.wanted = [tensor.requires_grad for tensor in tensors]  # type: ignore[attr-defined]  # as above
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _differentiate(ctx: FunctionCtx, grad_out: Tensor, _: Tensor | None) -> tuple:
    out, lse, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]  # declared of the function only
    wanted = ctx.wanted  # type: ignore[attr-defined]  # set above
    grads = iter(_backward(grad_out, out, lse, tensors, wanted, *ctx.rest))  # type: ignore[attr-defined]  # as above
    return [next(grads) if wants else None for wants in wanted], *[None] * 5


def _refuse_second_derivative(ctx: object, *grads: object) -> tuple:
    raise RuntimeError(
        'second derivatives are not implemented by this backend: pass backend="reference", '
        "which differentiates any number of times"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse_second_derivative)


class _Direct(torch.autograd.Function):
    """The operator and its derivative for eager calls that nothing watches."""

    @staticmethod
    def forward(ctx: Any, call: tuple[str, tuple[str, ...], dict[str, Any], int], *tensors: Tensor) -> Tensor:
        kernel, names, plan, lowest = ctx.call = call
        arguments = Arguments(dict(zip(names, tensors, strict=True)), plan, lowest)
        out, lse = KERNELS[kernel][0](arguments)
        ctx.save_for_backward(out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple:
        out, lse, *tensors = ctx.saved_tensors
        kernel, names, plan, lowest = ctx.call
        wanted = list(ctx.needs_input_grad[1:])
        # A second derivative is asked of the operator, which refuses it.
        if torch.is_grad_enabled() or _watched((grad_out, *tensors)):
            numbers: list[float] = []
            text = encode(plan, numbers)
            grads = _backward(
                grad_out, out, lse, tensors, wanted, ",".join(names), kernel, text, numbers, lowest
            )
        else:
            arguments = Arguments(dict(zip(names, tensors, strict=True)), plan, lowest)
            grads = _gradients(kernel, arguments, grad_out, out, lse, wanted)
        given = iter(grads)
        return None, *(next(given) if wants else None for wants in wanted)


def differentiable(problem: Problem) -> list[Tensor]:
    """Floating-point tensors of a call, without those inside a bias by tiles."""
    bias = problem.bias
    parts = {DistanceBias: ("values",), SeparableBias: ("row", "column")}.get(type(bias), ())
    tensors = [problem.q, problem.k, problem.v, *(getattr(bias, part) for part in parts)]
    tensors += [bias] if isinstance(bias, Tensor) else []
    return tensors + [tensor for _, tensor in problem.program.tensors()]


def unsupported_transform(problem: Problem) -> str | None:
    """Reason why a hand-written backward cannot run inside torch.func.grad, jvp, vmap and the like, or None.

    In forward mode PyTorch would silently give zero tangents, and it has no rule to batch the operator.
    """
    if torch.compiler.is_compiling():
        return None
    functorch = torch._C._functorch
    transforms = {level.key() for level in functorch.get_interpreter_stack() or ()}
    # Outside of all levels no tensor has a tangent.
    if not transforms and forward_ad._current_level < 0:
        return None
    kinds = functorch.TransformType
    if transforms & {kinds.Grad, kinds.Jvp, kinds.Vmap} or any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in differentiable(problem)
    ):
        return (
            "its derivative is written for backward(), not for torch.func or forward mode differentiation; "
            'backend="reference" has them'
        )
    return None
