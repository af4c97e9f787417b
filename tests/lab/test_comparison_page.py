"""report.html in Chromium: it draws the numbers of the tables, sorts, loads nothing, and shows hostile text as text."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from browser import HOSTILE, check_unharmed, visit

from dape.evaluation.table import make_table
from dape.lab.comparison import STEP, TIME, About, Comparison, Failure, read_about

PLOTTED = """
  const click = (axis, value) => document.querySelector(`[data-axis=${axis}][data-value=${value}]`).click();
  const drawn = {};
  for (const view of ["equal-step", "equal-time"]) {
    click("view", view);
    for (const quantity of ["perplexity", "change", "difference"]) {
      click("quantity", quantity);
      drawn[`${view} ${quantity}`] = [...document.querySelectorAll("#plot circle title")].map(one => one.textContent);
    }
  }
  click("view", "equal-step");
  const header = document.querySelector("section:not([hidden]) thead th:nth-child(3)");
  const methods = () => [...header.closest("table").tBodies[0].rows].map(row => row.cells[0].dataset.value);
  header.click(); const upward = methods(); header.click();
  return {
    drawn, upward, downward: methods(),
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
    hidden: [...document.querySelectorAll("section[data-view]")].map(section => section.hidden),
    training: document.querySelectorAll("#training polyline").length,
    wide: document.documentElement.scrollWidth,
  };
"""
EFFECTS = {"kerple": 0.0, "rope": 1.0, "dape1x3-kerple": -0.3}


def made_up(names: dict[str, float] = EFFECTS, seeds: int = 2) -> Comparison:
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.2, (seeds, 12))
    tables = {}
    for view, worse in ((STEP, 0.0), (TIME, 0.1)):
        rows = []
        cells = product(names.items(), range(seeds), (64, 128, 256), range(12))
        for (name, effect), seed, length, document in cells:
            loss = 2 + effect * math.log2(length / 64) / 2 + worse + noise[seed, document] * (1 + effect)
            row = {"run": f"{name}-{seed}-{view}", "method": name, "seed": seed, "corpus": "text"}
            row |= {"train_length": 64, "length": length, "document": document, "metric": "loss"}
            rows.append({**row, "sum": 32 * loss, "count": 32})
        tables[view] = make_table(rows)
    curves = {name: [(step, 6 / step, None) for step in range(1, 20)] for name in names}
    failures = (Failure("fire, seed 0", "it failed"),)
    settings = {"corpus": "text", "steps": 19, "seeds": "0,1"}
    about = About(
        (*names, "fire"), next(iter(names)), "dape compare", settings, {"cpu": "x"}, failures, curves
    )
    return Comparison(tables, about)


def test_the_page_draws_the_tables(tmp_path: Path) -> None:
    comparison = made_up()
    page = comparison.report(tmp_path / "report.html")
    assert page.stat().st_size < 1_500_000
    visited = visit(page, tmp_path, PLOTTED)
    assert (visited.console, visited.seen["requests"]) == ([], [])
    for view in (STEP, TIME):
        points = [(curve.method, point) for curve in comparison.curves(view) for point in curve.points]
        assert len(points) == 9
        shown = visited.seen["drawn"][f"{view} perplexity"]
        assert [one.rpartition(": ")[0] for one in shown] == [f"{name} at {p.length}" for name, p in points]
        values = [float(one.rpartition(": ")[2].split(" [")[0]) for one in shown]
        assert values == pytest.approx([point.ppl for _, point in points], rel=1e-3)
        gaps = [(name, point) for name, point in points if point.difference.known]
        assert len(visited.seen["drawn"][f"{view} difference"]) == len(gaps) == 6
        low = float(visited.seen["drawn"][f"{view} difference"][-1].partition(" [")[2].split(",")[0])
        assert low == pytest.approx(gaps[-1][1].difference.low, rel=1e-3)
    # What has no number stays at the end, either way.
    assert visited.seen["upward"] == ["dape1x3-kerple", "kerple", "rope", "fire"]
    assert visited.seen["downward"] == ["rope", "kerple", "dape1x3-kerple", "fire"]
    assert visited.seen["hidden"] == [False, True]
    assert visited.seen["training"] == 3


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_has_no_horizontal_scroll(dark: bool, tmp_path: Path) -> None:
    visited = visit(made_up().report(tmp_path / "r.html"), tmp_path, PLOTTED, size=(500, 900), dark=dark)
    assert visited.seen["wide"] <= 500
    assert visited.console == []


def test_hostile_text_is_text(tmp_path: Path) -> None:
    comparison = made_up({HOSTILE: 0.0, f"b{HOSTILE}": 0.5})
    texts = {"command": HOSTILE, "settings": {HOSTILE: HOSTILE, "corpus": HOSTILE}}
    texts |= {"failures": (Failure(HOSTILE, HOSTILE, HOSTILE),), "samples": {HOSTILE: {HOSTILE: HOSTILE}}}
    hostile = Comparison(comparison.tables, replace(comparison.about, **texts))
    hostile.save(tmp_path)
    check_unharmed(tmp_path / "report.html", tmp_path)
    assert "<script" not in hostile._repr_html_().replace("&lt;script", "")


def test_without_results_the_page_says_so(tmp_path: Path) -> None:
    empty = Comparison({}, replace(made_up().about, curves={}))
    page = empty.report(tmp_path / "report.html")
    assert visit(page, tmp_path, "return 1").console == []
    assert "No run was evaluated." in page.read_text("utf-8")
    assert empty.failed


def test_figures_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    made = made_up()
    for name in "ab":
        Comparison({STEP: made.frame}, made.about).save(tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 7
    for file in files:
        if file.name != "about.json":
            assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    # Long names leave the curves their room.
    long = made_up({"a long name of a method in a sweep over options, learning_rate 0.001": 0.0})
    drawn = long.plot()
    drawn.canvas.draw()
    assert drawn.axes[0].get_window_extent().width > 200


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"methods": ["a"]}, "expected an object with baseline, methods"),
        ({"methods": 3.5, "baseline": "a"}, "expected a list, got 3.5"),
        ({"methods": ["a"], "baseline": "a", "more": 1}, "expected an object with baseline, methods"),
    ],
)
def test_a_damaged_description_is_a_sentence(tmp_path, content, reason):
    file = tmp_path / "about.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"about.json is damaged: {reason}"):
        read_about(file, ["a"])
