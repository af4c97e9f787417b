"""The page of a paper, and every number of ours in other documents, from the tables of results.

A document may hold `<!-- papers: NAME -->…<!-- /papers -->`; what stands between is replaced by the block of that name
(`BLOCKS`), by the table of results/retrofit/NAME.csv.gz (`retrofit NAME`, and lengths if not all of them), or by a number:
`gap CORPUS A B LENGTH` (or `lead`, its negative), `change CORPUS METHOD START END`, `growth CORPUS A B START END`,
`perplexity CORPUS METHOD LENGTH`, `verdict PAPER CLAIM`, all of the headline experiment.
"""

from __future__ import annotations

import importlib
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd

from dape.evaluation.table import ALL, read_table
from dape.retrofitting.report import Report
from dev import bench_tables
from papers.experiment import Experiment
from papers.figures import DRAW, mean_accuracy, write_figures
from papers.ledger import CORPORA, HERE, WORDS, Data, Judgement, Ledger, Verdict, interval, show
from papers.printed import printed_accuracies

PAPERS = ("dape_v2", "beyond")
ROOT = HERE.parent
MARKED = re.compile(r"(<!-- papers: ([^>]+?) -->)(.*?)(<!-- /papers -->)", re.S)


@cache
def ledger(paper: str) -> Ledger:
    return Ledger(HERE / paper, importlib.import_module(f"papers.{paper}.claims").CLAIMS)


def experiments(paper: str) -> list[Experiment]:
    return importlib.import_module(f"papers.{paper}.experiments").EXPERIMENTS


def text_of(paper: str):
    return importlib.import_module(f"papers.{paper}.text")


# --- tables


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def verdict_row(verdict: Verdict, *, section: bool) -> list[str]:
    run = [one for one in verdict.judgements if one.comparison]
    named = len(verdict.claim.corpora) > 1 or len(run) > 1
    ours = [ours_of(one, named) for one in run]
    missing = [f"{one.corpus} not run" for one in verdict.judgements if one.word == "not run" and one.corpus]
    seeds = ", ".join(str(one.seeds or "–") for one in run) or "–"
    text = verdict.claim.text + (" *(ours)*" if verdict.claim.ours else "")
    row = [text, verdict.paper or "–", "<br>".join([*ours, *missing]) or "–", seeds, verdict.words]
    return [verdict.claim.section, *row] if section else row


def ours_of(one: Judgement, named: bool) -> str:
    assert one.comparison is not None
    note = f" ({one.comparison.text})" if one.count > 2 else ""
    return f"{f'{one.corpus} ' if named else ''}{show(one.comparison)}{note}"


def verdicts_table(paper: str, names: list[str] | None = None) -> str:
    chosen = [v for v in ledger(paper).verdicts() if names is None or v.claim.name in names]
    section = names is None and paper != "beyond"
    heads = ["claim", "paper", "ours", "seeds", "verdict"]
    rows = [verdict_row(v, section=section) for v in chosen]
    if paper == "beyond":
        return table(["hypothesis", "ours", "seeds", "verdict"], [[row[0], *row[2:]] for row in rows])
    return table(["§", *heads] if section else heads, rows)


def counts(paper: str) -> str:
    """11 reproduced, 4 contradicted, …"""
    found = Counter(v.word for v in ledger(paper).verdicts())
    return ", ".join(f"{found[word]} {word}" for word in (*WORDS, "not run") if found[word])


