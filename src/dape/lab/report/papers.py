"""READMEs of the papers and one page of all: claims with verdicts, figures and tables, ours and the paper's."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from warnings import warn

from jinja2 import UndefinedError
from matplotlib.style import context

from dape.evaluation.inference import Estimate
from dape.files import write_atomically
from dape.lab.claims import (
    FAILS,
    HOLDS,
    NOT_RUN,
    STYLES,
    UNDECIDED,
    VERDICTS,
    Verdict,
    count,
    counted,
    numbered,
    summary,
    undecided_parts,
    verdicts_of,
)
from dape.lab.figures import LOOK, on_page, svg
from dape.lab.folders import Folder, load_folder, load_folders, with_claims
from dape.lab.kinds import kind_named
from dape.lab.kinds.panels import BASE, BEST, headline, main_models
from dape.lab.paper import Paper, load_paper
from dape.lab.records import STEP, TIME, Results
from dape.lab.report import method_summary, render
from dape.lab.report.hypotheses import FILE as HYPOTHESES
from dape.lab.report.hypotheses import hypotheses, joined, share_of_hits
from dape.lab.stats import (
    ERRORS,
    ONE_POSITION,
    TWO_POSITIONS,
    Losses,
    SeedVariance,
    Trained,
    searched,
    signed,
)
from dape.lab.tables import Table

FIGURE, HEADLINE = "figure.svg", "headline.svg"
LEADING = ("headline", "baselines")
TABLE_MARKS = ("<!-- headline -->", "<!-- /headline -->")
# Our texts, by the name of what they stand for.
NAMES = {"arxiv": "LaTeX", "books3": "books"}
CLASSES = {HOLDS: "holds", FAILS: "fails", UNDECIDED: "undecided", NOT_RUN: "not-run"}
# Entries of the environment shown first, in this order.
FIRST = ("cpu", "cores", "memory", "gpu", "threads", "jobs", "dape", "commit", "python", "torch")
# Number of an experiment's further images that are embedded in the page.
KINDS_OF_PICTURE = {".png": "image/png", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Section:
    """Contents of one experiment's section."""

    folder: Folder
    paper: Paper
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def tables(self) -> list[Table]:
        return kind_named(self.folder.kind).tables(self.folder, self.paper) if self.folder.kind else []

    @property
    def notes(self) -> list[str]:
        return self.paper.notes_on(self.folder.name)

    @property
    def hypotheses(self) -> str:
        """Name of the file of hypotheses, if the experiment has one."""
        return HYPOTHESES if (self.folder.path / HYPOTHESES).exists() else ""

    @property
    def anchor(self) -> str:
        return f"{self.folder.path.parent.name}-{self.folder.name}"

    @property
    def pictures(self) -> list[tuple[str, str]]:
        """File names and titles of the images in the results."""
        names = self.folder.best.get("pictures", ()) if self.folder.best else ()
        return [(name, spoken(name)) for name in names]

    @property
    def scale_note(self) -> str:
        return another_scale(self.folder, self.paper)

    @property
    def ran(self) -> str:
        assert self.folder.best is not None
        return ran(self.folder, self.folder.best)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, flattened."""
        flat: dict[str, Any] = {}
        for name, value in (self.folder.best.settings if self.folder.best else {}).items():
            inner = (
                {f"{name}: {key}": entry for key, entry in value.items()} if isinstance(value, dict) else None
            )
            flat |= {name: value} if inner is None else inner
        return flat

    @property
    def machine(self) -> dict[str, Any]:
        known = self.folder.best["environment"] if self.folder.best else {}
        names = [*(name for name in FIRST if name in known), *(name for name in known if name not in FIRST)]
        return {name: known[name] for name in names if known[name] is not None}

    def draw(self) -> str | None:
        """The figure as SVG on white; None if there is nothing to draw."""
        with context(["default", LOOK]):
            drawn = kind_named(self.folder.kind).figure(self.folder, self.paper) if self.folder.kind else None
            return None if drawn is None else svg(drawn)

    @property
    def drawing(self) -> str:
        """The figure for a page, redrawn if the file is older than its data."""
        path, own = self.folder.path / FIGURE, self.folder.path
        sources = [*own.glob("*.json"), *own.glob("*.toml"), *own.parent.glob("paper.json")]
        fresh = path.exists() and all(path.stat().st_mtime >= source.stat().st_mtime for source in sources)
        text = path.read_text("utf-8") if fresh else self.draw()
        return on_page(text) if text else ""

    @property
    def embedded(self) -> list[tuple[str, str]]:
        """Images as data URLs for a page, with their titles."""
        images = []
        for name, title in self.pictures:
            path = self.folder.path / name
            if path.suffix in KINDS_OF_PICTURE and path.exists():
                content = base64.b64encode(path.read_bytes()).decode()
                images.append((f"data:{KINDS_OF_PICTURE[path.suffix]};base64,{content}", title))
        return images


@dataclass(frozen=True)
class Part:
    """A folder under papers/: its printed numbers, its experiments, and the verdicts on its claims."""

    path: Path
    paper: Paper
    sections: list[Section]
    verdicts: list[Verdict]

    @property
    def title(self) -> str:
        return self.paper.title or ("Beyond the paper" if self.path.name == "beyond" else self.path.name)

    @property
    def folders(self) -> list[Folder]:
        return [section.folder for section in self.sections]


def load_part(path: Path) -> Part:
    verdicts, paper = verdicts_of(path), load_paper(path)
    folders = load_folders(path, [verdict.claim.experiment for verdict in verdicts])
    sections = [
        Section(folder, paper, [v for v in verdicts if v.claim.experiment == folder.name])
        for folder in folders
    ]
    return Part(path, paper, sections, verdicts)


def write_readmes(papers: Path) -> list[Path]:
    """Write README.md, figure.svg and hypotheses.md of every experiment, README.md of every paper, the headline figure."""
    written = []
    for path in with_claims(papers):
        part = load_part(path)
        for section in part.sections:
            folder = section.folder
            if not folder.path.is_dir():
                continue
            if drawn := section.draw():
                write_atomically(folder.path / FIGURE, drawn)
                written.append(folder.path / FIGURE)
            try:
                text = hypotheses(folder)
            except (LookupError, ValueError, UndefinedError) as error:
                # Results that are not complete must not stop the report of all others.
                warn(f"{folder.path / HYPOTHESES} is not written: {error}", stacklevel=2)
                text = None
            if text:
                write_atomically(folder.path / HYPOTHESES, text)
                written.append(folder.path / HYPOTHESES)
            write_atomically(folder.path / "README.md", experiment_readme(section))
            written.append(folder.path / "README.md")
        write_atomically(path / "README.md", paper_readme(part))
        written.append(path / "README.md")
    if (headline := write_headline(papers)) is not None:
        written.append(headline)
    if (readme := write_overview(papers)) is not None:
        written.append(readme)
    return written


def leading(papers: Path) -> Folder | None:
    """Experiment summarised at the top of the page: the headline, or the baselines before it has results."""
    folders = [load_folder(path) for name in LEADING for path in papers.glob(f"*/{name}")]
    return next((f for f in folders if f.best and {BASE, BEST} <= set(main_models(f.losses))), None)


def write_headline(papers: Path) -> Path | None:
    """Write papers/headline.svg, the loss by length against Kerple's, once there are results."""
    folder = leading(papers)
    with context(["default", LOOK]):
        drawn = headline(folder) if folder else None
        if drawn is None:
            return None
        write_atomically(papers / HEADLINE, svg(drawn))
    return papers / HEADLINE


