"""Large trainings: each cell's order in a file, as commands for torchrun or as one Slurm script."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from rich.console import Console

from dape.files import write_atomically
from dape.reproduce.experiment import Experiment
from dape.reproduce.place import Place
from dape.reproduce.runner import CellJob, cells_left, make_job

WORKER = "dape.reproduce.worker"
# Of a node, as in the paper; the batch is that of all processes together, so any number computes the same.
GPUS = 8

SLURM = """#!/bin/bash
# One task a training, each on a node of its own. A task that is ended saves where it is, and goes on when it is
# given again: submit the script once more, or let Slurm requeue it.
#SBATCH --job-name=dape
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task=32
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --output={logs}/%x-%A_%a.log

set -euo pipefail
ORDERS=(
{orders}
)
exec torchrun --standalone --nproc-per-node="${{GPUS:-{gpus}}}" -m {worker} --alone "${{ORDERS[$SLURM_ARRAY_TASK_ID]}}"
"""


def launch(experiments: list[Experiment], place: Place, script: Path | None, console: Console) -> int:
    """Print what is left to train, or write the Slurm script; orders are left in files, and nothing is trained."""
    cells = cells_left(experiments, place)
    jobs = [make_job(cell, place, must_exist=False) for cell in cells]
    orders = [write_order(job) for job in jobs] if place.scale == "paper" else []
    if script is not None:
        write_script(script, orders, place)
        console.print(f"{len(orders)} tasks: sbatch {script}", soft_wrap=True, markup=False)
    else:
        for number, job in enumerate(jobs):
            console.print(f"# {job.cell.label}, {job.steps} steps", soft_wrap=True, markup=False)
            if orders:
                console.print(command(orders[number]), soft_wrap=True, markup=False)
    for experiment in experiments:
        if not experiment.trains_cells:
            again = f"dape reproduce {experiment.name} --scale {place.scale}"
            console.print(f"# {experiment.name}, by itself\n{again}", soft_wrap=True, markup=False)
    for name in dict.fromkeys(cell.corpus.name for cell in cells):
        if not place.corpora[name].found(place.texts):
            console.print(f"# {place.corpora[name].missing(place.texts)}.", soft_wrap=True, markup=False)
    return 0


def write_order(job: CellJob) -> Path:
    for path in (job.note("json"), job.scores):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(job.note("json"), json.dumps(job.order(), indent=1))
    return job.note("json")


def command(order: Path) -> str:
    """The training and its evaluation on a node of several GPUs."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={GPUS}", "-m", WORKER, "--alone", str(order)]
    return shlex.join(words)


def write_script(path: Path, orders: list[Path], place: Place) -> None:
    if not orders:
        raise ValueError(
            "there is nothing left to train, or not at this scale: --slurm goes with --scale paper"
        )
    logs = place.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    content = SLURM.format(
        last=len(orders) - 1,
        gpus=GPUS,
        logs=logs,
        orders="\n".join(f"  {shlex.quote(str(order))}" for order in orders),
        worker=WORKER,
    )
    write_atomically(path, content)
