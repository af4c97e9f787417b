"""Generated tasks: accuracy by length of models that were trained on short inputs."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dape.files import read_json, write_atomically
from dape.lab.accuracies import Accuracies, figure, tables
from dape.lab.environment import environment
from dape.lab.folders import Folder
from dape.lab.kinds import Kind, Plan
from dape.lab.paper import Paper
from dape.lab.records import STEP, Results, find_results
from dape.lab.runner import Job
from dape.lab.tables import Table
from dape.methods import parse_method
from dape.positions import POSITIONS
from dape.tasks.base import Protocol, Task, generator_for
from dape.tasks.registry import build_task


@dataclass(frozen=True)
class TaskRun:
    """One training and its test. `protocol` is the task's own with the user's changes."""

    task: str
    method: str
    seed: int
    protocol: Protocol
    options: dict[str, Any] = field(default_factory=dict)
    position_range: int | None = None

    view = STEP
    wave = ()

    def __post_init__(self) -> None:
        task, protocol = self.build(), self.protocol
        encoding = POSITIONS[parse_method(self.method).position]
        if task.model == "encoder" and encoding.direction == "causal":
            raise ValueError(
                f'"{self.method}" has no meaning where the future is visible, as in "{self.task}"'
            )
        if not protocol.train_lengths or not protocol.test_lengths:
            raise ValueError("there must be at least one length to train and one to test")
        # An invalid length is reported before hours of training.
        lengths = {*protocol.train_lengths, *protocol.test_lengths}
        num_tokens = max(
            task.examples(1, length, generator_for(0)).ids.shape[1] for length in sorted(lengths)
        )
        if self.position_range is not None and self.position_range < num_tokens:
            raise ValueError(
                f'--randomized-positions {self.position_range} is too few for "{self.task}": at its longest length '
                f"input and output take {num_tokens} positions, so give at least {num_tokens}"
            )

    def build(self) -> Task:
        return build_task(self.task, **self.options)

    @property
    def id(self) -> str:
        """Identifier, unique within a folder."""
        options = "".join(f"-{name}={value}" for name, value in sorted(self.options.items()))
        positions = f"-range{self.position_range}" if self.position_range else ""
        layers = self.protocol.num_layers
        return f"{self.task}{options}-{self.method}{positions}-layers{layers}-seed{self.seed}"

    @property
    def label(self) -> str:
        return self.id

    def settings(self) -> dict[str, Any]:
        """All settings that determine the result, as JSON data."""
        return json.loads(json.dumps({**asdict(self), "protocol": asdict(self.protocol)}))


def run_from(settings: dict[str, Any]) -> TaskRun:
    """Build a run from its settings."""
    lengths = {name: tuple(settings["protocol"][name]) for name in ("train_lengths", "test_lengths")}
    return TaskRun(**{**settings, "protocol": Protocol(**{**settings["protocol"], **lengths})})


def grid(settings: dict[str, Any]) -> list[TaskRun]:
    """Every combination of an experiment's settings, seed by seed; a task may have seeds of its own."""
    seeds_of = {task: settings.get("seeds_of", {}).get(task, settings["seeds"]) for task in settings["tasks"]}
    runs = []
    for seed in sorted({seed for seeds in seeds_of.values() for seed in seeds}):
        for task in (task for task, seeds in seeds_of.items() if seed in seeds):
            protocol = replace(build_task(task).protocol, **protocol_of(settings, task))
            runs += [
                TaskRun(task, method, seed, replace(protocol, num_layers=layers))
                for layers in settings.get("layers", [protocol.num_layers])
                for method in settings["methods"]
            ]
    return runs


def protocol_of(settings: dict[str, Any], task: str) -> dict[str, Any]:
    """Changes of the task's protocol by the settings; lengths are lists, or first, last and step."""
    changed = {**settings.get("protocol", {}), **settings.get("protocol_of", {}).get(task, {})}
    for name in ("train_lengths", "test_lengths"):
        if isinstance(value := changed.get(name), dict):
            changed[name] = tuple(range(value["first"], value["last"] + 1, value.get("step", 1)))
        elif value is not None:
            changed[name] = tuple(value)
    return changed


