"""The forward kernel for GPUs, and the walk along the keys that the backward pass repeats.

A program takes BLOCK_Q queries, all heads, and STREAMS key streams: stream g walks the contiguous keys
[begin + g·m, begin + (g + 1)·m), one key a step. So a step sees BLOCK_Q × STREAMS *pixels*, maps are
[channels, pixels], a convolution is one matrix product a tap, and its shift along the keys is the loop
itself: the last few maps are kept in a ring. A stream starts 2·LEFT keys early and runs 2·RIGHT late.

Padded sizes are HEADS, WIDTH (powers of two, at least 16) and DIMS (a multiple of PART). Padded channels hold
zeros.
"""

# Kernels are compiled from a language of their own.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a · b, accumulated in float32."""
    if PRECISION == "interpreted":
        # The interpreter multiplies bfloat16 numbers as if they were integers; in float32 the products are exact.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc)
    return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@triton.jit
def load_heads(x, token, part, token_stride, head_stride, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
               HEADS: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Rows `token` of x for every query head, PART numbers of each: [HEADS, tokens, PART].

    Query head h reads head h · G // H; a padded head repeats the last one.
    """
    head = tl.minimum(tl.arange(0, HEADS), H - 1)[:, None, None] * G // H
    dim = part * PART + tl.arange(0, PART)[None, None, :]
    place = token[None, :, None] * token_stride + head * head_stride + dim
    if D % PART == 0:
        return tl.load(x + place)
    else:
        return tl.load(x + place, mask=dim < D, other=0.0)


@triton.jit
def load_queries(x, row, row_stride, head_stride, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
                 DIMS: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Rows of q or of the output's gradient, in parts [HEADS, rows, PART]; a padded head holds zeros."""
    parts = ()
    for part in tl.static_range(DIMS // PART):
        tile = load_heads(x, row, part, row_stride, head_stride, H, H, D, HEADS, PART)
        parts = parts + (tl.where(tl.arange(0, HEADS)[:, None, None] < H, tile, 0.0).to(tile.dtype),)
    return parts


@triton.jit
def dot_keys(parts, x, token, token_stride, head_stride, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
             HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, STREAMS: tl.constexpr, PART: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Dot products [HEADS, BLOCK_Q, STREAMS] of the queries in `parts` with rows `token` of x."""
    products = tl.zeros([HEADS, BLOCK_Q, STREAMS], tl.float32)
    for part in tl.static_range(len(parts)):
        tile = load_heads(x, token, part, token_stride, head_stride, H, G, D, HEADS, PART)
        products = dot(parts[part], tl.permute(tile, (0, 2, 1)), products, PRECISION)
    return products


@triton.jit
def load_bounds(first, last, query, num_queries):
    """First and last visible key of each query; a query that does not exist sees nothing."""
    exists = query < num_queries
    return tl.load(first + query, mask=exists, other=1 << 30), tl.load(last + query, mask=exists, other=-1)


@triton.jit
def load_bias(bias, place, shown, bias_head, H: tl.constexpr, HEADS: tl.constexpr):
    """The bias of each pixel, [HEADS, pixels] in float32; `place` is where head 0 has it."""
    head = tl.arange(0, HEADS)[:, None]
    mask = shown[None, :] & (head < H)
    return tl.load(bias + place[None, :] + head * bias_head, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_tap(taps, tap, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows and columns of matrix number `tap` of taps [KERNEL, ROWS, COLUMNS]."""
    return tl.load(taps + tap * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :])


@triton.jit
def load_start(b1, table, table_plane, distance, column, inside, channel, WIDTH: tl.constexpr,
               LEFT: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """What the hidden map of each pixel starts from, [channels, pixels]: the bias b₁, or the table with it.

    table: [LEFT + 1, distances, WIDTH]; plane c < LEFT is for the column c keys after the first visible one.
    """
    if TABLE:
        plane = tl.minimum(column, LEFT)
        place = (plane * table_plane + distance * WIDTH)[None, :] + channel[:, None]
        return tl.load(table + place, mask=inside[None, :], other=0.0).to(tl.float32)
    else:
        return tl.zeros([channel.shape[0], distance.shape[0]], tl.float32) + tl.load(b1 + channel)[:, None]


@triton.jit
def push(ring, x, n):
    """The ring without its oldest map and with x."""
    # Moving a map on unchanged would keep the compiler from pipelining the loop; n is never this low.
    moved = ()
    for i in tl.static_range(1, len(ring)):
        moved = moved + (tl.where(n > -(1 << 20), ring[i], x),)
    return moved + (x,)


@triton.jit
def walk_convolutions(n, scores, bias, distance, column, inside, score_ring, bias_ring, pending, w1, wb, w2, b1,
                      b2, table, table_plane, slope, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                      KERNEL: tl.constexpr, LEFT: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr,
                      RESIDUAL_BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One step of both convolutions: the new rings and pending logits; `pending[0]` is finished.

    At step n the scores (and bias) of position n arrive. The hidden map of position n − RIGHT is complete
    with them, and adds its taps to the logits of positions n − 2·RIGHT … n − RIGHT + LEFT. Pending logits
    number i belong to position n − 2·RIGHT + i. The hidden map is made 16 channels at a time.
    """
    RIGHT: tl.constexpr = KERNEL - 1 - LEFT
    PART: tl.constexpr = 16
    dtype: tl.constexpr = w1.dtype.element_ty
    head = tl.arange(0, HEADS)
    score_ring = push(score_ring, scores.to(dtype), n)
    if BIAS != "none" and not TABLE:
        bias_ring = push(bias_ring, bias.to(dtype), n)

    pending = pending[1:] + (tl.zeros_like(scores) + tl.load(b2 + head)[:, None],)
    residual = scores
    if BIAS != "none" and RESIDUAL_BIAS:
        residual = scores + bias
    pending = pending[: 2 * RIGHT] + (pending[2 * RIGHT] + residual,) + pending[2 * RIGHT + 1 :]

    for part in tl.static_range(WIDTH // PART):
        channel = part * PART + tl.arange(0, PART)
        hidden = load_start(b1, table, table_plane, distance, column, inside, channel, WIDTH, LEFT, TABLE)
        for tap in tl.static_range(KERNEL):
            hidden = dot(load_tap(w1, tap, channel, head, WIDTH, HEADS), score_ring[tap], hidden, PRECISION)
        if BIAS != "none" and not TABLE:
            for tap in tl.static_range(KERNEL):
                hidden = dot(
                    load_tap(wb, tap, channel, head, WIDTH, HEADS), bias_ring[tap], hidden, PRECISION
                )
        active = tl.where(hidden > 0, hidden, hidden * slope)
        active = tl.where(inside[None, :], active, 0.0).to(dtype)
        updated = ()
        for i in tl.static_range(KERNEL):
            matrix = load_tap(w2, KERNEL - 1 - i, head, channel, HEADS, WIDTH)
            updated = updated + (dot(matrix, active, pending[i], PRECISION),)
        pending = updated + pending[KERNEL:]
    return score_ring, bias_ring, pending


@triton.jit
def stream_tokens(begin, end, length, n, STREAMS: tl.constexpr):
    """The keys of all streams at step n; a halo that reaches past the keys in use repeats the outermost."""
    return tl.minimum(tl.maximum(begin + tl.arange(0, STREAMS) * length + n, begin), end - 1)


@triton.jit
def walk_step(n, q_parts, k, rings, begin, end, length, lowest_n, highest_n, distance, bias_place, w1, wb, w2,
              b1, b2, table, bias, k_token, k_head, table_plane, bias_head, bias_step, scale, slope,
              H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PART: tl.constexpr,
              WIDTH: tl.constexpr, KERNEL: tl.constexpr, LEFT: tl.constexpr, BLOCK_Q: tl.constexpr,
              STREAMS: tl.constexpr, CAUSAL: tl.constexpr, CONV: tl.constexpr, BIAS: tl.constexpr,
              TABLE: tl.constexpr, RESIDUAL_BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Step n of the walk: the scores [HEADS, pixels] that arrive (0 where hidden), the logits of position
    n − 2·RIGHT (−∞ where hidden), and the rings to go on with.

    lowest_n, highest_n: [pixels], the steps at which a pixel's query sees its key.
    distance, bias_place: [pixels], distance and place of the bias at step 0.
    """
    RIGHT: tl.constexpr = KERNEL - 1 - LEFT
    token = stream_tokens(begin, end, length, n, STREAMS)
    scores = dot_keys(q_parts, k, token, k_token, k_head, H, G, D, HEADS, BLOCK_Q, STREAMS, PART, PRECISION)
    scores = tl.reshape(scores * scale, (HEADS, BLOCK_Q * STREAMS))
    shown = (n >= lowest_n) & (n <= highest_n)
    scores = tl.where(shown[None, :], scores, 0.0)
    bias_tile = scores
    if BIAS != "none":
        bias_tile = load_bias(bias, bias_place + n * bias_step, shown, bias_head, H, HEADS)
    if CONV:
        score_ring, bias_ring, pending = rings
        column = n - RIGHT - lowest_n
        inside = (column >= 0) & (n - RIGHT <= highest_n + RIGHT * CAUSAL)
        score_ring, bias_ring, pending = walk_convolutions(
            n, scores, bias_tile, distance - n + 2 * RIGHT, column, inside, score_ring, bias_ring, pending,
            w1, wb, w2, b1, b2, table, table_plane, slope, HEADS, WIDTH, KERNEL, LEFT, BIAS, TABLE,
            RESIDUAL_BIAS, PRECISION)  # fmt: skip
        rings = (score_ring, bias_ring, pending)
        logits = pending[0]
    elif BIAS != "none":
        logits = scores + bias_tile
    else:
        logits = scores
    done = n - 2 * RIGHT
    shown = (done >= 0) & (done >= lowest_n) & (done <= highest_n)
    return scores, tl.where(shown[None, :], logits, -float("inf")), rings


@triton.jit
def empty_rings(dtype: tl.constexpr, PIXELS: tl.constexpr, HEADS: tl.constexpr, KERNEL: tl.constexpr,
                LEFT: tl.constexpr, CONV: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr):  # fmt: skip
    """Rings of scores and bias (one map a tap) and the pending logits, before the first step."""
    RIGHT: tl.constexpr = KERNEL - 1 - LEFT
    scores, bias, pending = (), (), ()
    if CONV:
        for _ in tl.static_range(KERNEL):
            scores = scores + (tl.zeros([HEADS, PIXELS], dtype),)
            if BIAS != "none" and not TABLE:
                bias = bias + (tl.zeros([HEADS, PIXELS], dtype),)
        for _ in tl.static_range(RIGHT + 1 + (LEFT if LEFT > RIGHT else RIGHT)):
            pending = pending + (tl.zeros([HEADS, PIXELS], tl.float32),)
    return scores, bias, pending


@triton.jit
def forward_kernel(
    q, k, v, first, last, w1, wb, w2, b1, b2, table, bias, out, lse,
    q_batch, q_head, q_token, k_batch, k_head, k_token, first_batch, last_batch,
    bias_batch, bias_head, bias_row, bias_step, table_plane, num_queries, offset, scale, slope,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr, PART: tl.constexpr,
    WIDTH: tl.constexpr, KERNEL: tl.constexpr, LEFT: tl.constexpr, BLOCK_Q: tl.constexpr,
    STREAMS: tl.constexpr, CAUSAL: tl.constexpr, CONV: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr,
    RESIDUAL_BIAS: tl.constexpr, PRECISION: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """out [B, H, Tq, D] and lse [B, H, Tq], both contiguous; the grid is (query blocks, B).

    HOLD: whether the queries stay on the chip, or are loaded again at each step.
    """
    RIGHT: tl.constexpr = KERNEL - 1 - LEFT
    # The last queries see the most keys: they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    k, v, bias = k + batch * k_batch, v + batch * k_batch, bias + batch * bias_batch
    first, last = first + batch * first_batch, last + batch * last_batch
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    safe_rows = tl.minimum(rows, num_queries - 1)
    q_held = ()
    if HOLD:
        q_held = load_queries(q + batch * q_batch, safe_rows, q_token, q_head, H, D, HEADS, DIMS, PART)
    sums = ()
    for part in tl.static_range(DIMS // PART):
        sums = sums + (tl.zeros([HEADS, BLOCK_Q, PART], tl.float32),)

    pixel = tl.arange(0, BLOCK_Q * STREAMS)
    query = block * BLOCK_Q + pixel // STREAMS
    first_key, last_key = load_bounds(first, last, query, num_queries)
    begin, end = tl.min(first_key), tl.max(last_key) + 1
    length = tl.cdiv(tl.maximum(end - begin, 0), STREAMS)
    steps = tl.where(length > 0, length + 2 * (KERNEL - 1), 0)
    key = begin + pixel % STREAMS * length
    bias_place = key * bias_step + query * bias_row

    rings = empty_rings(q.dtype.element_ty, BLOCK_Q * STREAMS, HEADS, KERNEL, LEFT, CONV, BIAS, TABLE)
    highest = tl.full([HEADS, BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([HEADS, BLOCK_Q], tl.float32)
    for step in tl.range(steps, disable_licm=True):
        n = step - 2 * LEFT
        q_parts = q_held
        if not HOLD:
            # A condition that always holds keeps the compiler from moving the loads out of the loop.
            row = tl.where(n > -(1 << 20), safe_rows, 0)
            q_parts = load_queries(q + batch * q_batch, row, q_token, q_head, H, D, HEADS, DIMS, PART)
        _, logits, rings = walk_step(
            n, q_parts, k, rings, begin, end, length, first_key - key, last_key - key, query + offset - key,
            bias_place, w1, wb, w2, b1, b2, table, bias, k_token, k_head, table_plane, bias_head, bias_step,
            scale, slope, H, G, D, HEADS, PART, WIDTH, KERNEL, LEFT, BLOCK_Q, STREAMS, CAUSAL, CONV, BIAS,
            TABLE, RESIDUAL_BIAS, PRECISION)  # fmt: skip
        logits = tl.reshape(logits, (HEADS, BLOCK_Q, STREAMS))
        token = stream_tokens(begin, end, length, n - 2 * RIGHT, STREAMS)
        higher = tl.maximum(highest, tl.max(logits, 2))
        # Before the first visible key everything is −∞: any finite number serves.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(logits - base[:, :, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 2)
        weights = weights.to(v.dtype.element_ty)
        updated = ()
        for part in tl.static_range(DIMS // PART):
            v_tile = load_heads(v, token, part, k_token, k_head, H, G, D, HEADS, PART)
            updated = updated + (dot(weights, v_tile, sums[part] * shrink[:, :, None], PRECISION),)
        sums = updated
        highest = higher

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    head = tl.arange(0, HEADS)[:, None]
    place = (batch * H + head) * num_queries + rows[None, :]
    exists = (head < H) & (rows < num_queries)[None, :]
    tl.store(lse + place, tl.where(empty, 0.0, highest + tl.log(total)), mask=exists)
    for part in tl.static_range(DIMS // PART):
        dim = part * PART + tl.arange(0, PART)[None, None, :]
        mean = (sums[part] / total[:, :, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, :, None] * D + dim, mean, mask=exists[:, :, None] & (dim < D))