def write_overview(papers: Path) -> Path | None:
    """Write the headline's table into the README beside papers/, between its two marks; None if it has none."""
    readme, folder = papers.parent / "README.md", leading(papers)
    text = readme.read_text("utf-8") if readme.exists() else ""
    if folder is None or any(text.count(mark) != 1 for mark in TABLE_MARKS):
        return None
    before, rest = text.split(TABLE_MARKS[0])
    after = rest.split(TABLE_MARKS[1])[1]
    table = "\n".join(overview(folder))
    write_atomically(readme, f"{before}{TABLE_MARKS[0]}\n{table}\n{TABLE_MARKS[1]}{after}")
    return readme


def overview(folder: Folder) -> list[str]:
    """A table of the headline: perplexities at the training length and at the longest, differences to Kerple's loss.

    Below it, how many of the paper's claims hold.
    """
    data, rows = folder.losses, []
    first, *_ = data.corpora()
    for corpus in data.corpora():
        models = {view: main_models(data, view, corpus=corpus) for view in (STEP, TIME)}
        for view, method in ((STEP, BASE), (STEP, "rope"), (STEP, BEST), (TIME, BEST)):
            one = models[view].get(method)
            if one is None or (method == "rope" and corpus != first):
                continue
            start, long = one.train_length, data.lengths(one)[-1]
            cells = [f"{math.exp(data.loss(one, n).value):.2f}" for n in (start, long)]
            gaps = [data.difference((1, one, n), (-1, models[view][BASE], n)) for n in (start, long)]
            cells += ["", ""] if method == BASE else [signed(gap) for gap in gaps]
            name = NAMES.get(data.paper_corpus(corpus), corpus)
            time = ", in Kerple's training time" if view == TIME else ""
            rows.append(f"| {name}, `{method}`{time} | {' | '.join(cells)} | {len(data.seeds(one))} |")
    heading = f"| perplexity at | {start} | {long} | loss − Kerple's at {start} | at {long} | seeds |"
    claims = [verdict for verdict in verdicts_of(folder.path.parent) if not verdict.claim.ours]
    below = ["", f"The paper's {numbered(claims, 'claim')}: {counted(count(claims))}."] if claims else []
    return [heading, "|---|---|---|---|---|---|", *rows, *below]