class Tasks(Kind):
    """Trainings on generated tasks. The results themselves record finished runs: no model is kept.

    settings: `runs` (a list of TaskRun, to which the folder's others are kept), or tasks, methods, seeds … of a grid;
    `protocol_of` and `seeds_of` by task take precedence.
    """

    scale_keys = frozenset(
        [
            "tasks",
            "methods",
            "layers",
            "seeds",
            "seeds_of",
            "protocol",
            "protocol_of",
            "construction",
            "note",
        ]
    )

    def items(self, plan: Plan) -> list[TaskRun]:
        return plan.settings["runs"] if "runs" in plan.settings else grid(plan.settings)

    def current(self, plan: Plan) -> Results:
        """Results so far."""
        if "current" not in plan.state:
            found = find_results(plan.workspace.results(plan.experiment))
            plan.state["current"] = with_environments(found) if found else Results({"kind": "tasks"})
        return plan.state["current"]

    def is_done(self, plan: Plan, item: TaskRun) -> bool:
        """Whether the run is finished; in the user's own folder, one of its name with other settings is an error."""
        for run in self.current(plan)["runs"]:
            if run.get("name") == item.id and "settings" in run:
                changed = differences(run["settings"], item.settings())
                if changed and "runs" in plan.settings:
                    setting, (before, now) = changed[0]
                    raise ValueError(
                        f'{plan.workspace.results(plan.experiment)} has "{item.id}" with {setting} {before}, not '
                        f"{now}: use another --out"
                    )
                return not changed
        return False

    def job(self, plan: Plan, item: TaskRun, *, must_exist: bool = True) -> Job:
        own = "runs" in plan.settings
        folder = plan.workspace.work / ("unfinished" if own else f"tasks/{plan.experiment.name}")
        result = folder / "evaluations" / f"{item.id}.json"
        spec = {"settings": item.settings()}
        return Job(item.id, item.label, "tasks", spec, folder, result, item.protocol.steps)

    def work(self, spec: dict[str, Any]) -> None:
        content = train_and_test(run_from(spec["settings"]), Path(spec["run"]))
        content["run"]["environment"] = environment(spec["jobs"])
        write_atomically(spec["result"], json.dumps(content))

    def finished(self, plan: Plan, job: Job) -> None:
        results, content = self.current(plan), read_json(job.result)
        stale = [number for number, run in enumerate(results["runs"]) if run.get("name") == job.name]
        if stale:
            drop(results, stale)
        results.add(content["run"], content["rows"])
        shutil.rmtree(job.run, ignore_errors=True)

    def summary(self, job: Job) -> str:
        content = read_json(job.result)
        mean = [row["value"] for row in content["rows"] if row["metric"] == "mean_accuracy"]
        said = f"accuracy {100 * mean[0]:.1f} %, " if mean else ""
        run = content["run"]
        return f"{said}{run['train_seconds']:.0f} s of training, {run['test_seconds']:.0f} s of tests"

    def collect(self, plan: Plan) -> dict[str, Any]:
        current, settings = self.current(plan), plan.settings
        wanted = [item.id for item in plan.items]
        number_of = {run.get("name"): number for number, run in enumerate(current["runs"])}
        done = [name for name in wanted if name in number_of]
        everything = list(range(len(current["runs"])))
        order = everything if "runs" in settings else [number_of[name] for name in done]
        results = Results({"kind": "tasks"})
        if "construction" in settings:
            from dape.lab.kinds.construction import construction_runs

            for run, rows in construction_runs(settings["construction"]):
                results.add(run, rows)
        rows_of = defaultdict(list)
        for row in current["rows"]:
            rows_of[row["run"]].append({name: value for name, value in row.items() if name != "run"})
        for number in order:
            results.add(current["runs"][number], rows_of[number])
        seconds = sum(current["runs"][number]["train_seconds"] for number in order)
        return {
            "seconds": round(seconds, 1),
            # Runs with earlier settings stay until those that replace them are done.
            "missing": [item.id for item in plan.items if not self.is_done(plan, item)],
            "failures": list(plan.failures.values()),
            "runs": results["runs"],
            "rows": results["rows"],
        }

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        return tables(Accuracies(folder.best, folder.seed_variance), folder.name, paper)

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        return figure(Accuracies(folder.best, folder.seed_variance), folder.name, paper)


