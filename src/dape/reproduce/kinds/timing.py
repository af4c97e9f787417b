"""Time of a training step by method and model size: each method takes turns with the one it is compared with."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dape.benchmarks.model import Options, training_step
from dape.benchmarks.timing import median_and_range, summary, take_turns
from dape.reproduce.results import load_results, write_results

if TYPE_CHECKING:
    from dape.reproduce.place import Place
    from dape.reproduce.runner import Plan


def body(plan: Plan, place: Place) -> dict[str, Any]:
    """A record a method and size; sizes that the results have already are not timed again."""
    settings, path = plan.experiment.at(place.scale), place.results(plan.experiment)
    before = load_results(path) or {"records": [], "seconds": 0.0}
    records = [row for row in before["records"] if row["rounds"] == settings["rounds"].get(row["size"])]
    seconds = before["seconds"] if records else 0.0
    failures: list[dict[str, Any]] = []
    wanted = [(size, method) for size in settings["rounds"] for method in settings["methods"]]

    def gather() -> dict[str, Any]:
        done = {(row["size"], row["method"]): row for row in records}
        missing = [f"{size}, {method}" for size, method in wanted if (size, method) not in done]
        return {
            "seconds": round(seconds, 1),
            "complete": not missing,
            "missing": missing,
            "failures": failures,
            "records": [done[place] for place in wanted if place in done],
        }

    for size in settings["rounds"]:
        if {(size, method) for method in settings["methods"]} <= {(r["size"], r["method"]) for r in records}:
            continue
        start = time.perf_counter()
        try:
            records = [row for row in records if row["size"] != size] + timed(size, settings)
        except (torch.OutOfMemoryError, MemoryError) as error:
            failures.append({"cell": size, "error": f"not enough memory: {error}"})
        seconds += time.perf_counter() - start
        write_results(plan.experiment, place.scale, path, gather(), jobs=place.jobs)
    return gather()


def timed(size: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two models are in memory at a time, the method's and the one's that all are compared with."""
    base = settings["base"]
    options = Options(preset=size, length=settings["length"], batch=settings["batch"])
    reference = step_on_device(base, options)
    records = []
    for method in settings["methods"]:
        candidates = {base: reference}
        if method != base:
            candidates[method] = step_on_device(method, options)
        taken = take_turns(candidates, settings["rounds"][size])
        own = summary(taken[method])
        ratio, ratio_spread = median_and_range(
            [a / b for a, b in zip(taken[method], taken[base], strict=True)]
        )
        records.append(
            {
                "method": method,
                "size": size,
                "length": settings["length"],
                "batch": settings["batch"],
                "milliseconds": own.milliseconds,
                "spread": own.spread,
                "ratio": ratio,
                "ratio_spread": round(ratio_spread, 5),
                "ratio_to": base,
                "rounds": settings["rounds"][size],
            }
        )
        del candidates
        gc.collect()
    return at_one_pace(records, base)


def step_on_device(method: str, options: Options) -> Callable[[], None]:
    """A step on the GPU if there is one, waited for."""
    if not torch.cuda.is_available():
        return training_step(method, options)
    with torch.device("cuda"):
        step = training_step(method, options)

    def waited() -> None:
        step()
        torch.cuda.synchronize()

    return waited


def at_one_pace(records: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Milliseconds such that their ratios are those that were measured side by side."""
    standard = next(row["milliseconds"] for row in records if row["method"] == base)
    for row in records:
        scale = row["ratio"] * standard / row["milliseconds"]
        row["milliseconds"] = float(f"{row['milliseconds'] * scale:.6g}")
        row["spread"] = float(f"{row['spread'] * scale:.4g}")
        row["ratio"] = round(row["ratio"], 4)
    return records
