"""Random calls and models against the definition in float64: nothing may differ, and nothing may be refused for no reason.

python tests/fuzz.py [--minutes 10] [--kinds op model retrofit command] [--start 0]      (`make fuzz`)
python tests/fuzz.py --again op:1234                                             one case, with all that it drew

A case is drawn from its kind and number alone. Of the op: shapes, layouts, dtypes, programs, biases and visibilities,
for every backend that takes them, outputs and gradients. Of models, ours and retrofitted ones: batches with padding or
packed documents, by chunks and caches, against every row alone. Of commands and of damaged results: fuzz_commands.py.
Calls of the Triton kernels run in their interpreter, by the smallest blocks, in memory of NaN:

TRITON_INTERPRET=1 python tests/fuzz.py --kinds triton --cases 200
"""

import argparse
import contextlib
import copy
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import fuzz_commands
import torch
import transformers
from torch import Tensor, nn

import dape
from dape import POSITIONS
from dape.models import DapeConfig, DapeForCausalLM, Encoder
from dape.models.attention import Attention
from dape.ops.score_attention import (
    Bias,
    DistanceBias,
    ScoreProgram,
    SeparableBias,
    Stage,
    TileBias,
    Visible,
    attention,
    by_tiles,
)
from dape.ops.score_attention.api import BACKENDS
from dape.ops.score_attention.triton import call as calls
from dape.ops.score_attention.triton.launch import interpreting

# Largest error of the output and of gradients, relative to the largest number expected. A gradient jumps where the
# input of an activation is about zero, so that rounding can change it by more than itself.
ERRORS = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (1e-4, 1e-2),
    torch.bfloat16: (3e-2, 1e-1),
    torch.float16: (5e-3, 5e-2),
}


@dataclass
class Draw:
    """Choices of one case, remembered by name."""

    kind: str
    number: int
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.kind}:{self.number}")
        self.numbers = torch.Generator().manual_seed(self.number)

    def one(self, name: str, *choices: Any) -> Any:
        chosen = self.random.choice(choices)
        self.made[name] = chosen
        return chosen

    def number_in(self, name: str, low: int, high: int) -> int:
        return self.one(name, self.random.randint(low, high))

    def chance(self, name: str, share: float = 0.5) -> bool:
        return self.one(name, self.random.random() < share)

    def normal(self, *shape: int, deviation: float = 1.0) -> Tensor:
        return deviation * torch.randn(shape, generator=self.numbers, dtype=torch.float64)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.numbers)


class Refused(Exception):
    """The case is not one that the software takes, by its own words."""


def differs(found: Tensor, expected: Tensor, most: float) -> str | None:
    """A sentence if two results differ, relative to the largest number expected."""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if not found.numel():
        return None
    error = (found.double() - expected.double()).abs().max().item() / max(1.0, expected.abs().max().item())
    return None if error <= most else f"error {error:.2g}, at most {most:g} expected"


# The op.


def draw_stage(
    draw: Draw, name: str, inputs: int, outputs: int, heads: int, *, rows: bool, linear: bool = False
) -> Stage:
    divisors = [n for n in range(1, heads + 1) if not (heads % n or inputs % n or outputs % n)]
    groups, kernel = draw.one(f"{name} groups", 1, 1, *divisors), draw.one(f"{name} kernel", 1, 2, 3, 3, 5)
    queries = draw.one(f"{name} query kernel", 1, 1, 1, 2, 3) if rows else 1
    read = inputs // groups
    weight = draw.normal(outputs, read, queries, kernel, deviation=(read * kernel) ** -0.5)
    offset = draw.normal(outputs) if draw.chance(f"{name} offset") else None
    left = draw.number_in(f"{name} left", 0, kernel - 1)
    slope = draw.one(f"{name} slope", *((0.0, 0.01, 0.3, 1.0)[3 * linear :]))
    return Stage(weight, offset, left, groups, slope)


