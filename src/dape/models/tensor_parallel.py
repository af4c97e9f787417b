"""Tensor parallelism of whole models: every process keeps its share of the heads and of the MLPs' hidden channels.

    share_heads(model)              # on every process, after the same weights were loaded
    model(ids, labels=ids).loss.backward()
    sum_shared_gradients(model)     # then step the optimizer

Logits, loss and gradients equal those of one process. Heads can be split only if the score program does not mix those
of different processes (`groups`); else `share_heads` raises and leaves the model unchanged.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dape.models.attention import Attention
from dape.models.decoder import MLP, DapePreTrainedModel
from dape.models.heads import HeadShare, program_of_heads
from dape.positions import PositionEncoding
from dape.scores import ScoreProcessor


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
        if layer.heads is not None:
            raise ValueError("the heads of this model are already sharded")
        for name in ("num_heads", "num_key_value_heads"):
            if (count := getattr(layer, name)) % share.parts:
                raise ValueError(f"{name}={count} does not divide evenly across {share.parts} ranks")
        program_of_heads(layer.scores.program(), share.part, share.parts)
    for encoding in _encodings(model):
        if _embeds(encoding) and _reads_heads(encoding) and any(True for _ in encoding.parameters()):
            raise ValueError(
                f"{type(encoding).__name__} has parameters, embeds tokens and changes heads: which of its gradients are "
                "partial cannot be told; write it as two encodings"
            )
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    for mlp in mlps:
        if mlp.up.out_features % share.parts:
            raise ValueError(
                f"intermediate_size={mlp.up.out_features} does not divide evenly across {share.parts} ranks"
            )
    for layer in layers:
        for name in ("query", "key", "value", "gate"):
            if (whole := getattr(layer, name)) is not None:
                setattr(layer, name, row_shard(whole, share))
        layer.out = cast(nn.Linear, LeavingLinear(layer.out, share))
        layer.heads = share
    for mlp in mlps:
        mlp.up = cast(nn.Linear, EnteringLinear(mlp.up, share))
        mlp.down = cast(nn.Linear, LeavingLinear(mlp.down, share))


def sum_shared_gradients(model: DapePreTrainedModel) -> None:
    """Sum the gradients of replicated parameters that each process uses for its own heads alone."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    if any(layer.heads is None for layer in layers):
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
        dist.all_reduce(parameter.grad, group=cast(HeadShare, layers[0].heads).group)


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
