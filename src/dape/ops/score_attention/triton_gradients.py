"""The backward pass of the Triton backend, a chunk of query rows at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dape.ops.score_attention import triton_call
from dape.ops.score_attention.triton_call import BLOCK_Q, Call
from dape.ops.score_attention.triton_compile import run

# Rows of a program that walks along distances, and the distances that it owns.
BLOCK_R, SEGMENT = 16, 64
# The backward pass goes by as many query rows at a time as keep each of its maps below this many numbers.
SCRATCH_NUMBERS = 32 * 1024 * 1024


class Gradients:
    """Gradients of all inputs, gathered over chunks of query rows."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.arguments = call.arguments()
        self.q = torch.empty_like(call.q)
        self.k, self.v = (
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (call.k, call.v)
        )
        names = ("w1", "b1", "w2", "b2", "dense", "values", "hidden", "edges")
        self.rest = {
            name: torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            if (x := getattr(call, name)) is not None
            else None
            for name in names
        }

    def rows_per_chunk(self) -> int:
        call = self.call
        rows = SCRATCH_NUMBERS // (call.batch * call.num_keys * call.heads)
        return max(BLOCK_R, rows // BLOCK_R * BLOCK_R)

    def add_rows(self, rows: slice, grad_out: Tensor, lse: Tensor, delta: Tensor) -> None:
        """Add what the queries `rows` contribute."""
        call = self.call
        num_columns = rows.stop + call.offset if call.causal else call.num_keys
        shape = (call.batch, rows.stop - rows.start, num_columns, call.heads)
        scratch = partial(triton_call.blank_memory, *shape, dtype=call.q.dtype, device=call.q.device)
        # Matrix products read these two everywhere, the kernels write them where keys are visible.
        weights, grad_scores = scratch().zero_(), scratch().zero_()
        convolved = call.w1 is not None
        maps = {
            "scores": scratch() if convolved else call.q,
            "grad_logits": scratch() if convolved else grad_scores,
        }
        chunk = {"row_start": rows.start, "row_stop": rows.stop, "num_columns": num_columns}
        self._logits(chunk, maps, weights, grad_out, lse, delta)
        grad_bias = grad_scores
        if convolved or call.values is not None:
            dense = convolved and call.dense is not None
            grad_bias = scratch().zero_() if dense else grad_scores
            self._convolutions(chunk, maps, grad_scores, grad_bias)
        if (grad := self.rest["dense"]) is not None:
            through = grad_bias[..., : call.num_heads].permute(0, 3, 1, 2).float()
            grad[:, :, rows, :num_columns] = through.sum(0, keepdim=True) if grad.shape[0] == 1 else through
        self._products(rows, num_columns, weights, grad_scores, grad_out)

    def _logits(
        self, chunk: dict, maps: dict, weights: Tensor, grad_out: Tensor, lse: Tensor, delta: Tensor
    ) -> None:
        from dape.ops.score_attention.triton_backward import logits_kernel

        strides = dict(zip(("grad_batch", "grad_head", "grad_token"), grad_out.stride(), strict=False))
        own = {"grad_out": grad_out, "lse": lse, "delta": delta, "weights_out": weights, **strides, **chunk}
        own |= {"scores_out": maps["scores"], "grad_logits": maps["grad_logits"]}
        grid = (-(-(chunk["row_stop"] - chunk["row_start"]) // BLOCK_Q), self.call.batch)
        run(logits_kernel, grid, self.arguments | own, self.call.variants())

    def _convolutions(self, chunk: dict, maps: dict, grad_scores: Tensor, grad_bias: Tensor) -> None:
        from dape.ops.score_attention.triton_backward import convolution_kernel

        call, device = self.call, self.call.q.device
        top = chunk["row_stop"] - 1 + call.offset
        bottom = -call.right if call.causal else chunk["row_start"] + call.offset - (call.num_keys - 1)
        distances = top - bottom + 1
        blocks = -(-(chunk["row_stop"] - chunk["row_start"]) // BLOCK_R)
        grid = (-(-distances // SEGMENT), blocks, call.batch)
        blank = partial(
            triton_call.blank_memory, grid[0] * grid[1] * grid[2], dtype=torch.float32, device=device
        )
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        planes = (call.left + 1, 0 if call.hidden is None else call.hidden.shape[1], call.width)
        sums = {
            "sum_w1": blank(call.kernel_size, call.width, call.heads),
            "sum_wb": blank(call.kernel_size, call.width, call.heads),
            "sum_w2": blank(call.kernel_size, call.width, call.heads),
            "sum_b1": blank(call.width),
            "sum_b2": blank(call.heads),
            "sum_table": zeros(blocks * call.batch, *planes),
            "sum_values": zeros(blocks * call.batch, distances, call.heads),
        }
        own: dict[str, Any] = {
            "top": top,
            "bottom": bottom,
            "num_distances": distances,
            "BLOCK_R": BLOCK_R,
            "SEGMENT": SEGMENT,
        }
        for name in ("w1", "wb", "w2"):
            own[f"{name}_turned"] = self.arguments[name].transpose(-1, -2).contiguous()
        own |= {"grad_scores": grad_scores, "grad_bias": grad_bias, **chunk, **maps, **sums}
        variants = [{"num_warps": 2, "num_stages": stages} for stages in (2, 1)]
        run(convolution_kernel, grid, self.arguments | own, variants)
        self._add_sums({name: x.sum(0) for name, x in sums.items()}, top, bottom)

    def _add_sums(self, sums: dict[str, Tensor], top: int, bottom: int) -> None:
        """Add the sums over programs, without their padding."""
        call, rest, num_heads = self.call, self.rest, self.call.num_heads
        if (values := rest["values"]) is not None:
            # Below the table's lowest distance nothing is visible.
            skip = max(0, call.lowest - bottom)
            table = sums["sum_values"][skip:, :num_heads].T
            values[:, bottom + skip - call.lowest : top + 1 - call.lowest] += table
        if (w1 := rest["w1"]) is None:
            return
        width = w1.shape[0]
        w1[:, :num_heads] += sums["sum_w1"][:, :width, :num_heads].permute(1, 2, 0)
        if w1.shape[1] > num_heads:
            w1[:, num_heads:] += sums["sum_wb"][:, :width, :num_heads].permute(1, 2, 0)
        assert rest["w2"] is not None and rest["b2"] is not None
        rest["w2"] += sums["sum_w2"].flip(0)[:, :width, :num_heads].permute(2, 1, 0)
        rest["b2"] += sums["sum_b2"][:num_heads]
        if (b1 := rest["b1"]) is not None:
            b1 += sums["sum_b1"][:width]
        if (hidden := rest["hidden"]) is not None and (edges := rest["edges"]) is not None:
            table = sums["sum_table"][..., :width].transpose(1, 2)
            edges += table[: call.left]
            hidden += table[call.left]

    def _products(
        self, rows: slice, num_columns: int, weights: Tensor, grad_scores: Tensor, grad_out: Tensor
    ) -> None:
        """Add the gradients of q, k and v: plain matrix products of the maps [B, rows, keys, HEADS]."""
        call = self.call
        lead = (call.batch, call.num_groups, -1)

        def grouped(x: Tensor) -> Tensor:
            return x.reshape(*lead, x.shape[-1])

        def by_heads(x: Tensor) -> Tensor:
            return grouped(x[..., : call.num_heads].permute(0, 3, 1, 2))

        scores, keys = by_heads(grad_scores), call.k[:, :, :num_columns]
        products = (scores @ keys).view(call.batch, call.num_heads, -1, call.head_width)
        self.q[:, :, rows] = products * call.scale
        grad_k = scores.transpose(-1, -2) @ grouped(call.q[:, :, rows])
        self.k[:, :, :num_columns] += grad_k.float() * call.scale
        self.v[:, :, :num_columns] += by_heads(weights).transpose(-1, -2) @ grouped(grad_out[:, :, rows])