def draw_program(
    draw: Draw, heads: int, *, has_bias: bool, rows: bool, causal: bool, triton: bool = False
) -> ScoreProgram:
    """A plain softmax, the paper's pair, or any stages; triton: what those kernels take."""
    kind = draw.one("program", "plain", "pair", "pair", "stages", "stages", "stages")
    if kind == "plain":
        return ScoreProgram()
    channels = 2 * heads if has_bias and draw.chance("reads the bias", 0.7) else heads
    if kind == "pair":
        width, kernel = draw.one("width", 1, 3, 8, 32), draw.one("kernel", 1, 2, 3, 5, 7)
        left = draw.number_in("left", 0, kernel - 1)
        expand = Stage(draw.normal(width, channels, 1, kernel, deviation=0.3), draw.normal(width), left, slope=0.01)  # fmt: skip
        project = Stage(draw.normal(heads, width, 1, kernel, deviation=0.3), draw.normal(heads), left)
        return ScoreProgram((expand, project), residual=draw.one("residual", "scores+bias", "scores"))
    depth = draw.one("stages before", 0, 1, 2, 3)
    widths = [channels, *(heads * draw.one(f"width {n}", 1, 2) for n in range(1, depth)), heads]
    pre = tuple(
        draw_stage(draw, f"pre {n}", *widths[n : n + 2], heads, rows=rows, linear=triton and n == depth - 1)
        for n in range(depth)
    )
    leak = not triton and depth > 0 and draw.chance("leak", 0.15)
    after = 0 if leak else draw.one("stages after", 0, 0, 1, 2)
    post = tuple(
        draw_stage(draw, f"post {n}", heads, heads, heads, rows=rows, linear=triton and n == after - 1)
        for n in range(after)
    )
    length_scale = draw.normal(heads).abs() if draw.chance("length scale", 0.2) else None
    stick = causal and not triton and draw.chance("stick-breaking", 0.2)
    return ScoreProgram(
        pre,
        post,
        draw.one("residual", "scores+bias", "scores", "bias", "none") if depth else "scores+bias",
        sink=draw.normal(heads) if not stick and draw.chance("sink", 0.2) else None,
        normaliser="stickbreaking" if stick else "softmax",
        length_scale=length_scale,
        length_offset=draw.normal(heads)
        if length_scale is not None and draw.chance("length offset")
        else None,
        softcap=None if triton else draw.one("softcap", None, None, None, 3.0),
        leak_future=leak,
    )


def draw_visible(draw: Draw, batch: int, queries: int, keys: int) -> Visible | None:
    kind = draw.one("visible", "all", "all", "padding", "window", "any", "beyond")
    if kind == "all":
        return None
    if kind == "padding":
        return Visible(first=draw.integers(0, keys, batch, 1), last=draw.integers(0, keys, batch, 1))
    if kind == "window":
        back = draw.number_in("window", 1, keys)
        return Visible(first=(torch.arange(queries) + keys - queries - back)[None])
    reach = 0 if kind == "any" else 5
    shape = draw.one("bounds of", (1, queries), (batch, queries), (batch, 1), (1, 1))
    first = draw.integers(-reach, keys + reach, *shape) if draw.chance("first") else None
    return Visible(first, draw.integers(-reach, keys + reach, *shape) if draw.chance("last") else None)


def draw_layout(draw: Draw, name: str, x: Tensor) -> Tensor:
    """The same numbers with other strides."""
    kind = draw.one(f"{name} layout", "rows", "rows", "by token", "sliced", "by feature")
    if kind == "by token":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "by feature":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if kind == "sliced":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.contiguous()


