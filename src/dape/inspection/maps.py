"""Attention maps of bounded size: scores, bias, processed scores and weights.

Maps are computed and pooled one tile of query rows at a time, so that no T×T tensor of all heads ever exists; a map
of T tokens has at most `resolution` rows and columns.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from dape.devices import check_fits
from dape.layers import Inputs
from dape.models.attention import Context
from dape.models.config import DapeConfig
from dape.models.decoder import DapeDecoderLayer, DapeForCausalLM
from dape.models.interface import INPUTS, recording
from dape.ops.score_attention.edges import Edges
from dape.ops.score_attention.reference import capped, normalise, process, repeat_heads
from dape.ops.score_attention.types import bias_tile
from dape.positions import Positions
from dape.retrofitting.attach import is_retrofitted, record
from dape.retrofitting.check import inference_mode

# In the paper's order, the weights last.
MAPS = {
    "scores": "S: query times key, scaled",
    "bias": "B: the position encoding's bias",
    "processed": "f(S, B): what the score processor adds",
    "weights": "softmax of S + B + f(S, B)",
}

# Numbers of a head, fields of `LayerMaps`.
STATISTICS = ("sink", "entropy", "change", "copying")

# Numbers of keys in a tile are multiples of this.
KEYS_PER_STEP = 512
# Lengths of runs of tokens, the last one included, that count as copied.
SHORTEST, LONGEST = 3, 12


@dataclass(frozen=True)
class LayerMaps:
    """Maps of one layer, each [heads, P, P] with NaN where nothing is visible, and statistics per head.

    sink:    mean weight on the first token. entropy: mean entropy of the rows, in nats; where heads are mixed after the
             softmax, of the weights' absolute values as shares of their sum.
    change:  mean share of a row's weight that f(S, B) moves (total variation distance to softmax(S + B)).
    copying: mean weight on the earlier place that the next token repeats (`copied_from`), over the rows that have one.
    A map that a method does not have (the bias of RoPE, f of plain scores) is absent.
    kernels: learned weights of the score processor's stages, [out, in, queries, keys] each.
    """

    layer: int
    heads: tuple[int, ...]
    maps: dict[str, np.ndarray]
    sink: np.ndarray
    entropy: np.ndarray
    change: np.ndarray
    copying: np.ndarray
    kernels: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """Result of `inspect`: labelled arrays of the chosen layers and heads.

    edges: [P + 1] token indices; pixel (r, c) is the mean over queries edges[r] … edges[r+1] − 1 and keys
    edges[c] … edges[c+1] − 1 that are visible to them. With P = T every pixel is one pair.
    losses: [T], of each token given those before it, in nats; NaN for the first. copied: [T], `copied_from` the ids.
    """

    method: str
    ids: list[int]
    edges: np.ndarray
    layers: list[LayerMaps]
    losses: np.ndarray
    copied: list[int]

    def map(self, layer: int, head: int, name: str) -> np.ndarray:
        """One map [P, P]."""
        for inspected in self.layers:
            if inspected.layer == layer and head in inspected.heads:
                if name not in inspected.maps:
                    available = ", ".join(inspected.maps)
                    raise ValueError(f'"{self.method}" has no map "{name}"; it has {available}')
                return inspected.maps[name][inspected.heads.index(head)]
        have = ", ".join(f"{inspected.layer}: heads {list(inspected.heads)}" for inspected in self.layers)
        raise ValueError(f"layer {layer}, head {head} was not inspected; there are {have}")

    def records(self) -> list[dict[str, object]]:
        """The statistics of every head; None for NaN."""
        about = {"method": self.method, "length": len(self.ids)}
        return [
            {**about, "layer": layer.layer, "head": head, **dict(zip(STATISTICS, numbers, strict=True))}
            for layer in self.layers
            for head, *numbers in zip(
                layer.heads, *(plain_numbers(getattr(layer, n), 6) for n in STATISTICS), strict=True
            )
        ]

    def most_changed(self) -> tuple[int, int]:
        """The layer and head whose attention f(S, B) changes most; the first ones if there is no f."""
        layer = max(self.layers, key=lambda maps: float(maps.change.max()))
        return layer.layer, layer.heads[int(layer.change.argmax())]

    def plot(self, layer: int | None = None, *, max_heads: int = 6) -> Any:
        """The paper's figure of one layer, by default the first: rows are heads, columns maps (needs `dape[lab]`)."""
        from dape.inspection.figure import figure_of

        return figure_of(self, self.layers[0].layer if layer is None else layer, max_heads=max_heads)


