"""Generated tasks: accuracy by length, from a folder of results where that is there, else trained here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dape.reproduce.construction import construction_records
from dape.reproduce.results import write_results
from dape.tasks import build_task
from dape.tasks.results import Results, difference
from dape.tasks.runs import TaskRun, execute_all

if TYPE_CHECKING:
    from dape.reproduce.place import Place
    from dape.reproduce.runner import Plan


def task_runs(settings: dict[str, Any]) -> list[TaskRun]:
    """Every combination of the settings, seed by seed."""
    runs = []
    for seed in settings["seeds"]:
        for task in settings["tasks"]:
            protocol = replace(build_task(task).protocol, **protocol_of(settings, task))
            runs += [
                TaskRun(task, method, seed, replace(protocol, num_layers=layers))
                for layers in settings.get("layers", [protocol.num_layers])
                for method in settings["methods"]
            ]
    return runs


def protocol_of(settings: dict[str, Any], task: str) -> dict[str, Any]:
    """What the settings change of the task's protocol; lengths are lists, or first, last and step."""
    changed = {**settings.get("protocol", {}), **settings.get("protocol_of", {}).get(task, {})}
    for name in ("train_lengths", "test_lengths"):
        if isinstance(value := changed.get(name), dict):
            changed[name] = tuple(range(value["first"], value["last"] + 1, value.get("step", 1)))
        elif value is not None:
            changed[name] = tuple(value)
    return changed


def body(plan: Plan, place: Place) -> dict[str, Any]:
    """Run what is left, and put it all into the common form."""
    settings = plan.experiment.at(place.scale)
    runs = task_runs(settings)
    results = Results(place.work / "tasks" / plan.experiment.name)
    adopted = adopt(runs, results, place, settings.get("results"))
    built = construction_records(settings["construction"]) if "construction" in settings else []

    def gather() -> dict[str, Any]:
        return {**gathered(runs, results, built), **({"adopted": adopted} if adopted else {})}

    def save(run: TaskRun, result: dict[str, Any]) -> None:
        path = place.results(plan.experiment)
        write_results(plan.experiment, place.scale, path, gather(), jobs=place.jobs)

    execute_all(runs, results, jobs=place.jobs, progress=False, on_done=save)
    return gather()


def adopt(runs: Sequence[TaskRun], results: Results, place: Place, folder: str | None) -> dict[str, Any]:
    """Take over the runs of `dape tasks run` with just these settings, instead of training them again."""
    source = place.papers.parent / folder / "results.json" if folder else None
    if source is None or not source.exists():
        return {}
    content = json.loads(source.read_text("utf-8"))
    done = {run["name"]: run for run in content["runs"]}
    here = {run["name"] for run in results.runs}
    taken = 0
    for run in runs:
        found = done.get(run.name)
        if found is None or difference(found["settings"], run.settings()):
            continue
        taken += 1
        if run.name not in here:
            rows = [row for row in content["records"] if row["run"] == run.name]
            lengths = [{"length": row["length"], "accuracy": row["accuracy"]} for row in rows]
            results.add({**found, "accuracy": lengths})
    about = {"commands": content["commands"], "environment": content["environment"]}
    return {"from": f"{folder}/results.json", "runs": taken, **about} if taken else {}


def gathered(runs: Sequence[TaskRun], results: Results, built: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = {run.name: run for run in runs}
    done = [entry for entry in results.runs if entry["name"] in wanted]
    missing = [name for name in wanted if name not in {entry["name"] for entry in done}]
    records = [
        {
            "task": row["task"],
            "method": row["method"],
            "variant": "",
            "layers": row["num_layers"],
            "seed": row["seed"],
            "length": row["length"],
            "accuracy": round(row["accuracy"], 6),
            "samples": row["samples"],
        }
        for row in results.records
        if row["run"] in wanted
    ]
    scores = [
        {
            "task": entry["task"],
            "method": entry["method"],
            "variant": "",
            "layers": entry["num_layers"],
            "seed": entry["seed"],
            "score": entry["score"],
            "train_seconds": entry["train_seconds"],
        }
        for entry in done
    ]
    return {
        "seconds": round(sum(entry["train_seconds"] for entry in done), 1),
        "complete": not missing,
        "missing": missing,
        "failures": [],
        "scores": scores,
        "records": built + records,
    }