def op(draw: Draw, *, triton: bool = False) -> Iterator[str]:
    heads = draw.one("heads", *((1, 2, 3, 4, 6, 8, 12)[: 4 if triton else None]))
    groups = draw.one("groups", *(n for n in range(1, heads + 1) if heads % n == 0))
    batch, causal = draw.number_in("batch", 1, 3), draw.chance("causal", 0.75)
    bounds = [(3, 20)] * 4 + ([(21, 40)] * 2 if triton else [(21, 90), (91, 300)])
    keys = draw.one("keys", 1, 2, *(draw.random.randint(*bound) for bound in bounds))
    rows = not triton and draw.chance("rows", 0.4)
    most = keys if causal or rows else keys + 7
    queries = draw.one("queries", 1, min(most, keys), draw.random.randint(1, most))
    width = draw.one("head width", 1, 4, 8, 16, 33, 64)
    dtypes = [torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]
    # The interpreter of Triton cuts bits off on the way to bfloat16, where GPUs round.
    dtype = draw.one("dtype", *([torch.float32, torch.float32, torch.float16] if triton else dtypes))
    finer = draw.chance("companions in float32") and dtype not in (torch.float64, torch.float32)

    leaves: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}

    def leaf(name: str, x: Tensor, *, learned: bool, own: bool = True) -> tuple[Tensor, Tensor]:
        rounded = x.to(dtype if own or not finer else torch.float32)
        leaves[name] = rounded.detach().requires_grad_(learned)
        exact[name] = rounded.double().detach().requires_grad_(learned)
        return leaves[name], exact[name]

    trains = draw.one("gradients", "all", "all", "inputs", "added", "none")
    shapes = {"q": (batch, heads, queries, width), "k": (batch, groups, keys, width)}
    shapes["v"] = shapes["k"]
    for name, shape in shapes.items():
        leaf(name, draw.normal(*shape), learned=trains in ("all", "inputs"))
    form = draw.one("bias", "none", "dense", "distance", "separable", *(["tiles"] * (not triton)))
    rows = rows and queries <= keys
    program = draw_program(draw, heads, has_bias=form != "none", rows=rows, causal=causal, triton=triton)
    named = {}
    for name, tensor in program.tensors():
        named[name] = leaf(name, tensor, learned=trains in ("all", "added"), own=False)
    programs = [program.with_tensors({name: pair[which] for name, pair in named.items()}) for which in (0, 1)]

    biases: list[Bias] = [None, None]
    each, added = draw.one("bias of", 1, batch), trains in ("all", "added")
    if form in ("dense", "tiles"):
        pair = leaf("bias", draw.normal(each, heads, queries, keys), learned=added, own=False)
        biases = list(pair)
        if form == "tiles":
            dense = pair[0]
            biases[0] = TileBias(lambda rows, count: dense[:, :, rows, :count], batch=each)
    elif form == "distance":
        below = draw.one("distances below", 0, 3) + (0 if causal else queries - 1)
        pair = leaf("bias", draw.normal(heads, keys + below + 2), learned=added, own=False)
        biases = [DistanceBias(values, -below) for values in pair]
    elif form == "separable":
        row = leaf("row", draw.normal(each, heads, queries), learned=added, own=False)
        column = leaf("column", draw.normal(each, heads, keys), learned=added, own=False)
        biases = [SeparableBias(row[n], column[n]) for n in (0, 1)]

    visible = draw_visible(draw, batch, queries, keys)
    options = {"causal": causal, "visible": visible, "scale": draw.one("scale", None, None, 0.3, -1.0, 0.0)}
    layouts = {name: draw.random.getstate() for name in shapes}
    cast = None if triton else draw.one("autocast", None, None, None, torch.bfloat16)
    tile = draw.one("numbers a tile", by_tiles.TILE_NUMBERS, 4 * heads * keys)

    def results(backend: str, which: int) -> dict[str, Tensor]:
        made = (leaves, exact)[which]
        given = dict(made)
        if which == 0:
            for name in shapes:
                draw.random.setstate(layouts[name])
                given[name] = draw_layout(draw, name, made[name])
        context = torch.autocast("cpu", cast) if cast and which == 0 else contextlib.nullcontext()
        with context:
            out = attention(given["q"], given["k"], given["v"], programs[which], bias=biases[which], backend=backend, **options)  # fmt: skip
        outputs = {"out": out.detach()}
        learned = {name: x for name, x in made.items() if x.requires_grad}
        if not learned:
            return outputs
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads = torch.autograd.grad(out, list(learned.values()), weight.to(out.dtype), allow_unused=True)
        return outputs | {
            name: torch.zeros_like(x) if grad is None else grad
            for (name, x), grad in zip(learned.items(), grads, strict=True)
        }

    expected = results("reference", 1)
    backends = ("triton",) if triton else ("auto", *(name for name in BACKENDS if name != "triton"))
    before, by_tiles.TILE_NUMBERS = by_tiles.TILE_NUMBERS, tile
    try:
        for backend in backends:
            try:
                found = results(backend, 0)
            except ValueError as error:
                if backend in ("auto", "triton") or "cannot run this call" not in str(error):
                    raise
                continue
            for name, x in found.items():
                most = ERRORS[dtype][name != "out"]
                if name not in ("out", *shapes) and dtype in (torch.bfloat16, torch.float16):
                    # A sum over rows, which for an offset of all logits of a row is zero but for the rounding of each.
                    most *= max(1.0, (batch * queries) ** 0.5 / 4)
                if wrong := differs(x, expected[name], most):
                    yield f"{backend}, {name}: {wrong}"
    finally:
        by_tiles.TILE_NUMBERS = before


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Triton's kernels by the smallest blocks and tiles there are, several of each in a small call, in memory of NaN.

    The interpreter prepares triton.language anew for each call of a device function; here once a module.
    """
    from triton.runtime import interpreter

    prepared: set[str] = set()
    prepare = interpreter._patch_lang

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ not in prepared:
            prepared.add(self.fn.__module__)
            prepare(self.fn)
        return self.rewrite()(*args, **kwargs)

    def blank(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    with (
        mock.patch.multiple(calls, BLOCK_R=16, BLOCK_K=16, blank_memory=blank),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", call),
    ):
        yield


def triton(draw: Draw) -> Iterator[str]:
    """A call of the Triton kernels, in every second case by chunks of 16 rows."""
    share = 0.0 if draw.number % 2 else calls.SCRATCH
    with small_blocks(), mock.patch.object(calls, "SCRATCH", share):
        yield from op(draw, triton=True)


# Models.

PROCESSORS = [
    "", "dape", "dape1x3", "dape1x2", "dape2x3", "dape3x1", "keyconv1x3", "keyshift", "talking", "mta2x3", "diff"
]  # fmt: skip
OPTIONS = {
    "dape": ["depth=3", "groups=2", "padding=causal", "residual=scores", "negative_slope=1"],
    "talking": ["before=false", "after=false"],
    "mta2x3": ["mix_before=true", "convolve_after=true"],
    "fire": ["threshold=4"],
    "cope": ["num_positions=5"],
    "t5": ["num_buckets=8"],
    "selective-rope": ["gate=true,bias=true", "silu=true"],
    "selfextend": ["near=3", "near=4,group=2"],
    "rope": [
        "fraction=0.5",
        "scaling=linear,factor=4",
        "scaling=yarn,factor=4,original_length=8",
        "base=100",
    ],
}
# Of every method: those of encoders, and of causal attention alone.
EVERY = [f"normaliser={name}" for name in ("sink", "ssmax", "asentmax")]
CAUSAL = ["normaliser=stickbreaking", "window=3", "canon=ac", "canon=a"]
WORDS = 40


def draw_method(draw: Draw, name: str, positions: list[str], *, causal: bool = True) -> str:
    processor, position = draw.one(f"{name} scores", *PROCESSORS), draw.one(f"{name} positions", *positions)
    options = ["", *2 * (EVERY + CAUSAL * causal)]
    for part in (processor, position):
        options += OPTIONS.get("dape" if part.startswith("dape") else part, [])
    chosen = draw.one(f"{name} options", "", *options)
    return "-".join(filter(None, (processor, position))) + (f"[{chosen}]" if chosen else "")


def shaken(model: nn.Module, draw: Draw) -> nn.Module:
    """In float64, away from what is initialised to zero or to the identity."""
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(draw.normal(*parameter.shape, deviation=0.1))
    return model


def batches(
    draw: Draw, model: Any, alone: Callable[[Tensor], Tensor], *, most: float, gradients: bool = True
) -> Iterator[str]:
    """A batch by chunks, caches, padding or packing against each of its texts alone; `most`: the largest error."""
    kind = draw.one("batch", "left", "right", "packed", "plain")
    counts = [draw.number_in(f"tokens {n}", 1, 30) for n in range(draw.number_in("texts", 1, 3))]
    texts = [draw.integers(0, WORDS, 1, count) for count in counts]
    longest, mask, positions = max(counts), None, None
    if kind == "plain":
        counts = [longest] * len(counts)
        texts = [draw.integers(0, WORDS, 1, longest) for _ in counts]
    if kind == "packed":
        ids = torch.cat(texts, 1)
        positions = torch.cat([torch.arange(count) for count in counts])[None]
        starts = [sum(counts[:n]) for n in range(len(counts))]
        places = [(0, slice(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    else:
        ids = draw.integers(0, WORDS, len(texts), longest)
        places = []
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            span = slice(longest - count, longest) if kind == "left" else slice(0, count)
            ids[row, span] = text[0]
            places.append((row, span))
        if kind != "plain" or draw.chance("mask of ones"):
            mask = torch.zeros(ids.shape, dtype=draw.one("mask", torch.long, torch.bool, torch.float32))
            for row, span in places:
                mask[row, span] = 1
        if draw.chance("position ids"):
            counted = mask if mask is not None else torch.ones(ids.shape)
            positions = (counted.long().cumsum(1) - 1).clamp(min=0)

    caching = "none" if kind == "packed" else draw.one("cache", "none", "dynamic", "static")
    cache = None
    if caching == "dynamic":
        cache = transformers.DynamicCache(config=model.config)
    elif caching == "static":
        room = draw.one("room", 0, 5)
        cache = transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + room)
    sizes = [ids.shape[1]]
    if cache is not None:
        sizes = []
        while (left := ids.shape[1] - sum(sizes)) > 0:
            sizes.append(draw.random.randint(1, left) if draw.random.random() < 0.7 else 1)
        draw.made["chunks"] = sizes
    embeds = draw.chance("embeddings", 0.15)
    learns = gradients and cache is None and draw.chance("gradients")
    if learns and draw.chance("checkpointing", 0.3):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": draw.chance("reentrant", 0.3)})
    kept = ids.shape[1]
    if cache is None and kind in ("left", "plain") and draw.chance("last logits", 0.3):
        kept = draw.number_in("kept", 1, ids.shape[1])
    parts, seen = [], 0
    with torch.set_grad_enabled(learns):
        for size in sizes:
            stop = seen + size
            shown = None if mask is None else mask[:, :stop]
            part = ids[:, seen:stop]
            given = {"inputs_embeds": model.get_input_embeddings()(part)} if embeds else {"input_ids": part}
            placed = None if positions is None else positions[:, seen:stop]
            options = {} if kept == ids.shape[1] else {"logits_to_keep": kept}
            parts.append(
                model(**given, attention_mask=shown, position_ids=placed, past_key_values=cache, use_cache=cache is not None, **options).logits
            )  # fmt: skip
            seen = stop
        together = torch.cat(parts, 1)
        model.eval()
        each = [alone(text)[:, -kept:] for text in texts]
    if kept < ids.shape[1]:
        counts = [logits.shape[1] for logits in each]
        places = [(row, slice(kept - n, kept)) for (row, _), n in zip(places, counts, strict=True)]
    weights = [draw.normal(*logits.shape[1:]) for logits in each]
    for number, ((row, span), logits) in enumerate(zip(places, each, strict=True)):
        if wrong := differs(together[row, span].detach(), logits[0].detach(), most):
            yield f"text {number}: {wrong}"
    if learns:
        pairs = zip(places, weights, strict=True)
        found = sum((together[row, span] * weight).sum() for (row, span), weight in pairs)
        expected = sum((logits[0] * weight).sum() for logits, weight in zip(each, weights, strict=True))
        named = {name: x for name, x in model.named_parameters() if x.requires_grad}
        grads = []
        for total in (found, expected):
            model.zero_grad()
            total.backward()
            grads.append([x.grad for x in named.values()])
        for name, one, other in zip(named, *grads, strict=True):
            if (one is None) != (other is None):
                yield f"gradient of {name}: {'none' if one is None else 'one'}"
            elif one is not None and other is not None and (wrong := differs(one, other, 10 * most)):
                yield f"gradient of {name}: {wrong}"


def model(draw: Draw) -> Iterator[str]:
    """Our decoder: "auto" against each text alone by the reference."""
    heads = draw.one("heads", 2, 4)
    positions = list(POSITIONS)
    methods = [draw_method(draw, f"method {n}", positions) for n in range(draw.one("methods", 1, 1, 2))]
    torch.manual_seed(draw.number)
    sizes = {"vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": heads}
    sizes |= {"hidden_size": heads * draw.one("head width", 4, 8)}
    sizes |= {"num_key_value_heads": draw.one("groups", 1, 2, heads), "score_width": draw.one("width", 4, 8)}
    sizes |= {name: draw.chance(name, 0.2) for name in ("head_norm", "head_gate", "tie_word_embeddings")}
    decoder = shaken(DapeForCausalLM(DapeConfig(method=methods, **sizes)), draw)

    def alone(text: Tensor) -> Tensor:
        with by_the_reference(decoder):
            return decoder(text, use_cache=False).logits

    yield from batches(draw, decoder, alone, most=1e-8)


@contextlib.contextmanager
def by_the_reference(model: nn.Module) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert layers
    for layer in layers:
        layer.backend = "reference"
    try:
        yield
    finally:
        for layer in layers:
            layer.backend = "auto"


def encoder(draw: Draw) -> Iterator[str]:
    """Our encoder: a batch with padding against each text alone by the reference."""
    torch.manual_seed(draw.number)
    names = [name for name, encoding in POSITIONS.items() if encoding.direction == "both"]
    method = draw_method(draw, "method", names, causal=False)
    reader = shaken(Encoder(WORDS, 5, method=method, hidden_size=16, num_layers=2, num_heads=4), draw)
    counts = [draw.number_in(f"tokens {n}", 1, 20) for n in range(draw.number_in("texts", 1, 3))]
    ids = draw.integers(0, WORDS, len(counts), max(counts))
    mask = torch.zeros(ids.shape, dtype=torch.long)
    spans = []
    for row, count in enumerate(counts):
        start = draw.number_in(f"padding before {row}", 0, max(counts) - count)
        spans.append(slice(start, start + count))
        mask[row, spans[-1]] = 1
    together = reader(ids, padding_mask=mask)
    for row, span in enumerate(spans):
        with by_the_reference(reader):
            alone = reader(ids[row : row + 1, span])
        if wrong := differs(together[row, span].detach(), alone[0].detach(), 1e-8):
            yield f"text {row}: {wrong}"


def base(draw: Draw) -> Any:
    heads = draw.one("heads", 2, 4)
    sizes = {"vocab_size": WORDS, "hidden_size": 8 * heads, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": heads, "max_position_embeddings": 256}
    kind = draw.one("base", "Llama", "Mistral", "Qwen3", "GPTNeoX")
    if kind == "GPTNeoX":
        sizes["rotary_pct"] = draw.one("rotary", 0.25, 1.0)
    else:
        sizes["num_key_value_heads"] = draw.one("groups", 1, 2, heads)
    if kind == "Qwen3":
        sizes["head_dim"] = draw.one("head width", 8, 16)
    if kind == "Mistral":
        sizes["sliding_window"] = draw.one("window", 4, 8, 256)
    if kind == "Llama":
        scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
        sizes["rope_parameters"] = draw.one("scaling", None, scaling)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def retrofit(draw: Draw) -> Iterator[str]:
    """A retrofitted model: batches against each text alone; and where nothing has been learned yet, against its base.

    The models of transformers rotate in float32, and the base computes its softmax so.
    """
    torch.manual_seed(draw.number)
    origin = shaken(base(draw), draw)
    unchanged = draw.chance("as its base", 0.3)
    if unchanged:
        method = draw.one("method", "dape1x3", "dape", "talking", "mta2x3", "dape1x3-rope")
    else:
        method = draw_method(draw, "method", [name for name in POSITIONS if name != "sinusoidal"])
    origin.set_attn_implementation("eager")

    def as_before(text: Tensor) -> Tensor:
        return expected(text, use_cache=False).logits

    if unchanged:
        kept = type(origin)(copy.deepcopy(origin.config)).double().eval()
        kept.load_state_dict(origin.state_dict())
        kept.set_attn_implementation("eager")
        fitted = dape.retrofit(origin, method, width=8)
        expected = kept
        yield from batches(draw, fitted, as_before, most=1e-5, gradients=False)
        return
    fitted = shaken(dape.retrofit(origin, method, width=8, zero_init=False), draw)
    yield from batches(draw, fitted, lambda text: fitted(text, use_cache=False).logits, most=1e-5)


KINDS: dict[str, Callable[[Draw], Iterator[str]]] = {
    "op": op,
    "model": model,
    "encoder": encoder,
    "retrofit": retrofit,
    "command": fuzz_commands.command,
    "merge": fuzz_commands.merge,
    "triton": triton,
}


def run(kind: str, number: int) -> tuple[Draw, list[str]]:
    """What a case drew, and what was wrong with it."""
    draw = Draw(kind, number)
    try:
        return draw, list(KINDS[kind](draw))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise Refused(str(error)) from error
    except Exception:
        return draw, [traceback.format_exc(limit=-4)]


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS][:-1])
    parser.add_argument("--cases", type=int, help="number of cases of each kind, in place of minutes")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--again", metavar="KIND:NUMBER", help="one case")
    args = parser.parse_args()
    if args.again:
        kind, number = args.again.split(":")
        draw, wrong = run(kind, int(number))
        print("\n".join([*(f"{name}: {value}" for name, value in draw.made.items()), "", *wrong]) or "fine")
        return bool(wrong)
    if "triton" in args.kinds and not interpreting():
        parser.error("the kind triton needs TRITON_INTERPRET=1 in the environment")
    end, number, failures = time.monotonic() + 60 * args.minutes, args.start, 0
    ran, refused = Counter(), {kind: Counter() for kind in args.kinds}
    while time.monotonic() < end if args.cases is None else number < args.start + args.cases:
        for kind in args.kinds:
            ran[kind] += 1
            try:
                _, wrong = run(kind, number)
            except Refused as error:
                refused[kind][str(error)[:150]] += 1
                continue
            if wrong:
                failures += 1
                print(
                    f"{kind}:{number}: {wrong[0].splitlines()[-1]}"
                    + f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)
                )
        number += 1
    for kind in args.kinds:
        print(f"{kind}: {ran[kind]} cases, {sum(refused[kind].values())} refused")
        for reason, count in refused[kind].most_common(8):
            print(f"    {count} × {reason}")
    print(f"{failures} failed" + (": `--again KIND:NUMBER` shows one" if failures else ""))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
