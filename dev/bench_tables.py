"""Tables of the guide from records of `dape bench`: `python -m papers report` writes them into docs/.

results/bench/programs: `dape bench attention --processor NAME --json FILE`; docs/methods.json: `python -m dev.methods --json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev.methods import COLUMNS

ROOT = Path(__file__).parents[1]
BOTH = "forward+backward"


def records(path: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / path).read_text("utf-8"))


def by_processor() -> dict[str, dict[tuple[str, str, int], dict[str, Any]]]:
    """Records of each processor, by backend, pass and length."""
    found: dict[str, dict[tuple[str, str, int], dict[str, Any]]] = {}
    for file in sorted((ROOT / "results/bench/programs").glob("*.json")):
        for r in records(str(file)):
            found.setdefault(r["processor"], {})[r["backend"], r["pass"], r["length"]] = r
    return found


def programs() -> tuple[list[str], list[list[str]]]:
    """Every processor, fastest first."""
    rows, found = [], by_processor()
    for name in sorted(found, key=lambda name: found[name]["cpu", BOTH, 2048]["milliseconds"]):
        cells = [found[name]["cpu", step, 2048] for step in ("forward", BOTH)]
        times = " / ".join(f"{cell['milliseconds']:,.0f}" for cell in cells)
        ratios = " / ".join(f"{cell['ratio_to_sdpa']:.2f}" for cell in cells)
        memory = found[name]["cpu", BOTH, 8192]["peak_extra_mb"]
        rows.append([f"`{name}`", times, ratios, f"{memory:.0f}"])
    return ["processor", "ms", "× SDPA", "MB, 8192 tokens"], rows


def trainable_bias() -> tuple[list[str], list[list[str]]]:
    """Plain attention with a bias by distance, beside PyTorch's own."""
    rows, found = [], by_processor()["plain"]
    for length in sorted({length for _, step, length in found if step == BOTH and length < 8192}):
        ours, dense, plain = (
            found[backend, BOTH, length]["milliseconds"] for backend in ("cpu", "sdpa with bias", "sdpa")
        )
        times = [f"{number:,.0f}" for number in (ours, dense, plain)]
        rows.append([str(length), *times, f"{dense / ours:.1f} ×", f"{ours / plain:.2f}"])
    heads = "tokens", "ours, ms", "SDPA with the bias", "SDPA without a bias"
    return [*heads, "faster than with", "share of without"], rows


def methods() -> tuple[list[str], list[list[str]]]:
    found = records("docs/methods.json")
    # Without --tasks no method reads long.
    columns = [column for column in COLUMNS if any(record[column[1]] != "" for record in found)]
    rows = [[format(record[key], form) for _, key, form in columns] for record in found]
    return [heading for heading, *_ in columns], [[f"`{name}`", *cells] for name, *cells in rows]


TABLES = {"programs": programs, "trainable-bias": trainable_bias, "methods": methods}