def perplexity_table(paper: str, experiment: Experiment) -> str:
    """Perplexity at the training length → at the longest input; the paper's beside it."""
    frame = ledger(paper).table(experiment.name)
    assert frame is not None
    losses = frame[(frame["metric"] == "loss") & (frame["slice"] == ALL)]
    printed = ledger(paper).printed()
    cells: dict[str, dict[str, str]] = {}
    for (corpus, train), rows in losses.groupby(["corpus", "train_length"], sort=False):
        name = f"{CORPORA.get(str(corpus), corpus)} {train}"
        for method in rows["method"].unique():
            cells.setdefault(method, {})[name] = start_and_end(rows[rows["method"] == method], int(train))
    heads = list(dict.fromkeys(name for row in cells.values() for name in row))
    texts = list(dict.fromkeys(head.split()[0] for head in heads))
    heads.sort(key=lambda head: (texts.index(head.split()[0]), int(head.split()[1])))
    if len(printed) and experiment.name in ("headline", "kernel_size", "length_1024", "data_adaptive"):
        length = 1024 if experiment.name == "length_1024" else 128
        for corpus in ("arxiv", "books3"):
            rows = printed[(printed["corpus"] == corpus) & (printed["train_length"] == length)]
            for method in set(cells) & set(rows["method"].unique()):
                if (rows["method"] == method).sum() > 3:
                    name = f"paper: {'Arxiv' if corpus == 'arxiv' else 'Books3'} {length}"
                    heads += [name] if name not in heads else []
                    cells[method][name] = start_and_end(rows[rows["method"] == method], length)
    return grid("perplexity", cells, heads)


def grid(corner: str, cells: dict[str, dict[str, str]], heads: list[str] | None = None) -> str:
    """Table of rows by method and columns by name."""
    heads = heads or list(dict.fromkeys(name for row in cells.values() for name in row))
    rows = [[f"`{method}`", *(row.get(head, "–") for head in heads)] for method, row in cells.items()]
    return table([corner, *heads], rows)


def length_table(paper: str, experiment: Experiment) -> str:
    """Perplexity of every method at every length, worst at the longest first, and the number of seeds."""
    frame = ledger(paper).table(experiment.name)
    losses = frame[(frame["metric"] == "loss") & (frame["slice"] == ALL)]
    sums = losses.groupby(["method", "length"])[["sum", "count"]].sum()
    values = (sums["sum"] / sums["count"]).map(math.exp).unstack().sort_values(8192, ascending=False)
    seeds = losses.groupby("method")["seed"].nunique()
    rows = [[f"`{m}`", *map(number, row), str(seeds[m])] for m, row in values.iterrows()]
    return table(["tokens of input", *map(str, values.columns), "seeds"], rows)


def start_and_end(rows: pd.DataFrame, train: int) -> str:
    sums = rows.groupby("length")[["sum", "count"]].sum()
    values = (sums["sum"] / sums["count"]).map(math.exp)
    start = train if train in values.index else values.index[0]
    return f"{number(values[start])} → {number(values.iloc[-1])}"


def number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def accuracy_table(paper: str, experiment: Experiment) -> str:
    frame = ledger(paper).table(experiment.name)
    assert frame is not None
    rows = frame[frame["metric"] == "accuracy"]
    cells: dict[str, dict[str, str]] = {}
    for (task, method), own in rows.groupby(["corpus", "method"], sort=False):
        mean, error = mean_accuracy(own)
        seeds = "" if math.isnan(error) else f" ± {100 * error:.1f}"
        cells.setdefault(str(task), {})[str(method)] = f"{100 * mean:.1f}{seeds}"
    methods = list(rows["method"].unique())
    if len(cells) < 4:
        # The claims are about one layer; two are in the figure.
        methods = [method for method in methods if not method.endswith("2 layers")]
        by_method = {
            m: {t.replace("_", " "): row[m] for t, row in cells.items() if m in row} for m in methods
        }
        return grid("%", by_method)
    theirs = printed_accuracies(HERE / paper / "printed.json")
    lines = []
    for task, row in cells.items():
        both = (f"{row[m]} ({theirs[task, m]:.1f})" if m in row else "–" for m in methods)
        lines.append([task.replace("_", " "), *both])
    return table(["% (paper)", *(f"`{method}`" for method in methods)], lines)


