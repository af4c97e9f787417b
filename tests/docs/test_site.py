"""The site: strict, with a reference of everything public, search that finds, and nothing from a network."""

from __future__ import annotations

import functools
import html
import http.server
import importlib
import os
import queue
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag

import pytest
import yaml
from browser import FLAGS, chromium, visit

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


def test_every_link_leads_somewhere(site):
    found = pages(site)
    assert site / "papers" / "dape_v2" / "index.html" in found  # results that are linked to
    for path, page in found.items():
        if path.name == "404.html":
            continue
        for tag, attributes in page.found:
            link = attributes.get("href", "")
            if tag != "a" or not link or re.match(r"https?:", link):
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


def test_the_reference_shows_constructors(site):
    def text(page: str) -> str:
        return html.unescape(re.sub(r"<[^>]+>", "", (site / "api" / page).read_text("utf-8")))

    assert "kernel_size: int = 3," in text("scores.html")
    assert "steps: int = 1000," in text("training.html")


def test_the_reference_has_every_command(site):
    from dape.cli import COMMANDS

    ids = Elements((site / "api" / "commands.html").read_text("utf-8")).ids
    assert {f"dape-{name}" for name in COMMANDS} <= ids
    printed = re.findall(r"<pre>.*?</pre>", (site / "api" / "commands.html").read_text("utf-8"), re.DOTALL)
    lines = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(printed))).splitlines()
    assert max(map(len, lines)) <= 80


def test_versions_are_configured():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["extra"]["version"]["provider"] == "mike"


class Server(http.server.ThreadingHTTPServer):
    """Serves the site; /found?N is told by a page, and /wait answers only then, which keeps the browser there."""

    def __init__(self, site: Path) -> None:
        self.told: queue.Queue[int] = queue.Queue()
        self.done = threading.Event()
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=site))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.SimpleHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path.startswith("/found?"):
            self.server.told.put(int(self.path.split("?")[1]))
            self.server.done.set()
        if self.path == "/wait":
            self.server.done.wait(60)
        if self.path.startswith(("/found?", "/wait")):
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server(site):
    with Server(site) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


PROBE = """
    const wide = document.documentElement.scrollWidth > innerWidth;
    const ground = getComputedStyle(document.body).backgroundColor;
    const figures = [...document.querySelectorAll('.figure svg')].map(e => e.getBoundingClientRect().width);
    return {wide, ground, figures};
"""
LOOKS = {"desk, light": ((1280, 900), False), "desk, dark": ((1280, 900), True), "phone": ((500, 900), False)}


@pytest.mark.parametrize("look", LOOKS)
def test_it_fits_the_window(look, site, server):
    size, dark = LOOKS[look]
    seen = visit(site / "index.html", site, PROBE, size=size, dark=dark, address=server.address)
    assert not seen.seen["wide"]
    assert len(seen.seen["figures"]) == 2
    assert all(250 < width <= size[0] for width in seen.seen["figures"])
    assert (seen.seen["ground"] == "rgb(255, 255, 255)") != dark


SEARCH = """<img src="/wait"><script>
  const watch = setInterval(() => {
    const found = document.querySelectorAll('.md-search-result__item').length;
    if (found) { clearInterval(watch); fetch('/found?' + found); }
  }, 100);
</script></body>"""


def test_search_finds(site, server, tmp_path):
    """In real time: under virtual time the search's worker does not answer."""
    page = (site / "index.html").read_text("utf-8").replace("</body>", SEARCH)
    (site / "searching.html").write_text(page, "utf-8")
    flags = [flag for flag in FLAGS if "virtual-time" not in flag]
    url = f"{server.address}/searching.html?q=ScoreConv"
    command = [chromium(), *flags, f"--user-data-dir={tmp_path}", url]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert server.told.get(timeout=1) > 1
