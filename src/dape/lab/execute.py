"""Execution of experiments: every required run once, with results written after each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from dape.lab.display import Announce, silent
from dape.lab.environment import environment, united
from dape.lab.experiments import Experiment, Workspace
from dape.lab.kinds import Plan, equal_time_labels, kind_named, ordered
from dape.lab.records import STEP, TIME, VIEWS, Results, find_results
from dape.lab.runner import Job, Launcher, run_here, run_jobs


def execute(
    experiments: Sequence[Experiment],
    workspace: Workspace,
    announce: Announce = silent,
    *,
    launcher: Launcher | None = None,
    only: Sequence[str] = (),
    about: dict[str, Any] | None = None,
) -> list[Results]:
    """Execute or resume the experiments; returns their results.

    only:  patterns of labels: only runs that match one, in the order of the patterns; all runs without.
    about: further entries of the results, such as the command.
    """
    with few_threads(workspace):
        plans = [make_plan(experiment, workspace) for experiment in experiments]
        check_patterns(plans, only)
        for plan in plans:
            settle(plan, only_kept=True)
            write(plan, about)
        check_requirements(plans, workspace, launcher, only)
        run_view(plans, workspace, announce, STEP, launcher, only, about)
        for plan in plans:
            settle(plan, only=only)
        run_view(plans, workspace, announce, TIME, launcher, only, about)
        return [save(plan, plan.kind.finish(plan), about) for plan in plans]


@contextlib.contextmanager
def few_threads(workspace: Workspace) -> Iterator[None]:
    """Limit torch to one thread for short work in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if workspace.scale == "smoke" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_plan(experiment: Experiment, workspace: Workspace) -> Plan:
    plan = Plan(experiment, workspace)
    plan.items = plan.kind.items(plan)
    plan.timed = plan.kind.timed(plan)
    return plan


def check_patterns(plans: Sequence[Plan], only: Sequence[str]) -> None:
    """Raise for a pattern that matches no run."""
    labels = [item.label for plan in plans for item in plan.items]
    labels += [label for plan in plans for group in plan.timed for label in equal_time_labels(group)]
    for pattern in only:
        if not any(fnmatchcase(label, pattern) for label in labels):
            example = f', such as "{labels[0]}"' if labels else ""
            raise ValueError(
                f'--only "{pattern}" matches none of the {len(labels)} runs: it is compared with whole labels{example}, '
                f"and * stands for anything; --dry-run lists them"
            )


def chosen(labelled: Iterable[tuple[str, Any]], only: Sequence[str]) -> list[Any]:
    """Of pairs of a label and an object, the objects whose labels match a pattern, in the order of the patterns."""
    pairs = list(labelled)
    if not only:
        return [one for _, one in pairs]
    rank = {label: [fnmatchcase(label, pattern) for pattern in only] for label, _ in pairs}
    matching = [(rank[label].index(True), one) for label, one in pairs if any(rank[label])]
    return [one for _, one in sorted(matching, key=lambda pair: pair[0])]


def settle(plan: Plan, *, only_kept: bool = False, only: Sequence[str] = ()) -> None:
    """Set the number of steps of the runs in the equal-time view.

    only_kept: only where the pace is known; only: only groups with a run that matches one of these patterns.
    """
    if not plan.timed:
        return
    from dape.lab.pace import equal_time_steps, pace_file

    for group in list(plan.timed):
        if not chosen(((label, group) for label in equal_time_labels(group)), only):
            continue
        if only_kept:
            if not pace_file(group, plan.workspace).exists():
                continue
            members = group
        else:
            # A run that cannot be trained has no pace, and does not affect the others.
            members = [item for item in group if item.label not in plan.failures]
        plan.timed.remove(group)
        if len(members) > 1:
            exact = plan.settings["equal_time"].get("exact", False)
            steps = equal_time_steps(members, plan.workspace, exact=exact)
            plan.items += [item.for_steps(steps[item.method]) for item in members]


def check_requirements(
    plans: Iterable[Plan], workspace: Workspace, launcher: Launcher | None = None, only: Sequence[str] = ()
) -> None:
    """Raise before any run if a text is missing, or the hardware where the runs would be on this machine."""
    plans = list(plans)
    waiting = (
        (item.label, item) for plan in plans for item in plan.items if not plan.kind.is_done(plan, item)
    )
    left = chosen(waiting, only)
    items = [item for item in left if hasattr(item, "corpus")]
    timed = [plan.experiment.name for plan in plans if plan.experiment.kind == "timing"]
    if workspace.scale == "paper" and not torch.cuda.is_available():
        if timed:
            raise ValueError(
                f"{timed[0]} times steps of the paper's models, for which it needs a GPU: there is none here"
            )
        if items and not (launcher and launcher.has_queue):
            raise ValueError(
                f"{len(items)} trainings of the paper's scale need GPUs, and there is none here: --dry-run prints "
                f"the commands for torchrun, --launcher 'slurm[partition=NAME,gpus_per_node=8]' submits them to a cluster"
            )
    for name in dict.fromkeys(item.corpus.name for item in items):
        workspace.corpora[name].locate(workspace.texts, workspace.work / "corpora")


