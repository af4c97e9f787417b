"""Results as experiments leave them, made up: losses as asked for, with documents, windows and seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dape.files import plain
from dape.lab.records import Results
from dape.lab.stats import median_error

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
    found = Results({})
    for view in views:
        for place, ((corpus, train_length, method, variant), by_length) in enumerate(losses.items()):
            for seed in seeds:
                # Alternating, so that the seeds' mean is what was asked for.
                shift = spread * (-1) ** (seed + place) if len(seeds) > 1 else 0.0
                rows = []
                for length, loss in by_length.items():
                    own = generator.normal(0, noise, len(documents)) if noise else np.zeros(len(documents))
                    own -= own.mean()
                    windows = loss + shift + hard + own
                    row = {"metric": "loss", "eval_length": length, "value": float(windows.mean())}
                    row["error"] = float(windows.std(ddof=1) / math.sqrt(len(windows)))
                    rows.append({**row, "windows": [round(x, 6) for x in windows.tolist()]})
                run = {"method": method, "variant": variant, "seed": seed, "corpus": corpus, "view": view}
                run |= {"train_length": train_length, "steps": 800, "train_seconds": 100.0}
                found.add({**run, "seconds_per_step": 0.001 * train_length}, rows)
    corpora = dict.fromkeys(corpus for corpus, *_ in losses)
    body = {"documents": {corpus: list(documents) for corpus in corpora}, **numbers(found)}
    return results("language", {**body, **changes})


def numbers(found: Results) -> dict[str, Any]:
    return {"runs": found["runs"], "rows": found["rows"]}


def rows_of(content: dict[str, Any], **about: Any) -> list[dict[str, Any]]:
    """The rows whose run is about all of this; they can be changed in place."""
    runs = content["runs"]
    return [
        row
        for row in content["rows"]
        if all({**runs[row["run"]], **row}.get(name) == value for name, value in about.items())
    ]


def kept(content: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The results with the runs alone that are wanted."""
    rows = [row for row in content["rows"] if wanted(content["runs"][row["run"]])]
    return {**content, "rows": rows}


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
    found = Results({})
    for (task, method), share in accuracy.items():
        for seed in seeds:
            protocol = {"train_lengths": [1, 40], "test_lengths": list(lengths)}
            run = {"corpus": task, "method": method, "layers": layers, "seed": seed}
            run["settings"] = {"protocol": protocol}
            row = {"metric": "accuracy", "value": share, "count": samples}
            rows = [{**row, "eval_length": n} for n in lengths]
            found.add(run, [*rows, {"metric": "mean_accuracy", "value": share}])
    return results("tasks", {**numbers(found), **changes})


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
    found = Results({})
    for (size, method, *length), value in times.items():
        place = (size, base) if base_length is None else (size, base, base_length)
        ratio = value / times.get(place, 1.0)
        where = {"eval_length": length[0] if length else 512, "count": rounds}
        itself = method == base and base_length in (None, where["eval_length"])
        errors = [median_error(None if spread is None else spread * x, rounds) for x in (value, ratio)]
        against = base if base_length is None else f"{base} at {base_length}"
        rows = [
            {"metric": "milliseconds", **where, "value": value, "error": errors[0]},
            {
                "metric": "ratio",
                **where,
                "value": ratio,
                "error": 0.0 if itself else errors[1],
                "against": against,
            },
        ]
        found.add({"method": method, "size": size, "batch_size": 1}, plain(rows))
    return results("timing", numbers(found))


def maps(shares: dict[tuple[str, int], Iterable[float]]) -> dict[str, Any]:
    """(method, length) → share of the weight on the first token, a head each."""
    found = Results({})
    for (method, length), heads in shares.items():
        rows = []
        for head, share in enumerate(heads):
            where = {"eval_length": length, "layer": 0, "head": head}
            rows.append({"metric": "sink_share", **where, "value": share})
            rows.append({"metric": "entropy", **where, "value": 2.0})
        found.add({"method": method, "seed": 0}, rows)
    return results("maps", numbers(found))


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
        + "[scale.laptop]\n"
    )
    if results is not None:
        name = "results-paper.json" if results["scale"] == "paper" else "results.json"
        own = {**results, "experiment": experiment, "paper": paper}
        (folder / name).write_text(json.dumps(own))
    return folder


def write_claims(papers: Path, paper: str, claims: Sequence[dict[str, Any]]) -> Path:
    """claims.py with these entries: id, text, experiment, section, closer, and `returns`, the evidence as code."""
    path = papers / paper / "claims.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["from dape.lab.rules import *", "from dape.lab.claims import claim", ""]
    for entry in claims:
        named = {name: entry[name] for name in ("scale", "closer", "ours") if name in entry}
        more = "".join(f", {name}={value!r}" for name, value in named.items())
        lines.append(f"@claim({entry['experiment']!r}, {entry.get('section', '')!r}{more})")
        lines.append(f"def {entry['id'].replace('-', '_')}(data):")
        lines += [f"    {entry['text']!r}", f"    return {entry['returns']}", ""]
    path.write_text("\n".join(lines) + "\n")
    return path
