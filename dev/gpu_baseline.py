"""Plain causal attention in the manner of FlashAttention-2, in Triton: the baseline of estimates. Never executed."""

# Kernels are compiled from a language of their own.
# mypy: ignore-errors

from typing import Any

import torch
import triton
import triton.language as tl

from dape.ops.score_attention.triton.call import head_part
from dape.ops.score_attention.triton.forward import LOG2E, load_rows
from dape.ops.score_attention.triton.launch import Launch

# Rows and keys of a tile, warps, stages of the pipeline: the fastest in simulation is used.
CONFIGURATIONS = (
    (128, 64, 4, 3),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 32, 4, 3),
    (128, 32, 8, 3),
    (64, 64, 4, 2),
)


@triton.jit
def flash_kernel(
    q, k, v, out, q_head, k_head, q_token, length, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """softmax · V of a block of rows of one head; length is a multiple of BLOCK_R. The grid is (row blocks, H)."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    q += head * q_head
    k += head * G // H * k_head
    v += head * G // H * k_head
    queries, sums = (), ()
    for part in tl.static_range(PARTS):
        queries = queries + (load_rows(q, row, row >= 0, part, q_token, D, PART, False),)
        sums = sums + (tl.zeros([BLOCK_R, PART], tl.float32),)
    highest = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for masked in tl.static_range(2):
        begin = block * BLOCK_R * masked
        end = block * BLOCK_R + masked * BLOCK_R
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_K)
            logits = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
            for part in tl.static_range(PARTS):
                tile = load_rows(k, key, key >= 0, part, q_token, D, PART, False)
                logits = tl.dot(queries[part], tl.trans(tile), acc=logits)
            if masked:
                logits = tl.where(key[None, :] <= row[:, None], logits, -float("inf"))
            higher = tl.maximum(highest, tl.max(logits, 1) * (scale * LOG2E))
            weights = tl.exp2(logits * (scale * LOG2E) - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            weights = weights.to(v.dtype.element_ty)
            updated = ()
            for part in tl.static_range(PARTS):
                tile = load_rows(v, key, key >= 0, part, q_token, D, PART, False)
                updated = updated + (tl.dot(weights, tile, acc=sums[part] * shrink[:, None]),)
            sums = updated
            highest = higher
    for part in tl.static_range(PARTS):
        dim = part * PART + tl.arange(0, PART)
        address = out + head * q_head + row[:, None] * q_token + dim[None, :]
        tl.store(address, (sums[part] / total[:, None]).to(out.dtype.element_ty), mask=(dim < D)[None, :])


def launches(
    *, num_heads: int, head_dim: int, dtype: torch.dtype, num_groups: int | None = None
) -> list[Launch]:
    """Launches of plain attention for a shape, one per configuration."""
    part = head_part(head_dim)
    shape: dict[str, Any] = {"H": num_heads, "G": num_groups or num_heads, "D": head_dim}
    shape |= {"PART": part, "PARTS": -(-head_dim // part), "length": 2048, "scale": 0.125}
    shape |= {"q_head": 2048 * head_dim, "k_head": 2048 * head_dim, "q_token": head_dim}
    shape |= {name: torch.zeros(1, dtype=dtype) for name in ("q", "k", "v", "out")}
    return [
        Launch(
            flash_kernel,
            (-(-2048 // rows), num_heads),
            shape,
            ({"BLOCK_R": rows, "BLOCK_K": keys, "STAGES": stages, "num_warps": warps},),
        )
        for rows, keys, warps, stages in CONFIGURATIONS
    ]
