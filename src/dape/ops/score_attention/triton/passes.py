"""Forward and backward pass: the sequence of kernels for each chunk of query rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton.call import Call, Chain, Chunk, Segment, StageTensors, padded
from dape.ops.score_attention.triton.compile import run

# Two stages run as one kernel if their weights fit into registers along with the running sums.
FUSED_NUMBERS = 2 * 3 * 32 * 32


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, D] and log-sum-exp of the logits and the sink [B, H, Tq], −∞ for a row that sees nothing."""
    out = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
    lse = calls.blank_memory(*call.q.shape[:3], dtype=torch.float32, device=call.device)
    bytes_per_pair = forward_bytes(call)
    for part, some in call.batches(bytes_per_pair) if bytes_per_pair else [(slice(None), call)]:
        for chunk in some.chunks(bytes_per_pair):
            forward_chunk(chunk, out[part], lse[part])
    if not call.post and call.sink is not None:
        # An additional key with value zero.
        out = (out * torch.sigmoid(lse - call.sink.float()[:, None])[..., None]).to(out.dtype)
        lse = with_sink(lse, call.sink)
    return out, lse


def forward_chunk(chunk: Chunk, out: Tensor, lse: Tensor) -> None:
    """Write the output and log-sum-exp of a chunk's rows; its images are freed on return."""
    call = chunk.call
    image = convolved(chunk, call.pre, scores(chunk)) if call.pre else None
    attend(chunk, image, out, lse)
    if call.post:
        rows = lse[:, :, chunk.start : chunk.stop]
        rows.copy_(with_sink(rows, call.sink))
        weights = convolved(chunk, call.post, weights_image(chunk, image, lse))
        times_keys(chunk, weights, call.v, 1.0, out)


def with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    """log(exp(lse) + exp(sink)); a row that sees nothing stays at −∞."""
    if sink is None:
        return lse
    return torch.where(lse == -torch.inf, lse, torch.logaddexp(lse, sink.float()[:, None].expand_as(lse)))


def forward_bytes(call: Call) -> int:
    """Bytes of scratch for a pair of query and key."""
    widths = [call.channels, call.num_heads] if is_fused(call, call.pre) else call.pre.widths
    return sum([*widths, *call.post.widths]) * call.dtype.itemsize


def is_fused(call: Call, chain: Chain) -> bool:
    """Whether the stages are two before the softmax that run as one kernel."""
    stages = chain.stages
    if chain is not call.pre or len(stages) != 2:
        return False
    sizes = [padded(s.num_in) * padded(s.num_out) * s.kernel_size for s in stages]
    widest = max(padded(s.num_in) for s in stages)
    return sum(sizes) <= FUSED_NUMBERS and widest <= 32 and call.dtype == torch.float16


def scores(chunk: Chunk) -> Tensor:
    """The first image of a chunk: scores, and the bias if it has channels."""
    call = chunk.call
    image = chunk.image(call.channels, call.dtype)
    arguments = call.arguments()
    if not call.bias_in_image:
        arguments["BIAS"] = "none"
    write_scores(chunk, arguments, image)
    return image


