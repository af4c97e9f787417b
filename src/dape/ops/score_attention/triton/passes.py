"""Forward and backward pass: the sequence of kernels for each chunk of query rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton.call import Call, Chain, Chunk, StageTensors, padded, strides_of
from dape.ops.score_attention.triton.launch import run

# Two stages run as one kernel if their weights fit into registers along with the running sums.
FUSED_NUMBERS = 2 * 3 * 32 * 32


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, D] and log-sum-exp of the logits and the sink [B, H, Tq], −∞ for a row that sees nothing."""
    out = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
    lse = calls.blank_memory(*call.q.shape[:3], dtype=torch.float32, device=call.device)
    widths = call.pre.widths
    if is_fused(call, call.pre):
        widths = [widths[0], widths[-1]]
    bytes_per_pair = sum([*widths, *call.post.widths]) * call.dtype.itemsize
    for part, some in call.batches(bytes_per_pair):
        for chunk in some.chunks(bytes_per_pair):
            forward_chunk(chunk, out[part], lse[part])
    return out, lse


def forward_chunk(chunk: Chunk, out: Tensor, lse: Tensor) -> None:
    """Write the output and log-sum-exp of a chunk's rows; its images are freed on return."""
    call = chunk.call
    image = convolved(chunk, call.pre, scores(chunk)) if call.pre else None
    attend(chunk, image, out, lse)
    if call.post:
        times_keys(chunk, convolved(chunk, call.post, weights_image(chunk, image, lse)), call.v, 1.0, out)


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
    image = chunk.image(call.pre.stages[0].num_in, call.dtype)
    write_scores(chunk, image, {} if call.bias_in_image else {"BIAS": "none"})
    return image


