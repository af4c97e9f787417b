"""Pictures that the build draws: for why.md from the trained models in models/, and for the reference of encodings."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from draw_encodings import draw
from matplotlib.figure import Figure
from matplotlib.style import context
from torch import Tensor

from dape.data import load_tokenizer
from dape.lab.figures import COLOURS, FAINT, LOOK
from dape.loading import load_named
from dape.models import Context, DapeForCausalLM
from dape.ops.score_attention.types import bias_tile
from dape.positions import Positions

ROOT = Path(__file__).resolve().parents[1]
TRAINED_AT, NUM_TOKENS, FARTHEST = 128, 448, 384


def read(name: str, num_tokens: int) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """The processor, the scores and the bias [1, H, T, T] of every layer of a model on a text."""
    named = load_named(str(ROOT / "models" / name), dtype=torch.float32)
    model, text = (
        cast(DapeForCausalLM, named.model).model,
        (ROOT / "src" / "dape" / "layers.py").read_text("utf-8"),
    )
    ids = torch.tensor([load_tokenizer(named.tokenizer).encode(text)[:num_tokens]])
    positions, rows = Positions.of(num_tokens), slice(0, num_tokens)
    states = model(ids, use_cache=False, output_hidden_states=True).hidden_states
    for index, layer in enumerate(model.layers):
        inputs = layer.attention.inputs(
            layer.attention_norm(states[index]), model.encoding(index), Context(positions)
        )
        scores = (inputs.q @ inputs.k.mT * layer.attention.scale).masked_fill(
            ~torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(), -torch.inf
        )
        bias = bias_tile(inputs.bias, rows, num_tokens, num_queries=num_tokens, total_keys=num_tokens)
        yield layer.attention.scores, scores, bias


@torch.no_grad()
def kernels() -> Figure:
    """How much a logit changes with the score of each head at the keys around it, for two heads."""
    figure = Figure(figsize=(6.2, 2.3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    layers = read("dape1x3-kerple", 200)
    for axis, (layer, head), name in zip(axes, ((0, 2), (1, 2)), ("copies", "does not"), strict=True):
        shown = response(*next(layers), head)
        axis.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1)
        for row, values in enumerate(shown):
            for column, value in enumerate(values):
                axis.text(
                    column,
                    row,
                    f"{value:.1f}".replace("-0.0", "0.0"),
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="#222222",
                )
        axis.set_xticks(range(5), ["−2", "−1", "0", "+1", "+2"])
        axis.set_yticks(range(len(shown)), [f"head {source}" for source in range(len(shown))])
        axis.set_title(f"layer {layer}, head {head}: {name}")
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("score of")
    figure.supxlabel("keys from the one whose logit changes", fontsize=9)
    return figure


def response(processor: Any, scores: Tensor, bias: Tensor | None, head: int) -> Tensor:
    """Mean change of f(S, B)[head] at a key by the score of each head [H, 5], 2 keys before it to 2 after it."""
    num_tokens, step, moved = scores.shape[-1], 0.5, []
    before = processor(scores, bias)[0, head]
    # Keys so far apart that the kernels of two do not meet.
    keys = torch.arange(16, num_tokens - 8, 8)
    past = torch.arange(num_tokens)[:, None] > keys + 2
    for source in range(scores.shape[1]):
        raised = scores.clone()
        raised[:, source, :, keys] += step
        change = (processor(raised, bias)[0, head] - before) / step
        moved.append(torch.stack([change[:, keys - at][past].mean() for at in range(-2, 3)]))
    return torch.stack(moved)


@torch.no_grad()
def lengths() -> Figure:
    """Mean score by distance of every head, relative to the end of the training window."""
    figure = Figure(figsize=(6.2, 2.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    bins = torch.arange(0, FARTHEST, 16)
    for axis, name, colour in zip(axes, ("rope", "kerple"), (COLOURS[4], COLOURS[0]), strict=True):
        for _, scores, bias in read(name, NUM_TOKENS):
            for head in (scores if bias is None else scores + bias)[0]:
                by_distance = torch.stack([head.diagonal(-apart).mean() for apart in range(FARTHEST)])
                curve = by_distance.unflatten(0, (-1, 16)).mean(-1)
                end = curve[(bins >= TRAINED_AT // 2) & (bins < TRAINED_AT)].mean()
                axis.plot(bins + 8, curve - end, color=colour, linewidth=0.9)
        axis.axvline(TRAINED_AT, color=FAINT, linestyle=":", linewidth=1)
        axis.text(TRAINED_AT + 8, 11, "never seen in training", fontsize=8, va="top")
        axis.set_title(name)
        axis.set_xlabel("keys ago")
        axis.grid(True)
    axes[0].set_ylabel("score, less that at 64 to 128")
    axes[0].set_ylim(-7, 12)
    return figure


def svg(make: Callable[[], Figure]) -> str:
    """The figure as SVG, with text as text."""
    file = io.StringIO()
    with context(LOOK):
        make().savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def encoding(name: str) -> str:
    """SVG of what an encoding adds to scores."""
    return svg(lambda: draw([name]))


def drawn() -> dict[str, str]:
    """SVG by file name."""
    return {f"{made.__name__}.svg": svg(made) for made in (kernels, lengths)}
