"""The README of every experiment and of every paper, made from results, claims and the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dape.files import write_atomically
from dape.reproduce.claims import STYLES, Verdict, count, place, verdicts_of
from dape.reproduce.content import tables
from dape.reproduce.figures import write_figure, write_headline
from dape.reproduce.folders import Folder, Results, load_folders, with_claims
from dape.reproduce.paper import Paper, load_paper
from dape.reproduce.tables import markdown
from dape.reproduce.wording import another_scale, explained, scale_of

MADE = (
    "<!-- Made by `dape reproduce --report` from results.json, claims.toml and paper.json: do not edit. -->"
)
# In this order, before whatever else the environment names.
FIRST = ("cpu", "cores", "memory", "gpu", "threads", "jobs", "dape", "commit", "python", "torch")


def write_readmes(papers: Path) -> list[Path]:
    """README.md and figure.svg of every experiment, README.md of every paper, and the headline figure."""
    written = []
    for paper in with_claims(papers):
        printed, verdicts = load_paper(paper), verdicts_of(paper)
        folders = load_folders(paper)
        for folder in folders:
            figure = write_figure(folder, printed)
            mine = [verdict for verdict in verdicts if verdict.claim.experiment == folder.name]
            readme = folder.path / "README.md"
            write_atomically(readme, experiment_readme(folder, printed, mine, figure))
            written += [readme, *([figure] if figure else [])]
            if folder.name == "baselines" and (headline := write_headline(folder, papers)):
                written.append(headline)
        write_atomically(paper / "README.md", paper_readme(paper, printed, folders, verdicts))
        written.append(paper / "README.md")
    return written


def experiment_readme(folder: Folder, paper: Paper, verdicts: Sequence[Verdict], figure: Path | None) -> str:
    parts = [f"# {folder.title}", MADE, shows(folder, paper)]
    whose = "the paper's" if folder.best is None else "ours and the paper's" if paper.title else "ours"
    parts += [f"![{folder.title}: {whose}]({figure.name})"] if figure else []
    if verdicts:
        parts += ["## Claims", "\n".join(map(bullet, verdicts))]
    if shown := tables(folder, paper):
        parts += ["## Numbers", another_scale(folder, paper)]
        for table in shown:
            parts += [f"**{table.title}**", markdown(table), *([table.note] if table.note else [])]
    parts += [f"{note}" for note in paper.notes_on(folder.name)]
    results = folder.best
    parts += [f"![{spoken(name)}]({name})" for name in (results or {}).get("pictures", ())]
    if results is None:
        parts += ["## Run it", f"Not run yet. `dape reproduce {folder.name}` runs it."]
        return "\n\n".join(part for part in parts if part) + "\n"
    parts += ["## Run it again", f"    {results.get('command', '')}", ran(folder, results)]
    parts += ["## Settings", pairs(settings(results)), "## Hardware and versions", pairs(machine(results))]
    return "\n\n".join(part for part in parts if part) + "\n"


def paper_readme(paper: Path, printed: Paper, folders: Sequence[Folder], verdicts: Sequence[Verdict]) -> str:
    """The ledger: every claim with its verdict, by experiment."""
    title = printed.title or ("Beyond the paper" if paper.name == "beyond" else paper.name)
    total = ", ".join(f"{number} {name}" for name, number in count(verdicts).items())
    parts = [
        f"# {title}",
        MADE,
        f"{len(verdicts)} claims: {total}.",
        scale_of(folders, printed),
        explained(folders),
    ]
    known = {folder.name: folder for folder in folders}
    for name in dict.fromkeys([*known, *(verdict.claim.experiment for verdict in verdicts)]):
        folder = known.get(name)
        head = f"[{folder.title}]({name}/README.md)" if folder else name
        mine = [verdict for verdict in verdicts if verdict.claim.experiment == name]
        parts += [f"## {head}", folder.shows if folder else "", "\n".join(map(bullet, mine))]
    return "\n\n".join(part for part in parts if part) + "\n"


def bullet(verdict: Verdict) -> str:
    where = f" ({place(verdict.claim.section)})" if verdict.claim.section else ""
    looks = (f"  - looked into: {told(closer)}" for closer in verdict.closer)
    return "\n".join((f"- {told(verdict, where)}", *looks))


def told(verdict: Verdict, where: str = "") -> str:
    symbol = STYLES[verdict.verdict][0]
    return f"{symbol} **{verdict.verdict}**{where}: {verdict.claim.text} *{verdict.sentence}*"


def shows(folder: Folder, paper: Paper) -> str:
    whose = "What the paper shows" if paper.title else "What we ask"
    source = f" ({folder.source})" if folder.source else ""
    return f"**{whose}{source}:** {folder.shows}" if folder.shows else ""


def ran(folder: Folder, results: Results) -> str:
    """Seeds, texts, time taken, and what is missing."""
    seeds = sorted({row["seed"] for row in results.get("records", ()) if "seed" in row})
    texts = [
        f"{name}: {folder.texts[name]}"
        + (f" (for {folder.stands_for[name]})" if name in folder.stands_for else "")
        for name in dict.fromkeys(row.get("corpus") for row in results.get("records", ()))
        if name in folder.texts
    ]
    lines = [f"Seeds: {', '.join(map(str, seeds))}." if seeds else ""]
    lines.append(f"Time taken: {duration(results['seconds'])} of training." if results.get("seconds") else "")
    lines.append(f"Texts: {'; '.join(texts)}." if texts else "")
    if adopted := results.get("adopted"):
        lines.append(f"{adopted['runs']} of its runs are taken over from {adopted['from']}.")
    if missing := results.get("missing"):
        lines.append(f"Not finished: {len(missing)} of its trainings are still to do.")
    for failure in results.get("failures", ()):
        lines.append(f"Failed: {failure.get('cell', failure.get('method', ''))}: {failure.get('error', '')}")
    return " ".join(line for line in lines if line)


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def settings(results: Results) -> dict[str, str]:
    """The settings in one level, as words."""
    found: dict[str, str] = {}
    for name, value in results.get("settings", {}).items():
        if isinstance(value, dict):
            found |= {f"{name}: {inner}": words(entry) for inner, entry in value.items()}
        else:
            found[name] = words(value)
    return found


def machine(results: Results) -> dict[str, str]:
    known = results.get("environment", {})
    names = [*(name for name in FIRST if name in known), *(name for name in known if name not in FIRST)]
    return {name: words(known[name]) for name in names if known[name] is not None}


def spoken(picture: str) -> str:
    """The name of a picture's file as words."""
    return Path(picture).stem.replace("-", " ").replace("_", " ")


def words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {words(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        joint = "; " if any(isinstance(entry, dict) for entry in value) else ", "
        return joint.join(map(words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return "–" if value is None or value == "" else str(value)


def pairs(entries: dict[str, str]) -> str:
    rows = [f"| {name.replace('_', ' ')} | {value.replace('|', '/')} |" for name, value in entries.items()]
    return "\n".join(["| | |", "|---|---|", *rows])
