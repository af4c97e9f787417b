"""The definition: attention with convolved scores, written like its formulas. Any dtype, any device, T×T memory.

    X      = [S ; B] over heads, 0 where not visible
    Y      = project(LeakyReLU(expand(X)))
    logits = S + B + Y where visible, else −∞
    out    = softmax(logits) · v

A row depends on its visible keys alone. To the right of a causal query's last visible key the hidden map
goes on, computed from zeros; to the left of the first visible key it is zero. Without causality it is zero
on both sides. A deeper stack, Y = project(LeakyReLU(middle(… LeakyReLU(expand(X))))), keeps this rule for all its
hidden maps.

A kernel of kq rows lets row i read rows i − kq + 1 … i of X and of every hidden map. A row counts as zero in all of
them, as if it were before the first, where row i does not see that row's own key (padding, another document) and
where it sees nothing itself. So rows depend on earlier rows, which a chunk of queries must bring along.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.types import ConvWeights, Problem, Visible


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
    refined = refine(scores, bias, conv, visible, causal=causal)
    residual = {"scores+bias": plain, "scores": scores}[conv.residual]
    return (residual + refined).masked_fill(~shown, -torch.inf)


def refine(
    scores: Tensor, bias: Tensor | None, conv: ConvWeights, visible: Visible, *, causal: bool
) -> Tensor:
    """What the convolutions make of scores and bias, [B, H, Tq, Tk]."""
    _, _, num_queries, num_keys = scores.shape
    sizes, device = (num_queries, num_keys), scores.device
    first, last = visible.bounds(*sizes, causal=causal, device=device)
    shown = visible.mask(*sizes, causal=causal and not conv.leak_future, device=device)
    earlier = visible.readable_rows(*sizes, device=device)
    channels = scores if bias is None else torch.cat([scores, bias.expand_as(scores)], dim=1)

    # As many columns past the last key as the later convolutions reach.
    num_columns = num_keys + (conv.depth - 1) * conv.right
    image = F.pad(channels.masked_fill(~shown, 0.0), (0, num_columns - num_keys))
    column = torch.arange(num_columns, device=device)
    inside = (column >= first[..., None]) & (first <= last)[..., None]
    if conv.leak_future:
        inside = inside & (column < num_keys)
    elif not causal:
        inside = inside & (column <= last[..., None])
    for weight, offset in conv.layers[:-1]:
        hidden = F.leaky_relu(convolve(image, weight, offset, conv.left, earlier), conv.negative_slope)
        image = hidden.masked_fill(~inside[:, None], 0.0)
    return convolve(image, *conv.layers[-1], conv.left, earlier)[..., :num_keys]


def convolve(image: Tensor, weight: Tensor, offset: Tensor, left: int, earlier: Tensor) -> Tensor:
    """A kq×k convolution [B, C, Tq, n] → [B, O, Tq, n] that reads at most `earlier` [B or 1, Tq] rows before its own."""
    num_rows, (query_kernel_size, kernel_size) = image.shape[2], weight.shape[2:]
    padded = F.pad(image, (left, kernel_size - 1 - left))
    total = offset[:, None, None]
    for distance in range(query_kernel_size):
        rows = F.pad(padded, (0, 0, distance, 0))[:, :, :num_rows]
        rows = rows.masked_fill((earlier < distance)[:, None, :, None], 0.0)
        total = total + F.conv2d(rows, weight[:, :, [query_kernel_size - 1 - distance]])
    return total


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
