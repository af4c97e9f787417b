"""Pure PyTorch by tiles of query rows: any device, dtype and bias, O(T) memory, hand-written backward.

The forward pass keeps the log-sum-exp of every row; the backward pass recomputes the tiles. The computation inside a
tile is in tiled_forward.py and tiled_backward.py, the two passes are here. Programs other than plain scores and the
paper's two convolutions of 1×k are in tiled_program.py.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dape.ops.score_attention import op, tiled_program
from dape.ops.score_attention.tables import hidden_tables
from dape.ops.score_attention.tiled_backward import Gradients
from dape.ops.score_attention.tiled_forward import Call
from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias, TileBias


def unsupported(problem: Problem) -> str | None:
    by_hand = problem.program.is_plain or problem.pair is not None
    if by_hand and isinstance(problem.bias, (SeparableBias, TileBias)):
        return "with this program it supports a bias by distance or a dense one only"
    return op.unsupported_transform(problem)


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    conv, bias, dtype = problem.pair, problem.bias, problem.compute_dtype
    if conv is None and not problem.program.is_plain:
        return tiled_program.attend(problem)
    values = bias.values.to(dtype) if isinstance(bias, DistanceBias) else None
    lowest = bias.lowest if isinstance(bias, DistanceBias) else 0
    dense = bias.to(dtype) if isinstance(bias, Tensor) else None
    w1 = b1 = w2 = b2 = hidden = edges = None
    left, slope, residual_bias = 0, 0.0, True
    if conv is not None:
        left, slope = conv.left, conv.negative_slope
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
        ):
            hidden, edges = hidden_tables(bias, conv, problem.k.shape[2], dtype)
            w1 = w1[:, : problem.q.shape[1]]
        else:
            b1 = conv.expand_bias.to(dtype)
    # Read by the kernel, so that compiled code draws a new seed at each call.
    seed = torch.randint(2**62, (), device="cpu") if problem.dropout else None
    tensors = {
        "q": problem.q, "k": problem.k, "v": problem.v, "w1": w1, "b1": b1, "w2": w2, "b2": b2, "dense": dense,
        "values": values, "hidden": hidden, "edges": edges, "first": problem.visible.first,
        "last": problem.visible.last, "seed": seed,
    }  # fmt: skip
    plan = {
        "causal": problem.causal, "scale": problem.scale, "left": left, "slope": slope,
        "residual_bias": residual_bias, "dropout": problem.dropout,
    }  # fmt: skip
    return op.run("tiled", tensors, plan, lowest=lowest)


def _call(arguments: op.Arguments) -> Call:
    numbers = {**arguments.plan, "lowest": arguments.lowest}
    tensors = {field.name: arguments.get(field.name) for field in fields(Call) if field.name not in numbers}
    return Call(**tensors, **numbers)  # type: ignore[arg-type]  # q, k and v are always there


def _forward(arguments: op.Arguments) -> tuple[Tensor, Tensor]:
    call = _call(arguments)
    out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    lse = torch.empty(call.q.shape[:3], dtype=call.dtype, device=call.q.device)
    for tile in call.tiles():
        logits = tile.forward()
        # A row that sees nothing: weights exp(−∞ − 0) = 0, and 0 / 1 = 0.
        peak = logits.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -torch.inf, 0.0)
        weights = logits.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        if call.dropout:
            weights *= tile.keep(weights)
        tile.put(out, torch.bmm(tile.grouped(weights), tile.v).view(tile.q.shape).div_(total))
        tile.put(lse[..., None], total.log_().add_(peak))
    return out, lse


def _backward(arguments: op.Arguments, grad_out: Tensor, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
    call = _call(arguments)
    grads = Gradients(call)
    for tile in call.tiles():
        grads.add_tile(tile, grad_out, out, lse)
    return grads.results()


op.KERNELS["tiled"] = (_forward, _backward)