def plain_numbers(values: np.ndarray, digits: int) -> list[float | None]:
    """Rounded for JSON, None for NaN."""
    return [None if np.isnan(x) else round(float(x), digits) for x in values]


def inspect(
    model: PreTrainedModel,
    ids: Tensor | Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    resolution: int = 512,
    rows_per_tile: int | None = None,
) -> Inspection:
    """Attention maps of a model on `ids` [T], for the given layers and heads (all by default), in evaluation mode.

    rows_per_tile: queries at a time; by default as many as fit a fixed amount of memory.
    """
    tokens = _token_ids(ids)
    if resolution < 1:
        raise ValueError(f"resolution={resolution} must be at least 1")
    config, method = _sizes(model)
    layers = _chosen("layer", layers, config.num_hidden_layers)
    heads = _chosen("head", heads, config.num_attention_heads)
    rows_per_tile = rows_per_tile or affordable_rows(config, len(tokens))
    check_map_memory(
        config,
        len(tokens),
        model.device,
        num_maps=len(layers) * len(heads) * len(MAPS),
        resolution=resolution,
        rows=rows_per_tile,
    )
    edges = np.linspace(0, len(tokens), min(resolution, len(tokens)) + 1).round().astype(int)
    shown, copied = tokens[None].to(model.device), copied_from(tokens.tolist())
    own = isinstance(model, DapeForCausalLM)
    with inference_mode(model):
        inputs = (
            _own_inputs(cast(DapeForCausalLM, model), shown, layers)
            if own
            else _retrofitted_inputs(model, shown, layers)
        )
        maps = [
            _layer_maps(layer, tuple(heads), read, edges, copied, rows_per_tile) for layer, read in inputs
        ]
        losses = token_losses(model, shown)
    return Inspection(method, tokens.tolist(), edges, maps, losses, copied)


def copied_from(ids: Sequence[int]) -> list[int]:
    """For each token, the latest earlier place of the same token after the same tokens; −1 if there is none.

    Of several, the one after the longest common run of tokens, which counts from `SHORTEST` tokens on.
    """
    places = [-1] * len(ids)
    for length in range(SHORTEST, LONGEST + 1):
        seen: dict[tuple[int, ...], int] = {}
        for end in range(length, len(ids) + 1):
            run = tuple(ids[end - length : end])
            places[end - 1] = seen.get(run, places[end - 1])
            seen[run] = end - 1
    return places


