"""Generated tasks: accuracy by length of models that were trained on short inputs."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.style import context

from dape.evaluate.inference import Estimate, VariancePrior, crossed_mean
from dape.files import read_json, write_atomically
from dape.lab.figures import LEGEND, LOOK, PANEL, canvas, errorbar, finish, legend, save, styles
from dape.lab.folders import Folder
from dape.lab.kinds import Kind, Plan
from dape.lab.paper import Paper
from dape.lab.records import STEP, Results, find_results, load_results
from dape.lab.report import render
from dape.lab.runner import Job
from dape.lab.stats import ERRORS, UNKNOWN, SeedVariance, of_scores, over_seeds, setting_of, share_error
from dape.lab.tables import OURS, PAPER, Cell, Row, Table, chosen, joined, plain
from dape.methods import parse_method
from dape.positions import POSITIONS
from dape.tasks.base import Protocol, Task, generator_for
from dape.tasks.registry import TASKS, build_task

# With more tasks than this, tasks are rows and methods columns; with more columns than that, errors are left out.
FEW_TASKS, FEW_COLUMNS = 3, 6
# Lengths that a table shows; results.json has all, and the plot.
COLUMNS = 8


@dataclass(frozen=True)
class TaskRun:
    """One training and its test. `protocol` is the task's own with what the user changed."""

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
        # Whatever is wrong with a length is said before hours of training.
        lengths = {*protocol.train_lengths, *protocol.test_lengths}
        places = max(task.examples(1, length, generator_for(0)).ids.shape[1] for length in sorted(lengths))
        if self.position_range is not None and self.position_range < places:
            raise ValueError(
                f'--randomized-positions {self.position_range} is too few for "{self.task}": at its longest length '
                f"input and output take {places} places, so give at least {places}"
            )

    def build(self) -> Task:
        return build_task(self.task, **self.options)

    @property
    def id(self) -> str:
        """Different for runs that a folder holds side by side."""
        options = "".join(f"-{name}={value}" for name, value in sorted(self.options.items()))
        positions = f"-range{self.position_range}" if self.position_range else ""
        layers = self.protocol.num_layers
        return f"{self.task}{options}-{self.method}{positions}-layers{layers}-seed{self.seed}"

    @property
    def label(self) -> str:
        return self.id

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, as JSON has it."""
        return json.loads(json.dumps({**asdict(self), "protocol": asdict(self.protocol)}))


def run_from(settings: dict[str, Any]) -> TaskRun:
    """The run that these settings are of."""
    lengths = {name: tuple(settings["protocol"][name]) for name in ("train_lengths", "test_lengths")}
    return TaskRun(**{**settings, "protocol": Protocol(**{**settings["protocol"], **lengths})})


def grid(settings: dict[str, Any]) -> list[TaskRun]:
    """Every combination of an experiment's settings, seed by seed."""
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


