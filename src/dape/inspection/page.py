"""The interactive page: one self-contained HTML file, maps as 16-bit images inside it, no network."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import numpy as np

from dape.inspection.figure import TITLES, limits, shade
from dape.inspection.maps import MAPS, Inspection


class Named(NamedTuple):
    """An inspection with the run's name and its tokens as text."""

    name: str
    inspection: Inspection
    tokens: list[str]


def page(runs: Sequence[Named]) -> str:
    """The page for one or more inspections; any two can be put side by side."""
    data = {
        "titles": {name: f"{TITLES[name]}: {MAPS[name].split(': ')[-1]}" for name in MAPS},
        "runs": [_run(*run) for run in runs],
    }
    template = resources.files("dape.inspection").joinpath("page.html").read_text(encoding="utf-8")
    # A token may contain "</script>": JSON inside a page must not.
    return template.replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c"))


def _run(name: str, inspection: Inspection, tokens: list[str]) -> dict[str, object]:
    return {
        "name": name,
        "method": inspection.method,
        "tokens": tokens,
        "edges": inspection.edges.tolist(),
        "layers": [
            {
                "layer": found.layer,
                "heads": list(found.heads),
                "sink": [round(float(value), 6) for value in found.sink],
                "entropy": [round(float(value), 4) for value in found.entropy],
                "maps": {
                    map_name: [_image(map_name, values) for values in found.maps[map_name]]
                    for map_name in found.maps
                },
            }
            for found in inspection.layers
        ],
    }


def _image(name: str, values: np.ndarray) -> dict[str, object]:
    """A map as a PNG: red and green are the high and low byte between low and high, blue says visible."""
    values = shade(name, values)
    visible = np.isfinite(values)
    low, high = (float(values[visible].min()), float(values[visible].max())) if visible.any() else (0.0, 1.0)
    scaled = np.nan_to_num((values - low) / max(high - low, 1e-30)).clip(0, 1)
    number = (scaled * 65535).round().astype(np.uint16)
    pixels = np.stack([number >> 8, number & 255, visible * 255], -1).astype(np.uint8)
    norm = limits(values)
    return {
        "low": low,
        "high": high,
        "dark": float(norm.vmin or 0.0),
        "bright": float(norm.vmax or 1.0),
        "png": base64.b64encode(png(pixels)).decode(),
    }


def png(pixels: np.ndarray) -> bytes:
    """An RGB image [rows, columns, 3] of bytes as a PNG file."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