def wanted(plans: Sequence[Plan], view: str) -> list[tuple[Plan, Any]]:
    """Every run of a view once, with a plan that requires it, by scheduling priority."""
    by_id: dict[str, tuple[Plan, Any]] = {}
    for plan in plans:
        for item in plan.items:
            if item.view == view:
                before = by_id.get(item.id)
                by_id[item.id] = (
                    (plan, item)
                    if before is None
                    else (
                        before[0],
                        plan.kind.unite(before[1], item),
                    )
                )
    plan_of = {item.id: plan for plan, item in by_id.values()}
    return [(plan_of[item.id], item) for item in ordered([item for _, item in by_id.values()])]


def left_of(plans: Sequence[Plan], view: str = STEP, only: Sequence[str] = ()) -> list[tuple[Plan, Any]]:
    """Runs that are not done yet, of those that match `only`."""
    left = [(plan, item) for plan, item in wanted(plans, view) if not plan.kind.is_done(plan, item)]
    return chosen(((item.label, (plan, item)) for plan, item in left), only)


def run_view(
    plans: Sequence[Plan],
    workspace: Workspace,
    announce: Announce,
    view: str,
    launcher: Launcher | None,
    only: Sequence[str],
    about: dict[str, Any] | None,
) -> None:
    """Execute the runs that are not done; the results of every experiment that requires a run are written after it."""
    left = [plan.kind.job(plan, item) for plan, item in left_of(plans, view, only)]
    asked = chosen(((item.label, item) for _, item in wanted(plans, view)), only)
    watch = announce(view, len(asked), left)

    def heed(job: Job, outcome: str | None) -> None:
        watch(job, outcome)
        if outcome is not None:
            for plan in plans:
                note(plan, job, outcome, about)

    if workspace.in_process:
        run_here(left, heed)
    else:
        run_jobs(left, at_once=workspace.jobs, watch=heed, launcher=launcher)


def note(plan: Plan, job: Job, outcome: str, about: dict[str, Any] | None = None) -> None:
    """Add a finished run to the results of an experiment that requires it."""
    items = [item for item in plan.items if item.id == job.name]
    for item in items:
        plan.failures.pop(item.label, None)
        if outcome:
            failure = {"label": item.label, "method": item.method, "seed": item.seed, "view": item.view}
            plan.failures[item.label] = {**failure, "error": outcome}
    if items:
        if not outcome:
            plan.kind.finished(plan, job)
        write(plan, about)


def write(plan: Plan, about: dict[str, Any] | None = None) -> None:
    """Write the results so far, unless the existing ones are more complete."""
    body = plan.kind.collect(plan)
    if body is None:
        return
    before = find_results(plan.workspace.results(plan.experiment))
    if len(body["rows"]) >= (len(before["rows"]) if before else 1):
        save(plan, body, about)


def save(plan: Plan, body: dict[str, Any], about: dict[str, Any] | None = None) -> Results:
    """Write the results with settings, environment and failures.

    The environment is that of the runs, where they have their own, and may be older than this command.
    """
    experiment, workspace = plan.experiment, plan.workspace
    known = {"experiment": experiment.name, "paper": experiment.paper, "title": experiment.title}
    known |= {"source": experiment.source, "scale": workspace.scale}
    command = {"command": f"dape reproduce {experiment.name} --scale {workspace.scale}"}
    machines = [run["environment"] for run in body["runs"] if "environment" in run]
    results = Results(
        {
            "schema": 2,
            **{name: value for name, value in known.items() if value},
            "kind": experiment.kind,
            **command,
            "settings": experiment.shown(workspace.scale),
            "environment": united(machines) if machines else environment(workspace.jobs),
            **(about or {}),
            **body,
        }
    )
    results.save(workspace.results(experiment))
    return results


def counted(experiment: Experiment, workspace: Workspace) -> tuple[int, int]:
    """Number of finished runs and of all runs, in both views."""
    plan = make_plan(experiment, workspace)
    settle(plan, only_kept=True)
    count = sum(len(wanted([plan], view)) for view in VIEWS)
    left = sum(len(left_of([plan], view)) for view in VIEWS)
    return count - left, count + sum(len(group) for group in plan.timed)


def summary_of(job: Job) -> str:
    """Short summary of a successful job."""
    return kind_named(job.kind).summary(job)
