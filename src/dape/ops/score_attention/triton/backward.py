"""Kernels for any stage and for the backward pass.

The backward pass of a chunk of rows repeats its forward pass, keeping the image before every stage, then walks the
stages back: the gradient of an image is a stage with turned weights (stage_kernel), the gradient of the weights a
product of two images over all their pixels (taps_kernel). Sums over programs are partial buffers, added in order.

If a chunk covers a segment of the keys, its images also have the columns around it that these depend on. Gradients
that are sums over keys include the segment's own alone, own_start … own_stop − 1.
"""

# Kernels are compiled from a language of their own.
# mypy: ignore-errors

import triton
import triton.language as tl

from dape.ops.score_attention.triton.forward import (
    LOG2E,
    dot,
    hidden_start,
    inside_row,
    leaky,
    load_bias,
    load_bounds,
    load_column,
    load_pixels,
    load_rows,
    output_start,
    unit_matrix,
)


@triton.jit
def weight_tiles(
    keys, values, sums, unit, extra, key, own, q, grad_out, image, given, bias, first, last, lse, delta, factor, result,
    grad_factor, begin, end, row_start, row_stop, num_rows, right, scale, q_token, grad_token, bias_row, bias_key,
    image_channel,
    D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, SCORES: tl.constexpr,
    IMAGES: tl.constexpr, BIAS: tl.constexpr, FACTOR: tl.constexpr, MODE: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The rows begin … end − 1 of a chunk against a tile of keys; returns sums including their part of grad_v."""
    for top in tl.range(begin, end, BLOCK_R, num_stages=STAGES):
        local = top + tl.arange(0, BLOCK_R)
        row = row_start + local
        exists = row < row_stop if EDGE else row >= 0
        shown, there = exists[None, :], exists[None, :]
        if EDGE:
            low, high = load_bounds(first, last, row, row_stop)
            shown = (key[:, None] >= low[None, :]) & (key[:, None] <= high[None, :])
            # Images have the columns that some row of the block sees.
            there = ((key >= tl.min(low)) & (key <= tl.max(high)) & (key < right))[:, None]
        logits = tl.zeros([key.shape[0], BLOCK_R], tl.float32)
        grad_weights = tl.zeros([key.shape[0], BLOCK_R], tl.float32)
        directions = ()
        for part in tl.static_range(PARTS):
            if SCORES:
                queries = load_rows(q, row, exists, part, q_token, D, PART, EDGE)
                logits = dot(keys[part], tl.trans(queries), logits, PRECISION)
            if MODE == "gradients":
                direction = load_rows(grad_out, row, exists, part, grad_token, D, PART, EDGE)
                grad_weights = dot(values[part], tl.trans(direction), grad_weights, PRECISION)
                directions = directions + (direction,)
        logits *= scale
        pixel = key[:, None] * num_rows + local[None, :]
        for number in tl.static_range(IMAGES):
            pixels = load_pixels(image + number * image_channel, pixel, there, EDGE)
            logits = dot(pixels, unit, logits, PRECISION)
        if BIAS != "none":
            logits += load_bias(bias, row[None, :], key[:, None], shown, bias_row, bias_key)
        if BIAS == "separable":
            logits += extra[:, None]
        row_lse = tl.load(lse + row, mask=exists, other=0.0)
        # A row whose logits are all −∞ has no weights.
        row_lse = tl.where(row_lse == -float("inf"), 0.0, row_lse) * LOG2E
        scaled = logits
        if FACTOR:
            row_factor = tl.load(factor + row, mask=exists, other=0.0)
            scaled = logits * row_factor[None, :]
        weights = tl.exp2(scaled * LOG2E - row_lse[None, :])
        if EDGE:
            weights = tl.where(shown, weights, 0.0)
        inside = (key < right)[:, None] if EDGE else None
        if MODE == "weights":
            tl.store(result + pixel, weights.to(result.dtype.element_ty), mask=inside)
        else:
            row_delta = tl.load(delta + row, mask=exists, other=0.0)
            if MODE == "given":
                grad_weights = load_pixels(given, pixel, there, EDGE).to(tl.float32)
            grad = weights * (grad_weights - row_delta[None, :])
            if FACTOR:
                share = tl.where(shown & own[:, None], logits * grad, 0.0)
                tl.store(grad_factor + local, tl.sum(share, 0), mask=exists)
                grad *= row_factor[None, :]
            tl.store(result + pixel, grad.to(result.dtype.element_ty), mask=inside)
        if MODE == "gradients":
            updated = ()
            for part in tl.static_range(PARTS):
                product = dot(weights.to(grad_out.dtype.element_ty), directions[part], sums[part], PRECISION)
                updated = updated + (product,)
            sums = updated
    return sums


@triton.jit(
    do_not_specialize=[
        "row_start",
        "row_stop",
        "num_queries",
        "num_keys",
        "left",
        "right",
        "own_start",
        "own_stop",
        "grad_keys",
        "offset",
        "out_rows",
    ]
)
def weights_kernel(
    q, k, v, grad_out, image, given, bias, column_bias, first, last, lse, delta, factor, result, grad_v, grad_factor,
    q_batch, q_head, q_token, k_batch, k_head, k_token, grad_batch, grad_head, grad_token,
    bias_batch, bias_head, bias_row, bias_key, bounds_batch, factor_batch, image_batch, image_head, image_channel,
    given_batch, given_channel, result_batch, result_channel, num_rows, row_start, row_stop, num_queries, num_keys,
    left, right, own_start, own_stop, grad_keys, offset, out_rows, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SCORES: tl.constexpr, IMAGES: tl.constexpr,
    BIAS: tl.constexpr, FACTOR: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, MODE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The weights of a chunk, or the gradients of its logits, as an image `result`, 0 where not visible.

    MODE: "weights"; "gradients", which also adds the rows' part of grad_v [B, H, grad_keys, D] from key own_start on;
    "given": the gradients of the weights are an image `given`. FACTOR: logits are multiplied by factor [1 or B, H, Tq],
    whose gradients go to grad_factor [key tiles, B, H, out_rows]. WHOLE: only causality hides keys.
    The grid is (key tiles, H, B); a program takes a tile of keys and walks along the rows, ROWS at a time. BLOCK_R is
    that of the images: if a row of a block sees a key, all rows of the block are written.
    """
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_key = left + tile * BLOCK_K
    key = first_key + tl.arange(0, BLOCK_K)
    seen = key < num_keys
    own = (key >= own_start) & (key < tl.minimum(own_stop, num_keys))
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * G // H * k_head
    v += batch * k_batch + head * G // H * k_head
    grad_out += batch * grad_batch + head * grad_head
    image += batch * image_batch + head * image_head - left * num_rows
    given += batch * given_batch + head * given_channel - left * num_rows
    bias += batch * bias_batch + head * bias_head
    column_bias += (batch * H + head) * num_keys
    result += batch * result_batch + head * result_channel - left * num_rows
    first += batch * bounds_batch
    last += batch * bounds_batch
    lse += (batch * H + head) * num_queries
    delta += (batch * H + head) * num_queries
    factor += batch * factor_batch + head * num_queries
    grad_factor += ((tile * tl.num_programs(2) + batch) * H + head) * out_rows
    keys, values, sums, unit, extra = (), (), (), key, key
    for part in tl.static_range(PARTS):
        if SCORES:
            keys = keys + (load_rows(k, key, seen, part, k_token, D, PART),)
        if MODE == "gradients":
            values = values + (load_rows(v, key, seen, part, k_token, D, PART),)
            sums = sums + (tl.zeros([BLOCK_K, PART], tl.float32),)
    if IMAGES:
        unit = unit_matrix(ROWS, image.dtype.element_ty)
    if BIAS == "separable":
        extra = tl.load(column_bias + key, mask=seen, other=0.0).to(tl.float32)
    begin, end = 0, row_stop - row_start
    if CAUSAL:
        # Rows before see none of these keys.
        begin = tl.maximum(first_key - offset - row_start, 0) // BLOCK_R * BLOCK_R
    if WHOLE:
        # From `full` to `stop`, every row sees every key.
        full, stop = 0, tl.maximum(end // ROWS * ROWS, begin)
        if CAUSAL:
            full = tl.cdiv(tl.maximum(first_key + BLOCK_K - 1 - offset - row_start, 0), ROWS) * ROWS
        inside = first_key + BLOCK_K <= tl.minimum(num_keys, right)
        full = tl.where(inside, tl.minimum(tl.maximum(full, begin), stop), stop)
        sums = weight_tiles(
            keys, values, sums, unit, extra, key, own, q, grad_out, image, given, bias, first, last, lse, delta, factor,
            result, grad_factor, begin, full, row_start, row_stop, num_rows, right, scale, q_token, grad_token,
            bias_row, bias_key, image_channel,
            D, PART, PARTS, ROWS, SCORES, IMAGES, BIAS, FACTOR, MODE, True, PRECISION, STAGES)  # fmt: skip
        sums = weight_tiles(
            keys, values, sums, unit, extra, key, own, q, grad_out, image, given, bias, first, last, lse, delta, factor,
            result, grad_factor, full, stop, row_start, row_stop, num_rows, right, scale, q_token, grad_token,
            bias_row, bias_key, image_channel,
            D, PART, PARTS, ROWS, SCORES, IMAGES, BIAS, FACTOR, MODE, False, PRECISION, STAGES)  # fmt: skip
        begin = stop
    # To the end of the last block: sums over rows read zeros there.
    end = tl.cdiv(end, BLOCK_R) * BLOCK_R
    sums = weight_tiles(
        keys, values, sums, unit, extra, key, own, q, grad_out, image, given, bias, first, last, lse, delta, factor,
        result, grad_factor, begin, end, row_start, row_stop, num_rows, right, scale, q_token, grad_token,
        bias_row, bias_key, image_channel,
        D, PART, PARTS, ROWS, SCORES, IMAGES, BIAS, FACTOR, MODE, True, PRECISION, STAGES)  # fmt: skip
    if MODE == "gradients":
        index = ((batch * H + head) * grad_keys + key - own_start) * D
        for part in tl.static_range(PARTS):
            dim = part * PART + tl.arange(0, PART)
            mask = own[:, None] & (dim < D)[None, :]
            target = grad_v + index[:, None] + dim[None, :]
            tl.store(target, tl.load(target, mask=mask, other=0.0) + sums[part], mask=mask)


@triton.jit(do_not_specialize=["row_start", "row_stop", "out_rows", "per_split"])
def inner_kernel(
    x, y, first, last, sums, bounds_batch, x_batch, x_channel, y_batch, y_channel, num_rows, row_start, row_stop,
    out_rows, per_split, H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over the visible columns of x · y, two images: sums [splits, B, H, out_rows].

    The grid is (row blocks · splits, H, B); BLOCK_R is that of the images.
    """
    blocks = num_rows // BLOCK_R
    block, split = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * bounds_batch, last + batch * bounds_batch, row, row_stop)
    x += batch * x_batch + head * x_channel
    y += batch * y_batch + head * y_channel
    total = tl.zeros([BLOCK_R], tl.float32)
    stop = tl.minimum(tl.max(high) + 1, (split + 1) * per_split)
    for start in tl.range(tl.maximum(tl.min(low), split * per_split), stop, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        pixel = key[:, None] * num_rows + local[None, :]
        mask = (key < stop)[:, None]
        one, two = tl.load(x + pixel, mask=mask, other=0.0), tl.load(y + pixel, mask=mask, other=0.0)
        total += tl.sum(one.to(tl.float32) * two.to(tl.float32), 0)
    index = ((split * tl.num_programs(2) + batch) * H + head) * out_rows + local
    tl.store(sums + index, total, mask=row < row_stop)


@triton.jit(
    do_not_specialize=[
        "row_start",
        "num_queries",
        "left",
        "right",
        "walk",
        "held",
        "wanted",
        "offset",
        "values_length",
        "lowest",
    ]
)
def stage_kernel(
    image, out, first, last, weights, offsets, table, values, gate, residual,
    bounds_batch, image_batch, image_channel, out_batch, out_channel, residual_batch, residual_channel, table_plane,
    values_length, lowest, num_rows, row_start, num_queries, left, right, walk, held, wanted, offset, slope,
    IN: tl.constexpr, OUTS: tl.constexpr, IN_PARTS: tl.constexpr, IN_PART: tl.constexpr, OUT_PARTS: tl.constexpr,
    OUT_PART: tl.constexpr, K: tl.constexpr, LEFT: tl.constexpr, BLOCK_R: tl.constexpr, CAUSAL: tl.constexpr,
    START: tl.constexpr, VALUES: tl.constexpr, FINISH: tl.constexpr, REPEAT: tl.constexpr, RESIDUALS: tl.constexpr,
    UNROLLED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One stage over an image, of any size.

    weights: [K, IN_PARTS · IN_PART, OUT_PARTS · OUT_PART]. held, wanted: columns past the visible ones in the image and
    in the result. START: "offsets", "table" or "zero"; VALUES: with a bias by distance. FINISH: "none", "leaky" (then
    zero outside of the row's hidden map), "gate" (the derivative of the LeakyReLU that made `gate`, likewise), or
    "residual": RESIDUALS channels of `residual`, channel c modulo REPEAT, are added where visible, 0 elsewhere.
    The grid is (row blocks, walks · OUT_PARTS, B).
    """
    RIGHT: tl.constexpr = K - 1 - LEFT
    block, batch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2).to(tl.int64)
    out_part = tl.program_id(1) % OUT_PARTS
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * bounds_batch, last + batch * bounds_batch, row, num_queries)
    begin, end = tl.maximum(tl.min(low), left), tl.max(high) + 1
    start = begin + tl.program_id(1) // OUT_PARTS * walk
    stop = tl.minimum(start + walk, tl.minimum(end + wanted, right))
    image_stop = tl.minimum(end + held, right)
    channel = out_part * OUT_PART + tl.arange(0, OUT_PART)
    image += batch * image_batch - left * num_rows
    gate += batch * out_batch - left * num_rows
    out += batch * out_batch - left * num_rows
    residual += batch * residual_batch - left * num_rows
    shift = tl.zeros([OUT_PART], tl.float32)
    if START == "offsets":
        shift = tl.load(offsets + channel)
    for column in tl.range(start, stop, num_stages=STAGES):
        if START == "table":
            distance = row + offset + RIGHT
            total = hidden_start(shift, table, table_plane, distance, column, low, channel, OUT_PARTS * OUT_PART, LEFT,
                                 True, True)  # fmt: skip
        else:
            total = output_start(
                shift,
                values,
                values_length,
                row + offset - column - lowest,
                channel,
                OUT_PARTS * OUT_PART,
                VALUES,
            )
        if UNROLLED:
            for tap in tl.static_range(K):
                for part in tl.static_range(IN_PARTS):
                    inputs = part * IN_PART + tl.arange(0, IN_PART)
                    x = load_column(
                        image,
                        column + tap - LEFT,
                        begin,
                        image_stop,
                        local,
                        num_rows,
                        inputs,
                        image_channel,
                        IN,
                    )
                    index = (tap * IN_PARTS * IN_PART + inputs[:, None]) * (OUT_PARTS * OUT_PART) + channel[
                        None, :
                    ]
                    total = dot(x, tl.load(weights + index), total, PRECISION)
        else:
            for number in tl.range(0, K * IN_PARTS):
                tap = number // IN_PARTS
                inputs = number % IN_PARTS * IN_PART + tl.arange(0, IN_PART)
                x = load_column(
                    image, column + tap - LEFT, begin, image_stop, local, num_rows, inputs, image_channel, IN
                )
                index = (tap * IN_PARTS * IN_PART + inputs[:, None]) * (OUT_PARTS * OUT_PART) + channel[
                    None, :
                ]
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


@triton.jit(
    do_not_specialize=[
        "row_start",
        "num_queries",
        "left",
        "right",
        "own_start",
        "own_stop",
        "walk",
        "held",
        "wanted",
    ]
)
def taps_kernel(
    image, grad, first, last, sums,
    bounds_batch, image_batch, image_channel, grad_batch, grad_channel,
    num_rows, row_start, num_queries, left, right, own_start, own_stop, walk, held, wanted,
    IN: tl.constexpr, OUTS: tl.constexpr, IN_PARTS: tl.constexpr, IN_PART: tl.constexpr, OUT_PARTS: tl.constexpr,
    OUT_PART: tl.constexpr, K: tl.constexpr, LEFT: tl.constexpr, TAPS: tl.constexpr, BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to partial gradients of a stage's weights and, as tap K, of its offsets (in every channel).

    sums: [programs, K + 1, IN_PARTS · IN_PART, OUT_PARTS · OUT_PART], each program's own. A program takes TAPS taps of
    a part of the channels. The grid is (row blocks · walks · B, IN_PARTS · OUT_PARTS, groups of taps).
    """
    blocks = num_rows // BLOCK_R
    program = tl.program_id(0)
    block, rest = program % blocks, program // blocks
    walks = tl.cdiv(right - left, walk)
    number, batch = rest % walks, (rest // walks).to(tl.int64)
    in_part, out_part = tl.program_id(1) % IN_PARTS, tl.program_id(1) // IN_PARTS
    first_tap = tl.program_id(2) * TAPS
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * bounds_batch, last + batch * bounds_batch, row, num_queries)
    begin, end = tl.maximum(tl.min(low), left), tl.max(high) + 1
    start = tl.maximum(begin, own_start) + number * walk
    stop = tl.minimum(start + walk, tl.minimum(end + wanted, own_stop))
    image_stop = tl.minimum(end + held, right)
    inputs = in_part * IN_PART + tl.arange(0, IN_PART)
    channel = out_part * OUT_PART + tl.arange(0, OUT_PART)
    image += batch * image_batch - left * num_rows
    grad += batch * grad_batch - left * num_rows
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
            index = ((program * (K + 1) + tap) * IN_PARTS * IN_PART + inputs[:, None]) * (
                OUT_PARTS * OUT_PART
            )
            target = sums + index + channel[None, :]
            tl.store(target, tl.load(target) + totals[i])


@triton.jit(
    do_not_specialize=[
        "row_start",
        "row_stop",
        "out_start",
        "out_rows",
        "num_keys",
        "left",
        "own_start",
        "own_stop",
        "per_split",
    ]
)
def queries_kernel(
    k, image, first, last, grad_q, k_batch, k_head, k_token, bounds_batch, image_batch, image_channel,
    num_rows, row_start, row_stop, out_start, out_rows, num_keys, left, own_start, own_stop, per_split, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_q [splits, B, H, out_rows, D] of a chunk: the gradients of the scores (an image) times a split of the keys.

    The grid is (row blocks · splits, H, B); BLOCK_R is that of the image.
    """
    blocks = num_rows // BLOCK_R
    block, split = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * bounds_batch, last + batch * bounds_batch, row, row_stop)
    begin, end = tl.maximum(tl.min(low), own_start), tl.minimum(tl.max(high) + 1, own_stop)
    k += batch * k_batch + head * G // H * k_head
    image += batch * image_batch + head * image_channel - left * num_rows
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_R, PART], tl.float32),)
    # Segments begin at a multiple of BLOCK_K.
    own = own_start + split * per_split
    stop = tl.minimum(end, own + per_split)
    for start in tl.range(tl.maximum(begin // BLOCK_K * BLOCK_K, own), stop, BLOCK_K, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_K)
        seen = (key >= begin) & (key < end)
        grad = tl.load(image + key[None, :] * num_rows + local[:, None], mask=seen[None, :], other=0.0)
        updated = ()
        for part in tl.static_range(PARTS):
            tile = load_rows(k, key, key < num_keys, part, k_token, D, PART)
            updated = updated + (dot(grad.to(tile.dtype), tile, sums[part], PRECISION),)
        sums = updated
    index = (((split * tl.num_programs(2) + batch) * H + head) * out_rows + row - out_start) * D
    for part in tl.static_range(PARTS):
        dim = part * PART + tl.arange(0, PART)
        mask = (row < row_stop)[:, None] & (dim < D)[None, :]
        result = (sums[part] * scale).to(grad_q.dtype.element_ty)
        tl.store(grad_q + index[:, None] + dim[None, :], result, mask=mask)


@triton.jit(
    do_not_specialize=[
        "row_start",
        "row_stop",
        "num_keys",
        "left",
        "own_start",
        "own_stop",
        "grad_keys",
        "offset",
    ]
)
def keys_kernel(
    q, image, first, last, grad_k, q_batch, q_head, q_token, bounds_batch, image_batch, image_channel,
    num_rows, row_start, row_stop, num_keys, left, own_start, own_stop, grad_keys, offset, scale,
    H: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add a chunk's part of grad_k [B, H, grad_keys, D]: the gradients of the scores (an image), transposed, times queries.

    grad_k is that of the segment's keys. The grid is (key tiles, H, B); BLOCK_R is that of the image.
    """
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key = own_start + tile * BLOCK_K + tl.arange(0, BLOCK_K)
    q += batch * q_batch + head * q_head
    image += batch * image_batch + head * image_channel - left * num_rows
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_K, PART], tl.float32),)
    start = 0
    if CAUSAL:
        start = tl.maximum(own_start + tile * BLOCK_K - offset - row_start, 0) // BLOCK_R * BLOCK_R
    for top in tl.range(start, row_stop - row_start, BLOCK_R, num_stages=STAGES):
        local = top + tl.arange(0, BLOCK_R)
        row = row_start + local
        low, high = load_bounds(first + batch * bounds_batch, last + batch * bounds_batch, row, row_stop)
        seen = (key >= tl.min(low)) & (key <= tl.max(high)) & (key < own_stop)
        grad = tl.load(image + key[:, None] * num_rows + local[None, :], mask=seen[:, None], other=0.0)
        updated = ()
        for part in tl.static_range(PARTS):
            queries = load_rows(q, row, row < row_stop, part, q_token, D, PART)
            updated = updated + (dot(grad.to(queries.dtype), queries, sums[part], PRECISION),)
        sums = updated
    index = ((batch * H + head) * grad_keys + key - own_start) * D
    for part in tl.static_range(PARTS):
        dim = part * PART + tl.arange(0, PART)
        mask = (key < tl.minimum(num_keys, own_stop))[:, None] & (dim < D)[None, :]
        target = grad_k + index[:, None] + dim[None, :]
        tl.store(target, tl.load(target, mask=mask, other=0.0) + sums[part] * scale, mask=mask)


@triton.jit(do_not_specialize=["splits", "row_size", "row_begin", "row_stride"])
def fold_kernel(
    parts, target, rest, splits, size, row_size, row_begin, row_stride, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum of parts [splits, size], in order, to the elements row_begin … row_begin + row_size − 1 of each
    block of row_stride elements of target.

    ADD: add to the values of target and rest. The rounding error of a dtype below float32 is kept in rest for the
    next addition. The grid is (blocks of elements,).
    """
    CUTS: tl.constexpr = target.dtype.element_ty != tl.float32
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = number < size
    index = (number // row_size).to(tl.int64) * row_stride + row_begin + number % row_size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(0, splits):
        total += tl.load(parts + split * size + number, mask=mask, other=0.0)
    if ADD:
        if CUTS:
            total += tl.load(rest + index, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(target + index, mask=mask, other=0.0).to(tl.float32)
    result = total.to(target.dtype.element_ty)
    tl.store(target + index, result, mask=mask)
    if ADD and CUTS:
        cut = total - result.to(tl.float32)
        tl.store(rest + index, cut.to(rest.dtype.element_ty), mask=mask)


@triton.jit
def diagonal_steps(
    totals, image, first, last, lane, channel, shift, begin, end, row_start, row_stop, least, num_rows, offset, extra,
    image_channel, C: tl.constexpr, PLANES: tl.constexpr, EVERY: tl.constexpr, WHOLE: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Add the pixels of the steps begin … end − 1 to totals; without EVERY only those of the last plane."""
    for step in tl.range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            local = step + i + lane
            # The same for all lanes.
            column = shift + step + i
            counts = (local >= least) & (local < row_stop - row_start) & (step + i < end)
            low = local * 0
            if not WHOLE:
                row = row_start + local
                low = tl.load(first + row, mask=counts, other=0)
                high = tl.load(last + row, mask=counts, other=-1)
                counts = counts & (low <= high) & (column >= low) & (column <= high + extra)
            index = column * num_rows + local
            x = tl.load(
                image + index[:, None] + channel[None, :] * image_channel,
                mask=counts[:, None] & (channel < C)[None, :],
                other=0.0,
            ).to(tl.float32)
            updated = ()
            for plane in tl.static_range(PLANES):
                added = totals[plane]
                if EVERY:
                    chosen = tl.minimum(column - low, PLANES - 1) == plane
                    added = added + tl.where(chosen[:, None], x, 0.0)
                elif plane == PLANES - 1:
                    added = added + x
                updated = updated + (added,)
            totals = updated
    return totals


@triton.jit(
    do_not_specialize=[
        "left",
        "row_start",
        "row_stop",
        "own_start",
        "own_stop",
        "offset",
        "bottom",
        "lowest",
        "num_distances",
        "extra",
        "num_batch",
    ]
)
def diagonals_kernel(
    image, first, last, sums, bounds_batch, image_batch, image_channel, sums_plane, sums_distance, sums_channel,
    num_rows, left, row_start, row_stop, own_start, own_stop, offset, bottom, lowest, num_distances, extra, num_batch,
    C: tl.constexpr, CHANNELS: tl.constexpr, PLANES: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add to sums by distance of an image: sums [PLANES, num_distances, C] with any strides, from `lowest` on.

    Plane p < PLANES − 1 is for pixels p columns after the first visible key, the last plane for all others. extra:
    columns past the last visible key that count. The grid is (tiles of BLOCK_D distances from `bottom` on, groups of
    CHANNELS channels). Lanes are distances, and walk along the diagonals: a step takes one column and consecutive rows.
    """
    base = bottom + tl.program_id(0) * BLOCK_D
    lane = tl.arange(0, BLOCK_D)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    # Lane i of step t is row t + i, in column shift + t.
    shift = row_start + offset - base
    begin = tl.maximum(1 - BLOCK_D, own_start - shift)
    end = tl.minimum(row_stop - row_start, own_stop - shift)
    # Earlier rows see nothing.
    least = tl.maximum(0, -offset - row_start) if CAUSAL else 0
    totals = ()
    for _ in tl.static_range(PLANES):
        totals = totals + (tl.zeros([BLOCK_D, CHANNELS], tl.float32),)
    image -= left * num_rows
    middle = end
    if WHOLE:
        # Every row begins with column 0.
        middle = tl.minimum(tl.maximum(PLANES - 1 - shift, begin), end)
    # The images of all batch entries have fewer than 2³¹ numbers.
    for number in tl.range(0, num_batch):
        own_image = image + number * image_batch
        own_first, own_last = first + number * bounds_batch, last + number * bounds_batch
        if PLANES > 1 or not WHOLE:
            totals = diagonal_steps(
                totals, own_image, own_first, own_last, lane, channel, shift, begin, middle, row_start, row_stop, least,
                num_rows, offset, extra, image_channel, C, PLANES, True, WHOLE, UNROLL)  # fmt: skip
        if WHOLE:
            totals = diagonal_steps(
                totals, own_image, own_first, own_last, lane, channel, shift, middle, end, row_start, row_stop, least,
                num_rows, offset, extra, image_channel, C, PLANES, False, WHOLE, UNROLL)  # fmt: skip
    n = base + lane - lowest
    mask = ((n >= 0) & (n < num_distances))[:, None] & (channel < C)[None, :]
    index = n[:, None] * sums_distance + channel[None, :] * sums_channel
    for plane in tl.static_range(PLANES):
        target = sums + plane * sums_plane + index
        tl.store(target, tl.load(target, mask=mask, other=0.0) + totals[plane], mask=mask)
