"""What an encoding adds to the scores of queries and keys: `python docs/draw_encodings.py kerple fire` draws it into a file.

The file's name may stand at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dape.ops.score_attention.types import bias_tile
from dape.positions import POSITIONS, Positions, build_position

HEADS, WIDTH, TOKENS = 4, 32, 48


@torch.no_grad()
def added(name: str, num_tokens: int = TOKENS) -> Tensor:
    """What the encoding adds to equal scores, [heads, T, T], NaN in the future; parameters as at the start.

    A rotation is shown by its effect on a query and a key of ones; what is added to embeddings, by the inner products of
    tokens; gates and contents are random.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = build_position(name, num_heads=HEADS, head_dim=WIDTH, hidden_size=HEADS * WIDTH)
        for parameter in encoding.parameters():
            if not parameter.any():
                # An encoding that starts at zero has nothing to show.
                torch.nn.init.normal_(parameter)
        x = torch.randn(1, num_tokens, HEADS * WIDTH)
    positions = Positions.of(num_tokens)
    ones = torch.ones(1, HEADS, num_tokens, WIDTH)
    q, k = encoding.rotate(ones, positions.queries), encoding.rotate_keys(ones, positions.keys)
    state = encoding.token_state(x)
    further = {} if state is None else {"state": state}
    if state is not None:
        q, k = encoding.turn(q, k, positions, state)
    total = q @ k.transpose(-1, -2) / WIDTH - 1
    q = x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    bias = encoding.bias(q, q, positions, scale=WIDTH**-0.5, **further)
    tile = bias_tile(bias, slice(0, num_tokens), num_tokens, num_queries=num_tokens, total_keys=num_tokens)
    if tile is not None:
        total = total + tile
    embedded = encoding.embed(torch.zeros_like(x), positions.queries)
    total = total + embedded @ embedded.transpose(-1, -2) * WIDTH**-0.5
    return total[0].masked_fill(~torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril(), torch.nan)


def draw(names: Sequence[str]) -> Figure:
    """A row an encoding, a column a head: queries downwards, keys to the right, dark where scores fall."""
    figure = Figure(figsize=(1.9 * HEADS, 1.9 * len(names) + 0.2), layout="constrained")
    grid = figure.subplots(len(names), HEADS, squeeze=False)
    for name, axes in zip(names, grid, strict=True):
        values = added(name)
        shown = values[~values.isnan()]
        low, high = float(shown.min()), max(float(shown.max()), float(shown.min()) + 1e-6)
        for head, axis in enumerate(axes):
            image = axis.imshow(
                values[head].numpy(), cmap="viridis", vmin=low, vmax=high, interpolation="none"
            )
            axis.set_title(f"{name}, head {head}", fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
        figure.colorbar(image, ax=list(axes), fraction=0.03).ax.tick_params(labelsize=7)
    return figure


if __name__ == "__main__":
    files = [argument for argument in sys.argv[1:] if "." in argument]
    names = [argument for argument in sys.argv[1:] if argument not in files]
    if not names or not set(names) <= set(POSITIONS) or len(files) > 1:
        sys.exit(
            f"usage: python docs/draw_encodings.py NAME … [FILE.svg]; the names are {', '.join(POSITIONS)}"
        )
    path = files[0] if files else f"{names[0]}.svg"
    draw(names).savefig(path)
    print(path)
