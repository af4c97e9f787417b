"""The definition: attention with convolved scores, written like its formulas. Any dtype, any device, T×T memory.

    X      = [S ; B] over heads, 0 where not visible
    Y      = project(LeakyReLU(expand(X)))
    logits = S + B + Y where visible, else −∞
    out    = softmax(logits) · v

A row depends on its visible keys alone. To the right of a causal query's last visible key the hidden
map goes on for as many columns as the second convolution can reach, computed from zeros; to the left
of the first visible key it is zero. Without causality it is zero on both sides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_conv_attention.types import ConvWeights, Problem, Visible


def unsupported(problem: Problem) -> str | None:
    return None


def process_scores(
    scores: Tensor, bias: Tensor | None, conv: ConvWeights | None, visible: Visible, *, causal: bool
) -> Tensor:
    """Logits [B, H, Tq, Tk]: the scores plus bias plus what the convolutions make of both, −∞ where not visible.

    scores: [B, H, Tq, Tk], already scaled. bias: [1 or B, H, Tq, Tk] or None.
    """
    _, _, num_queries, num_keys = scores.shape
    shown = visible.mask(num_queries, num_keys, causal=causal, device=scores.device)
    plain = scores if bias is None else scores + bias
    if conv is None:
        return plain.masked_fill(~shown, -torch.inf)
    hidden = hidden_map(scores, bias, conv, visible, causal=causal)
    refined = F.conv2d(F.pad(hidden, (conv.left, 0)), conv.project_weight, conv.project_bias)
    residual = {"scores+bias": plain, "scores": scores}[conv.residual]
    return (residual + refined).masked_fill(~shown, -torch.inf)


def hidden_map(
    scores: Tensor, bias: Tensor | None, conv: ConvWeights, visible: Visible, *, causal: bool
) -> Tensor:
    """The map between the convolutions, [B, W, Tq, Tk + right]: its extra columns lie past the last key."""
    _, _, num_queries, num_keys = scores.shape
    first, last = visible.bounds(num_queries, num_keys, causal=causal, device=scores.device)
    shown = visible.mask(num_queries, num_keys, causal=causal and not conv.leak_future, device=scores.device)
    channels = scores if bias is None else torch.cat([scores, bias.expand_as(scores)], dim=1)
    image = F.pad(channels.masked_fill(~shown, 0.0), (conv.left, 2 * conv.right))
    hidden = F.leaky_relu(F.conv2d(image, conv.expand_weight, conv.expand_bias), conv.negative_slope)

    column = torch.arange(num_keys + conv.right, device=scores.device)
    end = torch.full_like(last, num_keys - 1) if conv.leak_future else last + conv.right * causal
    inside = (column >= first[..., None]) & (column <= end[..., None])
    return hidden.masked_fill(~inside[:, None], 0.0)


def softmax_visible(logits: Tensor) -> Tensor:
    """Weights [B, H, Tq, Tk]; a row without visible keys has weights 0."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values [B, G, Tk, D] repeated to [B, H, Tk, D]: query head h reads head h · G // H."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def logits(problem: Problem) -> Tensor:
    """The logits [B, H, Tq, Tk] of a call, in its compute dtype."""
    dtype = problem.compute_dtype
    q, k = problem.q.to(dtype), repeat_heads(problem.k, problem.q.shape[1]).to(dtype)
    scores = q @ k.transpose(-1, -2) * problem.scale
    bias = problem.dense_bias()
    return process_scores(
        scores,
        None if bias is None else bias.to(dtype),
        None if problem.conv is None else problem.conv.to(dtype),
        problem.visible,
        causal=problem.causal,
    )


def attend(problem: Problem) -> Tensor:
    """softmax(logits) · v, [B, H, Tq, D]."""
    weights = softmax_visible(logits(problem))
    values = repeat_heads(problem.v, problem.q.shape[1]).to(weights.dtype)
    return (F.dropout(weights, problem.dropout) @ values).to(problem.q.dtype)
