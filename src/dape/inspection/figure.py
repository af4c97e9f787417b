"""The paper's figure: one row per head, with columns for scores, bias, processed scores and weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dape.inspection.maps import MAPS, Inspection

TITLES = {"scores": "S", "bias": "B", "processed": "f(S, B)", "weights": "weights"}


def draw_maps(inspection: Inspection, layer: int, path: Path, *, max_heads: int = 6) -> Path:
    """Write the figure of one layer; the suffix of `path` selects the format (png, svg, pdf)."""
    figure = figure_of(inspection, layer, max_heads=max_heads)
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    figure.savefig(temporary, dpi=110)
    temporary.replace(path)
    return path


def figure_of(inspection: Inspection, layer: int, *, max_heads: int = 6) -> Figure:
    """Figure of one layer."""
    layer_maps = next(maps for maps in inspection.layers if maps.layer == layer)
    heads, names = layer_maps.heads[:max_heads], [name for name in MAPS if name in layer_maps.maps]
    size = (2.6 * len(names) + 0.4, 2.5 * len(heads) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(heads), len(names), squeeze=False)
    length = int(inspection.edges[-1])
    for row, head in enumerate(heads):
        for column, name in enumerate(names):
            axis, values = axes[row][column], inspection.map(layer, head, name)
            by_logarithm = is_logarithmic(name, values)
            values = shade(name, values)
            image = axis.imshow(
                values,
                norm=limits(values),
                extent=(0, length, length, 0),
                interpolation="nearest",
                cmap="viridis",
            )
            axis.set_xticks([0, length])
            axis.set_yticks([0, length] if column == 0 else [])
            axis.tick_params(labelsize=7)
            if row == 0:
                axis.set_title(TITLES[name] + (" (log₁₀)" if by_logarithm else ""), fontsize=10)
            if column == 0:
                axis.set_ylabel(f"head {head}", fontsize=9)
            figure.colorbar(image, ax=axis, shrink=0.8).ax.tick_params(labelsize=6)
    figure.suptitle(f"{inspection.method}, layer {layer}, {length} tokens", fontsize=11)
    return figure


def is_logarithmic(name: str, values: np.ndarray) -> bool:
    """Whether a map is drawn by its logarithm: weights, unless heads are mixed after the softmax and some are negative."""
    return name == "weights" and not (values < 0).any()


def shade(name: str, values: np.ndarray) -> np.ndarray:
    """Values to draw: of weights the logarithm, as they span many orders of magnitude."""
    return np.log10(np.maximum(values, 1e-8)) if is_logarithmic(name, values) else values


def limits(values: np.ndarray) -> Normalize:
    """Colour scale from the 1st to the 99th percentile, so that a few extremes do not hide the rest."""
    visible = values[np.isfinite(values)]
    low, high = np.percentile(visible, [1, 99]) if visible.size else (0.0, 1.0)
    return Normalize(low, high if high > low else low + 1.0)
