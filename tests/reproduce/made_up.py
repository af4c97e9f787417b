"""Results as experiments leave them, made up: losses as asked for, with documents, windows and seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCUMENTS = [document for document in range(8) for _ in range(4)]
ENVIRONMENT = {
    "dape": "0.1.0",
    "commit": "abc",
    "python": "3.11",
    "torch": "2.13.0",
    "cpu": "A <processor>",
    "cores": 2,
}
# (corpus, training length, method, variant) → evaluation length → loss
Losses = dict[tuple[str, int, str, str], dict[int, float]]


def language(
    losses: Losses,
    *,
    seeds: Sequence[int] = (0,),
    noise: float = 0.01,
    spread: float = 0.0,
    difficulty: float = 0.3,
    documents: Sequence[int] = tuple(DOCUMENTS),
    views: Sequence[str] = ("equal-step",),
    **changes: Any,
) -> dict[str, Any]:
    """Windows of a document share a difficulty, alike for all; `noise` is each window's own, `spread` each seed's."""
    generator = np.random.default_rng(0)
    hard = generator.normal(0, difficulty, max(documents) + 1)[list(documents)]
    hard -= hard.mean()
    records = []
    for view in views:
        for place, ((corpus, train_length, method, variant), by_length) in enumerate(losses.items()):
            for seed in seeds:
                # Alternating, so that the seeds' mean is what was asked for.
                shift = spread * (-1) ** (seed + place) if len(seeds) > 1 else 0.0
                for length, loss in by_length.items():
                    own = generator.normal(0, noise, len(documents)) if noise else np.zeros(len(documents))
                    own -= own.mean()
                    windows = loss + shift + hard + own
                    records.append(
                        {
                            "corpus": corpus,
                            "method": method,
                            "variant": variant,
                            "train_length": train_length,
                            "eval_length": length,
                            "seed": seed,
                            "view": view,
                            "steps": 800,
                            "nll": float(windows.mean()),
                            "nll_se": float(windows.std(ddof=1) / math.sqrt(len(windows))),
                            "ppl": math.exp(windows.mean()),
                            "train_seconds": 100.0,
                            "seconds_per_step": 0.001 * train_length,
                            "windows": [round(x, 6) for x in windows.tolist()],
                        }
                    )
    corpora = dict.fromkeys(corpus for corpus, *_ in losses)
    body = {"documents": {corpus: list(documents) for corpus in corpora}, "records": records}
    return results("language", {**body, **changes})


def tasks(
    accuracy: dict[tuple[str, str], float],
    *,
    seeds: Sequence[int] = (0,),
    lengths: Sequence[int] = (50, 100),
    samples: int = 1000,
    layers: int = 1,
    **changes: Any,
) -> dict[str, Any]:
    """(task, method) → share of right answers, the same at every length."""
    records, scores = [], []
    for (task, method), share in accuracy.items():
        for seed in seeds:
            about = {"task": task, "method": method, "variant": "", "layers": layers, "seed": seed}
            records += [{**about, "length": n, "accuracy": share, "samples": samples} for n in lengths]
            scores.append({"task": task, "method": method, "seed": seed, "layers": layers, "score": share})
    return results("tasks", {"records": records, "scores": scores, **changes})


def timing(
    times: dict[tuple[str, str] | tuple[str, str, int], float],
    *,
    spread: float | None = 0.01,
    rounds: int = 4,
    base: str = "dape1x3-kerple",
    base_length: int | None = None,
) -> dict[str, Any]:
    """(size, method[, length]) → milliseconds; spread (an interquartile range) as a share of them and their ratios.

    base_length: if given, all lengths of a size are compared with the base at that one.
    """
    records = []
    for (size, method, *length), value in times.items():
        place = (size, base) if base_length is None else (size, base, base_length)
        ratio = value / times.get(place, 1.0)
        records.append(
            {
                "method": method,
                "size": size,
                "length": length[0] if length else 512,
                "batch": 1,
                "milliseconds": value,
                "spread": None if spread is None else spread * value,
                "ratio": ratio,
                "ratio_spread": None if spread is None else spread * ratio,
                "ratio_to": base,
                "rounds": rounds,
                **({} if base_length is None else {"ratio_length": base_length}),
            }
        )
    return results("timing", {"records": records})


def maps(shares: dict[tuple[str, int], Iterable[float]]) -> dict[str, Any]:
    """(method, length) → share of the weight on the first token, a head each."""
    records = [
        {
            "method": method,
            "layer": 0,
            "head": head,
            "seed": 0,
            "length": length,
            "map": "weights",
            "sink_share": share,
            "entropy": 2.0,
        }
        for (method, length), heads in shares.items()
        for head, share in enumerate(heads)
    ]
    return results("maps", {"records": records})


def results(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "experiment": "made_up",
        "paper": "made_up",
        "scale": "laptop",
        "kind": kind,
        "settings": {"seeds": [0], "steps": 800, "corpora": ["latex"]},
        "environment": ENVIRONMENT,
        "command": "dape reproduce made_up --scale laptop",
        "seconds": 4321.0,
        "complete": True,
        "missing": [],
        "failures": [],
        **body,
    }


def write(papers: Path, paper: str, experiment: str, results: dict[str, Any] | None, **about: Any) -> Path:
    """A folder papers/PAPER/EXPERIMENT with an experiment.toml and, if there are any, results."""
    folder = papers / paper / experiment
    folder.mkdir(parents=True, exist_ok=True)
    kind = results["kind"] if results else "language"
    known = {
        "title": f"About {experiment}",
        "kind": kind,
        "source": "Section 4",
        "summary": f"{experiment} shows it.",
        **about,
    }
    (folder / "experiment.toml").write_text(
        "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in known.items())
    )
    if results is not None:
        name = "results-paper.json" if results["scale"] == "paper" else "results.json"
        own = {**results, "experiment": experiment, "paper": paper}
        (folder / name).write_text(json.dumps(own))
    return folder


def write_claims(papers: Path, paper: str, claims: Sequence[dict[str, Any]]) -> Path:
    """claims.toml with these entries."""
    path = papers / paper / "claims.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for claim in claims:
        lines.append("[[claim]]")
        lines += [f"{name} = {toml(value)}" for name, value in claim.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
