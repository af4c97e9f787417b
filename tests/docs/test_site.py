"""The site: strict, with a reference of everything public, search that finds, and nothing from a network."""

import html
import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag

import pytest
from browser import visit

from dape import POSITIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Packages whose `__all__` the reference has to cover.
PUBLIC = ("dape", "dape.positions", "dape.scores", "dape.models", "dape.retrofitting")
# Registries and aliases, which are told of in the pages' words.
NOT_DOCUMENTED = {"POSITIONS", "SCORES", "PRESETS", "build_position"}


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
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    source = {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **source}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> dict[Path, Elements]:
    return {path: Elements(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_every_page_is_in_the_menu():
    nav = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(nav) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_every_link_and_picture_is_there(site):
    found = pages(site)
    assert site / "papers" / "dape_v2" / "index.html" in found  # results that are linked to
    for path, page in found.items():
        if path.name == "404.html":
            continue
        for tag, attributes in page.found:
            link = attributes.get({"a": "href", "img": "src"}.get(tag, ""), "")
            if not link or re.match(r"https?:|data:", link):
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / address).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.name}: {link}"
            if anchor and target in found:
                assert anchor in found[target].ids | {"__toc"}, f"{path.name}: {link}"


def test_nothing_comes_from_a_network(site):
    for path, page in pages(site).items():
        for tag, attributes in page.found:
            if tag in ("script", "img", "iframe", "link"):
                address = attributes.get("src", attributes.get("href", ""))
                assert not re.match(r"(?:https?:)?//", address) or attributes.get("rel") == "canonical", path


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_every_public_name(package, site):
    ids = set().union(*(page.ids for path, page in pages(site).items() if "api" in path.parts))
    documented = {name.rsplit(".", 1)[-1] for name in ids}
    module = importlib.import_module(package)
    assert set(module.__all__) - NOT_DOCUMENTED <= documented


def test_the_reference_shows_constructors_and_the_search_finds_it(site):
    def text(page: str) -> str:
        return html.unescape(re.sub(r"<[^>]+>", "", (site / "api" / page).read_text("utf-8")))

    assert "kernel_size: int = 3," in text("scores.html")
    assert "steps: int = 1000," in text("training.html")
    assert "ScoreConv" in (site / "search" / "search_index.json").read_text("utf-8")


def test_the_reference_draws_every_encoding_and_splits_no_sentence(site):
    """A colon within a sentence begins no list of fields."""
    drawn = html.unescape((site / "api" / "positions.html").read_text("utf-8"))
    for name in POSITIONS.keys() - {"nope"}:
        figure = drawn.split(f'aria-label="What {name} adds to scores"')[1].split("</svg>")[0]
        assert figure.count("<image") == 5  # four heads and a scale
        assert re.search(r"<h2[^>]*>(?:(?!<h2).)*$", drawn.split(figure)[0], re.DOTALL)[0].count("<h3") == 0
    for path in (site / "api").glob("*.html"):
        for told in re.findall(r"<p>((?:(?!</p>).)*)</p>\s*<ul>", path.read_text("utf-8"), re.DOTALL):
            assert re.sub(r"<[^>]+>", "", told).rstrip().endswith((".", ":")), (path.name, told)


def test_the_reference_has_every_command(site):
    from dape.cli import COMMANDS

    ids = Elements((site / "api" / "commands.html").read_text("utf-8")).ids
    assert {f"dape-{name}" for name in COMMANDS} <= ids
    printed = re.findall(r"<pre>.*?</pre>", (site / "api" / "commands.html").read_text("utf-8"), re.DOTALL)
    lines = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(printed))).splitlines()
    assert max(map(len, lines)) <= 80


PROBE = """
    const wide = document.documentElement.scrollWidth > innerWidth;
    const ground = getComputedStyle(document.body).backgroundColor;
    const figures = [...document.querySelectorAll('.figure svg')].map(e => e.getBoundingClientRect().width);
    return {wide, ground, figures};
"""
LOOKS = {"desk, light": ((1280, 900), False), "phone, dark": ((390, 900), True)}


@pytest.mark.parametrize("look", LOOKS)
def test_it_fits_the_window(look, site):
    size, dark = LOOKS[look]
    seen = visit(site / "index.html", site, PROBE, size=size, dark=dark)
    assert not seen.seen["wide"]
    assert len(seen.seen["figures"]) == 2
    assert all(250 < width <= size[0] for width in seen.seen["figures"])
    assert (seen.seen["ground"] == "rgb(255, 255, 255)") != dark


MAPS = """
    const ready = () => document.querySelectorAll('.panel[data-ready]').length;
    return (async () => {
      for (let i = 0; i < 200 && ready() < 2; i++) await new Promise(done => setTimeout(done, 10));
      const maps = [...document.querySelectorAll('select')].map(choice => choice.selectedOptions[0].text);
      return {maps, panels: ready(), words: document.getElementById('told').innerText,
        wide: document.documentElement.scrollWidth > innerWidth};
    })();
"""


@pytest.mark.parametrize("look", LOOKS)
def test_the_first_page_has_attention_maps_of_the_shipped_models(look, site):
    folder = site / "inspection"
    files = [folder / "index.html", *(folder / "tiles").iterdir()]
    assert sum(path.stat().st_size for path in files) < 1e6
    assert '<iframe class="inspection" src="inspection/index.html"' in (site / "index.html").read_text()
    size, dark = LOOKS[look]
    seen = visit(folder / "index.html", folder, MAPS, size=size, dark=dark)
    assert seen.console == []
    assert (seen.seen["panels"], seen.seen["wide"]) == (2, False)
    assert {"weights: softmax of S + B", "weights: softmax of S + B + f(S, B)"} <= {*seen.seen["maps"]}
    assert re.search(r"next .+ has loss .+; repeats token \d+", seen.seen["words"])
