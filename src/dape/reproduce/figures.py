"""Figures of experiments, ours and the paper's numbers alike: an SVG for the folder, and one for the page.

On the page a figure's ink follows the page's colours, so it can be read on light and on dark ground.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.style import context

from dape.files import write_atomically
from dape.report import figures as report
from dape.reproduce.curves import FAINT, GRID, INK, single_figure, styles
from dape.reproduce.drawings import KINDS
from dape.reproduce.folders import Folder
from dape.reproduce.panels import our_panels
from dape.reproduce.paper import Paper

NAME, HEADLINE = "figure.svg", "headline.svg"
# The methods of the headline figure, best last in the paper.
MAIN = ("rope", "alibi", "kerple", "dape-kerple", "dape1x3-kerple")
# The page's names for ink, faint ink and grid as drawn.
ON_PAGE = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)"}
LOOK = {
    **report.LOOK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "axes.facecolor": "none",
}


def write_figure(folder: Folder, paper: Paper) -> Path | None:
    """figure.svg in the experiment's folder; nothing if there is nothing to draw yet."""
    drawn = svg(folder, paper)
    if drawn is None:
        return None
    write_atomically(folder.path / NAME, drawn)
    return folder.path / NAME


def svg(folder: Folder, paper: Paper) -> str | None:
    """The figure as SVG on white; None if there is nothing to draw."""
    with context(["default", LOOK]):
        drawn = draw(folder, paper)
        return None if drawn is None else rendered(drawn)


def inline_svg(folder: Folder, paper: Paper) -> str | None:
    """The figure as SVG for a page: without ground, in the page's colours. Drawn anew if the file is older."""
    made = folder.path / NAME
    sources = [
        *folder.path.glob("*.json"),
        *folder.path.glob("*.toml"),
        *folder.path.parent.glob("paper.json"),
    ]
    fresh = made.exists() and all(made.stat().st_mtime >= source.stat().st_mtime for source in sources)
    text = made.read_text("utf-8") if fresh else svg(folder, paper)
    return None if text is None else on_page(text)


def rendered(drawn: Figure) -> str:
    content = io.StringIO()
    drawn.savefig(content, format="svg", metadata={"Date": None}, facecolor="white")
    return content.getvalue()


def on_page(text: str) -> str:
    """An SVG that stands in a page: no prologue, no ground, the page's colours and width, no ids of parts."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="patch_1">.*?</g>', "", text, count=1, flags=re.DOTALL)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    for colour, name in ON_PAGE.items():
        text = text.replace(colour, name)
    return re.sub(r'<svg [^>]*?width="([\d.]+)pt"', _sized, text, count=1, flags=re.DOTALL)


def _sized(match: re.Match[str]) -> str:
    points = float(match[1])
    head = match[0].replace(f'width="{match[1]}pt"', f'style="max-width:{points * 4 / 3:.0f}px"')
    return re.sub(r' height="[\d.]+pt"', "", head)


def draw(folder: Folder, paper: Paper) -> Figure | None:
    kind = (folder.best or {}).get("kind", folder.kind)
    return KINDS[kind](folder, paper) if kind in KINDS else None


def write_headline(folder: Folder, papers: Path) -> Path | None:
    """papers/headline.svg: perplexity by length of the main methods; nothing before there are results."""
    with context(["default", LOOK]):
        drawn = headline(folder)
        if drawn is None:
            return None
        write_atomically(papers / HEADLINE, rendered(drawn))
    return papers / HEADLINE


def headline(folder: Folder) -> Figure | None:
    """The longest training length of the first corpus, main methods alone."""
    panels = [panel for panel in our_panels(folder) if panel.key[0] == "equal-step"]
    if not panels:
        return None
    first = [panel for panel in panels if panel.key[1] == panels[0].key[1]]
    panel = max(first, key=lambda one: one.unit)
    order = {name: place for place, name in enumerate(MAIN)}
    lines = sorted((line for line in panel.lines if line.label in order), key=lambda line: order[line.label])
    title = f"Perplexity by input length: {panel.title}"
    looks = styles([line.label for line in lines], [line.method for line in lines])
    return single_figure(replace(panel, title=title, lines=tuple(lines)), looks, (6.0, 3.9))
