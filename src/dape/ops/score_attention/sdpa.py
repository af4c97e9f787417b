"""PyTorch's own fused attention, for calls without a convolution whose bias, if any, needs no gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dape.ops.score_attention.types import EVERYTHING, DistanceBias, Problem, SeparableBias, TileBias

# Largest number of elements of a T×T mask or bias to build.
MASK_NUMBERS = 16 * 1024 * 1024


def unsupported(problem: Problem) -> str | None:
    if not problem.program.is_plain:
        return "it supports plain scores only"
    if isinstance(problem.bias, (TileBias, SeparableBias)):
        return "it supports a dense bias only"
    bias = problem.bias.values if isinstance(problem.bias, DistanceBias) else problem.bias
    if bias is not None and bias.requires_grad:
        return "it would build a T×T gradient for the bias"
    if bias is not None and bias.dtype != problem.q.dtype:
        return f"it would round the bias from {bias.dtype} to {problem.q.dtype}"
    if problem.causal and problem.scale <= 0:
        return f"its causal mask is wrong for scale={problem.scale}"
    batch, num_heads, num_queries, num_keys, _ = problem.sizes
    numbers = num_queries * num_keys
    numbers *= num_heads if bias is not None else 1
    if isinstance(numbers, torch.SymInt) and not _is_plain(problem):
        return "it would build a mask of a size that is left open"
    if not _is_plain(problem) and numbers * batch > MASK_NUMBERS:
        return f"it would build a mask of {batch}×{num_queries}×{num_keys} numbers"
    return None


def _is_plain(problem: Problem) -> bool:
    """Whether no mask is needed: no bias, and no limits other than square causality."""
    _, _, num_queries, num_keys, _ = problem.sizes
    square = num_queries == num_keys or num_queries == 1 or not problem.causal
    return problem.bias is None and problem.visible == EVERYTHING and square


def attend(problem: Problem) -> Tensor:
    """softmax(S + B) · v, [B, H, Tq, D]."""
    q, k, v = problem.q, problem.k, problem.v
    _, num_heads, num_queries, num_keys, _ = problem.sizes
    grouped = k.shape[1] != num_heads
    if _is_plain(problem):
        # A statement, because a comparison with a size that a graph leaves open gives no bool.
        causal = problem.causal
        if num_queries == 1:
            causal = False
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=problem.scale, dropout_p=problem.dropout, enable_gqa=grouped
        )
    shown = problem.visible.mask(num_queries, num_keys, causal=problem.causal, device=q.device)
    bias = problem.dense_bias()
    mask = shown if bias is None else bias.masked_fill(~shown, -float("inf"))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=problem.scale, dropout_p=problem.dropout, enable_gqa=grouped
    )
    # Fused kernels disagree on rows without visible keys; ours are zero.
    return out.masked_fill(~shown.any(-1, keepdim=True), 0.0)
