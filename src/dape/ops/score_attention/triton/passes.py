"""Forward and backward pass: the sequence of kernels for each chunk of query rows. Importing this imports triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention.triton import backward
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton import forward as ahead
from dape.ops.score_attention.triton.call import Call, Chain, Chunk, StageTensors, padded

# Two stages run as one kernel if their weights fit into registers along with the running sums.
FUSED_NUMBERS = 2 * 3 * 32 * 32


def forward_pass(call: Call) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, D] and log-sum-exp of the logits and the sink [B, H, Tq], −∞ for a row that sees nothing."""
    out = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
    lse = calls.blank_memory(*call.q.shape[:3], dtype=torch.float32, device=call.device)
    widths = call.pre.widths[:: len(call.pre)] if is_fused(call, call.pre) else call.pre.widths
    for chunk in call.chunks(sum([*widths, *call.post.widths]) * call.dtype.itemsize):
        attend_chunk(chunk, out, lse)
    return out, lse


def attend_chunk(chunk: Chunk, out: Tensor, lse: Tensor) -> None:
    """Write the output and log-sum-exp of a chunk's rows; its images are freed on return."""
    call = chunk.call
    image = convolved(chunk, call.pre, scores(chunk)) if call.pre else None
    attended(chunk, out, lse, SUMS=not call.post, **logit_arguments(call, image))
    if call.post:
        weights = chunk.image(call.num_heads, call.dtype)
        pairs(chunk, "weights", weights, lse=lse, **logit_arguments(call, image))
        row_products(chunk, convolved(chunk, call.post, weights), call.v, 1.0, out)


def is_fused(call: Call, chain: Chain) -> bool:
    """Whether the stages are two before the softmax that run as one kernel."""
    if chain is not call.pre or len(chain) != 2 or call.dtype != torch.float16:
        return False
    sizes = [padded(s.num_in) * padded(s.num_out) * s.kernel_size for s in chain]
    return sum(sizes) <= FUSED_NUMBERS and max(padded(s.num_in) for s in chain) <= 32


def pipelined(warps: int, **own: Any) -> list[dict[str, Any]]:
    """Variants of a kernel that prefetches in its loop."""
    return [{"STAGES": stages, "num_warps": warps, **own} for stages in (3, 2, 1)]


def scores(chunk: Chunk) -> Tensor:
    """The first image of a chunk: scores, and the bias if it has channels."""
    call = chunk.call
    image = chunk.image(call.pre[0].num_in, call.dtype)
    pairs(chunk, "scores", image, **({} if call.bias_in_image else {"BIAS": "none"}))
    return image