class Tasks(Kind):
    """Trainings on generated tasks. What is done is told by the results themselves: no model is kept.

    settings: `runs` (a list of TaskRun, to which the folder's others are kept), or tasks, methods, seeds … of a grid.
    """

    scale_keys = frozenset(
        {"tasks", "methods", "layers", "seeds", "protocol", "protocol_of", "results", "construction", "note"}
    )

    def items(self, plan: Plan) -> list[TaskRun]:
        return plan.settings["runs"] if "runs" in plan.settings else grid(plan.settings)

    def found(self, plan: Plan) -> Results:
        """What is known so far: the results that are there, and runs taken over from another folder."""
        if "found" not in plan.state:
            plan.state["found"] = find_results(plan.workspace.results(plan.experiment)) or Results(
                {"kind": "tasks"}
            )
            plan.state["adopted"] = adopt(plan, plan.state["found"])
        return plan.state["found"]

    def is_done(self, plan: Plan, item: TaskRun) -> bool:
        """Whether the run is there; in the user's own folder, one of its name with other settings is an error."""
        for run in self.found(plan)["runs"]:
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
        result = folder / "scores" / f"{item.id}.json"
        spec = {"settings": item.settings()}
        return Job(item.id, item.label, "tasks", spec, folder, result, item.protocol.steps)

    def work(self, spec: dict[str, Any]) -> None:
        content = train_and_test(run_from(spec["settings"]), Path(spec["run"]))
        write_atomically(spec["result"], json.dumps(content))

    def finished(self, plan: Plan, job: Job) -> None:
        found, content = self.found(plan), read_json(job.result)
        stale = [number for number, run in enumerate(found["runs"]) if run.get("name") == job.name]
        if stale:
            drop(found, stale)
        found.add(content["run"], content["rows"])
        shutil.rmtree(job.run, ignore_errors=True)

    def summary(self, job: Job) -> str:
        content = read_json(job.result)
        score = [row["value"] for row in content["rows"] if row["metric"] == "score"]
        said = f"score {100 * score[0]:.1f} %, " if score else ""
        run = content["run"]
        return f"{said}{run['train_seconds']:.0f} s of training, {run['test_seconds']:.0f} s of tests"

    def collect(self, plan: Plan) -> dict[str, Any]:
        found, settings = self.found(plan), plan.settings
        wanted = [item.id for item in plan.items]
        places = {run.get("name"): number for number, run in enumerate(found["runs"])}
        done = [name for name in wanted if name in places]
        everything = list(range(len(found["runs"])))
        order = everything if "runs" in settings else [places[name] for name in done]
        results = Results({"kind": "tasks"})
        if "construction" in settings:
            from dape.lab.kinds.construction import construction_runs

            for run, rows in construction_runs(settings["construction"]):
                results.add(run, rows)
        rows_of = defaultdict(list)
        for row in found["rows"]:
            rows_of[row["run"]].append({name: value for name, value in row.items() if name != "run"})
        for number in order:
            results.add(found["runs"][number], rows_of[number])
        adopted = plan.state["adopted"]
        seconds = sum(found["runs"][number]["train_seconds"] for number in order)
        return {
            "seconds": round(seconds, 1),
            "missing": [name for name in wanted if name not in places],
            "failures": list(plan.failures.values()),
            **({"adopted": adopted} if adopted else {}),
            "runs": results["runs"],
            "rows": results["rows"],
        }

    def tables(self, folder: Folder, paper: Paper) -> list[Table]:
        """Accuracy: tasks by methods if there are many tasks, else methods by lengths, a table a task."""
        data = Accuracies(folder.best)
        if not data.rows:
            printed = paper.shown_with(folder.name, "accuracy")
            names = list(dict.fromkeys(n.get("task") for n in printed))
            methods = list(dict.fromkeys(n.get("method") for n in printed))
            return [_task_rows(data, names, methods, 0, paper)] if printed else []
        if len(data.tasks()) <= FEW_TASKS:
            return [_by_length(data, task, layers) for task in data.tasks() for layers in data.layers(task)]
        depths = sorted({solver.layers for solver in data.rows})
        return [
            _task_rows(data, data.tasks(), _methods(data, layers), layers, paper, f", {layers} layers")
            for layers in depths
        ]

    def figure(self, folder: Folder, paper: Paper) -> Figure | None:
        """Accuracy by length for few tasks; for many, a field of tasks × methods, ours and the paper's."""
        data = Accuracies(folder.best)
        if data.rows and len(data.tasks()) <= FEW_TASKS:
            return by_length_figure(data)
        fields = []
        for layers in sorted({solver.layers for solver in data.rows}):
            ours = {(s.task, s.label): data.accuracy(s).value for s in data.rows if s.layers == layers}
            fields.append((f"ours, {layers} layers", ours))
        names = set(data.tasks())
        theirs = {
            (n.get("task"), n.get("method")): n.value / 100
            for n in paper.shown_with(folder.name, "accuracy")
            if not names or n.get("task") in names
        }
        if theirs:
            fields.append(("the paper", theirs))
        return fields_figure(fields) if fields else None


def train_and_test(run: TaskRun, folder: Path) -> dict[str, Any]:
    """Train (or go on training) in the folder, and test; the run and its rows."""
    from dape.lab.solving import GeneratedTask, answers_by_length, build_model
    from dape.training import LoopSettings, TrainingStopped, fit

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
        # Lengths differ from step to step, and with them the loss: only the enormous is a failure.
        explosion=1000.0,
    )
    training = GeneratedTask(
        task, model, protocol.batch_size, protocol.train_lengths, run.seed, run.position_range
    )
    fitted = fit(training, settings, folder, progress=False)
    if fitted.stopped_early:
        raise TrainingStopped(f"{fitted.stopped_early} after step {fitted.steps} of {protocol.steps}")
    start = time.perf_counter()
    answers = answers_by_length(
        task, model, protocol.test_lengths, protocol.samples, position_range=run.position_range
    )
    rows: list[dict[str, Any]] = []
    for length, (right, asked) in answers.items():
        row = {"metric": "accuracy", "eval_length": length, "value": float(right.sum() / asked.sum())}
        # Samples are the same for every method: by their answers methods are paired.
        rows.append({**row, "count": len(asked), "windows": right.tolist(), "tokens": asked.tolist()})
    beyond = [row["value"] for row in rows if row["eval_length"] > max(protocol.train_lengths)]
    if beyond:
        rows.append({"metric": "score", "value": sum(beyond) / len(beyond)})
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


