"""The forward and backward pass: which kernels run on which images, a chunk of query rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton.call import Call, Chain, Chunk, StageTensors, padded
from dape.ops.score_attention.triton.compile import run

# Two stages run as one kernel where their weights fit into registers beside the running sums.
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
        # One more key with value zero.
        out = (out * torch.sigmoid(lse - call.sink.float()[:, None])[..., None]).to(out.dtype)
        lse = with_sink(lse, call.sink)
    return out, lse


def forward_chunk(chunk: Chunk, out: Tensor, lse: Tensor) -> None:
    """Write the output and log-sum-exp of a chunk's rows; its images are gone when it returns."""
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
    """The first image of a chunk: scores, and the bias where it has channels."""
    call = chunk.call
    image = chunk.image(call.channels, call.dtype)
    arguments = call.arguments()
    if not call.bias_in_image:
        arguments["BIAS"] = "none"
    write_scores(chunk, arguments, image)
    return image


def write_scores(chunk: Chunk, arguments: dict[str, Any], image: Tensor) -> None:
    """Products of q and k, 0 where not visible, and the bias into an image."""
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
    """What the stages make of an image, [B, H, columns, rows]; `keep` gets the image after every stage."""
    call = chunk.call
    if keep is None and is_fused(call, chain):
        return convolved_at_once(chunk, image)
    before = chain is call.pre
    for number, stage in enumerate(chain.stages):
        out = chunk.image(stage.num_out, call.dtype)
        own: dict[str, Any] = {"START": "offsets", "FINISH": "leaky", "slope": stage.slope}
        if before and number == 0 and call.table is not None:
            own["START"] = "table"
        if number == len(chain.stages) - 1:
            # Logits are hidden by the softmax; weights are zero where not visible.
            own |= {"FINISH": "none", **values_arguments(call)} if before else {"FINISH": "residual"}
        own |= {"offsets": stage.offsets(), "LEFT": stage.left, "held": chain.held[number]}
        own |= {"wanted": chain.held[number + 1]}
        one_stage(chunk, image, out, stage.taps(call.dtype), stage.num_in, stage.num_out, own)
        image = out
        if keep is not None:
            keep.append(out)
    return image


def weights_image(chunk: Chunk, image: Tensor | None, lse: Tensor) -> Tensor:
    """The weights of a chunk as an image, 0 where not visible; `image`: what the stages before the softmax made."""
    weights = chunk.image(chunk.call.num_heads, chunk.call.dtype)
    write_weights(chunk, image, lse, weights, {"MODE": "weights"})
    return weights


