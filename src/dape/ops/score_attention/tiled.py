"""Pure PyTorch by tiles of query rows: any device, dtype and bias, O(T) memory.

The paper's two convolutions have a backward pass by hand for a CPU (tiled_pair.py), where it is twice as fast as the
general one (tiled_program.py). The forward pass keeps the log-sum-exp of every row.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from dape.ops.score_attention import op, tiled_program
from dape.ops.score_attention.tables import hidden_tables
from dape.ops.score_attention.tiled_pair import Call, Gradients
from dape.ops.score_attention.types import DistanceBias, Problem, SeparableBias, TileBias


def unsupported(problem: Problem) -> str | None:
    by_hand = problem.program.is_plain or problem.pair is not None
    if by_hand and isinstance(problem.bias, (SeparableBias, TileBias)):
        return "with this program it supports a bias by distance or a dense one only"
    return op.unsupported_transform(problem)


def attend(problem: Problem) -> Tensor:
    """Attention output [B, H, Tq, D]."""
    conv, bias, visible, dtype = problem.pair, problem.bias, problem.visible, problem.compute_dtype
    bounded = not problem.causal or visible.first is not None or visible.last is not None
    if (
        conv is None
        or bounded
        or isinstance(bias, Tensor)
        or problem.dropout
        or tiled_program.on_gpu(problem.q)
    ):
        return tiled_program.attend(problem)
    tensors: dict[str, Tensor | None] = {
        "q": problem.q, "k": problem.k, "v": problem.v, "w1": conv.expand_weight[:, :, 0].to(dtype),
        "w2": conv.project_weight[:, :, 0].to(dtype), "b2": conv.project_bias.to(dtype),
    }  # fmt: skip
    lowest = 0
    if isinstance(bias, DistanceBias):
        hidden, edges = hidden_tables(bias, conv, problem.k.shape[2], dtype)
        lowest = bias.lowest
        tensors |= {"values": bias.values.to(dtype), "hidden": hidden, "edges": edges}
        tensors["w1"] = conv.expand_weight[:, : problem.q.shape[1], 0].to(dtype)
    else:
        tensors["b1"] = conv.expand_bias.to(dtype)
    plan = {"scale": problem.scale, "left": conv.left, "slope": conv.negative_slope}
    plan["residual_bias"] = conv.residual == "scores+bias"
    return op.run("tiled", tensors, plan, lowest=lowest)


def _call(arguments: op.Arguments) -> Call:
    numbers = {**arguments.plan, "lowest": arguments.lowest}
    tensors = {field.name: arguments.get(field.name) for field in fields(Call) if field.name not in numbers}
    return Call(**tensors, **numbers)  # type: ignore[arg-type]  # all but tables, b1 and the bias are always there


def _forward(arguments: op.Arguments) -> tuple[Tensor, Tensor]:
    call = _call(arguments)
    out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    lse = torch.empty(call.q.shape[:3], dtype=call.dtype, device=call.q.device)
    for tile in call.tiles():
        logits = tile.forward()
        # A row whose logits are all −∞: weights exp(−∞ − 0) = 0, and 0 / 1 = 0.
        peak = logits.amax(-1, keepdim=True)
        peak.masked_fill_(peak == -torch.inf, 0.0)
        weights = logits.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
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
