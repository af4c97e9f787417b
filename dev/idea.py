"""`python -m dev.idea docs/idea.svg`: the idea in one figure, and the accuracies of `python -m dev.demo --quick` beside it as JSON.

From a trained recall model: scores, output of the convolution, weights one key on. Drawn without a background and in
middle shades, to be readable on light and dark pages.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.style import context

from dape.files import write_atomically
from dape.inspection.maps import Inspection, inspect
from dape.lab.environment import environment
from dape.lab.solving import GeneratedTask, answers_by_length, build_solver
from dape.models import DapeForCausalLM
from dape.tasks.base import generator_for
from dape.tasks.recall import AssociativeRecall
from dape.training import LoopSettings, fit

PAIRS, STEPS, SEED = 6, 120, 0
INK, BELOW, ABOVE, MARK = "#808890", (0.16, 0.51, 0.80), (0.90, 0.48, 0.05), "#12a57c"
LOOK = {
    "svg.hashsalt": "dape",
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
PANELS = {
    "scores": "1  scores S = q·k\none key stands out",
    "processed": "2  f(S), the 1×3 convolution\nmoves it one key on",
    "weights": "3  softmax(S + f(S))\nthe value is read",
}


def main() -> None:
    path, start, task, accuracy = Path(sys.argv[1]), time.process_time(), AssociativeRecall(), {}
    for method in ("nope", "dape1x3-nope"):
        model = build_solver(task, method, num_layers=1, hidden_size=64, num_heads=2, seed=SEED)
        training = GeneratedTask(task, model, 64, task.protocol.train_lengths, SEED)
        settings = LoopSettings(
            steps=STEPS,
            learning_rate=3e-3,
            final_learning_rate=3e-3,
            warmup_steps=0,
            weight_decay=0.0,
            seed=SEED,
        )
        with tempfile.TemporaryDirectory() as folder:
            fit(training, settings, Path(folder), progress=False).complete()
        answers = answers_by_length(task, model, task.protocol.test_lengths, 256, seed=SEED)
        accuracy[method] = {n: float(right.sum() / asked.sum()) for n, (right, asked) in answers.items()}
    assert isinstance(model, DapeForCausalLM)
    draw_idea(model, task, path)
    record = {
        "accuracy": {
            m: {n: round(share, 4) for n, share in shares.items()} for m, shares in accuracy.items()
        },
        "train_length": max(task.protocol.train_lengths),
        "steps": STEPS,
        "seed": SEED,
        "cpu_seconds": round(time.process_time() - start, 1),
        "environment": environment(1),
    }
    write_atomically(path.with_suffix(".json"), json.dumps(record, indent=1) + "\n")


def draw_idea(model: DapeForCausalLM, task: AssociativeRecall, path: Path) -> None:
    """Write the figure for one input that the model was not trained on."""
    ids = task.examples(1, 3 * PAIRS, generator_for(1, SEED, 3 * PAIRS)).ids[0].tolist()
    figure = idea_figure(inspect(model, ids), ids, num_keys=task.keys)
    content = io.BytesIO()
    with context(LOOK):
        figure.savefig(content, format=path.suffix[1:], transparent=True, dpi=200, metadata={"Date": None})
    write_atomically(path, content.getvalue())


def idea_figure(inspection: Inspection, ids: list[int], *, num_keys: int) -> Figure:
    """Three maps of one head: rows are the queries of the task, columns the pairs before them."""
    shown, asked = ids[: 2 * PAIRS], ids[2 * PAIRS :]
    matches = [shown.index(key) for key in asked]
    rows = np.arange(PAIRS)

    def crop(head: int, name: str) -> np.ndarray:
        return inspection.map(0, head, name)[2 * PAIRS :, : 2 * PAIRS]

    def distinct(head: int) -> float:
        """Mean size of the scores of matching keys, relative to all scores."""
        scores = crop(head, "scores")
        return float(np.abs(scores[rows, matches]).mean() / np.abs(scores).mean())

    head = max(inspection.layers[0].heads, key=distinct)
    with context(LOOK):
        figure = Figure(figsize=(7.4, 2.35), layout="constrained")
        axes = figure.subplots(1, len(PANELS), sharey=True)
        for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
            _map(axis, crop(head, name))
            axis.set_title(title, fontsize=10)
            axis.set_xticks(range(2 * PAIRS), [_token(token, num_keys) for token in shown])
        axes[0].set_yticks(rows, [_token(key, num_keys) for key in asked])
        axes[0].set_ylabel("query")
        axes[1].set_xlabel("key, value, key, value, …")
        for row, match in enumerate(matches):
            _mark(axes[0], match, row)
            for axis in axes[1:]:
                _mark(axis, match + 1, row)
            arrow = FancyArrowPatch(
                (match - 0.1, row), (match + 1.1, row), arrowstyle="-|>", mutation_scale=8, color=MARK, lw=1.2
            )
            axes[1].add_patch(arrow)
    return figure


def _map(axis: Axes, values: np.ndarray) -> None:
    """Blue below zero, orange above, nothing at zero."""
    strength = np.linspace(-1, 1, 255)
    colours = [(*(BELOW if x < 0 else ABOVE), abs(x)) for x in strength]
    limit = float(np.abs(values).max())
    axis.imshow(values, cmap=ListedColormap(colours), vmin=-limit, vmax=limit, aspect="equal")
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_linewidth(0.6)


def _mark(axis: Axes, column: int, row: int) -> None:
    axis.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=MARK, linewidth=1.4))


def _token(token: int, num_keys: int) -> str:
    """Spell a token: recall keys as letters, values as numbers."""
    return (
        chr(ord("A") + token)
        if token < min(26, num_keys)
        else f"{token - num_keys}"
        if token >= num_keys
        else f"k{token}"
    )


if __name__ == "__main__":
    main()
