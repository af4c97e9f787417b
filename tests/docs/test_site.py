"""The static site: every page is in the menu, every link leads somewhere, nothing comes from a network."""

from __future__ import annotations

import importlib.util
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from browser import visit

DOCS = Path(__file__).parents[2] / "docs"


def load_builder():
    spec = importlib.util.spec_from_file_location("build_docs", DOCS / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


builder = load_builder()


class Elements(HTMLParser):
    """Every element's name and attributes, and the ids among them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.ids = {attributes["id"] for _, attributes in self.found if "id" in attributes}

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, {name: value or "" for name, value in attributes}))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "site"
    builder.build(folder)
    return folder


def pages(site: Path) -> dict[Path, Elements]:
    return {path: Elements(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_in_the_menu():
    assert sorted(builder.PAGES) == sorted(path.name for path in DOCS.glob("*.md"))


def test_every_link_leads_somewhere(site):
    found = pages(site)
    assert len(found) > len(builder.PAGES)  # results that are linked to
    for path, page in found.items():
        links = [attributes["href"] for tag, attributes in page.found if tag == "a"]
        assert len(links) >= len(builder.PAGES)
        for link in links:
            if re.match(r"https?:", link):
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / address).resolve() if address else path
            assert target.is_file(), f"{path.name}: {link}"
            if anchor:
                assert anchor in found[target].ids, f"{path.name}: {link}"


def test_nothing_comes_from_a_network(site):
    for path, page in pages(site).items():
        for tag, attributes in page.found:
            assert tag not in ("script", "iframe", "object"), path
            if tag == "link" or "src" in attributes:
                assert attributes.get("href", attributes.get("src", "")).startswith("data:"), path
        style = path.read_text("utf-8").split("<style>")[1].split("</style>")[0]
        assert not re.search(r"url\(|@import", style)


def test_a_link_to_nowhere_is_an_error(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# Title\n[here](missing.md)\n")
    with pytest.raises(FileNotFoundError, match=r"links to missing\.md, which is not there"):
        builder.render(page)


PROBE = """
    const wide = document.documentElement.scrollWidth > innerWidth;
    const menu = getComputedStyle(document.querySelector('.side')).display;
    const ground = getComputedStyle(document.body).backgroundColor;
    const spilled = [...document.querySelectorAll('main *')].filter(e => {
      const box = e.getBoundingClientRect();
      return box.right > innerWidth + 1 && !e.closest('pre, .scroll');
    }).map(e => e.outerHTML.slice(0, 80));
    return {wide, menu, ground, spilled};
"""
LOOKS = {"desk, light": ((1280, 900), False), "desk, dark": ((1280, 900), True), "phone": ((500, 900), False)}


@pytest.mark.parametrize("look", LOOKS)
def test_it_fits_the_window(look, site, tmp_path):
    size, dark = LOOKS[look]
    for name in ("kernels.html", "results/retrofit/index.html"):
        # The pages forbid scripts; the probe is one.
        page = tmp_path / Path(name).with_suffix(".probe.html").name
        allowed = builder.POLICY + "; script-src 'unsafe-inline'"
        page.write_text((site / name).read_text("utf-8").replace(builder.POLICY, allowed), "utf-8")
        seen = visit(page, tmp_path, PROBE, size=size, dark=dark)
        assert not seen.console
        assert seen.seen["spilled"] == []
        assert not seen.seen["wide"]
        assert (seen.seen["menu"] == "none") == (look == "phone")
        assert (seen.seen["ground"] == "rgb(255, 255, 255)") != dark