def findings(papers: Path) -> list[str]:
    """The findings in few sentences: against Kerple, with the length, where they come from, in equal time, on other texts."""
    folder = leading(papers)
    if folder is None:
        return []
    data, models = folder.losses, main_models(folder.losses)
    one, base = models[BEST], models[BASE]
    start, long = data.start(one) or one.train_length, data.lengths(one, base)[-1]
    seeds, texts = len(data.seeds(one)), len(set(data.documents[one.corpus]))
    name = NAMES.get(data.paper_corpus(one.corpus), one.corpus)
    said = [
        f"On {name}, Kerple with the 1×3 convolution ({BEST}) has a loss that is {compared(data, one, base, start, long)}.",
        f"Trained at {start} tokens, {counted_seeds(data, one)}{by_seed(data, (1, one, long), (-1, base, long), at=long)}; "
        f"evaluated on {texts} documents: {folder.texts.get(one.corpus, one.corpus)}.",
    ]
    shown = [models[name] for name in (BEST, BASE, "rope") if name in models]
    few = {t: f" ({counted_seeds(data, t)})" for t in shown if len(data.seeds(t)) < seeds}
    changes = []
    for t in shown:
        ends = (1, t, long), (-1, t, start)
        changes.append(f"{t.method}{few.get(t, '')} {changed(data.difference(*ends))}{by_seed(data, *ends)}")
    said.append(
        f"From {start}, the length of training, to {long} tokens, the loss of {', that of '.join(changes)}."
    )
    hits = folder.losses_on("hit")
    if {one, base} <= set(hits.rows):
        others = folder.losses_on("other")
        shares = [f"{100 * share_of_hits(hits, others, one, n):.0f} %" for n in (start, long)]
        near, far = (
            [signed(part.difference((1, one, n), (-1, base, n))) for part in (hits, others)]
            for n in (start, long)
        )
        said.append(
            f"Of the scored tokens, {shares[0]} complete a trigram that the input has shown before at {start} tokens, "
            f"{shares[1]} at {long}. On these the difference is {near[0]} nats at {start} and {far[0]} at {long} tokens, on all "
            f"others {near[1]} and {far[1]}."
        )
    if BEST in (timed := main_models(data, TIME)):
        pair = timed[BEST], timed[BASE]
        end = data.lengths(*pair)[-1]
        said.append(
            f"In the same training time ({counted_seeds(data, pair[0])}), it is {compared(data, *pair, start, end)}"
            f"{by_seed(data, (1, pair[0], end), (-1, pair[1], end))}."
        )
    return said + [text for corpus in data.corpora()[1:] if (text := finding_on(folder, corpus))]


