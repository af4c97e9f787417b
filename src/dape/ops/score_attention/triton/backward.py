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
    LOG2E,
    dot,
    first_terms,
    inside_row,
    leaky,
    load_bias,
    load_bounds,
    load_column,
    load_pixels,
    load_rows,
    unit_matrix,
)


@triton.jit
def weights_kernel(
    q, k, v, grad_out, image, given, bias, column_bias, first, last, lse, delta, factor, result, grad_v, grad_factor,
    q_batch, q_head, q_token, k_batch, k_head, k_token, grad_out_batch, grad_out_head, grad_out_token, bias_batch,
    bias_head, bias_row, column_bias_batch, column_bias_head, first_batch, factor_batch, image_batch, image_channel, given_batch, given_channel, result_batch,
    result_channel, num_rows, row_start, row_stop, num_queries, num_keys, columns, offset, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SCORES: tl.constexpr, IMAGE: tl.constexpr,
    BIAS: tl.constexpr, FACTOR: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weights of a chunk, or the gradients of its logits, as an image `result`, 0 where not visible.

    MODE: "weights"; "gradients", which also adds the rows' part of grad_v [B, H, num_keys, D]; "given": the gradients of
    the weights are an image `given`. FACTOR: logits are multiplied by factor [1 or B, H, Tq], whose gradients go to
    grad_factor [key tiles, B, H, num_rows]. WHOLE: only causality hides keys.
    The grid is (key tiles, H, B); a program takes a tile of keys and walks along the rows, ROWS at a time. BLOCK_R is
    that of the images: if a row of a block sees a key, all rows of the block are written.
    """
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_key = tile * BLOCK_K
    key = first_key + tl.arange(0, BLOCK_K)
    seen = key < num_keys
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * G // H * k_head
    v += batch * k_batch + head * G // H * k_head
    grad_out += batch * grad_out_batch + head * grad_out_head
    image += batch * image_batch + head * image_channel
    given += batch * given_batch + head * given_channel
    bias += batch * bias_batch + head * bias_head
    column_bias += batch * column_bias_batch + head * column_bias_head
    result += batch * result_batch + head * result_channel
    first += batch * first_batch
    last += batch * first_batch
    lse += (batch * H + head) * num_queries
    delta += (batch * H + head) * num_queries
    factor += batch * factor_batch + head * num_queries
    grad_factor += ((tile * tl.num_programs(2) + batch) * H + head) * num_rows
    keys, values, sums, unit = (), (), (), key
    for part in tl.static_range(PARTS):
        if SCORES:
            keys = keys + (load_rows(k, key, seen, part, k_token, D, PART, True),)
        if MODE == "gradients":
            values = values + (load_rows(v, key, seen, part, k_token, D, PART, True),)
            sums = sums + (tl.zeros([BLOCK_K, PART], tl.float32),)
    if IMAGE:
        unit = unit_matrix(ROWS, image.dtype.element_ty)
    begin, end = 0, row_stop - row_start
    if CAUSAL:
        # Rows before see none of these keys.
        begin = tl.maximum(first_key - offset - row_start, 0) // BLOCK_R * BLOCK_R
    # To the end of the last block: sums over rows read zeros there.
    finish = tl.cdiv(end, BLOCK_R) * BLOCK_R
    cuts = (begin, begin, begin, finish)
    if WHOLE:
        # From `full` to `stop`, every row sees every key.
        full, stop = 0, tl.maximum(end // ROWS * ROWS, begin)
        if CAUSAL:
            full = tl.cdiv(tl.maximum(first_key + BLOCK_K - 1 - offset - row_start, 0), ROWS) * ROWS
        full = tl.where(first_key + BLOCK_K <= num_keys, tl.minimum(tl.maximum(full, begin), stop), stop)
        cuts = (begin, full, stop, finish)
    for third in tl.static_range(0 if WHOLE else 2, 3):
        for top in tl.range(cuts[third], cuts[third + 1], ROWS, num_stages=STAGES):
            local = top + tl.arange(0, ROWS)
            row = row_start + local
            exists = row < row_stop if third != 1 else row >= 0
            shown, there = exists[None, :], exists[None, :]
            if third != 1:
                low, high = load_bounds(first, last, row, row_stop)
                shown = (key[:, None] >= low[None, :]) & (key[:, None] <= high[None, :])
                # Images have the columns that some row of the block sees.
                there = ((key >= tl.min(low)) & (key <= tl.max(high)) & (key < columns))[:, None]
            logits = tl.zeros([BLOCK_K, ROWS], tl.float32)
            grad_weights = tl.zeros([BLOCK_K, ROWS], tl.float32)
            directions = ()
            for part in tl.static_range(PARTS):
                if SCORES:
                    queries = load_rows(q, row, exists, part, q_token, D, PART, third != 1)
                    logits = dot(keys[part], tl.trans(queries), logits, PRECISION)
                if MODE == "gradients":
                    direction = load_rows(grad_out, row, exists, part, grad_out_token, D, PART, third != 1)
                    grad_weights = dot(values[part], tl.trans(direction), grad_weights, PRECISION)
                    directions = directions + (direction,)
            logits *= scale
            pixel = key[:, None] * num_rows + local[None, :]
            if IMAGE:
                logits = dot(load_pixels(image, pixel, there, third != 1), unit, logits, PRECISION)
            if BIAS != "none":
                logits += load_bias(
                    bias, column_bias, row[None, :], key[:, None], exists[None, :], seen[:, None], shown, bias_row,
                    BIAS)  # fmt: skip
            row_lse = tl.load(lse + row, mask=exists, other=0.0)
            # A row whose logits are all −∞ has no weights.
            row_lse = tl.where(row_lse == -float("inf"), 0.0, row_lse) * LOG2E
            scaled = logits
            if FACTOR:
                row_factor = tl.load(factor + row, mask=exists, other=0.0)
                scaled = logits * row_factor[None, :]
            weights = tl.exp2(scaled * LOG2E - row_lse[None, :])
            if third != 1:
                weights = tl.where(shown, weights, 0.0)
            inside = (key < columns)[:, None] if third != 1 else None
            if MODE == "weights":
                tl.store(result + pixel, weights.to(result.dtype.element_ty), mask=inside)
            else:
                row_delta = tl.load(delta + row, mask=exists, other=0.0)
                if MODE == "given":
                    grad_weights = load_pixels(given, pixel, there, third != 1).to(tl.float32)
                grad = weights * (grad_weights - row_delta[None, :])
                if FACTOR:
                    share = tl.where(shown & seen[:, None], logits * grad, 0.0)
                    tl.store(grad_factor + local, tl.sum(share, 0), mask=exists)
                    grad *= row_factor[None, :]
                tl.store(result + pixel, grad.to(result.dtype.element_ty), mask=inside)
            if MODE == "gradients":
                updated = ()
                for part in tl.static_range(PARTS):
                    product = dot(
                        weights.to(grad_out.dtype.element_ty), directions[part], sums[part], PRECISION
                    )
                    updated = updated + (product,)
                sums = updated
    if MODE == "gradients":
        index = ((batch * H + head) * num_keys + key) * D
        for part in tl.static_range(PARTS):
            dim = part * PART + tl.arange(0, PART)
            mask = seen[:, None] & (dim < D)[None, :]
            target = grad_v + index[:, None] + dim[None, :]
            tl.store(target, tl.load(target, mask=mask, other=0.0) + sums[part], mask=mask)


@triton.jit
def inner_kernel(
    x, y, first, last, sums, first_batch, x_batch, x_channel, x_column, x_pixel, y_batch, y_channel, y_column, y_pixel,
    row_start, row_stop, num_queries, columns,
    H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, VISIBLE: tl.constexpr,
):  # fmt: skip
    """Sums over columns, the visible ones or all, of x · y: sums [B, H, Tq]. The grid is (row blocks, H, B)."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    local = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    begin, end = 0, columns
    if VISIBLE:
        low, high = load_bounds(first + batch * first_batch, last + batch * first_batch, row, row_stop)
        begin, end = tl.min(low), tl.max(high) + 1
    x += batch * x_batch + head * x_channel
    y += batch * y_batch + head * y_channel
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        column = (start + tl.arange(0, BLOCK_K))[:, None]
        mask = (column < end) & (row < row_stop)[None, :]
        one = tl.load(x + column * x_column + local[None, :] * x_pixel, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(
            one * tl.load(y + column * y_column + local[None, :] * y_pixel, mask=mask, other=0.0), 0
        )
    tl.store(sums + (batch * H + head) * num_queries + row, total, mask=row < row_stop)


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
    block, batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2).to(tl.int64)
    out_part = tl.program_id(1) % OUT_PARTS
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * first_batch, last + batch * first_batch, row, row_stop)
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
    a part of the channels. The grid is (row blocks · walks · B, IN_PARTS · OUT_PARTS, groups of taps).
    """
    blocks, walks = num_rows // BLOCK_R, tl.cdiv(columns, walk)
    program = tl.program_id(0)
    block, rest = program % blocks, program // blocks
    number, batch = rest % walks, (rest // walks).to(tl.int64)
    in_part, out_part = tl.program_id(1) % IN_PARTS, tl.program_id(1) // IN_PARTS
    first_tap = tl.program_id(2) * TAPS
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * first_batch, last + batch * first_batch, row, row_stop)
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
def products_kernel(
    x, image, first, last, out, x_batch, x_head, x_token, first_batch, image_batch, image_channel,
    num_rows, row_start, row_stop, out_start, out_rows, num_keys, per_split, offset, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products of an image and rows of x, [B, G, tokens, D], times scale: out [splits, B, H, out_rows, D].

    Without KEYS, of each query's row of the image and a split of the keys x, written. With KEYS, of each column and the
    queries x, added to out, in float32. The grid is (row blocks · splits or key tiles, H, B); BLOCK_R is that of the image.
    """
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    split = 0
    if not KEYS:
        blocks = num_rows // BLOCK_R
        tile, split = blocks - 1 - tile % blocks, tile // blocks
    SIZE: tl.constexpr = BLOCK_K if KEYS else BLOCK_R
    STEP: tl.constexpr = BLOCK_R if KEYS else BLOCK_K
    first += batch * first_batch
    last += batch * first_batch
    x += batch * x_batch + head * G // H * x_head
    image += batch * image_batch + head * image_channel
    own = tile * SIZE + tl.arange(0, SIZE)
    low, high = load_bounds(first, last, row_start + own, row_stop if not KEYS else row_start)
    begin = tl.maximum(tl.min(low) // STEP * STEP, split * per_split)
    end = tl.minimum(tl.max(high) + 1, (split + 1) * per_split)
    if KEYS:
        begin, end = 0, row_stop - row_start
        if CAUSAL:
            begin = tl.maximum(tile * SIZE - offset - row_start, 0) // STEP * STEP
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([SIZE, PART], tl.float32),)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        other = start + tl.arange(0, STEP)
        # Pixels are there if some row of their block sees the key.
        if KEYS:
            lows, highs = load_bounds(first, last, row_start + other, row_stop)
            there = ((own >= tl.min(lows)) & (own <= tl.max(highs)))[:, None]
            pixel, token, stop = own[:, None] * num_rows + other[None, :], row_start + other, row_stop
        else:
            there = ((other >= tl.min(low)) & (other < end))[None, :]
            pixel, token, stop = other[None, :] * num_rows + own[:, None], other, num_keys
        pixels = tl.load(image + pixel, mask=there, other=0.0)
        updated = ()
        for part in tl.static_range(PARTS):
            rows = load_rows(x, token, token < stop, part, x_token, D, PART, True)
            updated = updated + (dot(pixels.to(rows.dtype), rows, sums[part], PRECISION),)
        sums = updated
    token = own if KEYS else row_start + own
    exists = token < num_keys if KEYS else token < row_stop
    index = (((split * tl.num_programs(2) + batch) * H + head) * out_rows + token - out_start) * D
    for part in tl.static_range(PARTS):
        dim = part * PART + tl.arange(0, PART)
        mask = exists[:, None] & (dim < D)[None, :]
        target = out + index[:, None] + dim[None, :]
        result = sums[part] * scale
        if KEYS:
            result += tl.load(target, mask=mask, other=0.0)
        tl.store(target, result.to(out.dtype.element_ty), mask=mask)


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