def ratio_table(paper: str, experiment: Experiment) -> str:
    frame = ledger(paper).table(experiment.name)
    assert frame is not None
    cells: dict[str, dict[str, str]] = {}
    for (size, length, method), own in frame.groupby(["corpus", "length", "method"], sort=False):
        of = own.set_index("metric")
        value, error = (of["sum"][name] / of["count"][name] for name in ("ratio", "ratio_error"))
        shown = f"{value:.2f}" + (f" ± {error:.2f}" if error else "")
        cells.setdefault(str(method), {})[f"{size}, {length}"] = shown
    return grid("relative time", cells)


def sink_table(paper: str, experiment: Experiment) -> str:
    frame = ledger(paper).table(experiment.name)
    assert frame is not None
    rows = frame[frame["metric"] == "sink_share"]
    shares = (100 * rows.groupby(["method", "length"], sort=False)["sum"].mean()).unstack("length")
    cells = {str(m): {str(n): f"{v:.2f}" for n, v in row.items()} for m, row in shares.iterrows()}
    return grid("% on the first token", cells)


TABLES = {
    "loss": perplexity_table,
    "accuracy": accuracy_table,
    "ratio": ratio_table,
    "sink_share": sink_table,
}


# --- pages


def page(paper: str) -> str:
    """README.md of a paper."""
    text, parts = text_of(paper), []
    parts.append(f"# {text.TITLE}\n\n<!-- Made by `python -m papers report` from results/: do not edit. -->")
    parts.append(fill(text.OPENING))
    if text.TOP:
        parts.append(verdicts_table(paper, text.TOP))
    parts.append(fill(text.LEGEND))
    for one in experiments(paper):
        if ledger(paper).table(one.name) is None:
            continue
        figure = f"![{one.title}](figures/{one.name}.svg)"
        shown = [figure] if one.metric in DRAW and figure.partition("(")[2] not in text.OPENING else []
        parts += [
            f"## {one.title}",
            f"{one.source}. {fill(one.shows)}",
            *shown,
            TABLES[one.metric](paper, one),
        ]
    kind = "claim" if paper != "beyond" else "hypothesis"
    parts += [f"# Appendix\n\n## Every {kind}\n\n{counts(paper).capitalize()}.", verdicts_table(paper)]
    parts += [
        f"## Hypotheses: {one.title}\n\n{findings(paper, one.name)}"
        for one in experiments(paper)
        if findings(paper, one.name)
    ]
    parts.append(fill(text.APPENDIX))
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def findings(paper: str, experiment: str) -> str:
    """Hypotheses of an experiment as they were written, with what was found beside them."""
    rows = getattr(text_of(paper), "HYPOTHESES", {}).get(experiment, [])
    listed = [[said, fill(found)] for said, found in rows]
    return table(["hypothesis, as written", "found"], listed) if rows else ""


def fill(text: str) -> str:
    """Replace {…} by numbers: {gap LaTeX dape1x3-kerple kerple 8192}."""
    return re.sub(r"\{([^{}]+)\}", lambda match: compute(match[1]), text).strip()


