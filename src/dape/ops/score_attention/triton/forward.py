"""The forward kernels: scores, convolutions over the score image, softmax · V.

Maps in scratch are images [B, channels, columns, rows]: a column is a key, rows are the queries of a chunk, and
contiguous. A convolution along the keys walks from column to column with BLOCK_R rows at a time as the rows of a matrix
product and channels as its reduction axis: the shift of a tap is the walk itself. For a block of rows, an image is
written in the columns that some row sees, and as far beyond as later stages reach.

Padded sizes (CHANNELS, WIDTH, OUT) are powers of two, at least 16; head_dim goes by PARTS of PART numbers. Where a
loop over tiles is repeated three times, the first and last have tiles at the edge of what rows see, and need masks.
"""

# Kernels are compiled from a language of their own.
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a · b, accumulated in float32."""
    if PRECISION == "interpreted":
        # The interpreter multiplies bfloat16 numbers as if they were integers; in float32 the products are exact.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc)
    return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@triton.jit
def load_bounds(first, last, row, row_stop):
    """First and last visible key of each query; a query that does not exist sees nothing."""
    exists = row < row_stop
    low, high = tl.load(first + row, mask=exists, other=0), tl.load(last + row, mask=exists, other=-1)
    # A query that sees nothing must not widen the range of its block.
    return tl.where(low <= high, low, 1 << 30), tl.where(low <= high, high, -1)


@triton.jit
def rows_of_program(first, last, first_batch, num_rows, row_start, row_stop, BLOCK_R: tl.constexpr):
    """Batch entry and split of a program, its rows in the chunk and in the call, their first and last visible keys.

    The last rows, which see the most, go first.
    """
    blocks = tl.cdiv(num_rows, BLOCK_R)
    block, split = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch = tl.program_id(2).to(tl.int64)
    local = block * BLOCK_R + tl.arange(0, BLOCK_R)
    row = row_start + local
    low, high = load_bounds(first + batch * first_batch, last + batch * first_batch, row, row_stop)
    return batch, split, local, row, low, high


@triton.jit
def tile_cuts(low, high, begin, end, BLOCK_K: tl.constexpr):
    """Where tiles of keys begin, those in which every row sees every key in the middle, and end."""
    inner = tl.maximum(begin, tl.cdiv(tl.minimum(tl.max(low), end), BLOCK_K) * BLOCK_K)
    inner = tl.minimum(inner, end)
    outer = tl.maximum(inner, tl.minimum(tl.min(high) + 1, end) // BLOCK_K * BLOCK_K)
    return begin, inner, outer, end


@triton.jit
def load_masked(pointers, inside, EDGE: tl.constexpr):
    """The numbers at pointers; with EDGE, 0 where they are not inside."""
    if EDGE:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(x, token, exists, part, token_stride, D: tl.constexpr, PART: tl.constexpr, EDGE: tl.constexpr):
    """Rows `token` of x, PART numbers of each: [tokens, PART], 0 where a token does not exist; without EDGE all do."""
    dim = part * PART + tl.arange(0, PART)
    index, inside = token[:, None] * token_stride + dim[None, :], exists[:, None]
    if D % PART:
        inside = inside & (dim[None, :] < D) if EDGE else (dim < D)[None, :]
    return load_masked(x + index, inside, EDGE or D % PART > 0)


@triton.jit
def load_bias(bias, columns, row, key, exists, seen, shown, bias_row, BIAS: tl.constexpr):
    """The bias of pairs (row, key) in float32; rows and keys broadcast against each other, and so do their masks.

    A separable bias comes as two float32 numbers a token, whose sum is its value: large values cancel exactly, then
    the rests are added.
    """
    if BIAS == "distance":
        return tl.load(bias + (row - key), mask=shown, other=0.0).to(tl.float32)
    elif BIAS == "separable":
        values = tl.load(bias + 2 * row, mask=exists, other=0.0) + tl.load(
            columns + 2 * key, mask=seen, other=0.0
        )
        rests = tl.load(bias + 2 * row + 1, mask=exists, other=0.0)
        return values + (rests + tl.load(columns + 2 * key + 1, mask=seen, other=0.0))
    else:
        return tl.load(bias + row * bias_row + key, mask=shown, other=0.0).to(tl.float32)


@triton.jit
def to_image(x, dtype: tl.constexpr):
    """x in the dtype of an image, clamped to its largest number."""
    x = x.to(dtype)
    if dtype == tl.float16:
        most = tl.full([1, 1], 65504.0, tl.float16)
        x = tl.minimum(tl.maximum(x, -most), most)
    return x


@triton.jit
def load_column(image, column, begin, end, local, num_rows, channel, image_channel, NUMBER: tl.constexpr,
                EDGE: tl.constexpr = True):  # fmt: skip
    """One column of an image, [rows, channels]; 0 outside (without EDGE it is inside) and in padded channels."""
    inside = (channel < NUMBER)[None, :]
    if EDGE:
        inside = inside & (column >= begin) & (column < end)
    index = column * num_rows + local[:, None] + channel[None, :] * image_channel
    return load_masked(image + index, inside, EDGE or channel.shape[0] > NUMBER)


@triton.jit
def load_taps(taps, row, column, KERNEL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of the KERNEL matrices taps [KERNEL, ROWS, COLUMNS]."""
    matrices = ()
    for tap in tl.static_range(KERNEL):
        index = (tap * ROWS + row[:, None]) * COLUMNS + column[None, :]
        matrices = matrices + (tl.load(taps + index),)
    return matrices


