"""One page of everything: the ledger, then every experiment with its claims, figure and tables, ours and the paper's."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from dape.files import write_atomically
from dape.methods import parse_method
from dape.report.markup import definitions
from dape.report.page import document
from dape.reproduce.claims import Verdict, count, place, verdicts_of
from dape.reproduce.content import tables
from dape.reproduce.curves import looks_of
from dape.reproduce.evidence import FAILS, HOLDS, NOT_RUN, UNDECIDED
from dape.reproduce.figures import HEADLINE, inline_svg, on_page
from dape.reproduce.folders import Folder, load_folders, with_claims
from dape.reproduce.paper import Paper, load_paper
from dape.reproduce.readme import machine, ran, settings, spoken
from dape.reproduce.tables import html
from dape.reproduce.wording import another_scale, explained, scale_of

CLASSES = {HOLDS: "holds", FAILS: "fails", UNDECIDED: "undecided", NOT_RUN: "not-run"}
SHORT = {NOT_RUN: "not run"}
INTRODUCTION = (
    "A Transformer decides which earlier tokens to look at by a score for every pair of tokens, and is told by a "
    "position encoding how far apart they are. Trained on short inputs, most such models fail on longer ones. The "
    "paper takes the scores as a picture, one channel a head, and runs a small convolution over them before they are "
    "used: over the heads alone (DAPE, kernel 1) or over neighbouring tokens as well (DAPE V2, kernel 3 and more). "
    "It claims that such models go on working, and even get better, on inputs many times longer than in training."
)
READING = (
    "Perplexity says how many tokens a model hesitates between: lower is better. Lengths are given in tokens and as "
    "multiples of the training length: at 16× a model reads sixteen times as much as in training. Each score is of "
    "the same last tokens of the same passages, with more text before them as the length grows. Errors in the tables "
    "are over documents: mostly that some documents are harder than others, for all methods alike. Differences between "
    "methods are taken passage by passage and are far surer; the bars in figures are the errors of such differences, "
    "to the curve that the legend names. A change with the length counts from the training length, or from twice it "
    "where the scored tokens fill it: the first of them have next to no text before them there, so that every model "
    "gains when they have. Texts that anyone can obtain stand in for the paper's corpora: where a claim names one of "
    "those, it is judged on the text that stands for it."
)
# Pictures beside an experiment's figure that are taken into the page.
KINDS_OF_PICTURE = {".png": "image/png", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Part:
    """A folder under papers/: its printed numbers, its experiments, and what became of its claims."""

    path: Path
    paper: Paper
    folders: list[Folder]
    verdicts: list[Verdict]

    @property
    def title(self) -> str:
        return self.paper.title or ("Beyond the paper" if self.path.name == "beyond" else self.path.name)

    def of(self, name: str) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.claim.experiment == name]


def build_report(papers: Path, out: Path) -> Path:
    """Write the page of all folders under papers/ that have claims; returns its path."""
    parts = [load_part(path) for path in with_claims(papers)]
    assets = files("dape.reproduce")
    style, script = ((assets / name).read_text("utf-8") for name in ("page.css", "page.js"))
    title = next((part.title for part in parts), "No claims yet")
    body = "\n".join([*head(title, parts), *(text for part in parts for text in sections(part))])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        out, document(f"{title}: table by table", f"{body}<script>{script}</script>", style=style)
    )
    return out


def load_part(path: Path) -> Part:
    verdicts = verdicts_of(path)
    folders = load_folders(path, [verdict.claim.experiment for verdict in verdicts])
    return Part(path, load_paper(path), folders, verdicts)


def head(title: str, parts: Sequence[Part]) -> list[str]:
    """Title, what this is about, the counts, the ledger, and where everything is."""
    # The tiles are of the paper's own claims; what goes beyond it has its count in the ledger.
    own = [part for part in parts if part.paper.title] or list(parts)
    verdicts = [verdict for part in own for verdict in part.verdicts]
    cards = "".join(
        f'<button class="card {CLASSES[name]}" data-verdict="{CLASSES[name]}" aria-pressed="false">'
        f"<b>{number}</b><span>{escape(name)}</span></button>"
        for name, number in count(verdicts).items()
    )
    lines = [
        f"<h1>{escape(title)}</h1>",
        '<p class="faint">The paper’s results, table by table, run again.</p>',
    ]
    lines += [f"<p>{escape(INTRODUCTION)}</p>", f'<div class="cards">{cards}</div>']
    lines += [f'<p class="faint">{escape(scale_of(part.folders, part.paper))}</p>' for part in own]
    if parts and (drawn := headline(parts[0].path.parent)):
        lines.append(
            f'<div class="drawing headline" role="img" aria-label="Perplexity by length">{drawn}</div>'
        )
    lines.append(methods(parts))
    lines += [f"<details><summary>How to read the numbers</summary><p>{escape(READING)}</p>"]
    lines += [
        f"<p>{_emphasised(explained([folder for part in parts for folder in part.folders]))}</p></details>"
    ]
    total = sum(len(part.verdicts) for part in parts)
    lines += [f"<h2>{total} claims</h2>", *(ledger_of(part) for part in parts), contents(parts)]
    return lines


def ledger_of(part: Part) -> str:
    """The claims of a folder under papers/, by experiment."""
    groups = []
    for folder in part.folders:
        if mine := part.of(folder.name):
            where = f'<a href="#{anchor(part, folder)}">{escape(folder.title)}</a>'
            groups.append(f"<section><h3>{where}</h3>{''.join(map(claim, mine))}</section>")
    whose = "What the paper claims" if part.paper.title else f"{part.title}: what we expected"
    total = ", ".join(f"{number} {name}" for name, number in count(part.verdicts).items() if number)
    head = f'<p><b>{escape(whose)}</b> <span class="faint">{escape(total)}</span></p>'
    return f'{head}<div class="ledger">{"".join(groups)}</div>'


def headline(papers: Path) -> str:
    """The headline figure, if it has been made."""
    made = papers / HEADLINE
    return on_page(made.read_text("utf-8")) if made.exists() else ""


def contents(parts: Sequence[Part]) -> str:
    lists = "".join(
        f"<h3>{escape(part.title)}</h3><ol>"
        + "".join(f'<li><a href="#{anchor(part, f)}">{escape(f.title)}</a></li>' for f in part.folders)
        + "</ol>"
        for part in parts
    )
    return f"<nav><h2>Experiments</h2>{lists}</nav>"


def methods(parts: Sequence[Part]) -> str:
    """The methods that the results name, in a line each."""
    rows = [r for part in parts for folder in part.folders for r in (folder.best or {}).get("records", ())]
    found = {}
    for name in sorted({row["method"] for row in rows if row.get("method")}):
        try:
            found[name] = parse_method(name).summary
        except ValueError:  # a name of somebody else's method says nothing to us
            continue
    return f"<details><summary>The methods</summary>{definitions(found)}</details>" if found else ""


def sections(part: Part) -> list[str]:
    return [section(part, folder) for folder in part.folders]


def section(part: Part, folder: Folder) -> str:
    """Everything of one experiment."""
    whose = "What the paper shows" if part.paper.title else "What we ask"
    source = f", {folder.source}" if folder.source else ""
    lines = [f'<h2 id="{anchor(part, folder)}">{escape(folder.title)}</h2>']
    if folder.shows:
        lines.append(f'<div class="shows"><b>{escape(whose + source)}</b>{escape(folder.shows)}</div>')
    lines += [claim(verdict, sentence=True) for verdict in part.of(folder.name)]
    if drawn := inline_svg(folder, part.paper):
        lines.append(f'<div class="drawing" role="img" aria-label="{escape(folder.title)}">{drawn}</div>')
    if shown_maps := [picture(path) for path in pictures(folder)]:
        many = f"{len(shown_maps)} picture{'s' if len(shown_maps) > 1 else ''}"
        lines.append(f"<details><summary>{many}</summary>{''.join(shown_maps)}</details>")
    if shown := tables(folder, part.paper):
        colours = {label: style.colour for label, style in looks_of(folder, part.paper).items()}
        lines.append(f'<p class="faint">{escape(another_scale(folder, part.paper))}</p>')
        # The first few at once, the rest behind a click.
        lines += [html(table, colours) for table in shown[:2]]
        if rest := shown[2:]:
            more = "".join(html(table, colours) for table in rest)
            lines.append(f"<details><summary>{len(rest)} more tables</summary>{more}</details>")
    lines += [f'<p class="faint">{escape(note)}</p>' for note in part.paper.notes_on(folder.name)]
    return "\n".join([*lines, about(folder)])


def about(folder: Folder) -> str:
    """How it was run."""
    results = folder.best
    if results is None:
        return f'<p class="faint">Not run yet: <code>dape reproduce {escape(folder.name)}</code> runs it.</p>'
    return (
        f'<p class="faint">{escape(ran(folder, results))}</p>'
        f"<pre>{escape(results.get('command', ''))}</pre>"
        "<details><summary>Settings, hardware and versions</summary>"
        f'<div class="columns"><div>{definitions(settings(results))}</div>'
        f"<div>{definitions(machine(results))}</div></div></details>"
    )


def claim(verdict: Verdict, *, sentence: bool = False) -> str:
    kind = CLASSES[verdict.verdict]
    badge = f'<span class="badge {kind}">{escape(SHORT.get(verdict.verdict, verdict.verdict))}</span>'
    where = (
        f' <span class="section">{escape(place(verdict.claim.section))}</span>'
        if verdict.claim.section
        else ""
    )
    numbers = f'<p class="faint">{escape(verdict.sentence)}</p>' if sentence else ""
    for closer in verdict.closer if sentence else ():
        said = f"Looked into: {closer.claim.text} {closer.verdict.capitalize()}. {closer.sentence}"
        numbers += f'<p class="faint">{escape(said)}</p>'
    return f'<div class="claim {kind}" data-verdict="{kind}">{badge}<p>{escape(verdict.claim.text)}{where}</p>{numbers}</div>'


def pictures(folder: Folder) -> list[Path]:
    """The pictures that the results name."""
    found = [folder.path / name for name in (folder.best or {}).get("pictures", ())]
    return [path for path in found if path.suffix in KINDS_OF_PICTURE and path.exists()]


def picture(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    name = escape(spoken(path.name))
    source = f"data:{KINDS_OF_PICTURE[path.suffix]};base64,{content}"
    return (
        f'<figure class="drawing"><img src="{source}" alt="{name}"><figcaption>{name}</figcaption></figure>'
    )


def anchor(part: Part, folder: Folder) -> str:
    return f"{part.path.name}-{folder.name}"


def _emphasised(text: str) -> str:
    """Words between asterisks, in italics."""
    pieces = escape(text).split("*")
    return "".join(f"<i>{piece}</i>" if place_ % 2 else piece for place_, piece in enumerate(pieces))
