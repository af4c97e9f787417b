"""The runner: all cells of the experiments asked for, each trained once, results written whenever one is done."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dape.compare.runs import Job, Watcher, run_jobs
from dape.compare.worker import sentence
from dape.reproduce.experiment import Experiment
from dape.reproduce.grid import STEP, TIME, Cell, cells_of, equal_time_cells
from dape.reproduce.kinds import KINDS
from dape.reproduce.pace import equal_time_steps, kept
from dape.reproduce.place import Place
from dape.reproduce.results import has_lengths, load_results, write_results
from dape.reproduce.worker import work
from dape.training import TrainConfig

# Told a view, how many trainings it takes and which are left; returns who watches them.
Announce = Callable[[str, int, list[Job]], Watcher]


@dataclass(frozen=True, eq=False)
class CellJob(Job):
    """A cell as a job of `run_jobs`."""

    cell: Cell
    results: Path

    @property
    def scores(self) -> Path:
        return self.results / f"{self.name}.json"

    @property
    def name(self) -> str:
        return self.cell.id

    @property
    def launcher(self) -> list[str]:
        worker = ["-m", "dape.reproduce.worker"]
        if self.cell.train.get("distributed", "none") == "none":
            return [sys.executable, *worker]
        processes = f"--nproc-per-node={max(1, torch.cuda.device_count())}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", processes, *worker]


@dataclass
class Plan:
    """An experiment and the cells it wants; those of the equal-time view come when their steps are known."""

    experiment: Experiment
    cells: list[Cell]
    timed: list[list[Cell]]
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[str]:
        """Cells of the equal-time view whose number of steps is not known yet."""
        return [replace(cell, view=TIME).label for group in self.timed for cell in group]


def reproduce(experiments: list[Experiment], place: Place, announce: Announce) -> list[dict[str, Any]]:
    """Run the experiments, or what is left of them; returns their results."""
    with few_threads(place):
        return carry_out(experiments, place, announce)


@contextlib.contextmanager
def few_threads(place: Place) -> Iterator[None]:
    """One thread for what takes a moment: more would only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if place.scale == "smoke" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def carry_out(experiments: list[Experiment], place: Place, announce: Announce) -> list[dict[str, Any]]:
    plans = [make_plan(experiment, place) for experiment in experiments]
    for plan in plans:
        settle(plan, place, [group for group in plan.timed if kept(group, place).exists()])
        write(plan, place)
    check_place(plans, place)
    train_cells(plans, place, announce, STEP)
    for plan in plans:
        settle(plan, place, plan.timed)
    train_cells(plans, place, announce, TIME)
    return [finish(plan, place) for plan in plans]


def settle(plan: Plan, place: Place, groups: list[list[Cell]]) -> None:
    """Give the cells of these groups their number of steps."""
    for group in list(groups):
        steps = equal_time_steps(group, place)
        plan.cells += [cell.for_steps(steps[cell.method]) for cell in group]
        plan.timed.remove(group)


def make_plan(experiment: Experiment, place: Place) -> Plan:
    if not experiment.trains_cells:
        return Plan(experiment, [], [])
    cells = cells_of(experiment, place.scale, place.corpora)
    return Plan(experiment, cells, equal_time_cells(experiment, place.scale, cells))


def check_place(plans: Iterable[Plan], place: Place) -> None:
    """Raise before anything is trained if a text or the hardware is not there."""
    plans = list(plans)
    left = [cell for plan in plans for cell in plan.cells if not is_done(cell, place)]
    timed = [plan.experiment.name for plan in plans if plan.experiment.kind == "timing"]
    if timed and place.scale == "paper" and not torch.cuda.is_available():
        raise ValueError(
            f"{timed[0]} times steps of the paper's models, for which it needs a GPU: there is none here"
        )
    if left and place.scale == "paper" and not torch.cuda.is_available():
        raise ValueError(
            f"{len(left)} trainings of the paper's scale need GPUs, and there is none here: --dry-run prints the "
            f"commands for torchrun, --slurm FILE writes a script for a cluster"
        )
    for name in dict.fromkeys(cell.corpus.name for cell in left):
        place.corpora[name].locate(place.texts, place.work / "corpora")


def train_cells(plans: list[Plan], place: Place, announce: Announce, view: str) -> None:
    """Train and evaluate what is not yet; every experiment that has a cell is written when it is done."""
    wanted = unite(cell for plan in plans for cell in plan.cells if cell.view == view)
    ordered = in_order(wanted)
    left: list[Job] = [make_job(cell, place) for cell in ordered if not is_done(cell, place)]
    watch = announce(view, len(ordered), left)

    def heed(job: Job, outcome: str | None) -> None:
        watch(job, outcome)
        if outcome is not None:
            for plan in plans:
                note(plan, job, outcome, place)

    if place.scale == "smoke":
        run_here(left, heed)
    else:
        run_jobs(left, at_once=place.jobs, watch=heed)


