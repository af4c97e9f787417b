"""What the Triton kernels are expected to cost for a visible pair of query and key: an estimate, not a measurement.

Counted are the multiply-accumulates that the kernels issue (padding included, the streams' halo left out) and
the bytes of maps of the size T×T that they write or read. Keys, values and tables are read through caches
and left out, here and for SDPA.
"""

from __future__ import annotations

from typing import NamedTuple


class PairCost(NamedTuple):
    """Per visible pair: multiply-accumulates and bytes of T×T maps, forward and backward."""

    forward_macs: int
    backward_macs: int
    forward_bytes: int
    backward_bytes: int


def padded(size: int) -> int:
    """The power of two, at least 16, that holds `size`: what tensor cores are fed with."""
    return max(16, 1 << (size - 1).bit_length())


def sdpa_cost(num_heads: int, head_width: int) -> PairCost:
    """Plain fused attention: QKᵀ and PV forward; both again and three gradients backward."""
    product = num_heads * head_width
    return PairCost(2 * product, 5 * product, 0, 0)


def pair_cost(
    num_heads: int,
    head_width: int,
    width: int,
    kernel_size: int,
    *,
    bias: str = "distance",
    element_size: int = 2,
    padding: bool = True,
) -> PairCost:
    """The kernels' cost; bias: "none", "distance" (by tables) or "dense"; without padding, the work that is needed."""
    heads, dims, hidden = num_heads, head_width, width
    if padding:
        heads, dims, hidden = padded(num_heads), padded(head_width), padded(width)
    product, convolution = heads * dims, heads * hidden * kernel_size
    inputs = 2 if bias == "dense" else 1
    # First convolution of scores (and of a dense bias), then the second.
    forward = 2 * product + (inputs + 1) * convolution
    # Scores again and the gradient of the weights, with the convolutions.
    first = 2 * product + (inputs + 1) * convolution
    # Hidden map, its gradient, the inputs' gradients (16 heads occupy one warp: the other repeats them), the
    # gradients of the weights, and the sums by distance; then dq, dk, dv.
    repeats = 2 if padding and heads == 16 else 1
    second = ((2 + repeats) * inputs + 2) * convolution + 16 * hidden
    products = 3 * num_heads * head_width
    # Maps: scores and logit gradients written and read, softmax weights and score gradients cleared, written, and
    # read by the copies that the matrix products take, which are written and read (twice for the scores').
    cell = heads * element_size
    maps = 2 * 2 + 2 * 3 + (2 + 3) * num_heads / heads
    if bias == "dense":
        # The bias, read by both kernels, and its gradient cleared, written, read, and written out.
        maps += 2 + 3 + 1
    forward_maps = 1 if bias == "dense" else 0
    return PairCost(forward, first + second + products, int(forward_maps * cell), int(maps * cell))


def table(num_heads: int = 12, head_width: int = 64, width: int = 32, kernel_size: int = 3) -> str:
    """The costs beside SDPA's, as a Markdown table."""
    rows = {
        "SDPA": sdpa_cost(num_heads, head_width),
        "needed, bias by distance": pair_cost(num_heads, head_width, width, kernel_size, padding=False),
        "no bias": pair_cost(num_heads, head_width, width, kernel_size, bias="none"),
        "bias by distance": pair_cost(num_heads, head_width, width, kernel_size),
        "dense bias": pair_cost(num_heads, head_width, width, kernel_size, bias="dense"),
    }
    lines = [
        "| | forward MACs | backward MACs | forward bytes | backward bytes | MACs ÷ SDPA's, forward and backward |",
        "|---|---|---|---|---|---|",
    ]
    base = rows["SDPA"].forward_macs + rows["SDPA"].backward_macs
    for name, cost in rows.items():
        ratio = (cost.forward_macs + cost.backward_macs) / base
        lines.append(f"| {name} | " + " | ".join(str(number) for number in cost) + f" | {ratio:.1f} |")
    return "\n".join(lines)