def train_and_test(run: TaskRun, folder: Path) -> dict[str, Any]:
    """Train or resume in the folder, and test; returns the run and its rows."""
    from dape.lab.solving import GeneratedTask, answers_by_length, build_model
    from dape.training import LoopSettings, fit

    task, protocol = run.build(), run.protocol
    sizes = {name: getattr(protocol, name) for name in ("num_layers", "hidden_size", "num_heads")}
    model = build_model(task, run.method, **sizes, seed=run.seed)
    settings = LoopSettings(
        steps=protocol.steps,
        learning_rate=protocol.learning_rate,
        final_learning_rate=protocol.learning_rate,
        warmup_steps=0,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        clip=protocol.clip,
        seed=run.seed,
        checkpoint_every=max(100, min(5000, protocol.steps // 10)),
        keep_checkpoints=1,
        # Lengths differ from step to step, and with them the loss: only an enormous loss is a failure.
        explosion=1000.0,
    )
    about = {"task": run.task, "method": run.method, **sizes, **run.options}
    training = GeneratedTask(
        task, model, protocol.batch_size, protocol.train_lengths, run.seed, run.position_range, about
    )
    fitted = fit(training, settings, folder, progress=False).complete()
    start = time.perf_counter()
    answers = answers_by_length(
        task, model, protocol.test_lengths, protocol.samples, position_range=run.position_range
    )
    rows: list[dict[str, Any]] = []
    for length, (right, asked) in answers.items():
        row = {"metric": "accuracy", "eval_length": length, "value": float(right.sum() / asked.sum())}
        # Samples are the same for every method, so that methods can be paired by their answers.
        rows.append({**row, "count": len(asked), "windows": right.tolist(), "tokens": asked.tolist()})
    beyond = [row["value"] for row in rows if row["eval_length"] > max(protocol.train_lengths)]
    if beyond:
        rows.append({"metric": "mean_accuracy", "value": sum(beyond) / len(beyond)})
    return {
        "run": {
            "name": run.id,
            "corpus": run.task,
            "method": run.method,
            "seed": run.seed,
            "layers": protocol.num_layers,
            "train_seconds": round(fitted.seconds, 2),
            "test_seconds": round(time.perf_counter() - start, 2),
            "train_loss": fitted.final_loss,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "settings": run.settings(),
        },
        "rows": rows,
    }


def with_environments(results: Results) -> Results:
    """The results, in which runs without an environment of their own have that of the file."""
    for run in results["runs"]:
        run.setdefault("environment", results["environment"])
    return results


def drop(results: Results, numbers: Sequence[int]) -> None:
    """Remove runs, with their rows."""
    kept = [number for number in range(len(results["runs"])) if number not in numbers]
    index = {number: index for index, number in enumerate(kept)}
    results.content["runs"] = [results["runs"][number] for number in kept]
    results.content["rows"] = [
        {**row, "run": index[row["run"]]} for row in results["rows"] if row["run"] in index
    ]


def differences(before: Any, now: Any, path: str = "") -> list[tuple[str, tuple[Any, Any]]]:
    """Where two JSON values differ: dotted names and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            entry
            for name in {**before, **now}
            for entry in differences(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
        ]
    return [] if before == now else [(path, (before, now))]
