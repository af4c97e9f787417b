"""Kernels for any stage and for the backward pass.

The backward pass of a chunk of rows repeats its forward pass, keeping the image before every stage, then walks the
stages back: the gradient of an image is a stage with turned weights (stage_kernel), the gradient of the weights a
product of two images over all their pixels (taps_kernel). Sums over programs are partial buffers, added in order.
"""

# Kernels are compiled from a language of their own.
# mypy: ignore-errors

import triton
import triton.language as tl

from dape.ops.score_attention.triton.forward import (
    dot,
    first_terms,
    inside_row,
    leaky,
    load_bounds,
    load_column,
    load_rows,
    rows_of_program,
)


@triton.jit
def stage_kernel(
    image, out, first, last, weights, offsets, table, gate, residual,
    first_batch, image_batch, image_channel, out_batch, out_channel, residual_batch, residual_channel, table_plane,
    table_lowest, num_rows, row_start, row_stop, columns, walk, held, wanted, offset, slope,
    IN: tl.constexpr, OUTS: tl.constexpr, IN_PARTS: tl.constexpr, IN_PART: tl.constexpr, OUT_PARTS: tl.constexpr,
    OUT_PART: tl.constexpr, K: tl.constexpr, LEFT: tl.constexpr, BLOCK_R: tl.constexpr, CAUSAL: tl.constexpr,
    OFFSETS: tl.constexpr, TABLE: tl.constexpr, PLANES: tl.constexpr, FINISH: tl.constexpr, REPEAT: tl.constexpr, RESIDUALS: tl.constexpr,
    UNROLL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stage over an image, of any size.

    weights: [K, IN_PARTS · IN_PART, OUT_PARTS · OUT_PART]. held, wanted: columns past the visible ones in the image and
    in the result. OFFSETS or TABLE: it begins with offsets [out] or a table by distance. FINISH: "none", "leaky" (then
    zero outside of the row's hidden map), "gate" (the derivative of the LeakyReLU that made `gate`, likewise), or
    "residual": RESIDUALS channels of `residual`, channel c modulo REPEAT, are added where visible, 0 elsewhere.
    The grid is (row blocks, walks · OUT_PARTS, B).
    """
    WIDTH: tl.constexpr = OUT_PARTS * OUT_PART
    batch, _, local, row, low, high = rows_of_program(
        first, last, first_batch, num_rows, row_start, row_stop, BLOCK_R
    )
    out_part = tl.program_id(1) % OUT_PARTS
    begin, end = tl.min(low), tl.max(high) + 1
    start = begin + tl.program_id(1) // OUT_PARTS * walk
    stop = tl.minimum(start + walk, tl.minimum(end + wanted, columns))
    image_stop = tl.minimum(end + held, columns)
    channel = out_part * OUT_PART + tl.arange(0, OUT_PART)
    image += batch * image_batch
    gate += batch * out_batch
    out += batch * out_batch
    residual += batch * residual_batch
    shift = tl.zeros([OUT_PART], tl.float32)
    if OFFSETS:
        shift = tl.load(offsets + channel)
    for column in tl.range(start, stop, num_stages=STAGES):
        reach = row + offset - table_lowest
        total = first_terms(
            shift, table, table_plane, reach, column, low, channel, WIDTH, PLANES, TABLE, True
        )
        for number in tl.range(0, K * IN_PARTS, loop_unroll_factor=UNROLL):
            inputs = number % IN_PARTS * IN_PART + tl.arange(0, IN_PART)
            source = column + number // IN_PARTS - LEFT
            x = load_column(image, source, begin, image_stop, local, num_rows, inputs, image_channel, IN)
            index = (number // IN_PARTS * IN_PARTS * IN_PART + inputs[:, None]) * WIDTH + channel[None, :]
            total = dot(x, tl.load(weights + index), total, PRECISION)
        index = column * num_rows + local[:, None] + channel[None, :] * out_channel
        mask = (channel < OUTS)[None, :]
        if FINISH == "leaky":
            total = tl.where(inside_row(column, low, high, CAUSAL)[:, None], leaky(total, slope), 0.0)
        if FINISH == "gate":
            active = tl.load(gate + index, mask=mask, other=0.0)
            total = tl.where(active > 0, total, total * slope)
            total = tl.where(inside_row(column, low, high, CAUSAL)[:, None], total, 0.0)
        if FINISH == "residual":
            shown = (column >= low) & (column <= high)
            source = column * num_rows + local[:, None] + (channel % REPEAT)[None, :] * residual_channel
            # After the last visible key of the block there is no gradient.
            there = (column < end) & (channel < RESIDUALS)[None, :]
            total += tl.load(residual + source, mask=there, other=0.0).to(tl.float32)
            total = tl.where(shown[:, None], total, 0.0)
        tl.store(out + index, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def taps_kernel(
    image, grad, first, last, sums,
    first_batch, image_batch, image_channel, grad_batch, grad_channel,
    num_rows, row_start, row_stop, columns, walk, held, wanted,
    IN: tl.constexpr, OUTS: tl.constexpr, IN_PARTS: tl.constexpr, IN_PART: tl.constexpr, OUT_PARTS: tl.constexpr,
    OUT_PART: tl.constexpr, K: tl.constexpr, LEFT: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to partial gradients of a stage's weights and, as tap K, of its offsets (in every channel).

    sums: [programs, K + 1, IN_PARTS · IN_PART, OUT_PARTS · OUT_PART], each program's own. A program takes TAPS taps of
    a part of the channels. The grid is (row blocks · walks, groups of taps · IN_PARTS · OUT_PARTS, B).
    """
    batch, number, local, _, low, high = rows_of_program(
        first, last, first_batch, num_rows, row_start, row_stop, BLOCK_R
    )
    program = batch * tl.num_programs(0) + tl.program_id(0)
    in_part, out_part = tl.program_id(1) % IN_PARTS, tl.program_id(1) // IN_PARTS % OUT_PARTS
    first_tap = tl.program_id(1) // (IN_PARTS * OUT_PARTS) * TAPS
    begin, end = tl.min(low), tl.max(high) + 1
    start = begin + number * walk
    stop = tl.minimum(start + walk, tl.minimum(end + wanted, columns))
    image_stop = tl.minimum(end + held, columns)
    inputs = in_part * IN_PART + tl.arange(0, IN_PART)
    channel = out_part * OUT_PART + tl.arange(0, OUT_PART)
    image += batch * image_batch
    grad += batch * grad_batch
    dtype: tl.constexpr = grad.dtype.element_ty
    totals = ()
    for _ in tl.static_range(TAPS):
        totals = totals + (tl.zeros([IN_PART, OUT_PART], tl.float32),)
    for column in tl.range(start, stop, num_stages=STAGES):
        direction = load_column(grad, column, begin, stop, local, num_rows, channel, grad_channel, OUTS)
        updated = ()
        for i in tl.static_range(TAPS):
            tap = first_tap + i
            source = column + tap - LEFT
            inside = (source >= begin) & (source < image_stop) & (tap < K)
            index = source * num_rows + local[None, :] + inputs[:, None] * image_channel
            x = tl.load(image + index, mask=inside & (inputs < IN)[:, None], other=0.0)
            # The offset is the weight of a channel of ones.
            x = (x + tl.where(tap == K, 1.0, 0.0).to(x.dtype)).to(dtype)
            updated = updated + (dot(x, direction, totals[i], PRECISION),)
        totals = updated
    for i in tl.static_range(TAPS):
        tap = first_tap + i
        if tap <= K:
            index = (program * (K + 1) + tap) * IN_PARTS * IN_PART + inputs[:, None]
            target = sums + index * (OUT_PARTS * OUT_PART) + channel[None, :]
            tl.store(target, tl.load(target) + totals[i])


@triton.jit
def keys_kernel(
    x, image, first, last, out, x_batch, x_head, x_token, first_batch, image_batch, image_channel, out_batch, out_head,
    num_rows, row_start, row_stop, num_keys, offset, scale,
    D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to out [B, H, Tk, D], in float32: each column of an image times the queries x [B, H, Tq, D], times scale.

    The grid is (key tiles, H, B); BLOCK_R divides that of the image.
    """
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    x += batch * x_batch + head * x_head
    image += batch * image_batch + head * image_channel
    out += batch * out_batch + head * out_head
    first += batch * first_batch
    last += batch * first_batch
    begin, sums = 0, ()
    if CAUSAL:
        # Rows before see none of these keys.
        begin = tl.maximum(tile * BLOCK_K - offset - row_start, 0) // BLOCK_R * BLOCK_R
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_K, PART], tl.float32),)
    for start in tl.range(begin, row_stop - row_start, BLOCK_R, num_stages=STAGES):
        local = start + tl.arange(0, BLOCK_R)
        row = row_start + local
        low, high = load_bounds(first, last, row, row_stop)
        # Pixels are there if some row of their block sees the key.
        there = ((key >= tl.min(low)) & (key <= tl.max(high)))[:, None]
        pixels = tl.load(image + key[:, None] * num_rows + local[None, :], mask=there, other=0.0)
        updated = ()
        for part in tl.static_range(PARTS):
            rows = load_rows(x, row, row < row_stop, part, x_token, D, PART, True)
            updated = updated + (dot(pixels.to(rows.dtype), rows, sums[part], PRECISION),)
        sums = updated
    for part in tl.static_range(PARTS):
        dim = part * PART + tl.arange(0, PART)
        mask = (key < num_keys)[:, None] & (dim < D)[None, :]
        target = out + key[:, None] * D + dim[None, :]
        tl.store(target, tl.load(target, mask=mask, other=0.0) + sums[part] * scale, mask=mask)


@triton.jit
def diagonals_kernel(
    image, first, last, sums, first_batch, image_batch, image_channel, num_rows, row_start, row_stop, stop_column,
    offset, bottom, lowest, num_distances, extra,
    C: tl.constexpr, CHANNELS: tl.constexpr, PLANES: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Add to sums by distance of an image: sums [B, PLANES, num_distances, C], from `lowest` on.

    Plane p < PLANES − 1 is for pixels p columns after the first visible key, the last plane for all others. extra:
    columns past the last visible key that count. The grid is (tiles of BLOCK_D distances from `bottom` on, groups of
    CHANNELS channels, B). Lanes are distances, and walk along the diagonals: a step takes one column and consecutive
    rows.
    """
    batch = tl.program_id(2).to(tl.int64)
    base = bottom + tl.program_id(0) * BLOCK_D
    lane = tl.arange(0, BLOCK_D)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    # Lane i of step t is row t + i, in column shift + t.
    shift = row_start + offset - base
    begin = tl.maximum(1 - BLOCK_D, -shift)
    end = tl.minimum(row_stop - row_start, stop_column - shift)
    # Earlier rows see nothing.
    least = tl.maximum(0, -offset - row_start) if CAUSAL else 0
    image += batch * image_batch
    first += batch * first_batch
    last += batch * first_batch
    totals = ()
    for _ in tl.static_range(PLANES):
        totals = totals + (tl.zeros([BLOCK_D, CHANNELS], tl.float32),)
    for step in tl.range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            local = step + i + lane
            # The same for all lanes.
            column = shift + step + i
            counts = (local >= least) & (local < row_stop - row_start) & (step + i < end)
            low = tl.load(first + row_start + local, mask=counts, other=0)
            high = tl.load(last + row_start + local, mask=counts, other=-1)
            counts = counts & (low <= high) & (column >= low) & (column <= high + extra)
            index = (column * num_rows + local)[:, None] + channel[None, :] * image_channel
            x = tl.load(image + index, mask=counts[:, None] & (channel < C)[None, :], other=0.0).to(
                tl.float32
            )
            updated = ()
            for plane in tl.static_range(PLANES):
                chosen = tl.minimum(column - low, PLANES - 1) == plane
                updated = updated + (totals[plane] + tl.where(chosen[:, None], x, 0.0),)
            totals = updated
    n = base + lane - lowest
    mask = ((n >= 0) & (n < num_distances))[:, None] & (channel < C)[None, :]
    for plane in tl.static_range(PLANES):
        target = sums + ((batch * PLANES + plane) * num_distances + n[:, None]) * C + channel[None, :]
        tl.store(target, tl.load(target, mask=mask, other=0.0) + totals[plane], mask=mask)
