"""Time of a training step by method, model size and length: each takes turns with the one it is compared with."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dape.benchmarks.model import Options, training_step
from dape.benchmarks.timing import median_and_range, summary, take_turns
from dape.reproduce.results import load_results, write_results
from dape.reproduce.rules.timing import is_base

if TYPE_CHECKING:
    from dape.reproduce.place import Place
    from dape.reproduce.runner import Plan


def body(plan: Plan, place: Place) -> dict[str, Any]:
    """A record a method, size and length; sizes that the results have already are not timed again."""
    settings, path = plan.experiment.at(place.scale), place.results(plan.experiment)
    before = load_results(path) or {"records": [], "seconds": 0.0}
    records = [row for row in before["records"] if row["rounds"] == settings["rounds"].get(row["size"])]
    seconds = before["seconds"] if records else 0.0
    failures: list[dict[str, Any]] = []
    wanted = {
        size: [(size, *shape, method) for shape in shapes(settings) for method in settings["methods"]]
        for size in settings["rounds"]
    }

    def done() -> dict[tuple[Any, ...], dict[str, Any]]:
        return {(row["size"], row["length"], row["batch"], row["method"]): row for row in records}

    def gather() -> dict[str, Any]:
        found, order = done(), [key for keys in wanted.values() for key in keys]
        missing = [", ".join(map(str, key)) for key in order if key not in found]
        return {
            "seconds": round(seconds, 1),
            "complete": not missing,
            "missing": missing,
            "failures": failures,
            "records": [found[key] for key in order if key in found],
        }

    for size, keys in wanted.items():
        if set(keys) <= set(done()):
            continue
        start = time.perf_counter()
        try:
            records = [row for row in records if row["size"] != size] + timed(size, settings)
        except (torch.OutOfMemoryError, MemoryError) as error:
            failures.append({"cell": size, "error": f"not enough memory: {error}"})
        seconds += time.perf_counter() - start
        write_results(plan.experiment, place.scale, path, gather(), jobs=place.jobs)
    return gather()


def shapes(settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Lengths and batch sizes of a step: the one given, or several lengths with the same number of tokens."""
    if "lengths" not in settings:
        return [(settings["length"], settings["batch"])]
    return [(length, max(1, settings["tokens"] // length)) for length in settings["lengths"]]


def timed(size: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two models are in memory at a time: the one timed and the one, at the first length, that all are compared with."""
    base, first = settings["base"], shapes(settings)[0]
    reference = step_on_device(base, options_of(size, first))
    records = []
    for shape in shapes(settings):
        for method in settings["methods"]:
            itself = (method, shape) == (base, first)
            step = reference if itself else step_on_device(method, options_of(size, shape))
            taken = take_turns(
                {"base": reference} | ({} if itself else {"own": step}), settings["rounds"][size]
            )
            own = taken["base" if itself else "own"]
            pace = summary(own)
            ratio, ratio_spread = median_and_range([a / b for a, b in zip(own, taken["base"], strict=True)])
            records.append(
                {
                    "method": method,
                    "size": size,
                    "length": shape[0],
                    "batch": shape[1],
                    "milliseconds": pace.milliseconds,
                    "spread": pace.spread,
                    "ratio": ratio,
                    "ratio_spread": round(ratio_spread, 5),
                    "ratio_to": base,
                    **({"ratio_length": first[0]} if "lengths" in settings else {}),
                    "rounds": settings["rounds"][size],
                }
            )
            del step
            gc.collect()
    return at_one_pace(records)


def options_of(size: str, shape: tuple[int, int]) -> Options:
    return Options(preset=size, length=shape[0], batch=shape[1])


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


def at_one_pace(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds such that their ratios are those that were measured side by side."""
    standard = next(row["milliseconds"] for row in records if is_base(row))
    for row in records:
        scale = row["ratio"] * standard / row["milliseconds"]
        row["milliseconds"] = float(f"{row['milliseconds'] * scale:.6g}")
        row["spread"] = float(f"{row['spread'] * scale:.4g}")
        row["ratio"] = round(row["ratio"], 4)
    return records
