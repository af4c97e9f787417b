"""The page of all experiments in Chromium: no error, no request, its numbers those of the results, on any screen."""

from __future__ import annotations

import re
from pathlib import Path

import made_up
import pytest
from browser import HOSTILE, check_unharmed, visit

from dape.lab.claims import count, ledger
from dape.lab.folders import load_folder
from dape.lab.kinds.panels import headline
from dape.lab.report.papers import build_report

PAPER = Path(__file__).parents[2] / "papers" / "dape_v2" / "paper.json"
PROBE = """
  const card = name => document.querySelector(`button[data-verdict=${name}]`);
  const visible = () => [...document.querySelectorAll(".ledger .claim")].filter(claim => claim.checkVisibility()).length;
  const folded = visible();
  for (const part of document.querySelectorAll("details")) part.open = true;
  const all = visible();
  const shown = {};
  for (const name of ["holds", "fails", "undecided", "not-run"]) { card(name).click(); shown[name] = visible(); }
  card("not-run").click();
  const again = document.querySelectorAll(".ledger details[open]").length;
  for (const part of document.querySelectorAll("details")) part.open = true;
  return {
    all, shown, folded, again,
    counts: [...document.querySelectorAll(".cards b")].map(count => Number(count.textContent)),
    requests: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
    svgs: document.querySelectorAll(".drawing svg").length,
    curves: [...document.querySelectorAll(".drawing svg text")].map(text => text.textContent.trim()),
    ids: [...document.querySelectorAll("[id]")].map(element => element.id).filter(id => /_\\d+$/.test(id)),
    links: [...document.querySelectorAll("a[href^='#']")].map(link => document.getElementById(link.hash.slice(1)) !== null),
  };
"""
LOOK = """
  for (const part of document.querySelectorAll("details")) part.open = true;
  const text = document.querySelector(".drawing svg text");
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    ground: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    figure: getComputedStyle(text).fill,
    white: [...document.querySelectorAll(".drawing svg path")].filter(p => getComputedStyle(p).fill === "rgb(255, 255, 255)").length,
  };
"""


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One experiment of every kind, one that was not run, and one beyond the paper."""
    folder = tmp_path_factory.mktemp("papers")
    row = {"kerple": 2.2, "dape1x3-kerple": 2.0}
    losses = {("latex", 64, name, ""): {64: loss, 1024: loss - 0.02} for name, loss in row.items()}
    accuracy = {("recall", "nope"): 0.1, ("recall", "dape1x3-nope"): 1.0}
    times = {("tiny", "kerple"): 10.0, ("tiny", "dape1x3-kerple"): 12.0}
    shares = {("kerple", 64): (0.1, 0.2, 0.1, 0.2), ("dape1x3-kerple", 64): (0.7, 0.8, 0.7, 0.8)}
    ran = {
        "data_adaptive": made_up.language(losses),
        "recall": made_up.tasks(accuracy),
        "time_cost": made_up.timing(times),
        "visualisation": made_up.maps(shares),
        "effect": None,
    }
    for rank, (name, results) in enumerate(ran.items()):
        made_up.write(folder, "dape_v2", name, results, rank=rank, summary=f"<b>{name}</b> & more")
    made_up.write(folder, "beyond", "further", made_up.language(losses))
    (folder / "dape_v2" / "paper.json").write_text(PAPER.read_text("utf-8"))
    a, b = "dape1x3-kerple", "kerple"
    decided = [
        ("data_adaptive", f"lower(data, {a!r}, {b!r})"),
        ("data_adaptive", f"lower(data, {b!r}, {a!r})"),
        ("recall", "more_accurate(data, 'dape1x3-nope', 'nope')"),
        ("time_cost", f"slower(data, {a!r}, {b!r}, factor=1.2)"),
        ("visualisation", f"sink_higher(data, {a!r}, {b!r})"),
        ("effect", f"lower(data, {a!r}, {b!r})"),
    ]
    claims = [
        {"id": f"claim-{n}", "section": "4", "text": "Is <it> so?", "experiment": name, "returns": code}
        for n, (name, code) in enumerate(decided)
    ]
    made_up.write_claims(folder, "dape_v2", claims)
    further = {"id": "x", "text": "Further.", "experiment": "further", "returns": f"falls(data, {a!r})"}
    made_up.write_claims(folder, "beyond", [further])
    return folder


@pytest.fixture(scope="module")
def page(papers: Path) -> Path:
    return build_report(papers, papers / "out" / "report.html")


@pytest.fixture(scope="module")
def visited(page: Path, tmp_path_factory: pytest.TempPathFactory):
    return visit(page, tmp_path_factory.mktemp("desk"), PROBE)


def test_renders_without_errors_and_requests(visited) -> None:
    assert visited.console == []
    assert visited.seen["requests"] == []
    assert visited.seen["svgs"] == 6
    assert visited.seen["ids"] == []
    assert all(visited.seen["links"])


def test_counts_are_the_ledgers_and_choose_what_it_shows(visited, papers: Path) -> None:
    verdicts = ledger(papers)
    counts = list(count(verdicts).values())
    assert counts == [4, 1, 1, 1]
    # The tiles are of the paper's claims; they choose among those beyond it as well.
    own = count([verdict for verdict in verdicts if verdict.paper != "beyond"])
    assert visited.seen["counts"] == list(own.values()) != counts
    assert list(visited.seen["shown"].values()) == counts
    assert visited.seen["all"] == sum(counts)
    # Sections are folded until a count is chosen, and again when it is not.
    assert visited.seen["folded"] == visited.seen["again"] == 0


def test_table_numbers_are_those_of_the_results(visited) -> None:
    section = visited.document[visited.document.index('id="dape_v2-data_adaptive"') :]
    row = re.search(
        r'<tr class="ours"><td[^>]*>(?:<span[^>]*></span>)?dape1x3-kerple</td>(.*?)</tr>', section
    )
    values = [float(value) for value in re.findall(r'data-value="([^"]*)"', row[1])]
    assert values == pytest.approx([2.718281828**2.0, 2.718281828**1.98, -0.02], abs=1e-4)
    printed = re.search(r"41\.12", section)
    assert printed, "the paper's Transformer-XL at 8192 tokens"


def test_figures_show_ours_and_the_papers(visited) -> None:
    assert "latex, trained at 64" in visited.seen["curves"]
    assert any(text.startswith("the paper: books3, trained at 128") for text in visited.seen["curves"])


def test_words_of_others_are_escaped(visited) -> None:
    assert "Is &lt;it&gt; so?" in visited.document
    assert "&lt;b&gt;recall&lt;/b&gt; &amp; more" in visited.document


@pytest.mark.parametrize(("size", "dark"), [((400, 850), False), ((1280, 900), True)])
def test_phone_and_dark_mode(page: Path, tmp_path: Path, size: tuple[int, int], dark: bool) -> None:
    look = visit(page, tmp_path, LOOK, size=size, dark=dark).seen
    assert look["overflow"] <= 0
    ground, ink, figure = (
        sum(map(int, re.findall(r"\d+", look[part])[:3])) / 3 for part in ("ground", "ink", "figure")
    )
    assert (
        (ground < 64 and ink > 192 and figure > 192) if dark else (ground > 192 and ink < 64 and figure < 64)
    )
    assert not dark or look["white"] == 0


def test_the_legend_of_the_leading_figure_is_whole():
    drawn = headline(load_folder(PAPER.parent / "baselines"))
    assert drawn is not None
    drawn.canvas.draw()
    (legend,) = drawn.legends
    assert legend.get_window_extent().x0 >= 0
    assert legend.get_window_extent().x1 <= drawn.bbox.x1


@pytest.mark.filterwarnings("ignore:constrained_layout")  # the names are longer than the figure
def test_hostile_titles_claims_and_names_are_shown_as_text(tmp_path: Path) -> None:
    losses = {("latex", 64, method, HOSTILE): {64: 2.0, 512: 1.9} for method in ("kerple", "dape-kerple")}
    results = made_up.language(losses, command=HOSTILE, environment={HOSTILE: HOSTILE})
    made_up.write(tmp_path, "made_up", "trial", results, title=HOSTILE, source=HOSTILE, summary=HOSTILE)
    claim = {"id": "it", "text": HOSTILE, "experiment": "trial", "section": HOSTILE}
    made_up.write_claims(tmp_path, "made_up", [{**claim, "returns": "lower(data, 'dape-kerple', 'kerple')"}])
    page = build_report(tmp_path, tmp_path / "page.html")
    assert "hacked" in check_unharmed(page, tmp_path).document