def write_scores(chunk: Chunk, image: Tensor, own: dict[str, Any]) -> None:
    """Write products of q and k, 0 where not visible, and the bias into an image."""
    from dape.ops.score_attention.triton.forward import scores_kernel

    call = chunk.call
    rows = min(2 * calls.BLOCK_R, chunk.size)
    blocks = -(-chunk.size // rows)
    programs = calls.RESIDENT * call.multiprocessors // (blocks * call.num_heads * call.batch)
    splits, per_split = split_keys(chunk, programs)
    arguments = chunk.arguments | strides("image", image) | {"image": image, "per_split": per_split} | own
    # float32 operands take the registers of more warps.
    warps = max(1, min(8 if call.dtype == torch.float32 else 4, rows // 16))
    variants = [{"BLOCK_R": rows, "STAGES": stages, "num_warps": warps} for stages in (3, 2, 1)]
    run(scores_kernel, (blocks * splits, call.num_heads, call.batch), arguments, *variants)


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
        own["wanted"] = chain.held[number + 1]
        one_stage(chunk, image, out, stage.taps(call.dtype), stage.num_in, stage.num_out, own)
        image = out
        if keep is not None:
            keep.append(out)
    return image


def convolved_at_once(chunk: Chunk, image: Tensor, keep: list[Tensor] | None) -> Tensor:
    """Apply two stages to an image by one kernel; the hidden map and the result are appended to `keep`."""
    from dape.ops.score_attention.triton.forward import convolve_kernel

    call = chunk.call
    one, two = call.pre.stages
    out = chunk.image(two.num_out, call.dtype)
    hidden = out if keep is None else chunk.image(one.num_out, call.dtype)
    arguments = chunk.arguments | strides("image", image) | strides("out", out) | strides("kept", hidden)
    arguments |= {
        "image": image, "out": out, "kept": hidden, "KEEP": keep is not None, "HIDDEN": one.num_out,
        "w1": one.taps(call.dtype), "w2": two.taps(call.dtype), "b1": one.offsets(), "b2": two.offsets(),
        **table_arguments(call, one), **values_arguments(call), "held": call.pre.held[1],
        "slope1": one.slope, "slope2": two.slope, "IN": one.num_in, "OUTS": two.num_out,
        "CHANNELS": padded(one.num_in), "WIDTH": padded(one.num_out), "OUT": padded(two.num_out),
        "K1": one.kernel_size, "LEFT1": one.left, "K2": two.kernel_size, "LEFT2": two.left,
    }  # fmt: skip
    # With more channels, 16 rows of a warp fill its registers.
    warps = max(1, chunk.block // (32 if padded(one.num_in) == 16 else 16))
    run(convolve_kernel, (chunk.blocks, chunk.walks, call.batch), arguments, *pipelined(warps))
    if keep is not None:
        keep += [hidden, out]
    return out


def pipelined(warps: int, **own: Any) -> list[dict[str, Any]]:
    """Variants of a kernel that prefetches in its loop."""
    return [{"STAGES": stages, "num_warps": warps, **own} for stages in (3, 2, 1)]


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


def table_arguments(call: Call, stage: StageTensors) -> dict[str, Any]:
    """The table of a bias by distance, [planes, distances, width] padded, and the numbers of a plane."""
    if call.table is None:
        return {"table": call.q, "table_plane": 0, "TABLE": False}
    given, width = call.table, padded(stage.num_out)
    table = call.once("table", lambda: calls.pad(given.to(call.dtype), given.shape[1], width))
    return {"table": table, "table_plane": given.shape[1] * width, "TABLE": True}


def channel_parts(num_in: int, num_out: int) -> dict[str, int]:
    """The channels of a stage, in parts of at most 32."""
    in_part, out_part = min(32, padded(num_in)), min(32, padded(num_out))
    return {
        "IN": num_in, "OUTS": num_out, "IN_PART": in_part, "OUT_PART": out_part,
        "IN_PARTS": padded(num_in) // in_part, "OUT_PARTS": padded(num_out) // out_part,
    }  # fmt: skip


def one_stage(
    chunk: Chunk, image: Tensor, out: Tensor, taps: Tensor, num_in: int, num_out: int, own: dict[str, Any]
) -> None:
    """Run a stage of any size over an image."""
    from dape.ops.score_attention.triton.backward import stage_kernel

    call, parts = chunk.call, channel_parts(num_in, num_out)
    arguments = chunk.arguments | strides("image", image) | strides("out", out) | parts
    arguments |= {
        "offsets": taps, "gate": out, "residual": out, "residual_batch": 0, "residual_channel": 0,
        "values": image, "values_length": 1, "lowest": 0, "VALUES": False, "table": image, "table_plane": 0,
        "REPEAT": 1, "RESIDUALS": 0, "slope": 1.0, "image": image, "out": out, "weights": taps,
        "K": taps.shape[0], "UNROLLED": taps.shape[0] * parts["IN_PARTS"] <= 8,
    }  # fmt: skip
    if own["START"] == "table":
        arguments |= table_arguments(call, call.pre.stages[0])
    grid = (chunk.blocks, chunk.walks * parts["OUT_PARTS"], call.batch)
    run(stage_kernel, grid, arguments | own, *pipelined(max(1, chunk.block // 32)))


def strides(name: str, image: Tensor) -> dict[str, int]:
    return {f"{name}_batch": image.stride(0), f"{name}_channel": image.stride(1)}


def logit_arguments(chunk: Chunk, image: Tensor | None) -> dict[str, Any]:
    """Arguments for the terms of the logits: scores, an image and a bias."""
    call = chunk.call
    if image is None:
        own = {"image": call.q, "image_batch": 0, "image_channel": 0, "SCORES": True, "IMAGE": False}
        return chunk.arguments | own
    own = {"image": image, "SCORES": "scores" in call.residual, "IMAGE": True, **strides("image", image)}
    if "bias" not in call.residual or adds_values(call):
        own["BIAS"] = "none"
    return chunk.arguments | own


def attend(chunk: Chunk, image: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Write the output (unless stages follow) and the log-sum-exp of a chunk's rows."""
    from dape.ops.score_attention.triton.forward import attend_kernel, merge_kernel

    call, rows, sink = chunk.call, chunk.block, chunk.call.sink is not None
    others = call.num_heads * call.batch
    if chunk.blocks // 2 * others >= call.multiprocessors and call.dtype == torch.float16:
        rows = 2 * chunk.block
    blocks = -(-chunk.size // rows)
    # Parts are merged by a kernel of their own: only if most of the GPU were idle, or for long.
    programs = blocks * others
    short = 2 * programs <= call.multiprocessors
    splits, per_split = split_keys(chunk, 2 * call.multiprocessors // programs, 256 if short else 2048)
    arguments = logit_arguments(chunk, image) | {"per_split": per_split, "out": out, "lse": lse}
    arguments |= {"out_start": 0, "out_rows": call.num_queries, "SUMS": not call.post, "SINK": sink}
    if splits > 1:
        shape = (splits, call.batch, call.num_heads, chunk.stop - chunk.start)
        sums = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        parts = sums
        if not call.post:
            parts = calls.blank_memory(*shape, call.head_dim, dtype=torch.float32, device=call.device)
        arguments |= {
            "out": parts,
            "lse": sums,
            "out_start": chunk.start,
            "out_rows": shape[-1],
            "SINK": False,
        }
    # Sums of wide heads, and float32, take the registers of more warps.
    wide = call.head_dim > 80 or call.dtype == torch.float32
    warps = max(1, min(8 if wide else 4, rows // (8 if call.dtype == torch.float32 else 16)))
    tile = calls.BLOCK_K // 2 if rows == 128 else calls.BLOCK_K
    variants = [
        {"BLOCK_R": rows, "BLOCK_K": keys, "STAGES": stages, "num_warps": warps}
        for keys, stages in ((tile, 3), (tile, 2), (min(32, tile), 1))
    ]
    run(attend_kernel, (blocks * splits, call.num_heads, call.batch), arguments, *variants)
    if splits > 1:
        arguments |= {"parts": parts, "sums": sums, "out": out, "lse": lse, "splits": splits, "SINK": sink}
        arguments |= {"num_rows": shape[-1], "WIDTH": padded(call.head_dim)}
        run(merge_kernel, (shape[-1], call.num_heads, call.batch), arguments, {"num_warps": 1})


def split_keys(chunk: Chunk, wanted: int, least: int = 256) -> tuple[int, int]:
    """Number of splits of the keys, at most as many as wanted, of about `least` keys or more, and the keys of a split."""
    tile = calls.BLOCK_K
    wanted = max(1, min(wanted, -(-chunk.columns * 64 // (least * tile))))
    per_split = -(-chunk.columns // (wanted * tile)) * tile
    return -(-chunk.columns // per_split), per_split


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
    arguments |= dict.fromkeys(("grad_out", "delta", "given", "grad_v", "grad_factor"), call.q)
    arguments |= dict.fromkeys(("grad_batch", "grad_head", "grad_token", "given_batch", "given_channel"), 0)
    grid = (-(-chunk.columns // calls.BLOCK_K), call.num_heads, call.batch)
    rows = min(calls.ROWS, chunk.block)
    run(weights_kernel, grid, arguments | own, *pipelined(4, ROWS=rows)[1:])


def times_keys(chunk: Chunk, image: Tensor, keys: Tensor, scale: float, out: Tensor) -> None:
    """Write scale · imageᵀ · keys for the rows of a chunk: out [B, H, Tq, D]."""
    call = chunk.call
    programs = chunk.blocks * call.num_heads * call.batch
    splits, per_split = split_keys(chunk, 2 * call.multiprocessors // programs, 2048)
    own = {"per_split": per_split, "KEYS": False, "out": out, "out_start": 0, "out_rows": call.num_queries}
    if splits > 1:
        shape = (splits, call.batch, call.num_heads, chunk.stop - chunk.start, call.head_dim)
        parts = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        own |= {"out": parts, "out_start": chunk.start, "out_rows": shape[3]}
    products(chunk, image, keys, scale, chunk.blocks * splits, own)
    if splits > 1:
        out[:, :, chunk.start : chunk.stop] = parts.sum(0)


def add_times_rows(chunk: Chunk, image: Tensor, rows: Tensor, scale: float, out: Tensor) -> None:
    """Add scale · image · rows of a chunk to out [B, H, Tk, D] in float32."""
    call = chunk.call
    own = {"per_split": 0, "KEYS": True, "out": out, "out_start": 0, "out_rows": call.num_keys}
    products(chunk, image, rows, scale, -(-min(chunk.columns, call.num_keys) // calls.BLOCK_K), own)


def products(
    chunk: Chunk, image: Tensor, x: Tensor, scale: float, programs: int, own: dict[str, Any]
) -> None:
    from dape.ops.score_attention.triton.backward import products_kernel

    call = chunk.call
    arguments = chunk.arguments | strides("image", image) | strides_of("x", x) | own
    arguments |= {"x": x, "image": image, "scale": scale, "G": x.shape[1]}
    run(products_kernel, (programs, call.num_heads, call.batch), arguments, *pipelined(4))


class Gradients:
    """Gradients of all inputs of a call, gathered over parts of the batch and chunks of query rows, in float32.

    Those of queries have their dtype at once; those of keys and values, sums over all chunks, are for all heads.
    """

    def __init__(self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        self.call, self.lse = call, lse
        self.grad_out = calls.unit_stride(grad_out)
        self.q = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
        shape = (call.batch, call.num_heads, call.num_keys, call.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=torch.float32, device=call.device) for _ in range(2))
        self.factor, self.dense, self.row, self.column = map(
            zeros_like, (call.factor, call.dense, call.row, call.column)
        )
        # Sums by distance of a batch entry [planes, distances, channels], and of a stage's program [taps, in, out].
        self.sums: dict[Any, Tensor] = {}
        # Inner product of each row's weights and their gradients; behind stages after the softmax, chunk by chunk.
        self.delta = self._inner_products(out)
        bytes_per_pair = sum(call.pre.widths or [call.num_heads]) * call.dtype.itemsize
        if call.post:
            # The gradients of the weights, before and after the stages, have images of their own.
            bytes_per_pair += sum([*call.post.widths, 2 * call.num_heads]) * call.dtype.itemsize
        for part, some in call.batches(bytes_per_pair):
            for chunk in some.chunks(bytes_per_pair):
                self._add(chunk, part)

    def _inner_products(self, out: Tensor) -> Tensor:
        from dape.ops.score_attention.triton.backward import rows_kernel

        call = self.call
        delta = calls.blank_memory(*self.lse.shape, dtype=torch.float32, device=call.device)
        if not call.post:
            arguments = call.arguments | strides_of("x", out) | strides_of("y", self.grad_out)
            arguments |= {"x": out, "y": self.grad_out, "sums": delta, "WIDTH": padded(call.head_dim)}
            grid = (-(-call.num_queries // 32), call.num_heads, call.batch)
            run(rows_kernel, grid, arguments, {"BLOCK": 32, "num_warps": 4})
        return delta

    def by_name(self) -> dict[str, Tensor]:
        """The gradients by the names of the call's tensors."""
        call = self.call
        k, v = (
            x if x.shape[1] == call.num_groups else x.unflatten(1, (call.num_groups, -1)).sum(2)
            for x in (self.k, self.v)
        )
        found = {"q": self.q, "k": k, "v": v, "dense": self.dense, "factor": self.factor}
        for name, sums in (("row", self.row), ("column", self.column)):
            # One part for all batch entries gets the sum of their gradients.
            if sums is not None:
                found[name] = sums.sum(0, keepdim=True) if call.given[name].shape[0] == 1 else sums
        if call.table is not None:
            found["table"] = self.sums["table"].sum(0)
        if call.values is not None:
            # Without a residual, the bias acts through the table alone.
            sums = self.sums.get("values")
            found["values"] = torch.zeros_like(call.values) if sums is None else sums.sum((0, 1)).T
        for side, chain in (("pre", call.pre), ("post", call.post)):
            for number, stage in enumerate(chain.stages):
                total = self.sums[side, number].sum(0)
                found[f"{side}.{number}.weight"] = total[:-1, : stage.num_in, : stage.num_out].permute(
                    2, 1, 0
                )
                if stage.offset is not None:
                    found[f"{side}.{number}.offset"] = total[-1, 0, : stage.num_out].clone()
        if (sink := call.sink) is not None:
            weights = torch.exp(sink.float()[:, None] - self.lse).masked_fill(self.lse == -torch.inf, 0.0)
            found["sink"] = -(weights * self.delta).sum((0, 2))
        return {name: grad for name, grad in found.items() if grad is not None}

    def _sums(self, name: Any, *shape: int) -> Tensor:
        """Sums of that name and at least that size in the first dimension, zero at first."""
        have = self.sums.get(name)
        if have is None or have.shape[0] < shape[0]:
            fresh = torch.zeros(shape, dtype=torch.float32, device=self.call.device)
            if have is not None:
                fresh[: have.shape[0]] = have
            self.sums[name] = fresh
        return self.sums[name]

    def _add(self, chunk: Chunk, part: slice) -> None:
        """Add the contributions of a chunk's rows."""
        call = chunk.call
        images: list[Tensor] = []
        if call.pre:
            images.append(scores(chunk))
            convolved(chunk, call.pre, images[0], keep=images)
        image = images[-1] if images else None
        given = self._weights(chunk, part, image) if call.post else None
        grad = self._logits(chunk, part, image, given)
        if "bias" in call.residual and not call.bias_in_image:
            self._bias(chunk, part, grad)
        if call.pre:
            heads = call.num_heads
            residuals = heads * ("scores" in call.residual)
            residuals += heads * ("bias" in call.residual and call.bias_in_image)
            grad = self._stages(chunk, "pre", images, grad, residuals)
            if call.bias_in_image:
                self._bias(chunk, part, grad[:, heads:])
        times_keys(chunk, grad, call.k, call.scale, self.q[part])
        add_times_rows(chunk, grad, call.q, call.scale, self.k[part])

    def _weights(self, chunk: Chunk, part: slice, image: Tensor | None) -> Tensor:
        """Gradients of the weights, as an image, if stages follow them; fills in `delta`, adds to those of v."""
        from dape.ops.score_attention.triton.backward import inner_kernel

        call, grad_out = chunk.call, self.grad_out[part]
        images = [weights_image(chunk, image, self.lse[part])]
        convolved(chunk, call.post, images[0], keep=images)
        add_times_rows(chunk, images[-1], grad_out, 1.0, self.v[part])
        grad = chunk.image(call.num_heads, call.grad_dtype)
        write_scores(
            chunk,
            grad,
            {"q": grad_out, "k": call.v, "scale": 1.0, "BIAS": "none", **strides_of("q", grad_out)},
        )
        # The weights themselves are needed once more.
        grad = self._stages(chunk, "post", images, grad, 0, chunk.image(call.num_heads, call.grad_dtype))
        arguments = chunk.arguments | strides("x", images[0]) | strides("y", grad)
        arguments |= {"x": images[0], "y": grad, "sums": self.delta[part]}
        run(inner_kernel, (chunk.blocks, call.num_heads, call.batch), arguments, {"num_warps": 4})
        return grad

    def _logits(self, chunk: Chunk, part: slice, image: Tensor | None, given: Tensor | None) -> Tensor:
        """Gradients of the logits, as an image that overwrites `image`; adds to those of v unless those of the weights are `given`."""
        call, grad_out = chunk.call, self.grad_out[part]
        grad = chunk.image(call.num_heads, call.grad_dtype) if image is None else image.view(call.grad_dtype)
        own: dict[str, Any] = {"MODE": "gradients", "grad_out": grad_out, "grad_v": self.v[part]}
        own |= strides_of("grad", grad_out)
        if given is not None:
            own = {"MODE": "given", "given": given, **strides("given", given)}
        own["delta"] = self.delta[part]
        if self.factor is not None:
            # Tiles that no row of a block sees are skipped.
            shape = (-(-chunk.columns // calls.BLOCK_K), call.batch, call.num_heads, chunk.size)
            sums = own["grad_factor"] = torch.zeros(shape, dtype=torch.float32, device=call.device)
        write_weights(chunk, image, self.lse[part], grad, own)
        if self.factor is not None:
            shared = self.factor.shape[0] == 1
            target = (self.factor if shared else self.factor[part])[:, :, chunk.start : chunk.stop]
            target += sums.sum((0, 1) if shared else 0)[..., : chunk.stop - chunk.start]
        return grad

    def _stages(
        self,
        chunk: Chunk,
        side: str,
        images: list[Tensor],
        grad: Tensor,
        residuals: int,
        first: Tensor | None = None,
    ) -> Tensor:
        """Gradients of the first image, written over it or into `first`; adds to those of weights, offsets and the table.

        residuals: number of channels of the first image, from its first on, that are also added to the result.
        """
        call, result = chunk.call, grad
        chain = call.pre if side == "pre" else call.post
        for number in reversed(range(len(chain.stages))):
            stage, image = chain.stages[number], images[number]
            self._taps(chunk, (side, number), image, grad)
            into = first if number == 0 and first is not None else image.view(call.grad_dtype)
            own: dict[str, Any] = {"START": "zero", "LEFT": stage.right, "held": chain.held[number + 1]}
            own |= {"wanted": chain.held[number]}
            if number > 0:
                own |= {"FINISH": "gate", "gate": image, "slope": chain.stages[number - 1].slope}
            else:
                own |= {"FINISH": "residual", "residual": result, **strides("residual", result)}
                own |= {"REPEAT": call.num_heads, "RESIDUALS": residuals}
            one_stage(chunk, grad, into, stage.turned(call.grad_dtype), stage.num_out, stage.num_in, own)
            grad = into
            if number == 1 and side == "pre" and call.table is not None:
                planes, distances, _ = call.table.shape
                one = chain.stages[0]
                self._by_distance(chunk, grad, "table", (planes, distances), -one.right, chain.held[1])
        return grad

    def _taps(self, chunk: Chunk, name: tuple[str, int], image: Tensor, grad: Tensor) -> None:
        """Add to the sums from which the gradients of a stage's weights and offset are computed."""
        from dape.ops.score_attention.triton.backward import taps_kernel

        call, (side, number) = chunk.call, name
        chain = call.pre if side == "pre" else call.post
        stage = chain.stages[number]
        parts, taps = channel_parts(stage.num_in, stage.num_out), stage.kernel_size + 1
        programs, group = chunk.blocks * chunk.walks * call.batch, min(taps, 4)
        sums = self._sums(name, programs, taps, padded(stage.num_in), padded(stage.num_out))
        arguments = chunk.arguments | strides("image", image) | strides("grad", grad) | parts
        arguments |= {
            "image": image, "grad": grad, "sums": sums, "held": chain.held[number], "TAPS": group,
            "wanted": chain.held[number + 1], "K": stage.kernel_size, "LEFT": stage.left,
        }  # fmt: skip
        grid = (programs, parts["IN_PARTS"] * parts["OUT_PARTS"], -(-taps // group))
        run(taps_kernel, grid, arguments, *pipelined(max(1, chunk.block // 32)))

    def _bias(self, chunk: Chunk, part: slice, grad: Tensor) -> None:
        """Add the gradients of the bias from those of its image."""
        call = chunk.call
        if call.values is not None:
            self._by_distance(chunk, grad, "values", (1, call.values.shape[1]), call.lowest, 0)
        elif self.dense is not None or self.row is not None:
            rows, keys = slice(chunk.start, chunk.stop), slice(0, min(chunk.columns, call.num_keys))
            key = torch.arange(keys.stop, device=call.device)
            low, high = (x[:, rows, None] for x in (call.first, call.last))
            visible = grad[:, :, keys, : chunk.stop - chunk.start].transpose(-1, -2).float()
            through = torch.where(((key >= low) & (key <= high))[:, None], visible, 0.0)
            if self.dense is not None:
                shared = self.dense.shape[0] == 1
                target = self.dense if shared else self.dense[part]
                target[:, :, rows, keys] += through.sum(0, keepdim=True) if shared else through
            else:
                assert self.row is not None and self.column is not None
                self.row[part][:, :, rows] += through.sum(3)
                self.column[part][:, :, keys] += through.sum(2)

    def _by_distance(
        self, chunk: Chunk, grad: Tensor, name: str, shape: tuple[int, int], lowest: int, extra: int
    ) -> None:
        """Add to the sums by distance of an image, [planes, distances, channels], from `lowest` on."""
        from dape.ops.score_attention.triton.backward import diagonals_kernel

        call, (planes, distances), channels = chunk.call, shape, grad.shape[1]
        sums = self._sums(name, call.batch, planes, distances, channels)
        last_column = min(chunk.columns, call.num_keys + extra)
        least = max(lowest, chunk.start + call.offset - (last_column - 1), -extra if call.causal else lowest)
        reached = chunk.stop - 1 + call.offset - least + 1
        tile, group = 32, 4 if channels > 16 else 2
        arguments = chunk.arguments | strides("image", grad)
        arguments |= {
            "image": grad, "sums": sums, "bottom": least, "lowest": lowest, "num_distances": distances,
            "extra": extra, "last_column": last_column, "C": channels, "CHANNELS": group, "PLANES": planes,
            "BLOCK_D": tile, "UNROLL": 4,
        }  # fmt: skip
        grid = (max(0, -(-reached // tile)), -(-channels // group), call.batch)
        run(diagonals_kernel, grid, arguments, {"num_warps": 1})


def zeros_like(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros(x.shape, dtype=torch.float32, device=x.device)
