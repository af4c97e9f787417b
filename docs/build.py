"""These pages as a static site: `python docs/build.py FOLDER`. Each page is one file that fetches nothing.

Markdown is read by markdown-it-py and code coloured by Pygments, both of which come with rich; the look is that of
our reports. Pages of the repository that are linked to become pages too, other linked files are copied beside them.
"""

from __future__ import annotations

import base64
import mimetypes
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from urllib.parse import urldefrag

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
STYLES = (ROOT / "src/dape/lab/report/page.css", DOCS / "site.css")

# In the order of the menu; a test holds this against the folder.
PAGES = (
    "index.md",
    "own_model.md",
    "trainable_bias.md",
    "score_programs.md",
    "retrofit.md",
    "train_and_compare.md",
    "tasks.md",
    "reproduce.md",
    "inspect.md",
    "hugging_face.md",
    "scale_out.md",
    "add_an_encoding.md",
    "kernels.md",
)
# The browser itself refuses whatever is not in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass
class Page:
    """One Markdown file, and what became of it."""

    source: Path
    title: str = ""
    body: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)
    links: list[Path] = field(default_factory=list)

    @property
    def target(self) -> str:
        """Where it lies in the site."""
        if self.source.parent == DOCS:
            return f"{self.source.stem}.html"
        return self.source.relative_to(ROOT).with_name("index.html").as_posix()


def build(site: Path) -> list[Path]:
    """The pages written, those of the menu first."""
    shutil.rmtree(site, ignore_errors=True)
    menu = [render(DOCS / name) for name in PAGES]
    pages, waiting, files = {page.source: page for page in menu}, list(menu), set()
    while waiting:
        for link in waiting.pop().links:
            if link.suffix != ".md":
                files.add(link)
            elif link not in pages:
                pages[link] = render(link)
                waiting.append(pages[link])
    style = "\n".join(path.read_text("utf-8") for path in STYLES)
    written = []
    for page in pages.values():
        path = site / page.target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document(page, menu, style), "utf-8")
        written.append(path)
    for file in sorted(files):
        copy = site / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    return written


def render(source: Path) -> Page:
    """The page's title, sections, links and HTML."""
    page = Page(source)
    markdown = MarkdownIt("commonmark").enable("table")
    rules = {
        "fence": _fence,
        "table_open": lambda *_: '<div class="scroll"><table>',
        "table_close": lambda *_: "</table></div>",
    }
    for name, rule in rules.items():
        markdown.renderer.rules[name] = rule  # type: ignore[attr-defined]  # declared of a protocol without rules
    tokens = markdown.parse(source.read_text("utf-8"))
    for token, text in pairwise(tokens):
        if token.type == "heading_open":
            plain = "".join(child.content for child in text.children or ())
            token.attrSet("id", slug(plain))
            if token.tag == "h1":
                page.title = plain
            elif token.tag == "h2":
                page.sections.append((slug(plain), plain))
    for token in tokens:
        for child in token.children or ():
            _resolve(child, page)
    page.body = markdown.renderer.render(tokens, markdown.options, {})
    return page


def slug(heading: str) -> str:
    """A heading as an address, as GitHub writes it."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def _resolve(token: Token, page: Page) -> None:
    """Links lead to what the site has, pictures come into the page; a missing file is an error."""
    name = {"link_open": "href", "image": "src"}.get(token.type)
    address, anchor = urldefrag(str(token.attrGet(name) or "")) if name else ("", "")
    if name is None or not address or re.match(r"[a-z]+:", address):
        return
    linked = (page.source.parent / address).resolve()
    if not linked.is_file():
        raise FileNotFoundError(f"{page.source} links to {address}, which is not there")
    if token.type == "image":
        kind = mimetypes.guess_type(linked.name)[0]
        token.attrSet("src", f"data:{kind};base64,{base64.b64encode(linked.read_bytes()).decode()}")
        return
    page.links.append(linked)
    target = Page(linked).target if linked.suffix == ".md" else linked.relative_to(ROOT).as_posix()
    relative = os.path.relpath(target, Path(page.target).parent)
    token.attrSet("href", f"{relative}#{anchor}" if anchor else relative)


def _fence(tokens: Sequence[Token], index: int, *_: object) -> str:
    """A block of code, coloured; above it the name of the file that it is, or that tests leave it out."""
    language, _, rest = tokens[index].info.partition(" ")
    colours = HtmlFormatter(nowrap=True)
    code = highlight(tokens[index].content, get_lexer_by_name(language or "text"), colours)
    label = {"": "", "not-run": '<figcaption class="tag">not run by the tests</figcaption>'}.get(
        rest, f"<figcaption>{escape(rest)}</figcaption>"
    )
    return f'<figure class="code">{label}<pre tabindex="0"><code>{code}</code></pre></figure>\n'


def document(page: Page, menu: Sequence[Page], style: str) -> str:
    """The page as a whole HTML document."""
    up = "../" * page.target.count("/")
    entries = "".join(_entry(other, page, up) for other in menu)
    title = page.title if page is menu[0] else f"{page.title} · {menu[0].title}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body class="site">
<nav class="side" aria-label="Pages"><ul>{entries}</ul></nav>
<details class="menu"><summary>{escape(menu[0].title)}</summary><ul>{entries}</ul></details>
<main>
{page.body}
{_neighbours(page, menu)}
</main>
</body>
</html>
"""


def _entry(other: Page, here: Page, up: str) -> str:
    if other is not here:
        return f'<li><a href="{up}{other.target}">{escape(other.title)}</a></li>'
    inside = "".join(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in here.sections)
    return f'<li><a aria-current="page" href="#">{escape(other.title)}</a>{f"<ul>{inside}</ul>" if inside else ""}</li>'


def _neighbours(page: Page, menu: Sequence[Page]) -> str:
    if page not in menu:
        return ""
    place = menu.index(page)
    links = [("prev", menu[place - 1])] if place else []
    links += [("next", menu[place + 1])] if place + 1 < len(menu) else []
    return (
        '<footer class="neighbours">'
        + "".join(
            f'<a rel="{rel}" href="{other.target}">{"← " if rel == "prev" else ""}{escape(other.title)}'
            f"{' →' if rel == 'next' else ''}</a>"
            for rel, other in links
        )
        + "</footer>"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/build.py FOLDER")
    pages = build(Path(sys.argv[1]))
    print(f"{len(pages)} pages: {pages[0]}")