def token_losses(model: PreTrainedModel, ids: Tensor) -> np.ndarray:
    """Loss [T] of each token of ids [1, T] given those before it; logits of a few tokens at a time."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    head = cast(torch.nn.Module, model.get_output_embeddings())
    parts = [
        F.cross_entropy(head(part).float()[0], targets[0], reduction="none")
        for part, targets in zip(hidden[:, :-1].split(256, 1), ids[:, 1:].split(256, 1), strict=True)
    ]
    first = torch.full((1,), torch.nan)
    return torch.cat([first, *(part.cpu() for part in parts)]).numpy()


def _sizes(model: PreTrainedModel) -> tuple[DapeConfig, str]:
    """Sizes as a DapeConfig, and the name of the method."""
    if isinstance(model, DapeForCausalLM):
        config = cast(DapeConfig, model.config)
        return config, str(config.method)
    if not is_retrofitted(model):
        raise TypeError(f"expected a DapeForCausalLM or a retrofitted model, got a {type(model).__name__}")
    plan, own = record(model), model.config.get_text_config()
    if len(set(plan.num_heads)) > 1:
        raise ValueError(f"the layers have {plan.num_heads} heads: maps need the same number in all")
    sizes = DapeConfig(
        hidden_size=own.hidden_size - own.hidden_size % plan.num_heads[0],
        num_hidden_layers=len(plan.num_heads),
        num_attention_heads=plan.num_heads[0],
        intermediate_size=getattr(own, "intermediate_size", None),
        score_width=plan.width,
    )
    return sizes, plan.method


def _own_inputs(model: DapeForCausalLM, ids: Tensor, layers: Sequence[int]) -> Iterator[tuple[int, Inputs]]:
    states = model.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    positions = Positions.of(ids.shape[1], device=model.device)
    for layer in layers:
        block = cast(DapeDecoderLayer, model.model.layers[layer])
        x, encoding = block.attention_norm(states[layer]), model.model.encoding(layer)
        yield layer, block.attention.inputs(x, encoding, Context(positions))


def _retrofitted_inputs(
    model: PreTrainedModel, ids: Tensor, layers: Sequence[int]
) -> Iterator[tuple[int, Inputs]]:
    with recording(INPUTS) as recorded:
        model.base_model(input_ids=ids, use_cache=False)
    for layer in layers:
        yield layer, recorded[layer]


def _token_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """[T], int64."""
    if len(ids) == 0:
        raise ValueError("there are no tokens to inspect")
    tokens: Tensor | None = None
    with suppress(TypeError, ValueError, RuntimeError):
        tokens = torch.as_tensor(ids).flatten()
    if tokens is None or tokens.dtype == torch.bool or tokens.is_floating_point():
        raise TypeError(f"ids must be integers that a tokenizer makes of a text, got {reprlib.repr(ids)}")
    return tokens.long()


def _chosen(what: str, wanted: Sequence[int] | None, count: int) -> list[int]:
    wanted = list(range(count)) if wanted is None else list(wanted)
    for number in wanted:
        if not 0 <= number < count:
            raise ValueError(f"there is no {what} {number}: the model has {what}s 0 to {count - 1}")
    return wanted


def _layer_maps(
    layer: int,
    heads: tuple[int, ...],
    inputs: Inputs,
    edges: np.ndarray,
    copied: Sequence[int],
    rows_per_tile: int,
) -> LayerMaps:
    program, bias = inputs.program, inputs.bias
    q = inputs.q.float()
    k = repeat_heads(inputs.k, q.shape[1]).float()
    num_tokens, chosen = q.shape[2], list(heads)
    whole = Edges.of(
        inputs.visible, num_tokens, num_tokens, causal=True, leak_future=program.leak_future, device=q.device
    )
    in_float = program.to(q.dtype)
    # The scores of the maps are capped, so the program need not do it again.
    uncapped = replace(in_float, softcap=None)
    pool = _Pool(edges)
    sink, entropy, change, copying = torch.zeros(4, len(heads))
    sources = torch.tensor([*copied[1:], -1])  # by the row that predicts the token
    for start in range(0, num_tokens, rows_per_tile):
        rows = slice(start, min(start + rows_per_tile, num_tokens))
        # A causal row needs only the keys up to itself, unless the future leaks, and the earlier rows that its kernel
        # reads. But a different
        # width for every tile would have convolutions planned, and memory allocated, for each of them.
        halo = slice(max(0, start - program.earlier_rows), rows.stop)
        stop = num_tokens if program.leak_future else rows.stop
        num_keys = min(num_tokens, -(-stop // KEYS_PER_STEP) * KEYS_PER_STEP)
        scores = capped(q[:, :, halo] @ k[:, :, :num_keys].transpose(-1, -2) * inputs.scale, in_float)
        tile = bias_tile(bias, halo, num_keys, num_queries=num_tokens, total_keys=num_tokens)
        tile = None if tile is None else tile.float()
        seen = whole.tile(slice(None), halo, num_keys)
        logits = process(scores, tile, uncapped, seen)
        weights = normalise(logits, in_float, seen)
        without = scores if tile is None else scores + tile
        without = normalise(without.masked_fill(~seen.shown, -torch.inf), in_float, seen)
        own = slice(start - halo.start, None)
        scores, logits, weights = scores[:, :, own], logits[:, :, own], weights[:, :, own]
        tile = None if tile is None else tile[:, :, own]
        parts = {"scores": scores, "weights": weights}
        if tile is not None:
            parts["bias"] = tile.expand_as(scores)
        if program.pre:
            parts["processed"] = logits - scores - (0 if tile is None else tile)
        shown = logits[0, 0] > -torch.inf
        # One map at a time, so that only one is copied.
        pool.add(rows, shown, ((name, part[0, chosen]) for name, part in parts.items()))
        sink += weights[0, chosen, :, 0].sum(-1).cpu()
        shares = weights[0, chosen]
        if program.post:
            # Mixed after the softmax, weights may be negative.
            shares = shares.abs() / shares.abs().sum(-1, keepdim=True)
        entropy += torch.special.entr(shares).sum((-1, -2)).cpu()
        predicts = (sources[rows] >= 0).nonzero()[:, 0]
        copying += weights[0, chosen][:, predicts, sources[rows][predicts]].sum(-1).cpu()
        change += 0.5 * (weights - without[:, :, own])[0, chosen].abs().sum((-1, -2)).cpu()
    kernels = tuple(stage.weight.detach().float().cpu().numpy() for stage in (*program.pre, *program.post))
    means = [(total / num_tokens).numpy() for total in (sink, entropy, change)]
    copying = (copying / (sources >= 0).sum()).numpy()
    return LayerMaps(layer, heads, pool.means(), means[0], means[1], means[2], copying, kernels)


class _Pool:
    """Sums over the pixels of maps, accumulated tile by tile."""

    def __init__(self, edges: np.ndarray) -> None:
        self.edges, self.size = edges, len(edges) - 1
        self.sums: dict[str, np.ndarray] = {}
        self.count = np.zeros((self.size, self.size))

    def add(self, rows: slice, shown: Tensor, parts: Iterable[tuple[str, Tensor]]) -> None:
        """shown: [rows, n]; parts: names and maps [heads, rows, n]."""
        first, last = np.searchsorted(self.edges, (rows.start, rows.stop), side="right") - 1
        last = last + (self.edges[last] < rows.stop)
        down = np.maximum(self.edges[first:last] - rows.start, 0)
        across = self.edges[:-1][self.edges[:-1] < shown.shape[1]]
        pixels = (..., slice(first, last), slice(0, len(across)))

        def pooled(x: Tensor) -> np.ndarray:
            """Sums over the tile's share of each pixel, in float64."""
            columns = np.add.reduceat(x.cpu().numpy(), across, axis=-1, dtype=np.float64)
            return np.add.reduceat(columns, down, axis=-2)

        self.count[pixels] += pooled(shown)
        for name, part in parts:
            if name not in self.sums:
                self.sums[name] = np.zeros((part.shape[0], self.size, self.size))
            self.sums[name][pixels] += pooled(part.masked_fill(~shown, 0.0))

    def means(self) -> dict[str, np.ndarray]:
        """Maps [heads, P, P] in the paper's order, NaN where nothing is visible."""
        count = np.where(self.count == 0, np.nan, self.count)
        return {name: (self.sums[name] / count).astype(np.float32) for name in MAPS if name in self.sums}


