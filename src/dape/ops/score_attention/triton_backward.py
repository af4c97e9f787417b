"""The two backward kernels for GPUs: weights and logit gradients, then the way back through the convolutions.

Both work on a chunk of query rows and exchange maps through scratch [B, rows, keys, HEADS]. The first walks
along the keys like the forward kernel. The second walks along *distances*: a program takes BLOCK_R rows, and
at one step all of them at one distance, so that sums by distance are sums over a program's pixels. Its maps
are [channels, rows]; rings hold the positions that the taps reach.
"""

# Kernels are compiled from a language of their own.
# mypy: ignore-errors

import triton
import triton.language as tl

from dape.ops.score_attention.triton_forward import (
    dot,
    dot_keys,
    empty_rings,
    load_bias,
    load_bounds,
    load_queries,
    load_start,
    load_tap,
    push,
    stream_tokens,
    walk_step,
)


@triton.jit
def logits_kernel(
    q, k, v, grad_out, first, last, w1, wb, w2, b1, b2, table, bias, lse, delta, scores_out, weights_out, grad_logits,
    q_batch, q_head, q_token, grad_batch, grad_head, grad_token, k_batch, k_head, k_token, first_batch,
    last_batch, bias_batch, bias_head, bias_row, bias_step, table_plane, num_queries, offset, scale, slope,
    row_start, row_stop, num_columns,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
    PART: tl.constexpr, WIDTH: tl.constexpr, KERNEL: tl.constexpr, LEFT: tl.constexpr, BLOCK_Q: tl.constexpr,
    STREAMS: tl.constexpr, CAUSAL: tl.constexpr, CONV: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr,
    RESIDUAL_BIAS: tl.constexpr, PRECISION: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """For the rows row_start … row_stop − 1: scores, weights and logit gradients of the visible pairs.

    lse, delta: [B, H, Tq]; the three maps: [B, rows, num_columns, HEADS]. The grid is (query blocks, B).
    """
    RIGHT: tl.constexpr = KERNEL - 1 - LEFT
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    k, v, bias = k + batch * k_batch, v + batch * k_batch, bias + batch * bias_batch
    first, last = first + batch * first_batch, last + batch * last_batch
    rows = row_start + block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    safe_rows = tl.minimum(rows, row_stop - 1)
    q, grad_out = q + batch * q_batch, grad_out + batch * grad_batch
    q_held, grad_held = (), ()
    if HOLD:
        q_held = load_queries(q, safe_rows, q_token, q_head, H, D, HEADS, DIMS, PART)
        grad_held = load_queries(grad_out, safe_rows, grad_token, grad_head, H, D, HEADS, DIMS, PART)
    head = tl.minimum(tl.arange(0, HEADS), H - 1)[:, None]
    place = (batch * H + head) * num_queries + safe_rows[None, :]
    row_lse, row_delta = tl.load(lse + place)[:, :, None], tl.load(delta + place)[:, :, None]

    pixel = tl.arange(0, BLOCK_Q * STREAMS)
    query = row_start + block * BLOCK_Q + pixel // STREAMS
    first_key, last_key = load_bounds(first, last, query, row_stop)
    begin, end = tl.min(first_key), tl.max(last_key) + 1
    length = tl.cdiv(tl.maximum(end - begin, 0), STREAMS)
    steps = tl.where(length > 0, length + 2 * (KERNEL - 1), 0)
    key = begin + pixel % STREAMS * length
    bias_place = key * bias_step + query * bias_row
    map_start = batch * (row_stop - row_start) * num_columns * HEADS
    scores_out, weights_out, grad_logits = (
        scores_out + map_start,
        weights_out + map_start,
        grad_logits + map_start,
    )
    map_place = ((query - row_start) * num_columns + key)[None, :] * HEADS + tl.arange(0, HEADS)[:, None]

    rings = empty_rings(q.dtype.element_ty, BLOCK_Q * STREAMS, HEADS, KERNEL, LEFT, CONV, BIAS, TABLE)
    for step in tl.range(steps, disable_licm=True):
        n = step - 2 * LEFT
        q_parts, grad_parts = q_held, grad_held
        if not HOLD:
            q_parts = load_queries(q, safe_rows, q_token, q_head, H, D, HEADS, DIMS, PART)
            grad_parts = load_queries(grad_out, safe_rows, grad_token, grad_head, H, D, HEADS, DIMS, PART)
        lowest_n, highest_n = first_key - key, last_key - key
        scores, logits, rings = walk_step(
            n, q_parts, k, rings, begin, end, length, lowest_n, highest_n, query + offset - key, bias_place,
            w1, wb, w2, b1, b2, table, bias, k_token, k_head, table_plane, bias_head, bias_step, scale, slope,
            H, G, D, HEADS, PART, WIDTH, KERNEL, LEFT, BLOCK_Q, STREAMS, CAUSAL, CONV, BIAS, TABLE,
            RESIDUAL_BIAS, PRECISION)  # fmt: skip
        if CONV:
            own = (n >= 0) & (n < length) & (n >= lowest_n) & (n <= highest_n)
            tl.store(scores_out + map_place + n * HEADS, scores.to(q.dtype.element_ty), mask=own[None, :])
        done = n - 2 * RIGHT
        token = stream_tokens(begin, end, length, done, STREAMS)
        grad_weights = dot_keys(
            grad_parts, v, token, k_token, k_head, H, G, D, HEADS, BLOCK_Q, STREAMS, PART, PRECISION
        )
        weights = tl.exp(tl.reshape(logits, (HEADS, BLOCK_Q, STREAMS)) - row_lse)
        grad = tl.reshape(weights * (grad_weights - row_delta), (HEADS, BLOCK_Q * STREAMS))
        weights = tl.reshape(weights, (HEADS, BLOCK_Q * STREAMS))
        own = ((done >= 0) & (done >= lowest_n) & (done <= highest_n))[None, :]
        target = map_place + done * HEADS
        tl.store(weights_out + target, weights.to(v.dtype.element_ty), mask=own)
        tl.store(grad_logits + target, grad.to(q.dtype.element_ty), mask=own)


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """A tuple of COUNT maps of zeros."""
    maps = ()
    for _ in tl.static_range(COUNT):
        maps = maps + (tl.zeros([ROWS, COLUMNS], dtype),)
    return maps


@triton.jit
def load_map(x, place, shown, HEADS: tl.constexpr):
    """One position of a map in scratch, [HEADS, rows], 0 where hidden."""
    place = place[None, :] + tl.arange(0, HEADS)[:, None]
    return tl.load(x + place, mask=shown[None, :], other=0.0)


@triton.jit
def add_products(sums, x, ring, START: tl.constexpr, PRECISION: tl.constexpr):
    """sums[t] + x · ring[START + t]ᵀ for every tap t: the gradients of a convolution's weights."""
    updated = ()
    for tap in tl.static_range(len(sums)):
        updated = updated + (dot(x, tl.trans(ring[START + tap]), sums[tap], PRECISION),)
    return updated


@triton.jit
def store_taps(x, program, sums, part, ROWS: tl.constexpr, PART: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows part · PART … of a program's partial x [programs, taps, ROWS, COLUMNS]."""
    place = (part * PART + tl.arange(0, PART))[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for tap in tl.static_range(len(sums)):
        tl.store(x + (program * len(sums) + tap) * ROWS * COLUMNS + place, sums[tap])


@triton.jit
def convolution_kernel(
    scores, grad_logits, first, last, w1, wb, w1_turned, wb_turned, w2_turned, b1, table, bias,
    grad_scores, grad_bias, sum_w1, sum_wb, sum_w2, sum_b1, sum_b2, sum_table, sum_values,
    first_batch, last_batch, bias_batch, bias_head, bias_row, bias_step, table_plane, offset, slope,
    row_start, row_stop, num_columns, top, bottom, num_distances,
    H: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, KERNEL: tl.constexpr, LEFT: tl.constexpr,
    BLOCK_R: tl.constexpr, SEGMENT: tl.constexpr, CAUSAL: tl.constexpr, CONV: tl.constexpr,
    BIAS: tl.constexpr, TABLE: tl.constexpr, RESIDUAL_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of scores and bias from those of the logits, and partial sums for weights and tables.

    grad_scores, grad_bias: maps in scratch like scores and grad_logits. sum_w1, sum_wb: [programs, KERNEL, WIDTH,
    HEADS], sum_w2 (transposed) alike, sum_b1: [programs, WIDTH], sum_b2: [programs, HEADS], sum_table:
    [row programs, LEFT + 1, table distances, WIDTH], sum_values: [row programs, num_distances, HEADS].
    The grid is (segments of distances, row blocks, B); segment 0 starts at distance `top` and goes down.
    """
    RIGHT: tl.constexpr = KERNEL - 1 - LEFT
    REACH: tl.constexpr = LEFT if LEFT > RIGHT else RIGHT
    CHANNELS: tl.constexpr = CONV and BIAS != "none" and not TABLE
    PARTS: tl.constexpr = WIDTH // 32 if WIDTH > 32 else 1
    PART: tl.constexpr = WIDTH // PARTS
    dtype: tl.constexpr = grad_logits.dtype.element_ty
    segment, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row_program = batch * tl.num_programs(1) + block
    program = row_program * tl.num_programs(0) + segment
    bias, first, last = bias + batch * bias_batch, first + batch * first_batch, last + batch * last_batch

    # At step n a row stands at distance start − n; the program owns the steps 0 … SEGMENT − 1.
    start = top - segment * SEGMENT
    row = row_start + block * BLOCK_R + tl.arange(0, BLOCK_R)
    first_key, last_key = load_bounds(first, last, row, row_stop)
    key = row + offset - start
    lowest_n, highest_n = first_key - key, last_key - key
    map_start = batch * (row_stop - row_start) * num_columns * HEADS
    scores, grad_logits = scores + map_start, grad_logits + map_start
    grad_scores, grad_bias = grad_scores + map_start, grad_bias + map_start
    place = ((row - row_start) * num_columns + key) * HEADS
    head, pixel_head = tl.arange(0, HEADS), tl.arange(0, HEADS)[:, None]
    busy = (tl.max(highest_n) + RIGHT >= 0) & (tl.min(lowest_n) < SEGMENT)
    # Past the last visible key, and what the taps reach beyond it, there is nothing more.
    steps = tl.minimum(SEGMENT + LEFT, tl.max(highest_n) + 1 + REACH) + RIGHT + 2 * REACH
    steps = tl.where(busy, steps, 0)

    score_ring, bias_ring, grad_ring, pending, pending_bias = (), (), (), (), ()
    w1_sums, wb_sums, w2_sums, b1_sums = (), (), (), ()
    if CONV:
        score_ring = zeros(REACH + LEFT + 1, HEADS, BLOCK_R, dtype)
        grad_ring = zeros(REACH + RIGHT + 1, HEADS, BLOCK_R, dtype)
        pending = zeros(KERNEL, HEADS, BLOCK_R, tl.float32)
        w1_sums, w2_sums = (
            zeros(KERNEL * PARTS, PART, HEADS, tl.float32),
            zeros(KERNEL * PARTS, PART, HEADS, tl.float32),
        )
        b1_sums = zeros(PARTS, PART, 16, tl.float32)
        if CHANNELS:
            bias_ring = zeros(REACH + LEFT + 1, HEADS, BLOCK_R, dtype)
            pending_bias = zeros(KERNEL, HEADS, BLOCK_R, tl.float32)
            wb_sums = zeros(KERNEL * PARTS, PART, HEADS, tl.float32)
    b2_sums = tl.zeros([HEADS], tl.float32)

    for step in tl.range(steps, disable_licm=True):
        n = step - RIGHT - REACH
        shown = (n >= lowest_n) & (n <= highest_n)
        grad = load_map(grad_logits, place + n * HEADS, shown, HEADS)
        row_sum = tl.sum(grad.to(tl.float32), 1)
        owned = (n >= 0) & (n < SEGMENT)
        b2_sums += tl.where(owned, row_sum, 0.0)
        if BIAS == "distance" and RESIDUAL_BIAS and not CHANNELS:
            target = (row_program * num_distances + start - n - bottom) * HEADS + head
            tl.store(sum_values + target, row_sum, mask=owned & (start - n >= bottom))
        if CONV:
            grad_ring = push(grad_ring, grad, n)
            score_ring = push(score_ring, load_map(scores, place + n * HEADS, shown, HEADS), n)
            # The position whose taps, on both sides, have all arrived.
            c = n - REACH
            column = c - lowest_n
            inside = (column >= 0) & (c <= highest_n + RIGHT * CAUSAL)
            owned = (c >= 0) & (c < SEGMENT)
            fresh = grad_ring[2 * RIGHT].to(tl.float32)
            pending = pending[1:] + (fresh,)
            if CHANNELS:
                bias_place = (key + n) * bias_step + row * bias_row
                bias_ring = push(
                    bias_ring, load_bias(bias, bias_place, shown, bias_head, H, HEADS).to(dtype), n
                )
                pending_bias = pending_bias[1:] + (fresh if RESIDUAL_BIAS else tl.zeros_like(fresh),)
            w1_parts, wb_parts, w2_parts, b1_parts = (), (), (), ()
            for part in tl.static_range(PARTS):
                channel = part * PART + tl.arange(0, PART)
                distance = tl.zeros_like(row) + (start - c + RIGHT)
                hidden = load_start(
                    b1, table, table_plane, distance, column, inside, channel, WIDTH, LEFT, TABLE
                )
                grad_hidden = tl.zeros([PART, BLOCK_R], tl.float32)
                for tap in tl.static_range(KERNEL):
                    hidden = dot(
                        load_tap(w1, tap, channel, head, WIDTH, HEADS), score_ring[tap], hidden, PRECISION
                    )
                    if CHANNELS:
                        hidden = dot(
                            load_tap(wb, tap, channel, head, WIDTH, HEADS), bias_ring[tap], hidden, PRECISION
                        )
                    matrix = load_tap(w2_turned, tap, channel, head, WIDTH, HEADS)
                    grad_hidden = dot(matrix, grad_ring[KERNEL - 1 - tap], grad_hidden, PRECISION)
                positive = hidden > 0
                active = tl.where(
                    (inside & owned)[None, :], tl.where(positive, hidden, hidden * slope), 0.0
                ).to(dtype)
                grad_hidden = tl.where(positive, grad_hidden, grad_hidden * slope)
                grad_hidden = tl.where(inside[None, :], grad_hidden, 0.0).to(dtype)
                updated, updated_bias = (), ()
                for tap in tl.static_range(KERNEL):
                    matrix = load_tap(w1_turned, tap, head, channel, HEADS, WIDTH)
                    updated = updated + (dot(matrix, grad_hidden, pending[tap], PRECISION),)
                    if CHANNELS:
                        matrix = load_tap(wb_turned, tap, head, channel, HEADS, WIDTH)
                        updated_bias = updated_bias + (
                            dot(matrix, grad_hidden, pending_bias[tap], PRECISION),
                        )
                pending, pending_bias = updated, updated_bias

                own_grad = tl.where(owned, grad_hidden, tl.zeros_like(grad_hidden))
                mine = w1_sums[part * KERNEL : (part + 1) * KERNEL]
                w1_parts = w1_parts + add_products(mine, own_grad, score_ring, 0, PRECISION)
                mine = w2_sums[part * KERNEL : (part + 1) * KERNEL]
                w2_parts = w2_parts + add_products(mine, active, grad_ring, 0, PRECISION)
                if CHANNELS:
                    mine = wb_sums[part * KERNEL : (part + 1) * KERNEL]
                    wb_parts = wb_parts + add_products(mine, own_grad, bias_ring, 0, PRECISION)
                # Sums over rows, a column for each plane of the table (without a table, all in one).
                plane = tl.arange(0, 16)[None, :]
                chosen = (
                    (plane == (tl.minimum(column, LEFT) if TABLE else tl.zeros_like(column))[:, None])
                    .to(tl.float32)
                    .to(dtype)
                )
                if TABLE:
                    sums = dot(own_grad, chosen, tl.zeros([PART, 16], tl.float32), PRECISION)
                    target = (
                        row_program * (LEFT + 1) * table_plane
                        + (start - c + RIGHT) * WIDTH
                        + channel[:, None]
                    )
                    mask = owned & (start - c + RIGHT >= 0) & (plane <= LEFT) & (channel[:, None] >= 0)
                    tl.store(sum_table + target + plane * table_plane, sums, mask=mask)
                    b1_parts = b1_parts + (b1_sums[part],)
                else:
                    b1_parts = b1_parts + (dot(own_grad, chosen, b1_sums[part], PRECISION),)
            w1_sums, w2_sums, wb_sums, b1_sums = w1_parts, w2_parts, wb_parts, b1_parts

            done = c - LEFT
            own = (done >= 0) & (done < SEGMENT) & (done >= lowest_n) & (done <= highest_n)
            target = (place + done * HEADS)[None, :] + pixel_head
            tl.store(grad_scores + target, pending[0].to(dtype), mask=own[None, :])
            if CHANNELS and BIAS == "distance":
                row_sum = tl.sum(tl.where(own[None, :], pending_bias[0], 0.0), 1)
                target = (row_program * num_distances + start - done - bottom) * HEADS + head
                tl.store(
                    sum_values + target,
                    row_sum,
                    mask=(done >= 0) & (done < SEGMENT) & (start - done >= bottom),
                )
            if CHANNELS and BIAS == "dense":
                tl.store(grad_bias + target, pending_bias[0].to(dtype), mask=own[None, :])

    tl.store(sum_b2 + program * HEADS + head, b2_sums)
    if CONV:
        for part in tl.static_range(PARTS):
            store_taps(
                sum_w1, program, w1_sums[part * KERNEL : (part + 1) * KERNEL], part, WIDTH, PART, HEADS
            )
            store_taps(
                sum_w2, program, w2_sums[part * KERNEL : (part + 1) * KERNEL], part, WIDTH, PART, HEADS
            )
            if CHANNELS:
                store_taps(
                    sum_wb, program, wb_sums[part * KERNEL : (part + 1) * KERNEL], part, WIDTH, PART, HEADS
                )
            channel = part * PART + tl.arange(0, PART)
            tl.store(sum_b1 + program * WIDTH + channel, tl.sum(b1_sums[part], 1))
