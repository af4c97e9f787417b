"""`python -m papers`: list and run the experiments, and write their pages.

python -m papers list                                   the experiments, and how many of their runs are done
python -m papers run headline --texts FOLDER --jobs 2   train and evaluate what is missing; ends with the verdicts
python -m papers run headline --scale paper --launcher 'slurm[partition=gpu,gpus_per_node=8]'
python -m papers report                                 recompute every number: pages, figures, README, docs
python -m papers report --check                         exit with 1 if a number differs from the tables
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from dape.evaluation.table import make_table, read_table
from dape.lab.display import display
from papers.experiment import LAPTOP, PAPER, SMOKE, Experiment
from papers.ledger import show
from papers.pages import PAPERS, TABLES, experiments, ledger, outdated, report


def known() -> dict[str, tuple[str, Experiment]]:
    """Paper and experiment by name."""
    return {one.name: (paper, one) for paper in PAPERS for one in experiments(paper)}


def list_all(scale: str, work: Path) -> int:
    for name, (paper, one) in known().items():
        path, jobs = one.results(paper, scale, work), one.at(scale)
        table = read_table(path) if path.exists() else make_table()
        done = sum(not job.missing(table) for job in jobs)
        print(f"{paper:8} {name:22} {done:3}/{len(jobs):<4} {one.title} ({one.source})")
    return 0


def run(name: str, options: argparse.Namespace) -> int:
    if name not in known():
        raise ValueError(f'there is no experiment "{name}": {", ".join(known())}')
    paper, one = known()[name]
    work = options.work.absolute() / options.scale
    how = {"jobs": options.jobs, "launcher": options.launcher, "only": options.only}
    with display(Console(highlight=False)) as announce:
        outcome = one.run(paper, options.scale, work, options.texts, announce=announce, **how)
    if options.scale == LAPTOP:
        ledger.cache_clear()
        print(TABLES[one.metric](paper, one))
        for verdict in (v for v in ledger(paper).verdicts() if name in v.claim.sources):
            print(f"{verdict.words}: {verdict.claim.text}")
            for own in verdict.judgements:
                if own.comparison:
                    print(f"    {own.corpus}: {own.comparison.text} {show(own.comparison)} {own.why}")
    else:
        print(f"{len(outcome.table)} rows in {one.results(paper, options.scale, work)}")
    return 1 if outcome.failures else 0


def main(arguments: list[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m papers", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument("--scale", choices=(SMOKE, LAPTOP, PAPER), default=LAPTOP)
    runs.add_argument("--work", type=Path, default=Path("runs/papers"), help="folder of runs")
    commands.add_parser("list", parents=[runs], help="the experiments and their progress")
    one = commands.add_parser("run", parents=[runs], help="run experiments, or resume them")
    one.add_argument("names", nargs="+")
    one.add_argument("--jobs", type=int, default=1, help="concurrent runs")
    one.add_argument("--launcher", default="local", help="local, or slurm[partition=gpu,gpus_per_node=8]")
    one.add_argument("--only", nargs="*", default=(), help="patterns of run titles")
    texts = os.environ.get("DAPE_CORPORA")
    one.add_argument(
        "--texts", type=Path, default=texts and Path(texts), help="folder of the texts (DAPE_CORPORA)"
    )
    page = commands.add_parser("report", help="write pages and figures")
    page.add_argument("--check", action="store_true", help="only compare")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            return list_all(options.scale, options.work.absolute() / options.scale)
        if options.command == "run":
            return max(run(name, options) for name in options.names)
        if options.check:
            stale = outdated()
            for path in stale:
                print(f"{path} is out of date: run `python -m papers report`")
            return 1 if stale else 0
        for written in report():
            print(str(written))
        return 0
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"papers: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