def run_here(jobs: Iterable[Job], watch: Watcher) -> None:
    """Jobs of a moment, in this process: starting another takes longer than they do."""
    for job in jobs:
        watch(job, None)
        job.scores.parent.mkdir(parents=True, exist_ok=True)
        outcome = ""
        try:
            work(TrainConfig(**job.config), job.evaluation, job.scores)
        except (ValueError, OSError) as error:
            outcome = sentence(error)
        watch(job, outcome)


def unite(cells: Iterable[Cell]) -> dict[str, Cell]:
    """By id, with all the lengths that anybody asks for."""
    wanted: dict[str, Cell] = {}
    for cell in cells:
        before = wanted.get(cell.id)
        if before is None:
            wanted[cell.id] = cell
            continue
        if before.evaluation and cell.evaluation and before.evaluation != cell.evaluation:
            raise ValueError(f"{cell.label} is evaluated on other windows in another experiment")
        if cell.reading == before.reading:
            lengths, others = tuple(sorted({*before.lengths, *cell.lengths})), before.others
        else:
            lengths, others = before.lengths, tuple(sorted({*before.others, *cell.keys}))
        wanted[cell.id] = replace(
            before,
            lengths=lengths,
            others=others,
            evaluation=before.evaluation or cell.evaluation,
            wave=min(before.wave, cell.wave),
        )
    return wanted


def cells_left(experiments: list[Experiment], place: Place) -> list[Cell]:
    """What is still to train at equal steps, in the order in which it would be."""
    wanted = unite(cell for experiment in experiments for cell in make_plan(experiment, place).cells)
    return [cell for cell in in_order(wanted) if not is_done(cell, place)]


def in_order(wanted: dict[str, Cell]) -> list[Cell]:
    return sorted(wanted.values(), key=lambda cell: cell.wave)


def is_done(cell: Cell, place: Place) -> bool:
    content = load_results(place.scores / f"{cell.id}.json")
    if content is None:
        return False
    # Without lengths it is the model itself that is wanted.
    return has_lengths(content, cell) if cell.lengths else (place.work / "runs" / cell.id / "model").is_dir()


def make_job(cell: Cell, place: Place, *, must_exist: bool = True) -> CellJob:
    where = cell.corpus.locate(place.texts, place.work / "corpora", must_exist=must_exist)
    train = {**cell.train, **where, "data": str(data_folder(cell, place))}
    return CellJob(
        method=cell.method,
        seed=cell.seed,
        steps=cell.steps,
        folder=place.work,
        train=train,
        evaluation={**cell.evaluation, "lengths": cell.keys},
        cell=cell,
        results=place.scores,
    )


def data_folder(cell: Cell, place: Place) -> Path:
    tokenizer = str(cell.train.get("tokenizer", "bytes")).replace(":", "-").replace("/", "-")
    return place.work / "data" / f"{cell.corpus.name}-{tokenizer}"


def note(plan: Plan, job: Job, outcome: str, place: Place) -> None:
    """Put a finished cell into the results of an experiment that has it."""
    cells = [cell for cell in plan.cells if cell.id == job.name]
    for cell in cells:
        plan.failures.pop(cell.label, None)
        if outcome:
            plan.failures[cell.label] = {"cell": cell.label, "method": cell.method, "error": outcome}
    if cells:
        write(plan, place)


def write(plan: Plan, place: Place) -> None:
    """The results so far, for kinds whose results come from the cells alone, unless those there say more."""
    kind, path = KINDS[plan.experiment.kind], place.results(plan.experiment)
    if kind.partial is None:
        return
    body = kind.partial(plan, place)
    before = load_results(path)
    if len(body["records"]) >= (len(before["records"]) if before else 1):
        write_results(plan.experiment, place.scale, path, body, jobs=place.jobs)


def finish(plan: Plan, place: Place) -> dict[str, Any]:
    """The final results of an experiment."""
    body = KINDS[plan.experiment.kind].finish(plan, place)
    return write_results(plan.experiment, place.scale, place.results(plan.experiment), body, jobs=place.jobs)


def counted(experiment: Experiment, place: Place) -> tuple[int, int]:
    """Cells done and cells in all, for `--list`."""
    plan = make_plan(experiment, place)
    wanted = unite(plan.cells)
    return sum(is_done(cell, place) for cell in wanted.values()), len(wanted)