def write_scores(chunk: Chunk, arguments: dict[str, Any], image: Tensor) -> None:
    """Write products of q and k, 0 where not visible, and the bias into an image."""
    from dape.ops.score_attention.triton.forward import scores_kernel

    call = chunk.call
    rows = min(2 * calls.BLOCK_R, chunk.size)
    blocks = -(-chunk.size // rows)
    splits, per_split = split_keys(chunk, blocks)
    given = arguments | chunk.arguments() | strides("image", image) | {"image": image, "per_split": per_split}
    variants = [
        {"BLOCK_R": rows, "STAGES": stages, "num_warps": max(1, min(4, rows // 16))} for stages in (3, 2, 1)
    ]
    run(scores_kernel, (blocks * splits, call.num_heads, call.batch), given, variants)


def convolved(chunk: Chunk, chain: Chain, image: Tensor, keep: list[Tensor] | None = None) -> Tensor:
    """Apply the stages to an image, [B, H, columns, rows]; the image after every stage is appended to `keep`."""
    call = chunk.call
    if is_fused(call, chain):
        return convolved_at_once(chunk, image, keep)
    before = chain is call.pre
    for number, stage in enumerate(chain.stages):
        out = chunk.image(stage.num_out, call.dtype)
        own: dict[str, Any] = {"START": "offsets", "FINISH": "leaky", "slope": stage.slope}
        if before and number == 0 and call.table is not None:
            own["START"] = "table"
        if number == len(chain.stages) - 1:
            # Logits are masked by the softmax; weights are zero where not visible.
            own |= {"FINISH": "none", **values_arguments(call)} if before else {"FINISH": "residual"}
        own |= {"offsets": stage.offsets(), "LEFT": stage.left, "held": chain.held[number]}
        own |= {"wanted": chain.held[number + 1]}
        one_stage(chunk, image, out, stage.taps(call.dtype), stage.num_in, stage.num_out, own)
        image = out
        if keep is not None:
            keep.append(out)
    return image


def weights_image(chunk: Chunk, image: Tensor | None, lse: Tensor) -> Tensor:
    """The weights of a chunk as an image, 0 where not visible; `image`: output of the stages before the softmax."""
    weights = chunk.image(chunk.call.num_heads, chunk.call.dtype)
    write_weights(chunk, image, lse, weights, {"MODE": "weights"})
    return weights


def write_weights(
    chunk: Chunk, image: Tensor | None, lse: Tensor, result: Tensor, own: dict[str, Any]
) -> None:
    """Run the kernel that recomputes logits and weights from the log-sum-exp."""
    from dape.ops.score_attention.triton.backward import weights_kernel

    call = chunk.call
    arguments = logit_arguments(chunk, image) | strides("result", result) | {"result": result, "lse": lse}
    unused = call.q
    for name in ("grad_out", "delta", "given", "grad_v", "grad_factor"):
        arguments[name] = unused
    for name in (
        "grad_batch",
        "grad_head",
        "grad_token",
        "given_batch",
        "given_channel",
        "out_rows",
        "grad_keys",
    ):
        arguments[name] = 0
    grid = (-(-chunk.columns // calls.BLOCK_K), call.num_heads, call.batch)
    rows = min(calls.ROWS, chunk.block)
    run(weights_kernel, grid, arguments | own, [{"ROWS": rows, "STAGES": n, "num_warps": 4} for n in (2, 1)])


def convolved_at_once(chunk: Chunk, image: Tensor, keep: list[Tensor] | None) -> Tensor:
    """Apply two stages to an image by one kernel; the hidden map and the result are appended to `keep`."""
    from dape.ops.score_attention.triton.forward import convolve_kernel

    call = chunk.call
    one, two = call.pre.stages
    out = chunk.image(two.num_out, call.dtype)
    hidden = out if keep is None else chunk.image(one.num_out, call.dtype)
    table, plane = table_argument(call, one)
    arguments = chunk.arguments() | call.arguments() | strides("image", image) | strides("out", out)
    arguments |= strides("kept", hidden) | {"kept": hidden, "KEEP": keep is not None, "HIDDEN": one.num_out}
    arguments |= {
        "image": image, "out": out, "w1": one.taps(call.dtype), "w2": two.taps(call.dtype), "b1": one.offsets(),
        "b2": two.offsets(), "table": table, "table_plane": plane, **values_arguments(call), "held": call.pre.held[1], "wanted": 0, "slope1": one.slope, "slope2": two.slope, "IN": one.num_in, "OUTS": two.num_out,
        "CHANNELS": padded(one.num_in), "WIDTH": padded(one.num_out), "OUT": padded(two.num_out),
        "K1": one.kernel_size, "LEFT1": one.left, "K2": two.kernel_size, "LEFT2": two.left,
        "TABLE": call.table is not None, "FINAL": True,
    }  # fmt: skip
    grid = (chunk.blocks, chunk.walks, call.batch)
    # With more channels, 16 rows of a warp fill its registers.
    warps = max(1, chunk.block // (32 if padded(one.num_in) == 16 else 16))
    run(convolve_kernel, grid, arguments, [{"STAGES": n, "num_warps": warps} for n in (3, 2, 1)])
    if keep is not None:
        keep += [hidden, out]
    return out


def adds_values(call: Call) -> bool:
    """Whether the last stage adds the bias to its result: one by distance, used in a table."""
    return call.table is not None and "bias" in call.residual


def values_arguments(call: Call) -> dict[str, Any]:
    if not adds_values(call):
        return {"values": call.q, "values_length": 1, "lowest": 0, "VALUES": False}
    of_heads = call.values
    assert of_heads is not None

    def make() -> Tensor:
        offset = call.pre.stages[-1].offset
        values = of_heads.T.float() if offset is None else of_heads.T.float() + offset.float()
        return calls.pad(values.to(call.dtype), of_heads.shape[1], padded(call.num_heads))

    values = call.once("values by distance", make)
    return {"values": values, "values_length": values.shape[0], "lowest": call.lowest, "VALUES": True}


def table_argument(call: Call, stage: StageTensors) -> tuple[Tensor, int]:
    """The table of a bias by distance, [planes, distances, width] padded, and the numbers of a plane."""
    if call.table is None:
        return call.q, 0
    given, width = call.table, padded(stage.num_out)
    table = call.once("table", lambda: calls.pad(given.to(call.dtype), given.shape[1], width))
    return table, given.shape[1] * width


def one_stage(
    chunk: Chunk, image: Tensor, out: Tensor, taps: Tensor, num_in: int, num_out: int, own: dict[str, Any]
) -> None:
    """Run a stage of any size over an image."""
    from dape.ops.score_attention.triton.backward import stage_kernel

    call = chunk.call
    table, plane = table_argument(call, call.pre.stages[0]) if own["START"] == "table" else (image, 0)
    in_part, out_part = min(32, padded(num_in)), min(32, padded(num_out))
    in_parts, out_parts = padded(num_in) // in_part, padded(num_out) // out_part
    arguments = chunk.arguments() | call.arguments() | strides("image", image) | strides("out", out)
    arguments |= {"offsets": taps, "gate": out, "residual": out, "residual_batch": 0, "residual_channel": 0}
    arguments |= {"values": image, "values_length": 1, "lowest": 0, "VALUES": False}
    arguments |= {"REPEAT": 1, "RESIDUALS": 0, "slope": 1.0, "table": table, "table_plane": plane}
    arguments |= {
        "image": image, "out": out, "weights": taps, "IN": num_in, "OUTS": num_out, "IN_PARTS": in_parts,
        "IN_PART": in_part, "OUT_PARTS": out_parts, "OUT_PART": out_part, "K": taps.shape[0],
        "UNROLLED": taps.shape[0] * in_parts <= 8,
    } | own  # fmt: skip
    grid = (chunk.blocks, chunk.walks * out_parts, call.batch)
    run(
        stage_kernel,
        grid,
        arguments,
        [{"STAGES": n, "num_warps": max(1, chunk.block // 32)} for n in (3, 2, 1)],
    )


def strides(name: str, image: Tensor) -> dict[str, int]:
    return {f"{name}_batch": image.stride(0), f"{name}_channel": image.stride(1)}


def logit_arguments(chunk: Chunk, image: Tensor | None) -> dict[str, Any]:
    """Arguments for the terms of the logits: scores, images and a bias."""
    call = chunk.call
    arguments = call.arguments() | chunk.arguments()
    if image is None:
        return arguments | {
            "image": call.q, "image_batch": 0, "image_head": 0, "image_channel": 0, "SCORES": True, "IMAGES": 0,
        }  # fmt: skip
    arguments |= strides("image", image) | {"image": image, "image_head": image.stride(1)}
    arguments |= {"SCORES": "scores" in call.residual, "IMAGES": 1}
    if "bias" not in call.residual or adds_values(call):
        arguments["BIAS"] = "none"
    return arguments


def attend(chunk: Chunk, image: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Write the output and log-sum-exp of a chunk's rows."""
    from dape.ops.score_attention.triton.forward import attend_kernel

    call = chunk.call
    rows = min(2 * calls.BLOCK_R, chunk.size)
    tile = calls.BLOCK_K // 2 if rows == 128 else calls.BLOCK_K
    blocks = -(-chunk.size // rows)
    splits, per_split = split_keys(chunk, blocks)
    arguments = logit_arguments(chunk, image) | {"per_split": per_split, "out": out, "lse": lse}
    arguments |= {"out_start": 0, "out_rows": call.num_queries, "SUMS": not call.post}
    if splits > 1:
        shape = (splits, call.batch, call.num_heads, chunk.stop - chunk.start)
        parts = out
        if not call.post:
            parts = calls.blank_memory(*shape, call.head_width, dtype=torch.float32, device=call.device)
        sums = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        arguments |= {"out": parts, "lse": sums, "out_start": chunk.start, "out_rows": shape[-1]}
    # Sums of wide heads take the registers of more warps.
    warps = 8 if call.head_width > 80 else 4
    variants = [
        {"BLOCK_R": rows, "BLOCK_K": keys, "STAGES": stages, "num_warps": max(1, min(warps, rows // 16))}
        for keys, stages in ((tile, 3), (tile, 2), (32, 1))
    ]
    run(attend_kernel, (blocks * splits, call.num_heads, call.batch), arguments, variants)
    if splits > 1:
        own = slice(chunk.start, chunk.stop)
        total = torch.logsumexp(sums, 0)
        lse[:, :, own] = total
        if not call.post:
            # A row that sees nothing has −∞ everywhere.
            shares = torch.exp(sums - total).nan_to_num(0.0)
            out[:, :, own] = (parts * shares[..., None]).sum(0).to(out.dtype)


def times_keys(
    chunk: Chunk, image: Tensor, k: Tensor, scale: float, out: Tensor, rest: Tensor | None = None
) -> None:
    """Write scale · image · k, for the rows of a chunk: out [B, H, Tq, D]; k has the keys' strides.

    With `rest` it is added to out, and the rounding error of out's dtype is kept there.
    """
    from dape.ops.score_attention.triton.backward import fold_kernel, queries_kernel

    call = chunk.call
    arguments = call.arguments() | chunk.arguments() | strides("image", image)
    splits, per_split = split_keys(chunk, chunk.blocks)
    arguments |= {"image": image, "k": k, "scale": scale, "per_split": per_split}
    direct = splits == 1 and rest is None
    rows = chunk.stop - chunk.start
    if direct:
        parts = out
        arguments |= {"grad_q": out, "out_start": 0, "out_rows": call.num_queries}
    else:
        shape = (splits, call.batch, call.num_heads, rows, call.head_width)
        parts = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        arguments |= {"grad_q": parts, "out_start": chunk.start, "out_rows": rows}
    run(queries_kernel, (chunk.blocks * splits, call.num_heads, call.batch), arguments, product_variants())
    if direct:
        return
    size = parts[0].numel()
    run(
        fold_kernel,
        (-(-size // 256),),
        {
            "parts": parts, "target": out, "rest": parts if rest is None else rest, "splits": splits, "size": size,
            "row_size": rows * call.head_width, "row_begin": chunk.start * call.head_width,
            "row_stride": call.num_queries * call.head_width, "ADD": rest is not None, "BLOCK": 256,
        },
        [{"num_warps": 2}],
    )  # fmt: skip


def add_times_rows(chunk: Chunk, image: Tensor, q: Tensor, scale: float, out: Tensor) -> None:
    """Add scale · imageᵀ · q, over the rows of a chunk, to out [B, H, keys of the segment, D] in float32."""
    from dape.ops.score_attention.triton.backward import keys_kernel

    call = chunk.call
    arguments = call.arguments() | chunk.arguments() | strides("image", image)
    arguments |= {"image": image, "q": q, "scale": scale, "grad_k": out, "grad_keys": out.shape[2]}
    arguments |= dict(zip(("q_batch", "q_head", "q_token"), q.stride()[:3], strict=True))
    tiles = -(-chunk.own_keys // calls.BLOCK_K)
    run(keys_kernel, (tiles, call.num_heads, call.batch), arguments, product_variants())


def product_variants() -> list[dict[str, Any]]:
    return [{"STAGES": n, "num_warps": 4} for n in (3, 2, 1)]


def split_keys(chunk: Chunk, blocks: int) -> tuple[int, int]:
    """Number of splits of the keys such that blocks × heads × batch fill the GPU, and the keys of a split."""
    call = chunk.call
    wanted = -(-calls.PROGRAMS // (blocks * call.num_heads * call.batch))
    # Splits begin at a multiple of BLOCK_K.
    columns = max(1, chunk.right - chunk.left // calls.BLOCK_K * calls.BLOCK_K)
    wanted = max(1, min(wanted, -(-columns // (4 * calls.BLOCK_K))))
    per_split = max(1, columns // wanted // calls.BLOCK_K) * calls.BLOCK_K
    return -(-columns // per_split), per_split


class Gradients:
    """Gradients of all inputs of a call, gathered over segments of the keys and chunks of query rows.

    A segment's sums for keys and values are float32 for all heads; their gradients have the dtypes of k and v. Those
    of queries are sums over segments: the rounding error of their dtype is kept in `rest`, in bfloat16, for the next.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.q = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
        self.k, self.v = (
            calls.blank_memory(*x.shape, dtype=x.dtype, device=call.device) for x in (call.k, call.v)
        )
        self.rest: Tensor | None = None
        self.key_sums = self.value_sums = self.q
        # Gradients of weights and offsets by stage, and the programs' sums from which they are computed at the end.
        self.pre, self.post = (
            [(zeros(stage.weight), zeros_like(stage.offset)) for stage in chain.stages]
            for chain in (call.pre, call.post)
        )
        self.tap_sums: dict[tuple[bool, int], Tensor] = {}
        self.factor = zeros_like(call.factor)
        self.values, self.dense, self.table = (zeros_like(x) for x in (call.values, call.dense, call.table))
        self.row, self.column = (zeros_like(x) for x in (call.row, call.column))

    def add(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """Add the contributions of all rows; returns the inner product of each row's weights and their gradients."""
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        # Behind stages after the softmax, chunk by chunk.
        delta = torch.zeros_like(lse) if self.call.post else inner_products(grad_out, out)
        bytes_per_pair = backward_bytes(self.call)
        parts = [
            (part, list(some.segments(bytes_per_pair))) for part, some in self.call.batches(bytes_per_pair)
        ]
        self._prepare([chunk for _, segments in parts for _, chunks in segments for chunk in chunks])
        for part, segments in parts:
            for segment, chunks in segments:
                self._segment(part, segment, chunks, grad_out, lse, delta)
        self._finish()
        return delta

    def _prepare(self, chunks: list[Chunk]) -> None:
        """Allocate the memory shared by all chunks."""
        call = self.call
        if any(chunk.segment.halo or chunk.segment.start for chunk in chunks):
            self.q.zero_()
            self.rest = self.q
            if self.q.dtype != torch.float32:
                self.rest = torch.zeros(self.q.shape, dtype=torch.bfloat16, device=call.device)
        programs = max(chunk.blocks * chunk.walks * chunk.call.batch for chunk in chunks)
        for before, chain in ((True, call.pre), (False, call.post)):
            for number, stage in enumerate(chain.stages):
                shape = (programs, stage.kernel_size + 1, padded(stage.num_in), padded(stage.num_out))
                self.tap_sums[before, number] = torch.zeros(shape, dtype=torch.float32, device=call.device)

    def _segment(
        self, part: slice, segment: Segment, chunks: list[Chunk], grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> None:
        """Add the contributions of a segment's keys; their own gradients are then complete."""
        call = self.call
        stop = min(segment.stop, call.num_keys)
        shape = (len(self.q[part]), call.num_heads, stop - segment.start, call.head_width)
        self.key_sums, self.value_sums = (
            torch.zeros(shape, dtype=torch.float32, device=call.device) for _ in range(2)
        )
        for chunk in chunks:
            ChunkGradients(self, chunk, part).add(grad_out[part], lse[part], delta[part])
        for result, sums in ((self.k, self.key_sums), (self.v, self.value_sums)):
            result[part, :, segment.start : stop] = sums.unflatten(1, (call.num_groups, -1)).sum(2)

    def _finish(self) -> None:
        """The gradients of weights and offsets from the sums of the programs."""
        for before, chain, grads in ((True, self.call.pre, self.pre), (False, self.call.post, self.post)):
            for number, (stage, (weights, offsets)) in enumerate(zip(chain.stages, grads, strict=True)):
                total = self.tap_sums.pop((before, number)).sum(0)
                weights += total[:-1, : stage.num_in, : stage.num_out].permute(2, 1, 0)
                if offsets is not None:
                    offsets += total[-1, 0, : stage.num_out]


def inner_products(x: Tensor, y: Tensor) -> Tensor:
    """x · y over the last dimension, [B, H, T] in float32, by parts of rows that need little memory."""
    batch, num_heads, num_rows, width = x.shape
    size = max(1, 2**20 // (batch * num_heads * width))
    parts = [slice(start, start + size) for start in range(0, num_rows, size)]
    return torch.cat([(x[:, :, rows].float() * y[:, :, rows].float()).sum(-1) for rows in parts], 2)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def zeros_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else zeros(x)


def backward_bytes(call: Call) -> int:
    """Bytes of scratch for a pair of query and key."""
    images = call.pre.widths or [call.num_heads]
    if call.post:
        # The gradients of the weights, before and after the stages, have images of their own.
        images += [*call.post.widths, call.num_heads, call.num_heads]
    return sum(images) * call.dtype.itemsize


class ChunkGradients:
    """Contributions of the rows of one chunk to the gradients."""

    def __init__(self, whole: Gradients, chunk: Chunk, part: slice) -> None:
        self.whole, self.chunk, self.call, self.part = whole, chunk, chunk.call, part

    def add(self, grad_out: Tensor, lse: Tensor, delta: Tensor) -> None:
        call, chunk = self.call, self.chunk
        images: list[Tensor] = []
        if call.pre:
            images.append(scores(chunk))
            convolved(chunk, call.pre, images[0], keep=images)
        image = images[-1] if images else None
        given = self._weights(image, grad_out, lse, delta) if call.post else None
        grad = self._logits(image, grad_out, lse, delta, given)
        if "bias" in call.residual and not call.bias_in_image:
            self._bias(grad)
        if call.pre:
            heads = call.num_heads
            residuals = heads * ("scores" in call.residual)
            residuals += heads * ("bias" in call.residual and call.bias_in_image)
            grad = self._stages(call.pre, images, grad, residuals)
            if call.bias_in_image:
                self._bias(grad[:, heads:])
        rest = self.whole.rest
        rest = None if rest is None else rest[self.part]
        times_keys(chunk, grad, call.k, call.scale, self.whole.q[self.part], rest)
        add_times_rows(chunk, grad, call.q, call.scale, self.whole.key_sums)

    def _weights(self, image: Tensor | None, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Gradients of the weights, as an image, if stages follow them; fills in `delta`, adds to those of v."""
        from dape.ops.score_attention.triton.backward import inner_kernel

        call, chunk = self.call, self.chunk
        images = [weights_image(chunk, image, lse)]
        convolved(chunk, call.post, images[0], keep=images)
        add_times_rows(chunk, images[-1], grad_out, 1.0, self.whole.value_sums)
        grad = chunk.image(call.num_heads, call.grad_dtype)
        arguments = call.arguments() | {"q": grad_out, "k": call.v, "scale": 1.0, "BIAS": "none"}
        arguments |= dict(zip(("q_batch", "q_head", "q_token"), grad_out.stride()[:3], strict=True))
        write_scores(chunk, arguments, grad)
        # The weights themselves are needed once more.
        into = chunk.image(call.num_heads, call.grad_dtype)
        grad = self._stages(call.post, images, grad, 0, into)
        splits, per_split = split_keys(chunk, chunk.blocks)
        shape = (splits, call.batch, call.num_heads, chunk.stop - chunk.start)
        sums = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        arguments = call.arguments() | chunk.arguments() | strides("x", images[0]) | strides("y", grad)
        arguments |= {"x": images[0], "y": grad, "sums": sums, "per_split": per_split, "out_rows": shape[3]}
        grid = (chunk.blocks * splits, call.num_heads, call.batch)
        run(inner_kernel, grid, arguments, [{"num_warps": 4}])
        delta[:, :, chunk.start : chunk.stop] = sums.sum(0)
        return grad

    def _logits(
        self, image: Tensor | None, grad_out: Tensor, lse: Tensor, delta: Tensor, given: Tensor | None
    ) -> Tensor:
        """Gradients of the logits, as an image that overwrites `image`; adds to those of v unless those of the weights are `given`."""
        call, chunk = self.call, self.chunk
        grad = chunk.image(call.num_heads, call.grad_dtype) if image is None else image.view(call.grad_dtype)
        own: dict[str, Any] = {"MODE": "gradients", "grad_out": grad_out, "grad_v": self.whole.value_sums}
        own["grad_keys"] = self.whole.value_sums.shape[2]
        own |= dict(zip(("grad_batch", "grad_head", "grad_token"), grad_out.stride()[:3], strict=True))
        if given is not None:
            own = {"MODE": "given", "given": given, **strides("given", given)}
        own["delta"] = delta
        factor = self.whole.factor
        if factor is not None:
            tiles, rows = -(-chunk.columns // calls.BLOCK_K), chunk.stop - chunk.start
            # Tiles that no row of a block sees are skipped.
            shape = (tiles, call.batch, call.num_heads, rows)
            sums = torch.zeros(shape, dtype=torch.float32, device=call.device)
            own |= {"grad_factor": sums, "out_rows": rows}
        write_weights(chunk, image, lse, grad, own)
        if factor is not None:
            shared = factor.shape[0] == 1
            target = (factor if shared else factor[self.part])[:, :, chunk.start : chunk.stop]
            target += sums.sum((0, 1) if shared else 0)
        return grad

    def _stages(
        self, chain: Chain, images: list[Tensor], grad: Tensor, residuals: int, first: Tensor | None = None
    ) -> Tensor:
        """Gradients of the first image, written over it or into `first`; adds to those of weights, offsets and the table.

        residuals: number of channels of the first image, from its first on, that are also added to the result.
        """
        call, chunk = self.call, self.chunk
        result = grad
        for number in reversed(range(len(chain.stages))):
            stage, image = chain.stages[number], images[number]
            self._taps(chain, number, image, grad)
            into = first if number == 0 and first is not None else image.view(call.grad_dtype)
            own: dict[str, Any] = {"START": "zero", "LEFT": stage.right, "held": chain.held[number + 1]}
            own |= {"wanted": chain.held[number]}
            if number > 0:
                own |= {"FINISH": "gate", "gate": image, "slope": chain.stages[number - 1].slope}
            else:
                own |= {
                    "FINISH": "residual",
                    "residual": result,
                    "REPEAT": call.num_heads,
                    "RESIDUALS": residuals,
                }
                own |= strides("residual", result)
            one_stage(chunk, grad, into, stage.turned(call.grad_dtype), stage.num_out, stage.num_in, own)
            grad = into
            if number == 1 and chain is call.pre and call.table is not None:
                self._table(grad)
        return grad

    def _taps(self, chain: Chain, number: int, image: Tensor, grad: Tensor) -> None:
        """Add to the sums from which the gradients of a stage's weights and offset are computed."""
        from dape.ops.score_attention.triton.backward import taps_kernel

        call, chunk, stage = self.call, self.chunk, chain.stages[number]
        in_part, out_part = min(32, padded(stage.num_in)), min(32, padded(stage.num_out))
        in_parts, out_parts = padded(stage.num_in) // in_part, padded(stage.num_out) // out_part
        taps = stage.kernel_size + 1
        group = min(taps, 4)
        sums = self.whole.tap_sums[chain is call.pre, number]
        arguments = call.arguments() | chunk.arguments() | strides("image", image) | strides("grad", grad)
        arguments |= {
            "image": image, "grad": grad, "sums": sums, "held": chain.held[number],
            "wanted": chain.held[number + 1], "IN": stage.num_in, "OUTS": stage.num_out, "IN_PARTS": in_parts,
            "IN_PART": in_part, "OUT_PARTS": out_parts, "OUT_PART": out_part, "K": stage.kernel_size,
            "LEFT": stage.left, "TAPS": group,
        }  # fmt: skip
        grid = (chunk.blocks * chunk.walks * call.batch, in_parts * out_parts, -(-taps // group))
        warps = max(1, chunk.block // 32)
        run(taps_kernel, grid, arguments, [{"STAGES": n, "num_warps": warps} for n in (3, 2, 1)])

    def _table(self, grad: Tensor) -> None:
        """Add the gradients of the table: sums by distance of those of the first hidden map."""
        call = self.call
        table, stage = self.whole.table, call.pre.stages[0]
        assert table is not None
        self._by_distance(grad, table, -stage.right, call.pre.held[1])

    def _bias(self, grad: Tensor) -> None:
        """Add the gradients of the bias from those of its image."""
        call, chunk = self.call, self.chunk
        if (values := self.whole.values) is not None:
            self._by_distance(grad, values.T[None], call.lowest, 0)
        elif self.whole.dense is not None or self.whole.row is not None:
            rows, start = slice(chunk.start, chunk.stop), chunk.segment.start
            own = slice(start - chunk.left, start - chunk.left + chunk.own_keys)
            visible = grad[..., own, : chunk.stop - chunk.start].transpose(-1, -2)
            key = start + torch.arange(chunk.own_keys, device=call.device)
            keys = slice(start, start + chunk.own_keys)
            low, high = (x[:, rows, None] for x in (call.first, call.last))
            through = torch.where(((key >= low) & (key <= high))[:, None], visible.float(), 0.0)
            if (dense := self.whole.dense) is not None:
                shared = dense.shape[0] == 1
                target = dense if shared else dense[self.part]
                target[:, :, rows, keys] += through.sum(0, keepdim=True) if shared else through
            else:
                assert self.whole.row is not None and self.whole.column is not None
                self.whole.row[self.part][:, :, rows] += through.sum(3)
                self.whole.column[self.part][:, :, keys] += through.sum(2)

    def _by_distance(self, grad: Tensor, sums: Tensor, lowest: int, extra: int) -> None:
        """Add to sums by distance of an image: [planes, distances, channels], from `lowest` on."""
        from dape.ops.score_attention.triton.backward import diagonals_kernel

        call, chunk = self.call, self.chunk
        least = max(lowest, chunk.start + call.offset - (chunk.own_stop - 1))
        if call.causal:
            least = max(least, -extra)
        distances = chunk.stop - 1 + call.offset - chunk.segment.start - least + 1
        planes, channels = sums.shape[0], sums.shape[2]
        tile, group = 32, 4 if channels > 16 else 2
        arguments = call.arguments() | chunk.arguments() | strides("image", grad)
        arguments |= dict(zip(("sums_plane", "sums_distance", "sums_channel"), sums.stride(), strict=True))
        arguments |= {
            "image": grad, "sums": sums, "bottom": least, "lowest": lowest, "num_distances": sums.shape[1],
            "extra": extra, "num_batch": call.batch, "C": channels, "CHANNELS": group, "PLANES": planes,
            "BLOCK_D": tile, "UNROLL": 4,
        }  # fmt: skip
        grid = (-(-distances // tile), -(-channels // group))
        if distances > 0:
            run(diagonals_kernel, grid, arguments, [{"num_warps": 1}])
