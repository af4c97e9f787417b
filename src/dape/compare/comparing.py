"""`compare`: train what is not yet trained, evaluate, and put all of it together, paired and by view."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dape.compare.environment import environment
from dape.compare.runs import Job, Watcher, run_jobs
from dape.compare.scores import evaluated, load_scores
from dape.compare.settings import Comparison
from dape.data import prepare
from dape.evaluate import LengthScore, paired_difference
from dape.files import write_atomically
from dape.report import build
from dape.report.build import Paths
from dape.report.results import Results
from dape.training import TrainConfig, load_run
from dape.training.run import CONFIG, check_continues

# A run whose training took this close to the time that all are given stands for itself in the equal-time view.
CLOSE = 0.05

Runs = dict[tuple[str, int], Job]
# Told how many runs a view needs and how many of them are still to do; returns who watches them.
Announce = Callable[[str, int, list[Job]], Watcher]


def compare(settings: Comparison, announce: Announce, *, progress: bool = False) -> tuple[Results, Paths]:
    """Run the comparison, or what is left of it; returns the results and the files they were written to."""
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    check_folder(settings)
    prepare(
        settings.corpus,
        settings.training(settings.steps)["data"],
        tokenizer=settings.tokenizer,
        validation=settings.held_out(),
        field=settings.field,
        progress=progress,
    )
    shared = dict.fromkeys(settings.method_list, settings.steps)
    views = {"equal-step": carry_out(settings, "equal-step", shared, announce)}
    done, _ = views["equal-step"]
    if settings.equal_time and len({method for method, _ in done}) > 1:
        views["equal-time"] = carry_out(
            settings, "equal-time", equal_time_steps(done, settings.steps), announce
        )
    results = collect(settings, views)
    return results, build(results, folder)


def check_folder(settings: Comparison) -> None:
    """Raise if the folder holds a comparison with other options; else leave this one's there."""
    path = settings.folder / "comparison.json"
    now = json.loads(json.dumps(settings.fixed()))
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"{settings.folder} holds a comparison with {name}={before.get(name)}, now {name}="
                    f"{now.get(name)} is asked for: choose another --out, or delete that folder"
                )
    else:
        write_atomically(path, json.dumps(now, indent=1) + "\n")


def carry_out(
    settings: Comparison, view: str, steps: dict[str, int], announce: Announce
) -> tuple[Runs, list[dict[str, Any]]]:
    """The runs of a view that succeeded, by method and seed, and the failures."""
    jobs = [
        Job(method, seed, count, settings.folder, settings.training(count), settings.evaluation)
        for seed in settings.seed_list
        for method, count in steps.items()
    ]
    left = [job for job in jobs if not is_done(job)]
    failed = run_jobs(left, at_once=settings.jobs, watch=announce(view, len(jobs), left))
    failures = [
        {"method": job.method, "seed": job.seed, "view": view, "error": why} for job, why in failed.items()
    ]
    return {(job.method, job.seed): job for job in jobs if job not in failed}, failures


def is_done(job: Job) -> bool:
    """Whether the run is trained and evaluated; raises if its folder holds a run with other options."""
    if (job.run / CONFIG).exists():
        check_continues(job.run, TrainConfig(**job.config))
    return evaluated(job.scores, job.evaluation) and (job.run / "model").is_dir()


def equal_time_steps(done: Runs, steps: int) -> dict[str, int]:
    """Steps of each method in the training time of the fastest, by the median time of a step."""
    methods = list(dict.fromkeys(method for method, _ in done))
    pace = {
        method: median(seconds_per_step(job.run) for (name, _), job in done.items() if name == method)
        for method in methods
    }
    return share_time(pace, steps)


def share_time(pace: dict[str, float], steps: int) -> dict[str, int]:
    """Steps of each method in the time that the fastest needs for `steps`, from seconds a step."""
    budget = steps * min(pace.values())
    return {
        method: steps if seconds * steps <= budget * (1 + CLOSE) else max(1, round(budget / seconds))
        for method, seconds in pace.items()
    }


def seconds_per_step(run: Path) -> float:
    """The median, which the pauses of a busy machine do not move."""
    times = [0.0, *(record["seconds"] for record in load_run(run).metrics())]
    return median(after - before for before, after in pairwise(times))


def collect(settings: Comparison, views: dict[str, tuple[Runs, list[dict[str, Any]]]]) -> Results:
    """results.json, from the runs of every view."""
    records, pairs, changes = [], [], []
    for view, (runs, _) in views.items():
        scores = {key: load_scores(job.scores) for key, job in runs.items()}
        for (method, seed), job in runs.items():
            key = {"view": view, "method": method, "seed": seed}
            records += [{**key, **row} for row in record_rows(settings, job, scores[method, seed])]
            changes += [{**key, **row} for row in change_rows(scores[method, seed])]
            base = scores.get((settings.baseline_method, seed))
            if base is not None and method != settings.baseline_method:
                key["baseline"] = settings.baseline_method
                pairs += [{**key, **row} for row in pair_rows(scores[method, seed], base)]
    return {
        "settings": settings.shown(),
        "environment": environment(settings.jobs),
        "command": settings.command(),
        "records": records,
        "pairs": pairs,
        "changes": changes,
        "failures": [failure for _, failures in views.values() for failure in failures],
    }


def record_rows(settings: Comparison, job: Job, scores: Sequence[LengthScore]) -> list[dict[str, Any]]:
    seconds = load_run(job.run).metrics()[-1]["seconds"]
    return [
        {
            "steps": job.steps,
            "train_seconds": seconds,
            "train_length": settings.train_length,
            "eval_length": score.eval_length,
            "nll": score.nll,
            "nll_se": score.nll_se,
            "ppl": score.ppl,
            "tokens": score.tokens,
        }
        for score in scores
    ]


def change_rows(scores: Sequence[LengthScore]) -> list[dict[str, Any]]:
    """The loss at each length less that at the first, on the same tokens."""
    rows = []
    for score in scores:
        change, error = paired_difference(score, scores[0])
        lengths = {"from_length": scores[0].eval_length, "eval_length": score.eval_length}
        rows.append({**lengths, "change": change, "change_se": 0.0 if score is scores[0] else error})
    return rows


def pair_rows(scores: Sequence[LengthScore], base: Sequence[LengthScore]) -> list[dict[str, Any]]:
    """The loss less the baseline's at the same length, on the same tokens."""
    rows = []
    for score, other in zip(scores, base, strict=True):
        difference, error = paired_difference(score, other)
        rows.append({"eval_length": score.eval_length, "difference": difference, "difference_se": error})
    return rows


def exit_code(results: Results) -> int:
    """0 if every run succeeded and every score is a number, else 1."""
    numbers = all(math.isfinite(record["nll"]) for record in results["records"])
    return 0 if numbers and not results["failures"] else 1
