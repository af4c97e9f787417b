"""MkDocs hooks: titles of code blocks, pages and files outside docs/, figures in the page's colours, command help."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

import pictures
from mkdocs.structure.files import File, Files

from dape.positions import POSITIONS

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
FENCE = re.compile(r"^(```\w+) (\S+)$", re.MULTILINE)
IMAGE = re.compile(r'<img alt="([^"]*)" src="([^"]+\.svg)" ?/?>')
# Ink, faint ink and grid of our figures, and what the theme calls them.
COLOURS = {
    "#1a1d21": "var(--md-default-fg-color)",
    "#000000": "var(--md-default-fg-color)",
    "#8f99a3": "var(--md-default-fg-color--light)",
    "#e3e7eb": "var(--md-default-fg-color--lightest)",
    "#ebebeb": "var(--md-default-fg-color--lightest)",
    "fill: #ffffff": "fill: none",
}


# Of the page of attention maps.
NUM_TOKENS = 200
TO_FOLDER = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)\)")
INTERVAL = re.compile(r"(\d) (\[[−+]?[\d.]+,) (?=[−+]?[\d.]+\])")
ENCODING = re.compile(r'<h2 id="dape\.positions\.(\w+)".*?</h2>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add pictures, and what the pages link to outside docs/, under its path in the repository."""
    for name, drawn in pictures.drawn().items():
        files.append(File.generated(config, name, content=drawn))
    for path, text in attention_page().items():
        files.append(File.generated(config, f"inspection/{path}", content=text))
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        for address, _ in LINK.findall(source.read_text("utf-8")):
            target = (source.parent / address).resolve()
            inside = target.is_relative_to(ROOT / "docs")
            # A missing target stays as it is, and the strict build names it.
            if target in seen or inside or not target.is_file() or not target.is_relative_to(ROOT):
                continue
            seen.add(target)
            uri = target.relative_to(ROOT).as_posix()
            if target.suffix == ".ipynb":
                files.append(File.generated(config, page_of(uri), content=notebook_page(target)))
                continue
            files.append(File.generated(config, uri, abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def page_of(uri: str) -> str:
    """Where a notebook's page is."""
    return uri.removesuffix(".ipynb") + ".md" if uri.endswith(".ipynb") else uri


def notebook_page(path: Path) -> str:
    """A notebook as Markdown, with the outputs that are saved in it."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            printed = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                parts.append(f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">')
            else:
                parts.append(data.get("text/html") or f"```text\n{printed}\n```")
    return "\n\n".join(parts)


@functools.cache
def attention_page() -> dict[str, str]:
    """The page of `dape inspect` for two of the shipped models on a piece of an example: its files by path."""
    from dape.data.tokenizers import token_texts
    from dape.inspection import inspect
    from dape.inspection.page import Named, write_maps_page
    from dape.loading import open_for_inspection

    text = (ROOT / "examples" / "own_encoding.py").read_text("utf-8")
    text, runs = text[text.index("class ") :], []
    for name, model, tokenizer in open_for_inspection(
        [str(ROOT / "models" / name) for name in ("kerple", "dape1x3-kerple")]
    ):
        ids = tokenizer.encode(text)[:NUM_TOKENS]
        found = inspect(model, ids, layers=[0, 3], heads=[1, 2])
        runs.append(Named(name, found, token_texts(tokenizer.decode, ids)))
    with tempfile.TemporaryDirectory() as folder:
        write_maps_page(runs, Path(folder))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in files}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as paths within the site; a block's file name as its title."""
    here = posixpath.dirname(page.file.src_uri)
    source = Path(page.file.abs_src_path or ROOT / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        address, anchor = found.groups()
        target = (source / address).resolve()
        if not target.is_relative_to(ROOT) or not target.is_file():
            return found.group()
        uri = target.relative_to(ROOT / "docs" if target.is_relative_to(ROOT / "docs") else ROOT).as_posix()
        return posixpath.relpath(page_of(uri), here or ".") + anchor

    def title(found: re.Match[str]) -> str:
        return found[1] if found[2] == "not-run" else f'{found[1]} title="{found[2]}"'

    def unlinked(found: re.Match[str]) -> str:
        """A link to a folder, which the site does not have, as its text."""
        return found[1] if (source / found[2]).resolve().is_dir() else found.group()

    # An estimate and its interval stay on one line.
    markdown = INTERVAL.sub("\\1\N{NO-BREAK SPACE}\\2\N{NO-BREAK SPACE}", markdown)
    markdown = FENCE.sub(title, LINK.sub(link, TO_FOLDER.sub(unlinked, markdown)))
    return (
        markdown.replace("<!-- commands -->", command_help()) if "<!-- commands -->" in markdown else markdown
    )


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Our figures go into the page, where their ink follows its colours; an encoding's under its name."""

    def inline(found: re.Match[str]) -> str:
        alt, address = found.groups()
        file = files.get_file_from_path(
            posixpath.normpath(posixpath.join(posixpath.dirname(page.url), address))
        )
        return found.group() if file is None else figure(file.content_string, alt)

    def pictured(found: re.Match[str]) -> str:
        name = next(
            (name for name, cls in POSITIONS.items() if cls.__name__ == found[1] and name != "nope"), None
        )
        return found.group() + (
            figure(pictures.encoding(name), f"What {name} adds to scores") if name else ""
        )

    return ENCODING.sub(pictured, IMAGE.sub(inline, html))


def figure(svg: str, alt: str) -> str:
    """An SVG of ours as part of a page: no fixed size, no white ground, the theme's colours."""
    drawn = svg[svg.index("<svg") :]
    head, body = drawn.split(">", 1)
    head = re.sub(r' (?:width|height)="[^"]*"', "", head)
    for colour, name in COLOURS.items():
        head, body = head.replace(colour, name), body.replace(colour, name)
    return f'<span class="figure" role="img" aria-label="{alt}">{head}>{body.strip()}</span>'


def command_help() -> str:
    """`dape COMMAND --help` of every command, as wide as the text of a page."""
    from dape.cli import COMMANDS, dispatch, module_of

    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "80"
    parts = []
    for name, summary in COMMANDS.items():
        printed = io.StringIO()
        importlib.import_module(module_of(name))
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            dispatch([name, "--help"])
        plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue())
        parts.append(
            f"## dape {name}\n{summary[0].upper()}{summary[1:]}.\n\n````text\n{plain.rstrip()}\n````\n"
        )
    if before is None:
        del os.environ["COLUMNS"]
    else:
        os.environ["COLUMNS"] = before
    return "\n".join(parts)