def write_weights(
    chunk: Chunk, image: Tensor | None, lse: Tensor, result: Tensor, own: dict[str, Any]
) -> None:
    """Run the kernel that computes logits and weights again, now that their sums are known."""
    from dape.ops.score_attention.triton.backward import weights_kernel

    call = chunk.call
    arguments = logit_arguments(chunk, image) | strides("result", result) | {"result": result, "lse": lse}
    unused = call.q
    for name in ("grad_out", "delta", "given", "grad_v", "grad_factor"):
        arguments[name] = unused
    for name in ("grad_batch", "grad_head", "grad_token", "given_batch", "given_channel", "out_rows"):
        arguments[name] = 0
    grid = (-(-chunk.columns // calls.BLOCK_K), call.num_heads, call.batch)
    rows = min(calls.ROWS, chunk.block)
    run(weights_kernel, grid, arguments | own, [{"ROWS": rows, "STAGES": n, "num_warps": 4} for n in (2, 1)])


def convolved_at_once(chunk: Chunk, image: Tensor) -> Tensor:
    """What two stages make of an image, by one kernel."""
    from dape.ops.score_attention.triton.forward import convolve_kernel

    call = chunk.call
    one, two = call.pre.stages
    out = chunk.image(two.num_out, call.dtype)
    table, plane = table_argument(call, one)
    arguments = chunk.arguments() | call.arguments() | strides("image", image) | strides("out", out)
    arguments |= {
        "image": image, "out": out, "w1": one.taps(call.dtype), "w2": two.taps(call.dtype), "b1": one.offsets(),
        "b2": two.offsets(), "table": table, "table_plane": plane, **values_arguments(call), "held": 0, "wanted": 0, "slope1": one.slope, "slope2": two.slope, "IN": one.num_in, "OUTS": two.num_out,
        "CHANNELS": padded(one.num_in), "WIDTH": padded(one.num_out), "OUT": padded(two.num_out),
        "K1": one.kernel_size, "LEFT1": one.left, "K2": two.kernel_size, "LEFT2": two.left,
        "TABLE": call.table is not None, "FINAL": True,
    }  # fmt: skip
    grid = (chunk.blocks, -(-chunk.columns // chunk.segment()), call.batch)
    # With more channels, 16 rows of a warp fill its registers.
    warps = max(1, chunk.block // (32 if padded(one.num_in) == 16 else 16))
    run(convolve_kernel, grid, arguments, [{"STAGES": n, "num_warps": warps} for n in (3, 2, 1)])
    return out


def adds_values(call: Call) -> bool:
    """Whether the last stage adds the bias to its result: one by distance, that went into a table."""
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
    grid = (chunk.blocks, -(-chunk.columns // chunk.segment()) * out_parts, call.batch)
    run(
        stage_kernel,
        grid,
        arguments,
        [{"STAGES": n, "num_warps": max(1, chunk.block // 32)} for n in (3, 2, 1)],
    )


def strides(name: str, image: Tensor) -> dict[str, int]:
    return {f"{name}_batch": image.stride(0), f"{name}_channel": image.stride(1)}


def logit_arguments(chunk: Chunk, image: Tensor | None) -> dict[str, Any]:
    """Of what the logits are made: scores, images and a bias."""
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


def times_keys(chunk: Chunk, image: Tensor, k: Tensor, scale: float, out: Tensor) -> None:
    """Write scale · image · k, for the rows of a chunk: out [B, H, Tq, D]; k has the keys' strides."""
    from dape.ops.score_attention.triton.backward import queries_kernel

    call = chunk.call
    arguments = call.arguments() | chunk.arguments() | strides("image", image)
    splits, per_split = split_keys(chunk, chunk.blocks)
    shape = (splits, call.batch, call.num_heads, chunk.stop - chunk.start, call.head_width)
    parts = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
    arguments |= {"image": image, "k": k, "scale": scale, "grad_q": parts}
    arguments |= {"per_split": per_split, "out_start": chunk.start, "out_rows": shape[3]}
    run(queries_kernel, (chunk.blocks * splits, call.num_heads, call.batch), arguments, product_variants())
    out[:, :, chunk.start : chunk.stop] = parts.sum(0).to(out.dtype)


def add_times_rows(chunk: Chunk, image: Tensor, q: Tensor, scale: float, out: Tensor) -> None:
    """Add scale · imageᵀ · q, over the rows of a chunk, to out [B, H, Tk, D] in float32."""
    from dape.ops.score_attention.triton.backward import keys_kernel

    call = chunk.call
    arguments = call.arguments() | chunk.arguments() | strides("image", image)
    arguments |= {"image": image, "q": q, "scale": scale, "grad_k": out}
    arguments |= dict(zip(("q_batch", "q_head", "q_token"), q.stride()[:3], strict=True))
    tiles = -(-min(chunk.columns, call.num_keys) // calls.BLOCK_K)
    run(keys_kernel, (tiles, call.num_heads, call.batch), arguments, product_variants())


def product_variants() -> list[dict[str, Any]]:
    return [{"STAGES": n, "num_warps": 4} for n in (3, 2, 1)]


def split_keys(chunk: Chunk, blocks: int) -> tuple[int, int]:
    """Into how many parts the keys are split so that blocks × heads × batch fill the GPU, and the keys of a part."""
    call = chunk.call
    wanted = -(-calls.PROGRAMS // (blocks * call.num_heads * call.batch))
    wanted = max(1, min(wanted, -(-chunk.columns // (4 * calls.BLOCK_K))))
    per_split = max(1, chunk.columns // wanted // calls.BLOCK_K) * calls.BLOCK_K
    return -(-chunk.columns // per_split), per_split


class Gradients:
    """Gradients of all inputs of a call, gathered over chunks of query rows."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.q = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
        shape = (call.batch, call.num_heads, call.num_keys, call.head_width)
        self.k, self.v = (torch.zeros(shape, dtype=torch.float32, device=call.device) for _ in range(2))
        # Of weights and offsets, stage by stage.
        self.pre, self.post = (
            [(zeros(stage.weight), zeros_like(stage.offset)) for stage in chain.stages]
            for chain in (call.pre, call.post)
        )
        self.factor = zeros_like(call.factor)
        self.values, self.dense, self.table = (zeros_like(x) for x in (call.values, call.dense, call.table))
        self.row, self.column = (zeros_like(x) for x in (call.row, call.column))

    def grouped(self, x: Tensor) -> Tensor:
        """Sums over the query heads that share a key head, [B, G, Tk, D]."""
        call = self.call
        return x if call.num_groups == call.num_heads else x.unflatten(1, (call.num_groups, -1)).sum(2)

    def add(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """Add what all rows contribute; returns for every row the inner product of its weights and their gradients."""
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        # Behind stages after the softmax, chunk by chunk.
        delta = torch.zeros_like(lse) if self.call.post else inner_products(grad_out, out)
        bytes_per_pair = backward_bytes(self.call)
        for part, some in self.call.batches(bytes_per_pair):
            for chunk in some.chunks(bytes_per_pair):
                ChunkGradients(self, chunk, part).add(grad_out[part], lse[part], delta[part])
        return delta


def inner_products(x: Tensor, y: Tensor) -> Tensor:
    """x · y over the last dimension, [B, H, T] in float32, by parts of rows that need little memory."""
    batch, num_heads, num_rows, width = x.shape
    size = max(1, 2**22 // (batch * num_heads * width))
    parts = [slice(start, start + size) for start in range(0, num_rows, size)]
    return torch.cat([(x[:, :, rows].float() * y[:, :, rows].float()).sum(-1) for rows in parts], 2)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def zeros_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else zeros(x)


def backward_bytes(call: Call) -> int:
    """Bytes of scratch for a pair of query and key."""
    images = call.pre.widths or [call.num_heads]
    if call.table is not None:
        images.append(call.pre.stages[0].num_out)
    if call.post:
        # The gradients of the weights, before and after the stages, have images of their own.
        images += [*call.post.widths, call.num_heads, call.num_heads]
    return sum(images) * call.dtype.itemsize


class ChunkGradients:
    """What the rows of one chunk add to the gradients."""

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
            grad = self._stages(call.pre, self.whole.pre, images, grad, residuals)
            if call.bias_in_image:
                self._bias(grad[:, heads:])
        times_keys(chunk, grad, call.k, call.scale, self.whole.q[self.part])
        add_times_rows(chunk, grad, call.q, call.scale, self.whole.k[self.part])

    def _weights(self, image: Tensor | None, grad_out: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """Gradients of the weights, as an image, where stages follow them; fills in `delta`, adds to those of v."""
        from dape.ops.score_attention.triton.backward import inner_kernel

        call, chunk = self.call, self.chunk
        images = [weights_image(chunk, image, lse)]
        convolved(chunk, call.post, images[0], keep=images)
        add_times_rows(chunk, images[-1], grad_out, 1.0, self.whole.v[self.part])
        grad = chunk.image(call.num_heads, call.grad_dtype)
        arguments = call.arguments() | {"q": grad_out, "k": call.v, "scale": 1.0, "BIAS": "none"}
        arguments |= dict(zip(("q_batch", "q_head", "q_token"), grad_out.stride()[:3], strict=True))
        write_scores(chunk, arguments, grad)
        # The weights themselves are needed once more.
        into = chunk.image(call.num_heads, call.grad_dtype)
        grad = self._stages(call.post, self.whole.post, images, grad, 0, into)
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
        """Gradients of the logits, an image in place of `image`; adds to those of v unless `given` those of the weights."""
        call, chunk = self.call, self.chunk
        grad = chunk.image(call.num_heads, call.grad_dtype) if image is None else image.view(call.grad_dtype)
        own: dict[str, Any] = {"MODE": "gradients", "grad_out": grad_out, "grad_v": self.whole.v[self.part]}
        own |= dict(zip(("grad_batch", "grad_head", "grad_token"), grad_out.stride()[:3], strict=True))
        if given is not None:
            own = {"MODE": "given", "given": given, **strides("given", given)}
        own["delta"] = delta
        factor = self.whole.factor
        if factor is not None:
            tiles, rows = -(-chunk.columns // calls.BLOCK_K), chunk.stop - chunk.start
            # Tiles that no row of a block sees are left out.
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
        self,
        chain: Chain,
        grads: list[tuple[Tensor, Tensor | None]],
        images: list[Tensor],
        grad: Tensor,
        residuals: int,
        first: Tensor | None = None,
    ) -> Tensor:
        """Gradients of the first image, in its place or in `first`; adds to those of weights, offsets and the table.

        residuals: how many channels of the first image are also added to the result, from its first channel on.
        """
        call, chunk = self.call, self.chunk
        result = grad
        for number in reversed(range(len(chain.stages))):
            stage, image = chain.stages[number], images[number]
            self._taps(chain, number, grads[number], image, grad)
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

    def _taps(
        self, chain: Chain, number: int, grads: tuple[Tensor, Tensor | None], image: Tensor, grad: Tensor
    ) -> None:
        """Add the gradients of a stage's weights and offset."""
        from dape.ops.score_attention.triton.backward import taps_kernel

        call, chunk, stage = self.call, self.chunk, chain.stages[number]
        in_part, out_part = min(32, padded(stage.num_in)), min(32, padded(stage.num_out))
        in_parts, out_parts = padded(stage.num_in) // in_part, padded(stage.num_out) // out_part
        taps = stage.kernel_size + 1
        group = min(taps, 4)
        segment = chunk.segment()
        programs = chunk.blocks * -(-chunk.columns // segment) * call.batch
        shape = (programs, taps, in_parts * in_part, out_parts * out_part)
        sums = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        arguments = call.arguments() | chunk.arguments() | strides("image", image) | strides("grad", grad)
        arguments |= {
            "image": image, "grad": grad, "sums": sums, "segment": segment, "held": chain.held[number],
            "wanted": chain.held[number + 1], "IN": stage.num_in, "OUTS": stage.num_out, "IN_PARTS": in_parts,
            "IN_PART": in_part, "OUT_PARTS": out_parts, "OUT_PART": out_part, "K": stage.kernel_size,
            "LEFT": stage.left, "TAPS": group,
        }  # fmt: skip
        grid = (programs, in_parts * out_parts, -(-taps // group))
        run(
            taps_kernel,
            grid,
            arguments,
            [{"STAGES": n, "num_warps": max(1, chunk.block // 32)} for n in (3, 2, 1)],
        )
        total = sums.sum(0)
        weights, offsets = grads
        weights += total[:-1, : stage.num_in, : stage.num_out].permute(2, 1, 0)
        if offsets is not None:
            offsets += total[-1, 0, : stage.num_out]

    def _table(self, grad: Tensor) -> None:
        """Add the gradients of the table: sums by distance of those of the first hidden map."""
        call = self.call
        table, stage = self.whole.table, call.pre.stages[0]
        assert table is not None
        bottom = -stage.right
        sums = self._by_distance(grad, bottom, call.pre.held[1], stage.left + 1)
        table[:, : sums.shape[1]] += sums[..., : stage.num_out]

    def _bias(self, grad: Tensor) -> None:
        """Add the gradients of the bias from those of its image."""
        call, chunk = self.call, self.chunk
        if (values := self.whole.values) is not None:
            bottom = 0 if call.causal else chunk.start + call.offset - (call.num_keys - 1)
            sums = self._by_distance(grad, bottom, 0, 1)[0, :, : call.num_heads].T
            skip = max(0, call.lowest - bottom)
            place = bottom + skip - call.lowest
            values[:, place : place + sums.shape[1] - skip] += sums[:, skip:]
        elif self.whole.dense is not None or self.whole.row is not None:
            rows = slice(chunk.start, chunk.stop)
            visible = grad[..., : chunk.stop - chunk.start].transpose(-1, -2)[..., : call.num_keys]
            key = torch.arange(visible.shape[-1], device=call.device)
            low, high = (x[:, rows, None] for x in (call.first, call.last))
            through = torch.where(((key >= low) & (key <= high))[:, None], visible.float(), 0.0)
            if (dense := self.whole.dense) is not None:
                shared = dense.shape[0] == 1
                target = dense if shared else dense[self.part]
                target[:, :, rows, : len(key)] += through.sum(0, keepdim=True) if shared else through
            else:
                assert self.whole.row is not None and self.whole.column is not None
                self.whole.row[self.part][:, :, rows] += through.sum(3)
                self.whole.column[self.part][:, :, : len(key)] += through.sum(2)

    def _by_distance(self, grad: Tensor, bottom: int, extra: int, planes: int) -> Tensor:
        """Sums of an image by distance, from `bottom` to the chunk's greatest: [planes, distances, channels]."""
        from dape.ops.score_attention.triton.backward import diagonals_kernel

        call, chunk = self.call, self.chunk
        records = grad.permute(0, 2, 3, 1).contiguous()
        distances = chunk.stop - 1 + call.offset - bottom + 1
        tiles, rows, group = -(-distances // 64), chunk.stop - chunk.start, 16
        # Fewer rows a program where the GPU would not be full.
        while group > 4 and tiles * -(-rows // group) * call.batch < calls.PROGRAMS:
            group //= 2
        groups = -(-rows // group)
        channels = padded(records.shape[-1])
        shape = (groups * call.batch, planes, distances, channels)
        sums = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        arguments = call.arguments() | chunk.arguments()
        arguments |= {
            "records": records, "records_batch": records.stride(0), "sums": sums, "bottom": bottom,
            "num_distances": distances, "extra": extra, "C": records.shape[-1], "CHANNELS": channels,
            "PLANES": planes, "BLOCK_D": 64, "ROWS": group,
        }  # fmt: skip
        run(diagonals_kernel, (tiles, groups, call.batch), arguments, [{"num_warps": 4}])
        return sums.sum(0)