def ladder(folder: Folder) -> list[str]:
    """A table of every method's loss against the first one's, at the training length and at the longest input."""
    data = folder.losses
    trained = [t for t in data.rows if t.view == STEP]
    if len(trained) < 2:
        return []
    base, *others = trained
    if not (seeds := data.common_seeds(trained)):
        return []
    start, long = base.train_length, data.lengths(*trained)[-1]
    data = data.only(seeds)
    rows = [f"|  | at {start} | at {long} |", "|---|---|---|"]
    for one in others:
        gaps = (signed(data.difference((1, one, n), (-1, base, n))) for n in (start, long))
        rows.append(f"| {one.label} | {' | '.join(gaps)} |")
    said = f"seed{'s' if len(seeds) > 1 else ''} {joined(map(str, seeds))}, which all have"
    return [f"Loss less that of {base.label}, in nats on the same tokens, of {said}:", "", *rows]


def finding_on(folder: Folder, corpus: str) -> str:
    """The same on a further text, in one sentence; empty without results."""
    data, models = folder.losses, main_models(folder.losses, corpus=corpus)
    if not {BEST, BASE} <= set(models):
        return ""
    one, base = models[BEST], models[BASE]
    start, long = data.start(one) or one.train_length, data.lengths(one, base)[-1]
    return (
        f"On {folder.texts.get(corpus, corpus)} ({counted_seeds(data, one)}), it is "
        f"{compared(data, one, base, start, long)}, and from {start} to {long} tokens it "
        f"{changed(data.difference((1, one, long), (-1, one, start)))}."
    )


def compared(data: Losses, one: Trained, other: Trained, start: int, long: int) -> str:
    """The first loss against the other at two lengths: lower or higher than that of …, with errors, or undecided."""
    gaps = {n: data.difference((1, one, n), (-1, other, n)) for n in (start, long)}
    near, far = (towards(gap, "lower", "higher", "not clearly different") for gap in gaps.values())
    decided = not near.startswith("not")
    said = f"{near} {'than' if decided else 'from'} that of {other.method}"
    if near == far:
        amounts = f"{amount(gaps[start])} nats at {start} tokens and {amount(gaps[long])} at {long}"
        return f"{said}{' by' if decided else ':'} {amounts}"
    return (
        f"{said} at {start} tokens ({signed(gaps[start])} nats), and {far} at {long} ({signed(gaps[long])})"
    )


def counted_seeds(data: Losses, one: Trained) -> str:
    number = len(data.seeds(one))
    return f"{number} seed{'s' if number > 1 else ''}"


def by_seed(data: Losses, *terms: tuple[float, Trained, int], at: int | None = None) -> str:
    """The values of a difference's seeds in brackets, with the length if it is given; empty with one seed."""
    values = list(data.differences(*terms).values())
    if len(values) < 2:
        return ""
    said = ", ".join(signed(Estimate(value)) for value in values)
    alone = Estimate(fmean(values), stdev(values) / math.sqrt(len(values)), len(values) - 1)
    # The error takes in the seed variance of similar comparisons, and may be smaller than that of these seeds.
    caution = abs(data.difference(*terms).weight) > ERRORS >= abs(alone.weight)
    where = f"at {at} tokens, " if at else ""
    return f" ({where}by seed {said}{'; by themselves these seeds would not decide it' if caution else ''})"


def changed(change: Estimate) -> str:
    """A change of the loss in words: falls or rises by its size, or keeps within errors."""
    word = towards(change, "falls", "rises", "")
    return f"{word} by {amount(change)}" if word else f"does not clearly change ({signed(change)})"


def towards(estimate: Estimate, below: str, above: str, neither: str) -> str:
    if abs(estimate.weight) <= ERRORS:
        return neither
    return below if estimate.value < 0 else above


def amount(estimate: Estimate) -> str:
    """The size of a decided difference, or a signed one that is not decided."""
    if abs(estimate.weight) <= ERRORS:
        return signed(estimate)
    return signed(replace(estimate, value=abs(estimate.value))).removeprefix("+")


def experiment_readme(section: Section) -> str:
    figure = (section.folder.path / FIGURE).exists()
    return render(
        "experiment.md.j2",
        section=section,
        figure=FIGURE if figure else "",
        styles=STYLES,
    )


