"""Reference implementation of attention with a score program, close to the formulas: any dtype and device, T×T memory.

    X       = S, or [S ; B] over heads, 0 where not visible
    logits  = residual + pre(X) where visible, else −∞
    P       = softmax(logits), with the sink in its sum, logits scaled by `length_factor`; or
              stick-breaking or 1.5-entmax of them
    weights = post(P) where visible, else 0
    out     = weights · v

A stage is a convolution and a LeakyReLU; DAPE V2 has pre = project ∘ LeakyReLU ∘ expand. The values of maps at the
edges of visibility are defined in edges.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.edges import Edges
from dape.ops.score_attention.program import ScoreProgram, Stage
from dape.ops.score_attention.types import Problem


def unsupported(problem: Problem) -> str | None:
    return None


def attend(problem: Problem, support: type[Edges] = Edges) -> Tensor:
    """weights · v, [B, H, Tq, D]."""
    values = repeat_heads(problem.v, problem.q.shape[1]).to(problem.compute_dtype)
    return (F.dropout(weights(problem, support), problem.dropout) @ values).to(problem.q.dtype)


def weights(problem: Problem, support: type[Edges] = Edges) -> Tensor:
    """Attention weights [B, H, Tq, Tk] of a call, in its compute dtype."""
    dtype, edges = problem.compute_dtype, support.of_call(problem)
    program, bias = problem.program.to(dtype), problem.dense_bias()
    scores = problem.q.to(dtype) @ repeat_heads(problem.k, problem.q.shape[1]).to(dtype).transpose(-1, -2)
    bias = None if bias is None else bias.to(dtype)
    return normalise(process(scores * problem.scale, bias, program, edges), program, edges)


def process(scores: Tensor, bias: Tensor | None, program: ScoreProgram, edges: Edges) -> Tensor:
    """Logits [B, H, Tq, Tk] of scaled scores [B, H, Tq, Tk] and a bias [1 or B, H, Tq, Tk] or None."""
    scores = capped(scores, program)
    plain = scores if bias is None else scores + bias
    if not program.pre:
        return plain.masked_fill(~edges.shown, -torch.inf)
    nothing = torch.zeros_like(scores)
    residual = {
        "scores+bias": plain,
        "scores": scores,
        "bias": nothing if bias is None else bias,
        "none": nothing,
    }[program.residual]
    refined = apply_stages(edges.image(image_of(scores, bias, program)), program.pre, edges)
    return (residual + refined).masked_fill(~edges.shown, -torch.inf)


def capped(scores: Tensor, program: ScoreProgram) -> Tensor:
    """The scores after the program's softcap, if it has one."""
    return scores if program.softcap is None else program.softcap * torch.tanh(scores / program.softcap)


def normalise(logits: Tensor, program: ScoreProgram, edges: Edges) -> Tensor:
    """Attention weights [B, H, Tq, Tk] of logits; a row without visible keys has weights 0."""
    if program.length_scale is not None:
        factor = program.length_factor(edges.num_visible)[..., None].to(logits.dtype)
        logits = (logits.masked_fill(~edges.shown, 0.0) * factor).masked_fill(~edges.shown, -torch.inf)
    if program.normaliser == "softmax":
        weights = softmax_visible(logits, program.sink)
    else:
        weights = {"stickbreaking": stick_breaking, "entmax": entmax}[program.normaliser](logits)
    if program.post:
        weights = apply_stages(weights, program.post, edges).masked_fill(~edges.shown, 0.0)
    return weights


def image_of(scores: Tensor, bias: Tensor | None, program: ScoreProgram) -> Tensor:
    """Input channels [B, C, Tq, Tk] of the first stage."""
    if bias is None or not program.reads_bias(scores.shape[1]):
        return scores
    groups = (program.pre[0].groups, -1)
    pairs = (scores.unflatten(1, groups), bias.expand_as(scores).unflatten(1, groups))
    return torch.cat(pairs, dim=2).flatten(1, 2)


def apply_stages(image: Tensor, stages: tuple[Stage, ...], edges: Edges) -> Tensor:
    """Apply the stages to an image [B, C, Tq, Tk] → [B, H, Tq, Tk]."""
    # As many columns past the last key as the later stages reach.
    image = F.pad(image, (0, sum(stage.right for stage in stages[1:])))
    for stage in stages:
        image = edges.hidden(F.leaky_relu(convolve(image, stage, edges), stage.slope))
    return image[..., : edges.num_keys]


def convolve(image: Tensor, stage: Stage, edges: Edges) -> Tensor:
    """Convolution of a stage [B, in, Tq, n] → [B, out, Tq, n], without its activation."""
    padded = F.pad(image, (stage.left, stage.right))
    total = image.new_zeros(()) if stage.offset is None else stage.offset[:, None, None]
    for row in range(stage.query_kernel_size):
        rows = edges.rows_before(padded, stage.query_kernel_size - 1 - row)
        total = total + F.conv2d(rows, stage.weight[:, :, [row]], groups=stage.groups)
    return total


def softmax_visible(logits: Tensor, sink: Tensor | None = None) -> Tensor:
    """Weights [B, H, Tq, Tk]; exp(sink) [H] is added to their sum. A row without visible keys has weights 0."""
    empty = logits.detach().amax(-1, keepdim=True) == -torch.inf
    logits = logits.masked_fill(empty, 0.0)
    if sink is not None:
        column = sink[:, None, None].expand(*logits.shape[:3], 1)
        return torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1].masked_fill(empty, 0.0)
    return torch.softmax(logits, -1).masked_fill(empty, 0.0)


def stick_breaking(logits: Tensor) -> Tensor:
    """Weights σ(lⱼ) Π (1 − σ(lₘ)) over all later keys m: each key takes its share of what those after it left.

    The sum of a row is below 1.
    """
    hidden = logits == -torch.inf
    logits = logits.masked_fill(hidden, 0.0)
    left = F.logsigmoid(-logits).masked_fill(hidden, 0.0)
    after = F.pad(left[..., 1:].flip(-1).cumsum(-1).flip(-1), (0, 1))
    return (F.logsigmoid(logits) + after).exp().masked_fill(hidden, 0.0)


def entmax(logits: Tensor) -> Tensor:
    """Weights (lⱼ / 2 − τ)₊² that sum to 1, exactly zero for small logits: α-entmax with α = 1.5 (Peters et al. 2019)."""
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    half = logits.masked_fill(empty, 0.0) / 2
    half = half - half.detach().amax(-1, keepdim=True)
    with torch.no_grad():
        # Only values above −1 have weights. τ solves a quadratic equation in the k largest, for the right k.
        largest = half.clamp(min=-2).sort(-1, descending=True).values
        count = torch.arange(1, half.shape[-1] + 1, device=half.device, dtype=half.dtype)
        mean = largest.cumsum(-1) / count
        spread = largest.square().cumsum(-1) - count * mean.square()
        candidates = mean - ((1 - spread) / count).clamp(min=0).sqrt()
        size = (candidates <= largest).sum(-1, keepdim=True)
        threshold = candidates.gather(-1, size - 1)
    # A step of Newton's method from the solution: it keeps the value and has the derivative of τ.
    above = (half - threshold).clamp(min=0)
    threshold = threshold + (above.square().sum(-1, keepdim=True) - 1) / (2 * above.sum(-1, keepdim=True))
    return (half - threshold).clamp(min=0).square().masked_fill(empty, 0.0)


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Keys or values [B, G, Tk, D] repeated to [B, H, Tk, D]: query head h reads head h · G // H."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)