def compute(words: str) -> str:
    """A block or a number by its name."""
    if words in BLOCKS:
        return BLOCKS[words]()
    if words.startswith("retrofit "):
        name, *lengths = words.split()[1:]
        rows = read_table(ROOT / f"results/retrofit/{name}.csv.gz")
        hidden = rows["length"].ge(rows["train_length"]) & ~rows["length"].isin(map(int, lengths))
        return f"\n{Report(rows[~hidden] if lengths else rows).markdown()}\n"
    # A name with a space is written with underscores for spaces after its comma.
    kind, *rest = (word.replace(",_", ", ").replace("_time", " time") for word in words.split())
    if kind == "verdict":
        [found] = [v for v in ledger(rest[0]).verdicts() if v.claim.name == rest[1]]
        return found.words
    if kind == "count":
        return str(
            sum(v.word == rest[1].replace("_", " ") for v in ledger(rest[0]).verdicts())
            if len(rest) > 1
            else len(ledger(rest[0]).verdicts())
        )
    if kind == "largest":
        found = ledger("dape_v2").table(rest[0])
        return f"{found[found['metric'] == rest[1]]['sum'].max():.6f}"
    if kind not in ("gap", "lead", "lead_growth", "change", "growth", "perplexity", "share", "seeds"):
        raise ValueError(f'unknown number "{words}"')
    digits = int(rest.pop()[1:]) if rest[-1].startswith("d") and rest[-1][1:].isdigit() else 3
    source = rest.pop(0).partition(":")
    experiment, corpus = (source[0], source[2]) if source[1] else ("headline", source[0])
    paper = "beyond" if experiment in {e.name for e in experiments("beyond")} else "dape_v2"
    data = ledger(paper).by_corpus((experiment,))[corpus]
    _, data = max(data.settings(*[m for m in rest if not m.isdigit()]), key=lambda one: one[0])
    arguments = [int(word) if word.isdigit() else word for word in rest]
    if kind == "perplexity":
        return number(data.perplexity(*arguments))
    if kind == "share":
        return share_on_hits(data, *arguments)
    if kind == "seeds":
        return str(data.change(arguments[0], *data.lengths(arguments[0])[:2]).seeds)
    if kind in ("lead", "lead_growth"):
        one = data.gap(*arguments) if kind == "lead" else data.growth(*arguments)
        one = replace(one, value=-one.value, low=-one.high, high=-one.low)
        return interval(one, digits, signs=False)
    return interval(getattr(data, kind)(*arguments), digits)


def share_on_hits(data: Data, a: str, b: str, length: int) -> str:
    """Share of the lead of a over b that lies on recall hits, in percent."""
    hits = data.hits(length)
    rows = {m: (data.sums(m, length, hits)["sum"], data.sums(m, length)["sum"]) for m in (a, b)}
    seeds = sorted(set(rows[a][0].index) & set(rows[b][0].index))
    of = [rows[b][i].loc[seeds].sum().sum() - rows[a][i].loc[seeds].sum().sum() for i in (0, 1)]
    return f"{100 * of[0] / of[1]:.0f} %"


BLOCKS = {
    "verdicts": lambda: "\n" + verdicts_table("dape_v2", text_of("dape_v2").TOP) + "\n",
    "counts": lambda: counts("dape_v2"),
    "counts beyond": lambda: counts("beyond"),
    "headline": lambda: "\n" + perplexity_table("dape_v2", experiments("dape_v2")[0]) + "\n",
    "code": lambda: "\n" + length_table("dape_v2", experiments("dape_v2")[1]) + "\n",
    **{
        f"bench {name}": lambda make=make: f"\n{table(*make())}\n"
        for name, make in bench_tables.TABLES.items()
    },
}


def documents() -> dict[Path, str]:
    """Text that every document should have."""
    pages = {HERE / paper / "README.md": page(paper) for paper in PAPERS}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        if path.exists() and MARKED.search(text := path.read_text("utf-8")):
            pages[path] = MARKED.sub(lambda m: m[1] + compute(m[2].strip()) + m[4], text)
    return pages


def drawn(paper: str) -> list[tuple[str, str, pd.DataFrame]]:
    """(name, metric, table) of the experiments that have results and a figure."""
    known = [(e.name, e.metric, ledger(paper).table(e.name)) for e in experiments(paper)]
    return [(name, metric, table) for name, metric, table in known if table is not None and metric in DRAW]


def outdated() -> list[str]:
    """Documents that do not have the numbers of the tables, and figures that are missing."""
    stale = [
        str(path.relative_to(ROOT))
        for path, text in documents().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for paper in PAPERS:
        missing = {name for name, *_ in drawn(paper)} - {
            path.stem for path in (HERE / paper / "figures").glob("*.svg")
        }
        stale += [f"papers/{paper}/figures/{name}.svg" for name in sorted(missing)]
    return stale


def report() -> list[Path]:
    """Write pages, figures and the marked numbers of other documents."""
    written = []
    for path, text in documents().items():
        path.write_text(text, "utf-8")
        written.append(path)
    for paper in PAPERS:
        written += write_figures(drawn(paper), HERE / paper / "figures")
    return written