def paper_readme(part: Part) -> str:
    """The ledger: every claim with its verdict, by experiment."""
    shared: dict[str, Any] = {"scale_of": scale_of(part.folders, part.paper)}
    shared |= {"explained": explained(part.folders)}
    shared |= {
        "findings": findings(part.path.parent) if part.paper.title else [],
        "ladder": ladder,
        "counted": counted,
        "count": count,
        "numbered": numbered,
    }
    return render(
        "paper.md.j2",
        part=part,
        styles=STYLES,
        summary=summary,
        **shared,
    )


def build_report(papers: Path, out: Path) -> Path:
    """Write the page of all folders under papers/ that have claims; returns its path."""
    parts = [load_part(path) for path in with_claims(papers)]
    # The tiles count the paper's own claims; those beyond it are counted in the ledger.
    own = [part for part in parts if part.paper.title] or parts
    figure = papers / HEADLINE
    out.parent.mkdir(parents=True, exist_ok=True)
    page = render(
        "papers.html.j2",
        title=f"{own[0].title if own else 'No claims yet'}: table by table",
        heading=own[0].title if own else "No claims yet",
        parts=parts,
        cards=cards([verdict for part in own for verdict in part.verdicts if not verdict.claim.ours]),
        classes=CLASSES,
        short={NOT_RUN: "not run"},
        scales=[scale_of(part.folders, part.paper) for part in own],
        headline=on_page(figure.read_text("utf-8")) if figure.exists() else "",
        methods=methods_of(parts),
        explained=explained([folder for part in parts for folder in part.folders]).split("*"),
        findings=findings(papers),
        counted=counted,
        count=count,
        summary=summary,
    )
    write_atomically(out, page)
    return out


def cards(verdicts: Sequence[Verdict]) -> list[tuple[str, int, str, str]]:
    """Verdict, number, wording and remark of every tile."""
    pooled, fine = undecided_parts(verdicts)
    parts = [f"{pooled} decided by all settings together"] if pooled else []
    parts += [f"{fine} too fine for this scale"] if fine else []
    words = {HOLDS: "hold", FAILS: "do not hold", UNDECIDED: "undecided", NOT_RUN: NOT_RUN}
    remarks_of = {UNDECIDED: ", ".join(parts)}
    return [(name, n, words[name], remarks_of.get(name, "")) for name, n in count(verdicts).items()]


def methods_of(parts: Sequence[Part]) -> dict[str, str]:
    """One-line descriptions of the methods in the results."""
    folders = [folder for part in parts for folder in part.folders if folder.best]
    descriptions = {}
    for name in sorted({run["method"] for folder in folders for run in folder.best["runs"]}):  # type: ignore[index]  # folders have results
        try:
            descriptions[name] = method_summary(name)
        except ValueError:  # a name of somebody else's method says nothing to us
            continue
    return descriptions


def spoken(picture: str) -> str:
    """Title of an image from its file name."""
    return Path(picture).stem.replace("-", " ").replace("_", " ")


# --- caveats before the numbers


def ran(folder: Folder, results: Results) -> str:
    """Sentences on seeds, texts, training time and missing runs."""
    seeds = sorted({run["seed"] for run in results["runs"] if "seed" in run})
    texts = [
        f"{name}: {folder.texts[name]}"
        + (f" (for {folder.stands_for[name]})" if name in folder.stands_for else "")
        for name in dict.fromkeys(run.get("corpus") for run in results["runs"])
        if name in folder.texts
    ]
    lines = [f"Seeds: {', '.join(map(str, seeds))}." if seeds else ""]
    lines.append(f"Time taken: {duration(results['seconds'])} of training." if results.get("seconds") else "")
    lines.append(f"Texts: {'; '.join(texts)}." if texts else "")
    if missing := results["missing"]:
        lines.append(f"Not finished: {len(missing)} of its trainings are still to do.")
    for failure in results["failures"]:
        lines.append(f"Failed: {failure.get('label', failure.get('method', ''))}: {failure.get('error', '')}")
    return " ".join(line for line in lines if line)


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def explained(folders: Sequence[Folder]) -> str:
    """Explanation of the verdicts."""
    return (
        f"*{VERDICTS[0]}*: every comparison of the claim, or as many as it names, favours it by more than two standard "
        f"errors. *{VERDICTS[1]}*: one contradicts it by more; of many comparisons, a single one must exceed a larger "
        f"threshold, {searched(24):.1f} errors for one of 24. *{VERDICTS[2]}*: neither. With few documents or seeds the "
        f"thresholds are larger (Student's t). *Pooled*: the mean over all settings for each pair of methods, so that a "
        f"claim can hold although one setting contradicts it; the number is the margin beyond the claim's threshold. "
        f"*On the paper's own numbers*: the same rule applied to the numbers that the paper prints. Losses are compared "
        f"on the same tokens; errors cover documents and seeds. {borrowed(folders)} Where the scored tokens fill the "
        f"training window, changes with the length are measured from twice the training length."
    )