@triton.jit
def leaky(x, slope):
    """LeakyReLU for slopes of at most 1."""
    return tl.maximum(x, x * tl.full([1, 1], slope, x.dtype))


@triton.jit
def inside_row(column, low, high, CAUSAL: tl.constexpr):
    """Whether the hidden maps of each row exist at a column: from its first visible key on, without causality to its last."""
    inside = column >= low
    if not CAUSAL:
        inside = inside & (column <= high)
    return inside


@triton.jit
def first_terms(offset, table, plane, reach, column, low, channel, WIDTH: tl.constexpr, PLANES: tl.constexpr,
                TABLE: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Initial value of a column of a map, [rows, channels]: the offset, or a table by distance, which includes it.

    table: [PLANES + 1, distances, WIDTH], plane c < PLANES for the column c keys after the first visible one; column j
    of a row is at index reach − j.
    """
    if TABLE:
        index = (reach - column) * WIDTH + PLANES * plane
        if EDGE:
            distance = tl.minimum(tl.maximum(reach - column, 0), plane // WIDTH - 1)
            index = distance * WIDTH + tl.minimum(tl.maximum(column - low, 0), PLANES) * plane
        return tl.load(table + index[:, None] + channel[None, :]).to(tl.float32)
    else:
        return tl.zeros([reach.shape[0], channel.shape[0]], tl.float32) + offset[None, :]


@triton.jit
def convolve_kernel(
    image, out, kept, first, last, w1, w2, b1, b2, table, values,
    first_batch, image_batch, image_channel, out_batch, out_channel, kept_batch, kept_channel, table_plane,
    values_plane, values_lowest, num_rows, row_start, row_stop, columns, walk, held, offset, slope1, slope2,
    IN: tl.constexpr, OUTS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr,
    K1: tl.constexpr, LEFT1: tl.constexpr, K2: tl.constexpr, LEFT2: tl.constexpr, BLOCK_R: tl.constexpr,
    CAUSAL: tl.constexpr, TABLE: tl.constexpr, VALUES: tl.constexpr,
    KEEP: tl.constexpr, HIDDEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two stages over an image: out = stage₂(LeakyReLU(stage₁(image))), the hidden map on the chip.

    With column n of the image, its taps are added to the hidden columns n − RIGHT1 … n + LEFT1. The first of these
    is then complete, and adds its taps to the outputs, of which column n − RIGHT1 − RIGHT2 is complete.
    w1: [K1, CHANNELS, WIDTH], w2: [K2, WIDTH, OUT]; table and values [distances, OUT] replace b1 and b2.
    held: columns past the visible ones in the hidden map. KEEP: the hidden map, of HIDDEN channels, is also written, as
    an image `kept`. The grid is (row blocks, walks, B).
    """
    RIGHT1: tl.constexpr = K1 - 1 - LEFT1
    RIGHT2: tl.constexpr = K2 - 1 - LEFT2
    dtype: tl.constexpr = image.dtype.element_ty
    channel, wide, outs = tl.arange(0, CHANNELS), tl.arange(0, WIDTH), tl.arange(0, OUT)
    batch, _, local, row, low, high = rows_of_program(
        first, last, first_batch, num_rows, row_start, row_stop, BLOCK_R
    )
    begin, end = tl.min(low), tl.max(high) + 1
    start, finish = begin + tl.program_id(1) * walk, tl.minimum(end, columns)
    stop = tl.minimum(start + walk, finish)
    # The last of the walks includes the columns of the hidden map after those of the result.
    kept_stop = tl.where(stop == finish, tl.minimum(end + held, columns), stop)
    if start < stop:
        taps1 = load_taps(w1, channel, wide, K1, CHANNELS, WIDTH)
        taps2 = load_taps(w2, wide, outs, K2, WIDTH, OUT)
        offset1, offset2 = tl.load(b1 + wide), tl.load(b2 + outs)
        image += batch * image_batch
        out += batch * out_batch
        kept += batch * kept_batch
        # Column m of the table is distance m − RIGHT1.
        reach, nearest = row + offset + RIGHT1, row + offset - values_lowest
        steps = stop - start + K1 + K2 - 2
        interior = (tl.max(low) + LEFT1 + LEFT2 + K1 + K2 <= start) & (
            start + steps <= tl.minimum(columns, tl.minimum(tl.min(high), tl.min(row) + offset))
        )
        for EDGE in tl.static_range(2):
            if interior != (EDGE == 1):
                hidden, pending = (), ()
                for tap in tl.static_range(K1 - 1):
                    column = start - LEFT1 - LEFT2 - RIGHT1 + tap
                    fresh = first_terms(
                        offset1, table, table_plane, reach, column, low, wide, WIDTH, LEFT1, TABLE, EDGE
                    )
                    hidden = hidden + (fresh,)
                for tap in tl.static_range(K2 - 1):
                    column = start - LEFT1 - LEFT2 - RIGHT1 - RIGHT2 + tap
                    fresh = first_terms(
                        offset2, values, values_plane, nearest, column, low, outs, OUT, 0, VALUES, EDGE
                    )
                    pending = pending + (fresh,)
                for step in tl.range(0, steps, num_stages=STAGES):
                    n = start - LEFT1 - LEFT2 + step
                    x = load_column(
                        image, n, begin, finish, local, num_rows, channel, image_channel, IN, EDGE
                    )
                    fresh = first_terms(
                        offset1, table, table_plane, reach, n + LEFT1, low, wide, WIDTH, LEFT1, TABLE, EDGE
                    )
                    updated = ()
                    for i in tl.static_range(K1):
                        # Hidden column n − RIGHT1 + i reads this one by tap K1 − 1 − i.
                        before = hidden[i] if i < K1 - 1 else fresh
                        updated = updated + (dot(x, taps1[K1 - 1 - i], before, PRECISION),)
                    hidden = updated[1:]
                    c = n - RIGHT1
                    active = leaky(updated[0].to(dtype), slope1)
                    if EDGE:
                        active = tl.where(inside_row(c, low, high, CAUSAL)[:, None], active, 0.0).to(dtype)
                    if KEEP:
                        index = c * num_rows + local[:, None] + wide[None, :] * kept_channel
                        tl.store(
                            kept + index,
                            active,
                            mask=((c >= start) & (c < kept_stop)) & (wide < HIDDEN)[None, :],
                        )
                    fresh = first_terms(
                        offset2, values, values_plane, nearest, c + LEFT2, low, outs, OUT, 0, VALUES, EDGE
                    )
                    summed = ()
                    for i in tl.static_range(K2):
                        before = pending[i] if i < K2 - 1 else fresh
                        summed = summed + (dot(active, taps2[K2 - 1 - i], before, PRECISION),)
                    pending = summed[1:]
                    done = c - RIGHT2
                    index = done * num_rows + local[:, None] + outs[None, :] * out_channel
                    mask = ((done >= start) & (done < stop)) & (outs < OUTS)[None, :]
                    # Of rows that end earlier, later columns are not read.
                    tl.store(out + index, leaky(summed[0], slope2).to(out.dtype.element_ty), mask=mask)


@triton.jit
def unit_matrix(SIZE: tl.constexpr, dtype: tl.constexpr):
    index = tl.arange(0, SIZE)
    return (index[:, None] == index[None, :]).to(tl.float32).to(dtype)


@triton.jit
def pairs_kernel(
    q, k, v, grad_out, image, given, bias, column_bias, first, last, lse, delta, factor, result, weights, grad_factor,
    q_batch, q_head, q_token, k_batch, k_head, k_token, grad_out_batch, grad_out_head, grad_out_token, image_batch,
    image_channel, given_batch, given_channel, bias_batch, bias_head, bias_row, column_bias_batch, column_bias_head,
    first_batch, factor_batch, result_batch, result_channel, num_rows, row_start, row_stop, num_queries, num_keys, columns,
    per_split, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SCORES: tl.constexpr, IMAGE: tl.constexpr, BIAS: tl.constexpr,
    FACTOR: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A number for every pair of a query and a key, as an image `result`, 0 where not visible.

    MODE: "scores", and the bias as further channels; "weights", recomputed from lse; "gradients", those of the logits
    from that of the output, and the weights as an image of the same shape; "given", those of the logits from those of
    the weights, an image `given`, and delta, the sum of their products in each row. Logits are as in attend_kernel;
    gradients of the factor go to grad_factor [B, H, Tq].
    A program takes a block of rows and a split of the keys. The grid is (row blocks · splits, H, B).
    """
    dtype: tl.constexpr = result.dtype.element_ty
    batch, split, local, row, low, high = rows_of_program(
        first, last, first_batch, num_rows, row_start, row_stop, BLOCK_R
    )
    head, exists = tl.program_id(1), row < row_stop
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * G // H * k_head
    v += batch * k_batch + head * G // H * k_head
    grad_out += batch * grad_out_batch + head * grad_out_head
    image += batch * image_batch + head * image_channel
    given += batch * given_batch + head * given_channel
    bias += batch * bias_batch + head * bias_head
    column_bias += batch * column_bias_batch + head * column_bias_head
    result += batch * result_batch + head * result_channel
    weights += batch * result_batch + head * result_channel
    queries, directions, unit, row_factor = (), (), low, low
    for part in tl.static_range(PARTS):
        if SCORES:
            queries = queries + (tl.trans(load_rows(q, row, exists, part, q_token, D, PART, True)),)
        if MODE == "gradients":
            rows = load_rows(grad_out, row, exists, part, grad_out_token, D, PART, True)
            directions = directions + (tl.trans(rows),)
    if IMAGE:
        unit = unit_matrix(BLOCK_R, image.dtype.element_ty)
    index = (batch * H + head) * num_queries + row
    row_delta, row_grad = tl.zeros([BLOCK_R], tl.float32), tl.zeros([BLOCK_R], tl.float32)
    if MODE != "scores":
        row_lse = tl.load(lse + index, mask=exists, other=0.0)
        # A row whose logits are all −∞ has no weights.
        row_lse = tl.where(row_lse == -float("inf"), 0.0, row_lse) * LOG2E
    if MODE == "gradients":
        row_delta = tl.load(delta + index, mask=exists, other=0.0)
    if FACTOR:
        pointer = factor + batch * factor_batch + head * num_queries + row
        row_factor = tl.load(pointer, mask=exists, other=0.0)
    begin = tl.maximum(tl.min(low) // BLOCK_K * BLOCK_K, split * per_split)
    cuts = tile_cuts(low, high, begin, tl.minimum(tl.max(high) + 1, (split + 1) * per_split), BLOCK_K)
    # With the gradients of the weights given, a walk to sum delta comes first.
    for final in tl.static_range(0 if MODE == "given" else 1, 2):
        for third in tl.static_range(3):
            for start in tl.range(cuts[third], cuts[third + 1], BLOCK_K, num_stages=STAGES):
                key = start + tl.arange(0, BLOCK_K)
                seen = key < num_keys if third != 1 else key >= 0
                shown = seen[:, None]
                inside = None
                if third != 1:
                    shown = (key[:, None] >= low[None, :]) & (key[:, None] <= high[None, :])
                    inside = (key < columns)[:, None] & (local < num_rows)[None, :]
                pixel = key[:, None] * num_rows + local[None, :]
                logits = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
                grad = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
                for part in tl.static_range(PARTS):
                    if SCORES:
                        tile = load_rows(k, key, seen, part, k_token, D, PART, third != 1)
                        logits = dot(tile, queries[part], logits, PRECISION)
                    if MODE == "gradients":
                        tile = load_rows(v, key, seen, part, k_token, D, PART, third != 1)
                        grad = dot(tile, directions[part], grad, PRECISION)
                logits *= scale
                if IMAGE:
                    logits = dot(load_masked(image + pixel, shown, third != 1), unit, logits, PRECISION)
                if BIAS != "none":
                    values = load_bias(
                        bias, column_bias, row[None, :], key[:, None], exists[None, :], seen[:, None], shown, bias_row,
                        BIAS)  # fmt: skip
                    if MODE == "scores":
                        values = tl.where(shown, values, 0.0)
                        tl.store(result + H * result_channel + pixel, to_image(values, dtype), mask=inside)
                    else:
                        logits += values
                if MODE == "scores":
                    found = to_image(tl.where(shown, logits, 0.0) if third != 1 else logits, dtype)
                else:
                    scaled = logits * row_factor[None, :] if FACTOR else logits
                    found = tl.exp2(scaled * LOG2E - row_lse[None, :])
                    if third != 1:
                        found = tl.where(shown, found, 0.0)
                if MODE == "given":
                    grad = load_masked(given + pixel, shown, third != 1).to(tl.float32)
                if final == 0:
                    row_delta += tl.sum(found * grad, 0)
                else:
                    if MODE == "gradients":
                        tl.store(weights + pixel, found.to(dtype), mask=inside)
                    if MODE == "gradients" or MODE == "given":
                        found *= grad - row_delta[None, :]
                        if FACTOR:
                            row_grad += tl.sum(tl.where(found != 0, logits * found, 0.0), 0)
                            found *= row_factor[None, :]
                    tl.store(result + pixel, found.to(dtype), mask=inside)
    if MODE == "given":
        tl.store(delta + index, row_delta, mask=exists)
    if FACTOR and MODE != "weights":
        tl.store(grad_factor + index, row_grad, mask=exists)


@triton.jit
def softmax_sum(total, highest, sink, SINK: tl.constexpr):
    """One over a sum of exponentials and the sum's logarithm; total: the sum over exp(highest), 0 if nothing is seen."""
    empty = total == 0
    share = 1 / tl.where(empty, 1.0, total)
    lse = tl.where(empty, 0.0, highest) - tl.log(share)
    if SINK:
        alone, further = lse, tl.load(sink).to(tl.float32)
        most = tl.maximum(alone, further)
        lse = most + tl.log(tl.exp(alone - most) + tl.exp(further - most))
        share *= tl.exp(alone - lse)
    return share, tl.where(empty, -float("inf"), lse)


@triton.jit
def attend_kernel(
    q, k, v, image, bias, column_bias, factor, sink, first, last, out, lse,
    q_batch, q_head, q_token, k_batch, k_head, k_token, bias_batch, bias_head, bias_row, column_bias_batch,
    column_bias_head, first_batch, factor_batch, image_batch, image_channel, num_rows, row_start, row_stop, out_start,
    out_rows, num_queries, num_keys, per_split, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SCORES: tl.constexpr, IMAGE: tl.constexpr,
    BIAS: tl.constexpr, FACTOR: tl.constexpr, SINK: tl.constexpr, SUMS: tl.constexpr, LINEAR: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [splits, B, H, out_rows, D] and lse [splits, B, H, out_rows]: softmax · V over a split of the visible keys.

    The logits are the sum of those present among scores (SCORES), an image (IMAGE) and a bias (BIAS), times factor
    [1 or B, H, Tq] (FACTOR). SINK: sink [H] is the logit of a further key with value zero. Without SUMS, only lse is
    written. LINEAR: the image itself · V · scale. A split that sees nothing has lse −∞. The grid is (row blocks · splits,
    H, B); the last rows, which see the most, go first.
    """
    batch, split, local, row, low, high = rows_of_program(
        first, last, first_batch, num_rows, row_start, row_stop, BLOCK_R
    )
    head, exists = tl.program_id(1), row < row_stop
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head * G // H * k_head
    v += batch * k_batch + head * G // H * k_head
    image += batch * image_batch + head * image_channel
    bias += batch * bias_batch + head * bias_head
    column_bias += batch * column_bias_batch + head * column_bias_head
    sums, queries, unit, row_factor = (), (), low, low
    for part in tl.static_range(PARTS):
        if SUMS:
            sums = sums + (tl.zeros([BLOCK_R, PART], tl.float32),)
        if SCORES:
            queries = queries + (load_rows(q, row, exists, part, q_token, D, PART, True),)
    if IMAGE:
        unit = unit_matrix(BLOCK_K, image.dtype.element_ty)
    if FACTOR:
        pointer = factor + batch * factor_batch + head * num_queries + row
        row_factor = tl.load(pointer, mask=exists, other=0.0)
    # Maxima are in units of ln 2.
    highest = tl.full([BLOCK_R], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    begin = tl.maximum(tl.min(low) // BLOCK_K * BLOCK_K, split * per_split)
    cuts = tile_cuts(low, high, begin, tl.minimum(tl.max(high) + 1, (split + 1) * per_split), BLOCK_K)
    for third in tl.static_range(3):
        for start in tl.range(cuts[third], cuts[third + 1], BLOCK_K, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_K)
            seen = key < num_keys if third != 1 else key >= 0
            shown = seen[None, :]
            if third != 1:
                shown = (key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
            logits = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
            if SCORES:
                for part in tl.static_range(PARTS):
                    tile = load_rows(k, key, seen, part, k_token, D, PART, third != 1)
                    logits = dot(queries[part], tl.trans(tile), logits, PRECISION)
                logits *= scale
            pixel = key[None, :] * num_rows + local[:, None]
            if IMAGE:
                # As an operand of a product with the unit matrix, a tile of the image is cheap to load into registers.
                logits = dot(load_masked(image + pixel, shown, third != 1), unit, logits, PRECISION)
            if BIAS != "none":
                logits += load_bias(
                    bias, column_bias, row[:, None], key[None, :], exists[:, None], seen[None, :], shown, bias_row,
                    BIAS)  # fmt: skip
            if LINEAR:
                weights = load_masked(image + pixel, shown, third != 1)
                shrink = tl.full([BLOCK_R], 1.0, tl.float32)
            else:
                if FACTOR:
                    logits *= row_factor[:, None]
                if third != 1:
                    logits = tl.where(shown, logits, -float("inf"))
                higher = tl.maximum(highest, tl.max(logits, 1) * LOG2E)
                # Before the first visible key all logits are −∞: any finite number will do.
                base = tl.where(higher == -float("inf"), 0.0, higher)
                weights = tl.exp2(logits * LOG2E - base[:, None])
                shrink = tl.exp2(highest - base)
                total = total * shrink + tl.sum(weights, 1)
                highest = higher
            if SUMS:
                weights = weights.to(v.dtype.element_ty)
                updated = ()
                for part in tl.static_range(PARTS):
                    tile = load_rows(v, key, seen, part, k_token, D, PART, third != 1)
                    updated = updated + (dot(weights, tile, sums[part] * shrink[:, None], PRECISION),)
                sums = updated
    index = ((split * tl.num_programs(2) + batch) * H + head) * out_rows + row - out_start
    share = tl.zeros([BLOCK_R], tl.float32) + scale
    if not LINEAR:
        share, result = softmax_sum(total, highest / LOG2E, sink + head, SINK)
        tl.store(lse + index, result, mask=exists)
    if SUMS:
        for part in tl.static_range(PARTS):
            dim = part * PART + tl.arange(0, PART)
            mean = (sums[part] * share[:, None]).to(out.dtype.element_ty)
            tl.store(out + index[:, None] * D + dim[None, :], mean, mask=exists[:, None] & (dim < D)[None, :])


@triton.jit
def merge_kernel(
    parts, sums, out, lse, sink, num_splits, num_rows, row_start, num_queries,
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SINK: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The output and log-sum-exp of rows whose keys were split: parts [splits, B, H, num_rows, D], sums [splits, B, H,
    num_rows] as attend_kernel writes them. The grid is (num_rows, H, B).
    """
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, every = (batch * H + head) * num_rows + row, tl.num_programs(2).to(tl.int64) * H * num_rows
    dim = tl.arange(0, WIDTH)
    highest = tl.load(sums + index)
    for split in tl.range(1, num_splits):
        highest = tl.maximum(highest, tl.load(sums + split * every + index))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    total, mean = base * 0.0, tl.zeros([WIDTH], tl.float32)
    for split in tl.range(0, num_splits):
        weight = tl.exp(tl.load(sums + split * every + index) - base)
        total += weight
        if SUMS:
            mean += weight * tl.load(parts + (split * every + index) * D + dim, mask=dim < D, other=0.0)
    share, result = softmax_sum(total, base, sink + head, SINK)
    index = (batch * H + head) * num_queries + row_start + row
    tl.store(lse + index, result)
    if SUMS:
        tl.store(out + index * D + dim, (mean * share).to(out.dtype.element_ty), mask=dim < D)