def pairs(chunk: Chunk, mode: str, result: Tensor, **own: Any) -> None:
    """Write a number for every pair into an image: scores, weights, or gradients of the logits."""
    call, rows, keys = chunk.call, chunk.block, min(32, calls.BLOCK_K)
    own = {"MODE": mode, "result": result} | own
    if mode == "scores":
        own["FACTOR"] = False
    if call.exact:
        rows, keys = min(call.long, rows), min(call.short, keys)
    elif mode == "scores":
        rows, keys = min(2 * calls.BLOCK_R, chunk.size), calls.BLOCK_K
    blocks = -(-chunk.size // rows)
    wanted = calls.RESIDENT * call.multiprocessors // (blocks * call.num_heads * call.batch)
    # Sums over the keys of a row are those of one program.
    sums = mode == "given" or (mode == "gradients" and call.factor is not None)
    splits, own["per_split"] = (1, chunk.columns) if sums else split_keys(chunk, wanted)
    variants = pipelined(4 if call.exact else max(1, min(4, rows // 16)), BLOCK_R=rows, BLOCK_K=keys)
    chunk.run(ahead.pairs_kernel, blocks * splits, call.num_heads, *variants, **own)


def convolved(chunk: Chunk, chain: Chain, image: Tensor, keep: list[Tensor] | None = None) -> Tensor:
    """Apply the stages to an image, [B, H, columns, rows]; the image after every stage is appended to `keep`."""
    call = chunk.call
    if is_fused(call, chain):
        return convolved_at_once(chunk, image, keep)
    before = chain is call.pre
    for number, stage in enumerate(chain):
        out = chunk.image(stage.num_out, call.dtype)
        own: dict[str, Any] = {"OFFSETS": True, "FINISH": "leaky", "slope": stage.slope}
        if before and number == 0:
            own |= call.first_table
        if number == len(chain) - 1:
            # Logits are masked by the softmax; weights are zero where not visible.
            own |= {"FINISH": "none", **call.last_table} if before else {"FINISH": "residual"}
        own |= {"offsets": stage.offsets, "LEFT": stage.left, "held": chain.held[number]}
        one_stage(chunk, image, out, stage.taps, stage, wanted=chain.held[number + 1], **own)
        image = out
        if keep is not None:
            keep.append(out)
    return image


def convolved_at_once(chunk: Chunk, image: Tensor, keep: list[Tensor] | None) -> Tensor:
    """Apply two stages to an image by one kernel; the hidden map and the result are appended to `keep`."""
    call = chunk.call
    one, two = call.pre
    out = chunk.image(two.num_out, call.dtype)
    hidden = out if keep is None else chunk.image(one.num_out, call.dtype)
    own = call.first_table | {n.replace("table", "values"): x for n, x in call.last_table.items()}
    own |= {
        "image": image, "out": out, "kept": hidden, "KEEP": keep is not None, "HIDDEN": one.num_out,
        "w1": one.taps, "w2": two.taps, "b1": one.offsets, "b2": two.offsets, "VALUES": call.adds_values, "held": call.pre.held[1],
        "slope1": one.slope, "slope2": two.slope, "IN": one.num_in, "OUTS": two.num_out,
        "CHANNELS": padded(one.num_in), "WIDTH": padded(one.num_out), "OUT": padded(two.num_out),
        "K1": one.kernel_size, "LEFT1": one.left, "K2": two.kernel_size, "LEFT2": two.left,
    }  # fmt: skip
    # With more channels, 16 rows of a warp fill its registers.
    variants = pipelined(max(1, chunk.block // (32 if padded(one.num_in) == 16 else 16)))
    chunk.run(ahead.convolve_kernel, chunk.blocks, chunk.walks, *variants, **own)
    if keep is not None:
        keep += [hidden, out]
    return out


def channel_parts(num_in: int, num_out: int) -> dict[str, int]:
    """The channels of a stage, in parts of at most 32."""
    in_part, out_part = min(32, padded(num_in)), min(32, padded(num_out))
    return {
        "IN": num_in, "OUTS": num_out, "IN_PART": in_part, "OUT_PART": out_part,
        "IN_PARTS": padded(num_in) // in_part, "OUT_PARTS": padded(num_out) // out_part,
    }  # fmt: skip


def one_stage(
    chunk: Chunk, image: Tensor, out: Tensor, weights: Tensor, stage: StageTensors, **own: Any
) -> None:
    """Run a stage of any size over an image, or with its turned weights over a gradient."""
    parts = channel_parts(image.shape[1], out.shape[1])
    taps = stage.kernel_size * parts["IN_PARTS"]
    own |= parts | {"image": image, "out": out, "weights": weights, "K": stage.kernel_size}
    own["UNROLL"] = taps if taps <= 8 else 1
    programs, variants = chunk.walks * parts["OUT_PARTS"], pipelined(chunk.warps)
    chunk.run(backward.stage_kernel, chunk.blocks, programs, *variants, **own)


def logit_arguments(call: Call, image: Tensor | None) -> dict[str, Any]:
    """Arguments for the terms of the logits: scores, an image and a bias."""
    if image is None:
        return {}
    own = {"image": image, "SCORES": "scores" in call.residual, "IMAGE": True}
    return own | ({"BIAS": "none"} if "bias" not in call.residual or call.adds_values else {})


def attended(chunk: Chunk, out: Tensor, lse: Tensor | None, *, SUMS: bool = True, **own: Any) -> None:
    """Write the output (if SUMS) and, unless LINEAR, the log-sum-exp of a chunk's rows."""
    call, rows, tile = chunk.call, chunk.block, calls.BLOCK_K
    others = call.num_heads * call.batch
    if call.exact:
        rows, tile = min(call.short, rows), min(call.long, tile)
    elif chunk.blocks // 2 * others >= call.multiprocessors:
        rows = 2 * rows
    blocks = -(-chunk.size // rows)
    # Parts are merged by a kernel of their own: only if most of the GPU were idle, or for long.
    programs = blocks * others
    least = 256 if 2 * programs <= call.multiprocessors else 2048
    splits, per_split = split_keys(chunk, 2 * call.multiprocessors // programs, least)
    whole: dict[str, Any] = {"out": out, "SINK": call.sink is not None, "SUMS": SUMS}
    whole |= {} if lse is None else {"lse": lse}
    own = whole | {"out_start": 0, "out_rows": call.num_queries, "per_split": per_split} | own
    if splits > 1:
        shape = (splits, call.batch, call.num_heads, chunk.stop - chunk.start, call.head_dim)
        parts = calls.blank_memory(*shape, dtype=torch.float32, device=call.device)
        sums = calls.blank_memory(*shape[:4], dtype=torch.float32, device=call.device)
        own |= {"out": parts, "lse": sums, "out_start": chunk.start, "out_rows": shape[3], "SINK": False}
    # Sums of wide heads, and all that is float32, take the registers of more warps.
    warps = rows // 4 if call.exact else min(8 if call.head_dim > 80 else 4, rows // 16)
    tile = min(32, tile) if call.exact or rows == 128 else tile
    variants = [
        {"BLOCK_R": rows, "BLOCK_K": keys, "STAGES": stages, "num_warps": warps}
        for keys, stages in ((tile, 3), (tile, 2), (min(32, tile), 1))
    ]
    chunk.run(ahead.attend_kernel, blocks * splits, call.num_heads, *variants, **own)
    if splits > 1 and lse is None:
        out[:, :, chunk.start : chunk.stop] = parts.sum(0)
    elif splits > 1:
        whole |= {"parts": parts, "sums": sums, "num_splits": splits, "WIDTH": padded(call.head_dim)}
        chunk.run(ahead.merge_kernel, shape[3], call.num_heads, {"num_warps": 1}, num_rows=shape[3], **whole)


def row_products(chunk: Chunk, image: Tensor, x: Tensor, scale: float, out: Tensor) -> None:
    """Write the rows of out [B, H, Tq, D]: those of an image times x [B, G, Tk, D], times scale."""
    own: dict[str, Any] = {"v": x, "image": image, "scale": scale, "SCORES": False, "BIAS": "none"}
    attended(chunk, out, None, LINEAR=True, FACTOR=False, **own)


def key_products(chunk: Chunk, image: Tensor, x: Tensor, scale: float, out: Tensor) -> None:
    """Add to out [B, H, Tk, D]: the columns of an image times the chunk's rows of x [B, H, Tq, D], times scale."""
    call = chunk.call
    keys, rows = calls.BLOCK_K, chunk.block
    if call.exact:
        keys, rows = min(call.long, keys), min(call.short, rows)
    programs, variants = -(-min(chunk.columns, call.num_keys) // keys), pipelined(4)
    own = {"x": x, "image": image, "scale": scale, "out": out, "BLOCK_R": rows, "BLOCK_K": keys}
    chunk.run(backward.keys_kernel, programs, call.num_heads, *variants, **own)


def split_keys(chunk: Chunk, wanted: int, least: int = 256) -> tuple[int, int]:
    """Number of splits of the keys, at most as many as wanted, of about `least` keys or more, and the keys of a split."""
    tile = calls.BLOCK_K
    wanted = max(1, min(wanted, -(-chunk.columns * 64 // (least * tile))))
    per_split = -(-chunk.columns // (wanted * tile)) * tile
    return -(-chunk.columns // per_split), per_split


class Gradients:
    """Gradients of all inputs of a call, gathered over chunks of query rows, in float32.

    Those of queries have their dtype at once; those of keys and values, sums over all chunks, are for all heads.

    sums: of a dense or separable bias by its name; by distance of a batch entry [planes, distances, channels], "values" and
    "table"; of a stage's programs [taps, in, out], such as "pre.0".
    """

    def __init__(self, call: Call, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        self.call, self.lse = call, lse
        self.grad_out = calls.unit_stride(grad_out)
        self.q = calls.blank_memory(*call.q.shape, dtype=call.q.dtype, device=call.device)
        of_keys = (call.batch, call.num_heads, call.num_keys, call.head_dim)
        self.k, self.v = self._zeros(*of_keys), self._zeros(*of_keys)
        # The weights, or with further stages their gradients, have an image of their own.
        channels = sum([*(call.pre.widths or [call.num_heads]), *call.post.widths, call.num_heads])
        chunks = list(call.chunks(channels * call.dtype.itemsize))
        given = {"dense": call.dense, "row": call.row, "column": call.column}
        self.sums = {name: self._zeros(*x.shape) for name, x in given.items() if x is not None}
        if call.values is not None:
            self.sums["values"] = self._zeros(call.batch, 1, call.values.shape[1], call.num_heads)
        if call.table is not None:
            self.sums["table"] = self._zeros(call.batch, *call.table.shape)
        programs = max(chunk.blocks * chunk.walks * call.batch for chunk in chunks)
        for name, stage in call.stages.items():
            sizes = (stage.kernel_size + 1, padded(stage.num_in), padded(stage.num_out))
            self.sums[name] = self._zeros(programs, *sizes)
        # Inner product of each row's weights and their gradients; behind stages after the softmax, chunk by chunk.
        self.delta, self.factor = torch.empty_like(lse), torch.empty_like(lse)
        if not call.post:
            self.delta = (out.float() * self.grad_out).sum(3)
        for chunk in chunks:
            self._add_chunk(chunk)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.call.device)

    def by_name(self) -> dict[str, Tensor]:
        """The gradients by the names of the call's tensors."""
        call, sums = self.call, self.sums
        k, v = (x.unflatten(1, (call.num_groups, -1)).sum(2) if call.num_groups < call.num_heads else x
                for x in (self.k, self.v))  # fmt: skip
        found = {"q": self.q, "k": k, "v": v}
        found |= {name: sums[name] for name in ("dense", "row", "column") if name in sums}
        if call.factor is not None:
            found["factor"] = self.factor.sum_to_size(call.factor.shape)
        if call.table is not None:
            found["table"] = sums["table"].sum(0)
        if call.values is not None:
            found["values"] = sums["values"].sum((0, 1)).T
        for name, stage in call.stages.items():
            total = sums[name].sum(0)[:, : stage.num_in, : stage.num_out]
            found |= {f"{name}.weight": total[:-1].permute(2, 1, 0), f"{name}.offset": total[-1, 0].clone()}
        if (sink := call.sink) is not None:
            weights = torch.exp(sink.float()[:, None] - self.lse).masked_fill(self.lse == -torch.inf, 0.0)
            found["sink"] = -(weights * self.delta).sum((0, 2))
        return found

    def _add_chunk(self, chunk: Chunk) -> None:
        """Add the contributions of a chunk's rows."""
        call, heads = self.call, self.call.num_heads
        images: list[Tensor] = []
        if call.pre:
            images.append(scores(chunk))
            convolved(chunk, call.pre, images[0], keep=images)
        image = images[-1] if images else None
        # Over the image that it reads.
        grad = chunk.image(heads, call.grad_dtype) if image is None else image.view(call.grad_dtype)
        own = logit_arguments(call, image)
        own |= {"lse": self.lse, "delta": self.delta, "grad_factor": self.factor}
        if call.post:
            pairs(chunk, "given", grad, given=self._weights(chunk, image), **own)
        else:
            weights = chunk.image(heads, call.grad_dtype)
            pairs(chunk, "gradients", grad, grad_out=self.grad_out, weights=weights, **own)
            key_products(chunk, weights, self.grad_out, 1.0, self.v)
            del weights
        # The first channels of an image are the scores.
        both = call.bias_in_image and call.residual == ["scores", "bias"]
        if "bias" in call.residual and not both:
            self._bias(chunk, grad)
        if call.pre:
            residuals = heads * ("scores" in call.residual) + heads * both
            grad = self._stages(chunk, "pre", images, grad, residuals)
            if call.bias_in_image:
                self._bias(chunk, grad[:, heads:])
        row_products(chunk, grad, call.k, call.scale, self.q)
        key_products(chunk, grad, call.q, call.scale, self.k)

    def _weights(self, chunk: Chunk, image: Tensor | None) -> Tensor:
        """Gradients of the weights, as an image, if stages follow them; adds to those of v."""
        call = self.call
        images = [chunk.image(call.num_heads, call.dtype)]
        pairs(chunk, "weights", images[0], lse=self.lse, **logit_arguments(call, image))
        convolved(chunk, call.post, images[0], keep=images)
        key_products(chunk, images[-1], self.grad_out, 1.0, self.v)
        grad = chunk.image(call.num_heads, call.grad_dtype)
        pairs(chunk, "scores", grad, q=self.grad_out, k=call.v, scale=1.0, BIAS="none")
        return self._stages(chunk, "post", images, grad, 0)

    def _stages(self, chunk: Chunk, side: str, images: list[Tensor], grad: Tensor, residuals: int) -> Tensor:
        """Gradients of the first image, written over it; adds to those of weights, offsets and the table.

        residuals: number of channels of the first image, from its first on, that are also added to the result.
        """
        call, result = self.call, grad
        chain = call.pre if side == "pre" else call.post
        for number in reversed(range(len(chain))):
            stage, image, held, wanted = chain[number], images[number], *chain.held[number : number + 2]
            self._taps(chunk, f"{side}.{number}", image, grad, held=held, wanted=wanted)
            into = image.view(call.grad_dtype)
            own: dict[str, Any] = {"LEFT": stage.right, "held": wanted, "wanted": held}
            if number > 0:
                own |= {"FINISH": "gate", "gate": image, "slope": chain[number - 1].slope}
            else:
                own |= {"FINISH": "residual", "residual": result}
                own |= {"REPEAT": call.num_heads, "RESIDUALS": residuals}
            one_stage(chunk, grad, into, stage.turned, stage, **own)
            grad = into
            if number == 1 and side == "pre" and call.table is not None:
                self._by_distance(chunk, grad, "table", -chain[0].right, held)
        return grad

    def _taps(self, chunk: Chunk, name: str, image: Tensor, grad: Tensor, **own: Any) -> None:
        """Add to the sums from which the gradients of a stage's weights and offset are computed."""
        stage = self.call.stages[name]
        parts, taps = channel_parts(stage.num_in, stage.num_out), stage.kernel_size + 1
        own |= parts | {"image": image, "grad": grad, "sums": self.sums[name], "LEFT": stage.left}
        own |= {"K": stage.kernel_size, "TAPS": min(taps, 2 if self.call.exact else 4)}
        tasks = parts["IN_PARTS"] * parts["OUT_PARTS"] * -(-taps // own["TAPS"])
        variants = pipelined(chunk.warps)
        chunk.run(backward.taps_kernel, chunk.blocks * chunk.walks, tasks, *variants, **own)

    def _bias(self, chunk: Chunk, grad: Tensor) -> None:
        """Add the gradients of the bias from those of its image."""
        call = self.call
        if call.values is not None:
            self._by_distance(chunk, grad, "values", call.lowest, 0)
        elif call.dense is not None or call.row is not None:
            rows, keys = slice(chunk.start, chunk.stop), slice(0, min(chunk.columns, call.num_keys))
            key = torch.arange(keys.stop, device=call.device)
            low, high = (x[:, rows, None] for x in (call.first, call.last))
            visible = grad[:, :, keys, : chunk.stop - chunk.start].transpose(-1, -2).float()
            through = torch.where(((key >= low) & (key <= high))[:, None], visible, 0.0)

            def add(name: str, x: Tensor, *part: slice) -> None:
                # Batch entries may share a bias.
                total = self.sums[name][:, :, *part]
                total += x.sum(0, keepdim=True) if len(total) == 1 else x

            if call.dense is not None:
                add("dense", through, rows, keys)
            else:
                add("row", through.sum(3), rows)
                add("column", through.sum(2), keys)

    def _by_distance(self, chunk: Chunk, grad: Tensor, name: str, lowest: int, extra: int) -> None:
        """Add to the sums by distance of an image, [planes, distances, channels], from `lowest` on."""
        call, sums = self.call, self.sums[name]
        _, planes, distances, channels = sums.shape
        stop_column = min(chunk.columns, call.num_keys + extra)
        least = max(lowest, chunk.start + call.offset - (stop_column - 1), -extra if call.causal else lowest)
        reached = chunk.stop + call.offset - least
        tile, group = 32, 4 if channels > 16 else 2
        own = {
            "image": grad, "sums": sums, "bottom": least,
            "lowest": lowest, "num_distances": distances, "extra": extra, "stop_column": stop_column, "C": channels,
            "CHANNELS": group, "PLANES": planes, "BLOCK_D": tile, "UNROLL": 4,
        }  # fmt: skip
        programs = max(0, -(-reached // tile))
        chunk.run(backward.diagonals_kernel, programs, -(-channels // group), {"num_warps": 1}, **own)