def borrowed(folders: Sequence[Folder]) -> str:
    """Source of the seed variance for few seeds, and its size at the training length."""
    known_ = next((f.seed_variance for f in folders if f.kind == "language" and f.results), SeedVariance())
    known = {
        words: known_.prior([("methods", kind)], 1.0)
        for kind, words in (
            (ONE_POSITION, "sharing a position encoding"),
            (TWO_POSITIONS, "with different ones"),
        )
    }
    said = "One seed says nothing about the spread between seeds, and few say little"
    errors = [
        f"{words} {math.sqrt(prior.variance):.3f}" for words, prior in known.items() if prior is not None
    ]
    if not errors:
        return f"{said}: another training might decide otherwise."
    return (
        f"{said}: it is estimated together with that of similar comparisons in other experiments (at the training length, "
        f"in nats, between methods {' and '.join(errors)})."
    )


def another_scale(folder: Folder, paper: Paper) -> str:
    """Caveat that our numbers and the paper's are not directly comparable."""
    results = folder.best
    if results is None:
        return "The paper's alone; ours are not run yet."
    if not paper.title or results.get("scale") == "paper":
        return ""
    scale = f"the {results.get('scale')} scale"
    if results.kind == "tasks":
        return f"Ours are trained for far fewer steps ({scale}): compare which methods lead, not the values."
    if results.kind == "timing":
        return f"Ours are of small models on the processor named below ({scale}), the paper's on GPUs: compare ratios."
    steps = paper.value("configuration", setting="thousand steps", size="125m")
    budget = f", and {steps:g} thousand steps" if steps else ""
    return (
        f"Ours are small models on other text ({scale}), the paper's have {size_of(paper)} parameters or "
        f"more{budget}: compare the order of methods and the shape of curves, not the values."
    )


def size_of(paper: Paper) -> str:
    """The smallest size in the paper's table of configurations, as text."""
    sizes = [number.get("size") for number in paper.numbers if number.quantity == "configuration"]
    return f"{sizes[0].removesuffix('m')} million" if sizes else "many"


def scale_of(folders: Sequence[Folder], paper: Paper) -> str:
    """Sentence on the size of our models and texts; empty at the paper's scale."""
    trained = [f for f in folders if f.kind == "language" and f.best and f.best.get("scale") != "paper"]
    runs = [run for folder in trained for run in (folder.best["runs"] if folder.best else ())]
    runs = [run for run in runs if {"parameters", "steps", "batch_size", "train_length"} <= set(run)]
    if not runs:
        return ""
    sizes = millions(run["parameters"] for run in runs)
    tokens = millions(run["steps"] * run["batch_size"] * run["train_length"] for run in runs)
    folder, corpora = trained[0], dict.fromkeys(run["corpus"] for run in runs)
    texts = [f"{c} is {folder.texts[c]}{stand_in(folder, c)}" for c in corpora if c in folder.texts]
    theirs = f" The paper's have {size_of(paper)} parameters or more." if paper.title else ""
    return (
        f"Verdicts are of the laptop's scale: models of {sizes} parameters trained on {tokens} tokens each.{theirs}"
        + (f" Texts: {'; '.join(texts)}." if texts else "")
    )


def stand_in(folder: Folder, corpus: str) -> str:
    return f", in place of {folder.stands_for[corpus].capitalize()}" if corpus in folder.stands_for else ""


def millions(values: Iterable[float]) -> str:
    """Format the range of numbers, in millions."""
    numbers = list(values)
    low, high = (f"{value / 1e6:.1f}" for value in (min(numbers), max(numbers)))
    return f"{low} to {high} million" if low != high else f"{low} million"