def adopt(plan: Plan, found: Results) -> dict[str, Any]:
    """Take over the runs of `dape tasks run` with just these settings, instead of training them again."""
    folder, papers = plan.settings.get("results"), plan.workspace.papers
    source = papers.parent / folder / "results.json" if folder and papers else None
    if source is None or not source.exists():
        return {}
    other = load_results(source)
    done = {run["name"]: number for number, run in enumerate(other["runs"])}
    taken = 0
    for item in plan.items:
        number = done.get(item.id)
        if number is None or differences(other["runs"][number]["settings"], item.settings()):
            continue
        taken += 1
        drop(found, [index for index, run in enumerate(found["runs"]) if run.get("name") == item.id])
        rows = [{k: v for k, v in row.items() if k != "run"} for row in other["rows"] if row["run"] == number]
        found.add(other["runs"][number], rows)
    about = {"commands": other.get("commands", []), "environment": other["environment"]}
    return {"from": f"{folder}/results.json", "runs": taken, **about} if taken else {}


def drop(results: Results, numbers: Sequence[int]) -> None:
    """Leave out runs, with their rows."""
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


# --- what results say


class Solver(NamedTuple):
    """A method on a task, over its seeds."""

    task: str
    layers: int
    method: str
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method


class Accuracies:
    """Accuracies by solver and seed: rows, a length each, and scores, the mean beyond the training length.

    seeds: what is known of the variance between them elsewhere.
    """

    def __init__(self, results: Results | None, seeds: SeedVariance | None = None) -> None:
        self.results, self.known = results or Results({"kind": "tasks"}), seeds or SeedVariance()
        self.rows: dict[Solver, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        self.scores: dict[tuple[Solver, int], float] = {}
        for row in self.results.lines():
            solver = Solver(row["corpus"], row.get("layers") or 0, row["method"], variant_of(row))
            if row["metric"] == "accuracy":
                self.rows[solver][row["seed"]].append(row)
            elif row["metric"] == "score":
                self.scores[solver, row["seed"]] = row["value"]

    def tasks(self) -> list[str]:
        return list(dict.fromkeys(solver.task for solver in self.rows))

    def layers(self, task: str) -> list[int]:
        return sorted({solver.layers for solver in self.rows if solver.task == task})

    def lengths(self, solver: Solver) -> list[int]:
        rows = self.rows.get(solver, {})
        return sorted({row["eval_length"] for seed in rows.values() for row in seed})

    def accuracy(self, solver: Solver, lengths: Sequence[int] | None = None) -> Estimate:
        """Over the lengths (or the score, if no lengths are asked for), and over seeds; NaN if there is none."""
        found = [self._of_seed(solver, seed, lengths) for seed in self.rows.get(solver, {})]
        known = [entry for entry in found if entry is not None]
        if not known:
            return UNKNOWN
        prior = self._prior(solver)
        return over_seeds((value for value, _ in known), (error for _, error in known), prior=prior)

    def _of_seed(
        self, solver: Solver, seed: int, lengths: Sequence[int] | None = None
    ) -> tuple[float, float] | None:
        rows = self.rows[solver][seed]
        found = [row for row in rows if lengths is None or row["eval_length"] in lengths]
        if not found:
            return None
        mean = sum(row["value"] for row in found) / len(found)
        squares = sum(share_error(row["value"], row.get("count") or 1) ** 2 for row in found)
        score = self.scores.get((solver, seed), mean) if lengths is None else mean
        return score, math.sqrt(squares) / len(found)

    def difference(self, one: Solver, other: Solver) -> Estimate:
        """Accuracy of one less that of the other, on the same samples where answers are known, over common seeds."""
        seeds = sorted(self.rows[one].keys() & self.rows[other].keys())
        if not seeds:
            return UNKNOWN
        prior, samples = self._prior(one, other), [self._samples(one, other, seed) for seed in seeds]
        paired = [found for found in samples if found is not None]
        if len(paired) == len(seeds):
            return crossed_mean(np.array([gaps for gaps, _ in paired]), np.array(paired[0][1]), seeds=prior)
        pairs = [(self._of_seed(one, seed), self._of_seed(other, seed)) for seed in seeds]
        values = [a[0] - b[0] for a, b in pairs if a and b]
        return over_seeds(values, [math.hypot(a[1], b[1]) for a, b in pairs if a and b], prior=prior)

    def _samples(self, one: Solver, other: Solver, seed: int) -> tuple[list[float], list[float]] | None:
        """Differences sample by sample, every length counting the same, and weights; None where answers were not kept."""
        gaps: list[float] = []
        weights: list[float] = []
        for a, b in zip(*(_beyond(self.rows[solver][seed]) for solver in (one, other)), strict=False):
            if a["eval_length"] != b["eval_length"] or not a.get("tokens") or a["tokens"] != b.get("tokens"):
                return None
            total = sum(a["tokens"])
            gaps += [(x - y) / total for x, y in zip(a["windows"], b["windows"], strict=True)]
            weights += [asked / total for asked in a["tokens"]]
        return (gaps, weights) if gaps else None

    def _prior(self, *solvers: Solver) -> VariancePrior | None:
        row = next(iter(next(iter(self.rows[solvers[0]].values()))))
        kinds = of_scores(solvers[0].task, *(solver.method for solver in solvers))
        return self.known.prior(kinds, 1.0, setting_of(self.results, row))


def variant_of(row: dict[str, Any]) -> str:
    """What sets a run apart from others of its method: its own name for it, or options of the task and positions."""
    settings = row.get("settings") or {}
    words = [f"{name}={value}" for name, value in (settings.get("options") or {}).items()]
    words += [f"positions from {places}"] if (places := settings.get("position_range")) else []
    return row["variant"] or ", ".join(words)


def _beyond(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of their lengths; those of lengths beyond the training's, if that is known."""
    trained = ((rows[0].get("settings") or {}).get("protocol") or {}).get("train_lengths") or [0]
    return sorted((r for r in rows if r["eval_length"] > max(trained)), key=lambda row: row["eval_length"])


def has_learned(task: str, found: Estimate) -> bool:
    """Whether an accuracy lies beyond what is reached without the input: by guessing, or by always the same answer."""
    if task not in TASKS:
        return True
    known = build_task(task)
    return (
        replace(found, value=found.value - max(known.random_accuracy, known.constant_accuracy)).weight
        > ERRORS
    )


def _methods(data: Accuracies, layers: int) -> list[str]:
    return list(dict.fromkeys(solver.label for solver in data.rows if solver.layers == layers))


def _task_rows(
    data: Accuracies, names: Sequence[str], methods: Sequence[str], layers: int, paper: Paper, title: str = ""
) -> Table:
    rows = []
    solvers = {(s.task, s.label): s for s in data.rows if s.layers == layers}
    for task in names:
        found = [data.accuracy(solvers[task, m]) if (task, m) in solvers else None for m in methods]
        best = max((e.value for e in found if e is not None and has_learned(task, e)), default=math.nan)
        wide = len(methods) > FEW_COLUMNS
        cells = [
            Cell("–")
            if e is None
            else plain(100 * e.value, 1, math.nan if wide else 100 * e.error, best=e.value == best)
            for e in found
        ]
        printed = [paper.value("accuracy", task=task, method=method) for method in methods]
        if solvers:
            rows.append(Row(task.replace("_", " "), OURS, tuple(cells)))
        if any(value is not None for value in printed):
            rows.append(Row(task.replace("_", " "), PAPER, tuple(plain(value, 1) for value in printed)))
    note = "Bold: the best, where any is beyond what guessing or always the same answer reaches."
    return Table(f"Accuracy in percent{title}", tuple(methods), joined(rows), note if solvers else "")


def _by_length(data: Accuracies, task: str, layers: int, title: str = "") -> Table:
    """Methods by some of the lengths."""
    solvers = [solver for solver in data.rows if (solver.task, solver.layers) == (task, layers)]
    known = sorted({length for solver in solvers for length in data.lengths(solver)})
    lengths = [known[index] for index in chosen(len(known), COLUMNS)]
    rows = [Row(solver.label, OURS, tuple(_share(data, solver, n) for n in lengths)) for solver in solvers]
    corner = "method" if title else ""
    title = title or f"Accuracy in percent: {task.replace('_', ' ')}{depth_of(layers)}"
    return Table(title, tuple(f"length {length}" for length in lengths), tuple(rows), corner=corner)


def _share(data: Accuracies, solver: Solver, length: int) -> Cell:
    found = data.accuracy(solver, [length])
    return plain(100 * found.value, 1, 100 * found.error)


def depth_of(layers: int) -> str:
    return f", {layers} layer{'s' if layers > 1 else ''}" if layers else ""


def by_length_figure(data: Accuracies) -> Figure:
    panels = [(task, layers) for task in data.tasks() for layers in data.layers(task)]
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    drawn, axes = canvas(columns * PANEL[0] + LEGEND, rows * PANEL[1], rows, columns)
    labels = list(dict.fromkeys(solver.label for solver in data.rows))
    looks = styles(labels, [label.split(" ")[0] for label in labels])
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    for axis, (task, layers) in zip(axes.flat, panels, strict=False):
        solvers = [s for s in data.rows if (s.task, s.layers) == (task, layers)]
        for solver in solvers:
            lengths = data.lengths(solver)
            found = [data.accuracy(solver, [length]) for length in lengths]
            bars = [100 * estimate.error if math.isfinite(estimate.error) else 0.0 for estimate in found]
            values = [100 * estimate.value for estimate in found]
            errorbar(axis, lengths, values, bars, solver.label, looks[solver.label])
        protocol = (data.rows[solvers[0]][min(data.rows[solvers[0]])][0].get("settings") or {}).get(
            "protocol"
        )
        if protocol:
            axis.axvline(max(protocol["train_lengths"]), color="grey", ls="--", lw=0.8)
        if task in TASKS:
            axis.axhline(100 * build_task(task).constant_accuracy, color="grey", ls=":", lw=0.8)
        axis.set_title(f"{task.replace('_', ' ')}{depth_of(layers)}", loc="left")
        finish(axis, sorted({n for s in solvers for n in data.lengths(s)}), "accuracy, %", "length")
        axis.set_ylim(-4, 104)
    legend(drawn, axes.flat)
    return drawn


def by_multiple(data: Accuracies, label: str) -> dict[tuple[str, str], float]:
    """Accuracies of a method by task and by multiple of the longest length that the task was trained at."""
    found = {}
    for solver in data.rows:
        settings = next(iter(data.rows[solver].values()))[0].get("settings") or {}
        if solver.label != label or "protocol" not in settings:
            continue
        trained = max(settings["protocol"]["train_lengths"])
        for length in data.lengths(solver):
            if length >= trained:
                found[solver.task, f"{round(length / trained)}×"] = data.accuracy(solver, [length]).value
    return found


def lengths_figure(data: Accuracies) -> Figure:
    """A heat map of tasks × lengths for each method, lengths in multiples of those trained at."""
    labels = list(dict.fromkeys(solver.label for solver in data.rows))
    return fields_figure([(label, by_multiple(data, label)) for label in labels])


def fields_figure(fields: Sequence[tuple[str, dict[tuple[str, str], float]]]) -> Figure:
    names = list(dict.fromkeys(task for _, found in fields for task, _ in found))
    methods = list(dict.fromkeys(method for _, found in fields for _, method in found))
    width, height = 1.8 + len(fields) * (0.36 * len(methods) + 0.3), 1.2 + 0.26 * len(names)
    drawn, (axes,) = canvas(width, height, 1, len(fields))
    for index, (axis, (title, found)) in enumerate(zip(axes, fields, strict=True)):
        values = [[100 * found.get((task, method), math.nan) for method in methods] for task in names]
        axis.imshow(values, cmap="Blues", vmin=0, vmax=125, aspect="auto")
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if not math.isnan(value):
                    colour = "#ffffff" if value > 70 else "#1b2733"
                    axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axis.set_xticks(range(len(methods)), methods, rotation=90)
        axis.set_yticks(range(len(names)), [task.replace("_", " ") for task in names] if not index else [])
        axis.tick_params(length=0)
        axis.set_title(f"accuracy, %: {title}", loc="left")
        for spine in axis.spines.values():
            spine.set_visible(False)
    return drawn


# --- the folder of `dape tasks run`


@cache
def paper_table() -> dict[str, Any]:
    """The paper's table: `methods`, and `accuracy` in percent by task, in the order of the methods."""
    return json.loads((resources.files("dape.tasks") / "paper.json").read_text("utf-8"))


def paper_accuracy(task: str, method: str) -> float | None:
    """The paper's score in percent, None where it has none."""
    row = paper_table()["accuracy"].get(task)
    methods = paper_table()["methods"]
    return row[methods.index(method)] if row and method in methods else None


def score_table(data: Accuracies) -> Table:
    """Tasks by methods: our score with its error over samples and seeds, and the paper's in brackets where it has one."""
    methods = list(dict.fromkeys(solver.label for solver in data.rows))
    rows = []
    for (task, layers), title in titles(data).items():
        here = {s.label: s for s in data.rows if (s.task, s.layers) == (task, layers)}
        cells = [Cell(f"{100 * build_task(task).constant_accuracy:.0f}")]
        for method in methods:
            solver = here.get(method)
            printed = paper_accuracy(task, method)
            theirs = f" ({printed:.1f})" if printed is not None else ""
            cells.append(Cell(percents(data, solver) + theirs) if solver else Cell())
        rows.append(Row(title, OURS, tuple(cells)))
    title = "mean accuracy beyond the training length, % (the paper's)"
    return Table(title, ("constant", *methods), tuple(rows), corner="task")


def percents(data: Accuracies, solver: Solver) -> str:
    found = data.accuracy(solver)
    several = len(data.rows[solver]) > 1 and math.isfinite(found.error)
    return f"{100 * found.value:.1f}" + (f" ± {100 * found.error:.1f}" if several else "")


def titles(data: Accuracies) -> dict[tuple[str, int], str]:
    """Tasks and numbers of layers in the order of the registry, by the name of the task, with layers where it has several."""
    found = sorted(
        {(s.task, s.layers) for s in data.rows}, key=lambda entry: (list(TASKS).index(entry[0]), entry[1])
    )
    return {(task, n): task + (depth_of(n) if len(data.layers(task)) > 1 else "") for task, n in found}


def write_folder(results: Results, folder: Path) -> list[Table]:
    """README.md, accuracy.png and lengths.png, all read from the results; notes.md is included. Returns the tables.

    lengths.png: lengths × tasks for each method, where there are many tasks.
    """
    data, runs = Accuracies(results), results["runs"]
    about = results["environment"]
    tasks_of: dict[str, dict[str, None]] = {}
    for run in runs:
        tasks_of.setdefault(describe(run["settings"]["protocol"]), {})[run["corpus"]] = None
    notes = folder / "notes.md"
    tables = [_by_length(data, *entry, title) for entry, title in titles(data).items()]
    score, many = score_table(data), len(data.tasks()) > FEW_TASKS
    text = render(
        "tasks.md.j2",
        runs=runs,
        minutes=sum(run["train_seconds"] + run["test_seconds"] for run in runs) / 60,
        seeds=sorted({run["seed"] for run in runs}),
        commands=results.get("commands", []),
        protocols=[f"{', '.join(named)}: {text}" for text, named in tasks_of.items()],
        hardware=about.get("gpu") or f"{about['cpu']}, {about['threads']} of {about['cores']} cores",
        versions=[f"{n} {about[n]}" for n in ("dape", "python", "torch", "numpy", "transformers")],
        notes=notes.read_text("utf-8").strip() if notes.exists() else "",
        score=score,
        tables=tables,
        many=many,
        printed=any(paper_accuracy(s.task, s.method) is not None for s in data.rows),
    )
    write_atomically(folder / "README.md", text)
    with context(["default", LOOK]):
        save(by_length_figure(data), folder / "accuracy.png")
        if many:
            save(lengths_figure(data), folder / "lengths.png")
    return [*tables, score]


def describe(protocol: dict[str, Any]) -> str:
    """A protocol in a line."""
    return (
        f"{protocol['num_layers']} layer(s) of width {protocol['hidden_size']}, {protocol['num_heads']} heads; "
        f"{protocol['steps']} steps of Adam {protocol['learning_rate']:g}, clip {protocol['clip']:g}, batch "
        f"{protocol['batch_size']}, lengths {spans(protocol['train_lengths'])}; tested at lengths "
        f"{spans(protocol['test_lengths'])}, {protocol['samples']} samples each"
    )


def spans(lengths: Sequence[int]) -> str:
    """12, 24, 48; or 1…40 and 41…500 by 51 where the steps are equal."""
    if len(lengths) < 4:
        return ", ".join(map(str, lengths))
    step = lengths[1] - lengths[0]
    if list(lengths) != list(range(lengths[0], lengths[-1] + 1, step)):
        return ", ".join(map(str, lengths))
    return f"{lengths[0]}…{lengths[-1]}" + (f" by {step}" if step > 1 else "")
