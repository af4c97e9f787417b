"""report.html in Chromium: it renders without an error or a request, and its numbers are those of results.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import HOSTILE, check_unharmed, visit
from sample import LENGTHS, METHODS, sample_results

from dape.lab.compare import Comparison
from dape.lab.curves import QUANTITIES, bars, curves
from dape.lab.records import Results

PLOTTED = """
  const click = (axis, value) => document.querySelector(`[data-axis=${axis}][data-value=${value}]`).click();
  const drawn = {};
  for (const view of ["equal-step", "equal-time"]) {
    click("view", view);
    for (const quantity of ["ppl", "nll", "change", "difference"]) {
      click("quantity", quantity);
      drawn[`${view} ${quantity}`] = document.getElementById("plot").data.map(trace => ({
        name: trace.name, x: [...trace.x], y: [...trace.y], up: [...trace.error_y.array], down: [...trace.error_y.arrayminus],
      }));
    }
  }
  click("view", "equal-step"); click("quantity", "ppl");
  const header = document.querySelector("section:not([hidden]) table.losses thead th:nth-child(6)");
  const methods = () => [...header.closest("table").tBodies[0].rows].map(row => row.cells[0].dataset.value);
  header.click(); const upward = methods(); header.click();
  return {
    drawn, upward, downward: methods(),
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
    lines: document.querySelectorAll("#plot .scatterlayer .trace").length,
    results: JSON.parse(document.getElementById("results").textContent),
    hidden: [...document.querySelectorAll("section[data-view]")].map(section => section.hidden),
  };
"""
LOOK = """
  const plot = document.getElementById("plot");
  const text = plot.querySelector(".xtick text");
  return {
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    clipped: [...document.querySelectorAll(".scroll")].map(box => box.scrollWidth - box.clientWidth),
    width: document.documentElement.clientWidth,
    plot: plot.querySelector(".main-svg").getBoundingClientRect().width,
    ground: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    tick: getComputedStyle(text).fill,
  };
"""
# Entries that hold one of our own words.
KINDS = {"metric", "view"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    Comparison(sample_results()).save(folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def visited(page: Path, tmp_path_factory: pytest.TempPathFactory):
    return visit(page, tmp_path_factory.mktemp("desk"), PLOTTED)


def test_renders_without_errors_and_requests(visited) -> None:
    assert visited.console == []
    assert visited.seen["requests"] == []
    assert visited.seen["lines"] == len(METHODS)
    assert visited.seen["hidden"] == [False, True]


def test_an_error_and_a_request_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        "<body><img src='http://example.invalid/a.png'><script>nothing()</script></body>"
    )
    seen = visit(tmp_path / "page.html", tmp_path, "return performance.getEntriesByType('resource').length")
    assert seen.seen == 1
    assert any("nothing is not defined" in line for line in seen.console)


def test_plotted_numbers_are_those_of_the_results(visited, page: Path) -> None:
    content = json.loads((page.parent / "results.json").read_text())
    assert visited.seen["results"] == content
    results = Results(content)
    for view in ("equal-step", "equal-time"):
        for quantity in QUANTITIES:
            drawn = {trace["name"]: trace for trace in visited.seen["drawn"][f"{view} {quantity}"]}
            expected = {curve.label: bars(curve, quantity) for curve in curves(results, view) if curve.points}
            assert list(drawn) == list(expected)
            for method, wanted in expected.items():
                trace = drawn[method]
                assert trace["x"] == list(LENGTHS)
                shown = zip(trace["y"], trace["up"], trace["down"], strict=True)
                known = [tuple(None if value != value else value for value in bar) for bar in wanted]
                assert list(shown) == known


def test_table_numbers_are_those_of_the_results(visited) -> None:
    table = re.search(r'<section data-view="equal-step">.*?<tbody>(.*?)</tbody>', visited.document, re.DOTALL)
    rows = {}
    for row in re.findall(r"<tr.*?</tr>", table[1], re.DOTALL):
        method, *values = re.findall(r'data-value="([^"]*)"', row)
        rows[method] = [float(value) for value in values]
    for curve in curves(sample_results(), "equal-step"):
        wanted = [point.ppl for point in curve.points]
        wanted += [curve.points[-1].change.value, curve.steps, curve.train_seconds] if curve.points else []
        assert rows[curve.label] == wanted


def test_tables_sort_and_failures_stay_last(visited) -> None:
    *scored, failed = visited.seen["upward"]
    assert failed == "fire"
    assert scored == ["dape1x3-kerple", "dape-kerple", "kerple", "alibi", "rope"]
    assert visited.seen["downward"] == [*reversed(scored), "fire"]


@pytest.mark.filterwarnings("ignore:constrained_layout")  # the names are longer than the figure
def test_hostile_names_and_texts_are_shown_as_text(tmp_path: Path) -> None:
    results = sample_results()

    def hostile(value: object, *path: object) -> object:
        if isinstance(value, dict):
            return {name: hostile(entry, *path, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [hostile(entry, *path) for entry in value]
        return value + HOSTILE if isinstance(value, str) and not KINDS & {*path} else value

    content = hostile(results.content)
    content["samples"] = {HOSTILE: {HOSTILE: HOSTILE}}
    curve = [[step, 5.0 - step] for step in range(3)]
    content["training"] = [{"label": f"{method}{HOSTILE}", "curve": curve} for method in METHODS]
    Comparison(Results(content)).save(tmp_path)
    assert "hacked" in check_unharmed(tmp_path / "report.html", tmp_path).document


@pytest.mark.parametrize(("size", "dark"), [((390, 844), False), ((1280, 900), True)])
def test_phone_and_dark_mode(page: Path, tmp_path: Path, size: tuple[int, int], dark: bool) -> None:
    look = visit(page, tmp_path, LOOK, size=size, dark=dark).seen
    assert look["overflow"] <= 0
    assert look["plot"] <= look["width"]
    # Tables are whole on a desk; on a phone they scroll.
    assert size[0] < 1280 or max(look["clipped"]) <= 0
    ground, ink, tick = (
        sum(map(int, re.findall(r"\d+", look[part])[:3])) / 3 for part in ("ground", "ink", "tick")
    )
    assert (ground < 64 and ink > 192 and tick > 192) if dark else (ground > 192 and ink < 64 and tick < 64)
