"""Attention over several processes: the heads shared out (tensor parallelism), or the tokens (context parallelism).

Heads. Every process keeps its share of the heads and of the MLPs' hidden channels:

    share_heads(model)              # on every process, after the same weights were loaded
    model(ids, labels=ids).loss.backward()
    sum_shared_gradients(model)     # then step the optimizer

Logits, loss and gradients equal those of one process. The heads of a process have the same score program with their part
of the weights, if the groups of every stage can be divided among the processes; a program that mixes all heads raises, and
leaves the model unchanged. For layers of your own there are `program_of_heads` and `bias_of_heads`.

Tokens. A row of scores depends on its query and on all keys before it, so the rows are sharded: each process computes
queries, keys and values of its part of the tokens, and gathers the keys and values of all. Score programs do not cross
rows, except kernels over several queries, for which the earlier queries are gathered too. The cost of a causal row grows
with its number of keys; each process therefore has two chunks of the sequence, one from the front and its mirror image
from the back: 0 and 3, 1 and 2.

    model(ids, labels=ids, shares=Shares(ids.shape[1]))   # losses and gradients sum to those of the whole sequence
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from dape.layers import Inputs, inputs_of, rotates_late
from dape.models.attention import Attention, Context
from dape.models.decoder import MLP, DapePreTrainedModel
from dape.ops.score_attention import Bias, DistanceBias, ScoreProgram, SeparableBias, Stage, TileBias
from dape.ops.score_attention.api import HasProgram, program_of
from dape.positions import NoPE, PositionEncoding, Positions
from dape.positions.masks import KeyValueCache
from dape.scores import ScoreProcessor


@dataclass(frozen=True)
class HeadShare:
    """This process's share of the heads: `part` of `parts` equal ones, among the processes in `group`."""

    part: int
    parts: int
    group: dist.ProcessGroup | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Replicated x; its gradient is summed over the processes."""
        return _Enter.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum of x over the processes; its gradient is replicated."""
        return _Leave.apply(x, self.group)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def program_of_heads(program: ScoreProgram, part: int, parts: int) -> ScoreProgram:
    """The program of the heads from part · H / parts on, one of `parts` equal shares; raises if shares would mix."""
    if not 0 <= part < parts:
        raise ValueError(f"part={part} is not one of {parts} parts")

    def fewer(stage: Stage) -> Stage:
        if stage.groups % parts:
            raise ValueError(
                f"a stage mixes heads of different processes: choose groups that are a multiple of {parts}, as in "
                f"dape1x3[groups={parts}], or leave attention whole and split the MLPs"
            )
        return replace(stage, groups=stage.groups // parts)

    own = replace(program, pre=tuple(map(fewer, program.pre)), post=tuple(map(fewer, program.post)))
    # Output channels or heads are the first dimension of every tensor.
    return own.with_tensors({name: _share(tensor, 0, part, parts) for name, tensor in program.tensors()})


def bias_of_heads(bias: Bias, part: int, parts: int) -> Bias:
    """The bias of the heads of that share, of the same type."""
    if bias is None:
        return None
    if isinstance(bias, DistanceBias):
        return replace(bias, values=_share(bias.values, 0, part, parts))
    if isinstance(bias, SeparableBias):
        return SeparableBias(_share(bias.row, 1, part, parts), _share(bias.column, 1, part, parts))
    if isinstance(bias, TileBias):
        whole = bias.tile
        return TileBias(lambda rows, num_keys: _share(whole(rows, num_keys), 1, part, parts), bias.batch)
    return _share(bias, 1, part, parts)


def _share(x: Tensor, dim: int, part: int, parts: int) -> Tensor:
    if x.shape[dim] % parts:
        raise ValueError(f"{x.shape[dim]} heads or channels do not divide evenly across {parts} ranks")
    size = x.shape[dim] // parts
    return x.narrow(dim, part * size, size)


class SharedAttention(Attention):
    """Attention of this process's share of the heads, made of a whole layer by `share_heads`."""

    share: HeadShare

    def forward(
        self,
        x: Tensor,
        encoding: PositionEncoding,
        context: Context,
        past_key_values: KeyValueCache | None = None,
        last_rows: int | None = None,
    ) -> Tensor:
        if context.shares is not None:
            raise ValueError("heads and tokens cannot both be sharded: choose one")
        return super().forward(self.share.enter(x), encoding, context, past_key_values, last_rows)

    def program(self) -> ScoreProgram:
        return program_of_heads(self.scores.program(), self.share.part, self.share.parts)

    def inputs(self, x: Tensor, encoding: PositionEncoding, *arguments: Any) -> Inputs:
        return super().inputs(x, cast(PositionEncoding, EncodingOfHeads(encoding, self.share)), *arguments)


class EncodingOfHeads:
    """A position encoding for this process's heads; encodings compute all, of which the others' are dropped."""

    def __init__(self, whole: PositionEncoding, share: HeadShare) -> None:
        self.whole, self.share = whole, share

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def bias(self, q: Tensor, k: Tensor, positions: Positions, **options: Any) -> Bias:
        part, parts = self.share.part, self.share.parts
        return bias_of_heads(self.whole.bias(*self._all(q, k), positions, **options), part, parts)

    def rotate(self, x: Tensor, *at: Tensor) -> Tensor:
        every = x.repeat(1, self.share.parts, 1, 1)
        return _share(self.whole.rotate(every, *at), 1, self.share.part, self.share.parts)

    def turn(self, q: Tensor, k: Tensor, positions: Positions, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self.whole.rotates:
            return q, k
        turned = self.whole.turn(*self._all(q, k), positions, state)
        own_q, own_k = (_share(x, 1, self.share.part, self.share.parts) for x in turned)
        return own_q, own_k

    def _all(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Repeated, so that this process's heads have their own indices."""
        return q.repeat(1, self.share.parts, 1, 1), k.repeat(1, self.share.parts, 1, 1)


class EnteringLinear(nn.Module):
    """Row shard of a linear layer, for replicated x."""

    def __init__(self, whole: nn.Linear, share: HeadShare) -> None:
        super().__init__()
        self.share = share
        self.rows = row_shard(whole, share)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(self.share.enter(x))


class LeavingLinear(nn.Module):
    """Column shard of a linear layer, summed over the processes: the output is replicated."""

    def __init__(self, whole: nn.Linear, share: HeadShare) -> None:
        super().__init__()
        self.share = share
        self.weight = _own(whole.weight, 1, share)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        out = self.share.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def share_heads(model: DapePreTrainedModel, group: dist.ProcessGroup | None = None) -> None:
    """Keep this process's share of the heads of every attention layer and of every MLP, in place.

    group: process group, by default all processes. All must have the same weights before.
    """
    share = HeadShare(dist.get_rank(group), dist.get_world_size(group), group)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer in layers:
        if isinstance(layer, SharedAttention):
            raise ValueError("the heads of this model are already sharded")
        for name in ("num_heads", "num_key_value_heads"):
            if (count := getattr(layer, name)) % share.parts:
                raise ValueError(f"{name}={count} does not divide evenly across {share.parts} ranks")
        program_of_heads(layer.scores.program(), share.part, share.parts)
    for encoding in _encodings(model):
        if _embeds(encoding) and _reads_heads(encoding) and any(True for _ in encoding.parameters()):
            raise ValueError(
                f"{type(encoding).__name__} has parameters, embeds tokens and changes heads: which of its gradients "
                "are partial is ambiguous; write it as two encodings"
            )
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    for mlp in mlps:
        if mlp.up.out_features % share.parts:
            size = mlp.up.out_features
            raise ValueError(f"intermediate_size={size} does not divide evenly across {share.parts} ranks")
    for layer in layers:
        for name in ("query", "key", "value", "gate"):
            if (whole := getattr(layer, name)) is not None:
                setattr(layer, name, row_shard(whole, share))
        layer.out = cast(nn.Linear, LeavingLinear(layer.out, share))
        layer.num_heads, layer.num_key_value_heads = (
            count // share.parts for count in (layer.num_heads, layer.num_key_value_heads)
        )
        # As fully_shard does: the same module, which hooks and names refer to, with another forward.
        layer.__class__ = SharedAttention
        cast(SharedAttention, layer).share = share
    for mlp in mlps:
        mlp.up = cast(nn.Linear, EnteringLinear(mlp.up, share))
        mlp.down = cast(nn.Linear, LeavingLinear(mlp.down, share))


def sum_shared_gradients(model: DapePreTrainedModel) -> None:
    """Sum the gradients of replicated parameters that each process uses for its own heads alone."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if not all(isinstance(layer, SharedAttention) for layer in layers):
        raise ValueError("the heads of this model are not sharded: call share_heads before the first pass")
    # What is added to the embeddings is the same on every process, and so is its gradient.
    partly: list[nn.Module] = [encoding for encoding in _encodings(model) if not _embeds(encoding)]
    partly += [module for module in model.modules() if isinstance(module, ScoreProcessor)]
    partly += [layer.norm for layer in layers if layer.norm is not None]
    for parameter in dict.fromkeys(parameter for module in partly for parameter in module.parameters()):
        if not parameter.requires_grad:
            continue
        # Every process takes part in every all-reduce, whether or not its heads used the parameter.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=cast(SharedAttention, layers[0]).share.group)


def _encodings(model: DapePreTrainedModel) -> list[PositionEncoding]:
    return [module for module in model.modules() if isinstance(module, PositionEncoding)]


def _embeds(encoding: PositionEncoding) -> bool:
    """Whether it adds to the embeddings."""
    return type(encoding).embed is not PositionEncoding.embed


def _reads_heads(encoding: PositionEncoding) -> bool:
    """Whether it rotates queries and keys or gives a bias."""
    return any(
        getattr(type(encoding), hook) is not getattr(PositionEncoding, hook)
        for hook in ("rotate", "token_state", "bias")
    )


def row_shard(whole: nn.Linear, share: HeadShare) -> nn.Linear:
    """This process's rows of a linear layer."""
    rows = nn.Linear(1, 1, bias=whole.bias is not None)
    rows.weight = _own(whole.weight, 0, share)
    if whole.bias is not None:
        rows.bias = _own(whole.bias, 0, share)
    rows.in_features, rows.out_features = whole.in_features, len(rows.weight)
    return rows


def _own(parameter: Tensor, dim: int, share: HeadShare) -> nn.Parameter:
    return nn.Parameter(
        parameter.detach().chunk(share.parts, dim)[share.part].clone(), requires_grad=parameter.requires_grad
    )


class Shares:
    """This process's share of `num_tokens` tokens.

    group: process group, by default all processes.
    """

    def __init__(self, num_tokens: int, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if num_tokens % (2 * self.world):
            reason = f"do not divide evenly across {self.world} ranks"
            raise ValueError(f"{num_tokens} tokens {reason}: pad them to a multiple of {2 * self.world}")
        self.num_tokens, self.size = num_tokens, num_tokens // (2 * self.world)

    def chunks(self, rank: int) -> tuple[slice, slice]:
        """The two chunks of the sequence that belong to process `rank`."""
        first, last = (slice(n * self.size, (n + 1) * self.size) for n in (rank, 2 * self.world - 1 - rank))
        return first, last

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This process's tokens of x, which has all tokens along `dim`."""
        return torch.cat([x[(slice(None),) * dim + (chunk,)] for chunk in self.chunks(self.rank)], dim)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather the tokens of all processes along `dim`; gradients are reduced to the process that owns the token."""
        return _Gather.apply(x, self, dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Positions of this process's tokens [1, T / processes]."""
        return self.part(torch.arange(self.num_tokens, device=device)[None], 1)

    def attend(self, layer: Attention, x: Tensor, encoding: PositionEncoding) -> Tensor:
        """Heads' outputs [B, H, T / processes, D] of a layer for this process's tokens x, attending to those of all."""
        if layer.dropout and layer.training:
            raise ValueError(f"attention_dropout={layer.dropout} would differ between processes: set it to 0")
        if layer.window is not None:
            raise ValueError(f"tokens cannot be sharded with window={layer.window}")
        if rotates_late(layer.scores, encoding):
            raise ValueError(
                "keys shifted before they are rotated need their neighbours on other processes: choose a method without "
                "rotations, or do not shard the tokens"
            )
        q, k, v = (layer.heads(projection(x)) for projection in (layer.query, layer.key, layer.value))
        return context_attention(
            q,
            k,
            v,
            layer.program(),
            shares=self,
            encoding=encoding,
            state=encoding.token_state(x),
            scale=layer.scale,
            backend=layer.backend,
        )


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares, dim: int) -> Tensor:
        ctx.shares, ctx.dim = shares, dim
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(shares.world)]
        dist.all_gather(parts, x.contiguous(), group=shares.group)
        halves = [half for part in parts for half in part.chunk(2, dim)]
        order = halves[::2] + halves[1::2][::-1]
        return torch.cat(order, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.shares.group)
        return ctx.shares.part(total, ctx.dim), None, None


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreProgram | HasProgram | None = None,
    *,
    shares: Shares,
    encoding: PositionEncoding | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of this process's tokens [B, H, T / processes, D] over those of all processes.

    q, k, v:  of this process's tokens, not yet rotated; k and v may have fewer heads.
    encoding: position encoding; its gradients, summed over the processes, are those of the whole sequence.
    state:    encoding.token_state of this process's tokens, if the encoding has one.
    """
    program, encoding = program_of(scores), encoding or NoPE()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = shares.whole(k, 2), shares.whole(v, 2)
    positions = torch.arange(shares.num_tokens, device=q.device)[None]
    queries = shares.whole(q, 2) if encoding.rotates or program.earlier_rows else None
    if queries is not None:
        # All at once: some scalings depend on the length of the whole input.
        keys, queries = encoding.rotate_keys(keys, positions), encoding.rotate(queries, positions)
    states = None if state is None else shares.whole(state, 2)
    results = []
    for own, chunk in zip(q.chunk(2, 2), shares.chunks(shares.rank), strict=True):
        start, stop = max(0, chunk.start - program.earlier_rows), chunk.stop
        rows = own if queries is None else queries[:, :, start:stop]
        seen = Positions(positions[:, stop - rows.shape[2] : stop], positions[:, :stop], consecutive=True)
        of_keys = None if states is None else states[:, :, :stop]
        k, v = keys[:, :, :stop], values[:, :, :stop]
        inputs = inputs_of(rows, k, v, of_keys, seen, program, encoding, scale, None)
        results.append(inputs.attend(backend=backend)[:, :, -shares.size :])
    return torch.cat(results, 2)