# Memory of a tile of rows in bytes, including all its copies.
TILE_BYTES = 256 * 2**20


def bytes_per_pair(config: DapeConfig) -> int:
    """Bytes per query–key pair of a tile: channels of the convolutions and several maps per head, in float32."""
    return 4 * (4 * config.score_width + 20 * config.num_attention_heads)


def affordable_rows(config: DapeConfig, num_tokens: int) -> int:
    """Number of queries in a tile."""
    return max(1, min(64, TILE_BYTES // (num_tokens * bytes_per_pair(config))))


def check_map_memory(
    config: DapeConfig, num_tokens: int, device: torch.device, *, num_maps: int, resolution: int, rows: int
) -> None:
    """Raise, with advice, if the estimated peak exceeds free memory: states of all layers, a layer, a tile, and the maps."""
    assert config.intermediate_size is not None
    states = 4 * num_tokens * config.hidden_size * (config.num_hidden_layers + 1)
    working = 4 * num_tokens * (6 * config.hidden_size + 2 * config.intermediate_size)
    tile = rows * num_tokens * bytes_per_pair(config)
    # Sums in float64 while they are accumulated; afterwards float32 and the page's image.
    maps = min(resolution, num_tokens) ** 2 * (40 * config.num_attention_heads + 8 * num_maps)
    check_fits(
        # A quarter more for the allocator.
        (states + working + tile + maps) * 5 // 4,
        f"looking at {num_tokens} tokens",
        advice=f"look at fewer tokens, or at fewer layers and heads, or at a lower resolution than {resolution}",
        device=device,
    )
