"""Pure PyTorch by tiles of query rows: any device, dtype and bias, O(T) memory, hand-written backward.

The forward pass keeps the log-sum-exp of every row; the backward pass computes the tiles again. What happens
inside a tile is in tiled_forward.py and tiled_backward.py; here are the two registered operators. Programs other
than plain scores and the paper's two convolutions of 1×k are in tiled_program.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dape.ops.score_attention import tiled_program
from dape.ops.score_attention.library import make_differentiable
from dape.ops.score_attention.tables import hidden_tables
from dape.ops.score_attention.tiled_backward import Gradients
from dape.ops.score_attention.tiled_forward import Call
from dape.ops.score_attention.types import DistanceBias, Problem


def unsupported(problem: Problem) -> str | None:
    return None


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    conv, bias, dtype = problem.pair, problem.bias, problem.compute_dtype
    if conv is None and not problem.program.is_plain:
        return tiled_program.attend(problem)
    values = bias.values.to(dtype) if isinstance(bias, DistanceBias) else None
    lowest = bias.lowest if isinstance(bias, DistanceBias) else 0
    dense = bias.to(dtype) if isinstance(bias, Tensor) else None
    w1 = b1 = w2 = b2 = hidden = edges = None
    left, slope, residual_bias, leak = 0, 0.0, True, False
    if conv is not None:
        left, slope, leak = conv.left, conv.negative_slope, conv.leak_future
        residual_bias = conv.residual == "scores+bias"
        w1, w2, b2 = (
            conv.expand_weight[:, :, 0].to(dtype),
            conv.project_weight[:, :, 0].to(dtype),
            conv.project_bias.to(dtype),
        )
        if (
            isinstance(bias, DistanceBias)
            and problem.causal
            and problem.visible.first is None
            and problem.visible.last is None
            and not leak
        ):
            hidden, edges = hidden_tables(bias, conv, problem.k.shape[2], dtype)
            w1 = w1[:, : problem.q.shape[1]]
        else:
            b1 = conv.expand_bias.to(dtype)
    seed = torch.randint(2**62, (), device="cpu") if problem.dropout else torch.zeros((), dtype=torch.long)
    out, _ = _forward(
        problem.q, problem.k, problem.v, w1, b1, w2, b2, dense, values, hidden, edges,
        problem.visible.first, problem.visible.last, seed,
        lowest, problem.causal, problem.scale, left, slope, residual_bias, leak, problem.dropout,
    )  # fmt: skip
    return out


@torch.library.custom_op("dape::tiled_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None, seed: Tensor,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, leak: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, Tq, D] and log-sum-exp of the logits [B, H, Tq]."""
    call = Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last, seed,
                 lowest, causal, scale, left, slope, residual_bias, leak, dropout)  # fmt: skip
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=call.dtype, device=q.device)
    for tile in call.tiles():
        logits = tile.forward()
        # A row that sees nothing: weights exp(−∞ − 0) = 0, and 0 / 1 = 0.
        peak = logits.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -torch.inf, 0.0)
        weights = logits.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        if dropout:
            weights *= tile.keep(weights)
        tile.put(out, torch.bmm(tile.grouped(weights), tile.v).view(tile.q.shape).div_(total))
        tile.put(lse[..., None], total.log_().add_(peak))
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("dape::tiled_attention_backward", mutates_args=())
def _backward(
    grad_out: Tensor, out: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor,
    w1: Tensor | None, b1: Tensor | None, w2: Tensor | None, b2: Tensor | None,
    dense: Tensor | None, values: Tensor | None, hidden: Tensor | None, edges: Tensor | None,
    first: Tensor | None, last: Tensor | None, seed: Tensor,
    lowest: int, causal: bool, scale: float, left: int, slope: float, residual_bias: bool, leak: bool,
    dropout: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the eleven tensors from q to edges; an absent input has an empty one."""
    call = Call(q, k, v, w1, b1, w2, b2, dense, values, hidden, edges, first, last, seed,
                 lowest, causal, scale, left, slope, residual_bias, leak, dropout)  # fmt: skip
    grads = Gradients(call)
    for tile in call.tiles():
        grads.add_tile(tile, grad_out, out, lse)
    return [q.new_empty(0) if grad is None else grad for grad in grads.results()]


@_backward.register_fake
def _(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    return [out.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:11]]


make_differentiable(_forward, _backward, num_tensors=14, num_grads=11)
