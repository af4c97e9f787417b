"""Interactive page: index.html with thumbnails of all heads, and one tile per map, loaded on demand."""

from __future__ import annotations

import base64
import shutil
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dape.files import write_atomically
from dape.inspection.figure import TITLES, is_logarithmic, limits, shade
from dape.inspection.maps import MAPS, STATISTICS, Inspection, plain_numbers
from dape.pages import environment

# Values are stored in 12 bits: 0 where nothing is visible, 1 to 4095 from the least to the greatest of their map.
LEVELS = 4095
THUMBNAIL = 40


class Named(NamedTuple):
    """An inspection with the run's name and its tokens as text."""

    name: str
    inspection: Inspection
    tokens: list[str]


def write_maps_page(runs: Sequence[Named], folder: Path) -> Path:
    """Write index.html and tiles/ for one or more inspections; any two can be shown side by side."""
    tiles = folder / "tiles"
    shutil.rmtree(tiles, ignore_errors=True)
    tiles.mkdir(parents=True)
    described = []
    for number, (run, title) in enumerate(zip(runs, map_titles(runs), strict=True)):
        inspection = run.inspection
        layers = []
        for layer_maps in inspection.layers:
            maps = {}
            for name, values in layer_maps.maps.items():
                entries = []
                for head, drawn in zip(layer_maps.heads, values, strict=True):
                    key = f"{number}-{layer_maps.layer}-{head}-{name}"
                    entry, tile = encoded(shade(name, drawn))
                    write_atomically(tiles / f"{key}.js", f'TILE("{key}","{tile}")\n')
                    entries.append({**entry, "key": key, "logarithmic": is_logarithmic(name, drawn)})
                maps[name] = entries
            layers.append(
                {
                    "layer": layer_maps.layer,
                    "heads": list(layer_maps.heads),
                    **{name: plain_numbers(getattr(layer_maps, name), 6) for name in STATISTICS},
                    "maps": maps,
                    "kernels": [described_kernel(kernel) for kernel in layer_maps.kernels],
                }
            )
        described.append(
            {
                "name": run.name,
                "title": title,
                "tokens": run.tokens,
                "edges": inspection.edges.tolist(),
                "first": inspection.most_changed(),
                "losses": plain_numbers(inspection.losses, 3),
                "copied": inspection.copied,
                "layers": layers,
            }
        )
    data = {
        "titles": {name: f"{TITLES[name]}: {MAPS[name].split(': ')[-1]}" for name in MAPS},
        "runs": described,
    }
    page = environment("dape.inspection").get_template("page.html.j2").render(data=data)
    write_atomically(folder / "index.html", page)
    return folder / "index.html"


def described_kernel(weight: np.ndarray) -> dict[str, object]:
    """Shape [out, in, queries, keys] and values of a stage's weights."""
    return {"shape": list(weight.shape), "values": np.round(weight.ravel().astype(float), 3).tolist()}


def map_titles(runs: Sequence[Named]) -> list[str]:
    """Titles of runs: method and length, and the folder's name if a method occurs twice."""
    plain = [f"{run.inspection.method}, {len(run.tokens)} tokens" for run in runs]
    often = Counter(plain)
    return [
        f"{title} ({run.name})" if often[title] > 1 else title for run, title in zip(runs, plain, strict=True)
    ]


def encoded(values: np.ndarray) -> tuple[dict[str, object], str]:
    """Description of a map [P, P] in the page, and its tile: the lower triangle, since no query sees later keys.

    A tile is the high eight bits of every value, then the low four, two in a byte; deflated, in base 64.
    """
    visible = np.isfinite(values)
    low, high = (float(values[visible].min()), float(values[visible].max())) if visible.any() else (0.0, 1.0)
    norm = limits(values)
    scaled = np.nan_to_num((values - low) / max(high - low, 1e-30)).clip(0, 1)
    stored = np.where(visible, 1 + (scaled * (LEVELS - 1)).round(), 0).astype(np.uint16)
    numbers = stored[np.tril_indices(len(values))]
    small = np.append(numbers & 15, np.zeros(len(numbers) % 2, np.uint16))
    raw = (numbers >> 4).astype(np.uint8).tobytes() + (small[::2] << 4 | small[1::2]).astype(
        np.uint8
    ).tobytes()
    entry = {
        "low": low,
        "high": high,
        "dark": float(norm.vmin or 0.0),
        "bright": float(norm.vmax or 1.0),
        "thumb": base64.b64encode(thumbnail(values, low, high)).decode(),
    }
    return entry, base64.b64encode(zlib.compress(raw, 9)).decode()


def thumbnail(values: np.ndarray, low: float, high: float) -> bytes:
    """The map in at most 40 × 40 bytes: 0 where nothing is visible, 1 to 255 from low to high."""
    size = min(THUMBNAIL, len(values))
    edges = np.linspace(0, len(values), size + 1).round().astype(int)[:-1]
    visible = np.isfinite(values)

    def pooled(x: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(x, edges, axis=0), edges, axis=1)

    count = pooled(visible.astype(float))
    mean = pooled(np.where(visible, values, 0.0).astype(float)) / np.maximum(count, 1)
    scaled = ((mean - low) / max(high - low, 1e-30)).clip(0, 1)
    return np.where(count > 0, 1 + np.round(254 * scaled), 0).astype(np.uint8).tobytes()
