"""The page of `dape inspect` in headless Chromium: it draws, its selectors and the hover tell what the maps hold."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

import dape
from dape.inspection.page import Named, page
from dape.models import DapeForCausalLM, preset

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from browser import visit

TEXT = "def f(x):\n\treturn </script>"

# What a person does: choose, point, turn the wheel; each step waits until the panel says it is ready.
TOOLS = """
const ready = async (panel, words) => {
  for (let i = 0; i < 200 && panel.dataset.ready !== words; i++) await new Promise(done => setTimeout(done, 10));
  return panel.dataset.ready;
};
const choose = (panel, name, text) => {
  const select = panel.querySelector(`select[name=${name}]`);
  select.value = [...select.options].find(option => option.textContent.startsWith(text)).value;
  select.dispatchEvent(new Event('change'));
};
const at = (panel, kind, x, y, more = {}) => {
  const canvas = panel.querySelector('canvas'), box = canvas.getBoundingClientRect();
  const place = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true, cancelable: true, ...more};
  canvas.dispatchEvent(kind === 'wheel' ? new WheelEvent(kind, place) : new PointerEvent(kind, place));
};
const opacity = (panel, ...places) => {
  const canvas = panel.querySelector('canvas'), pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return places.map(([x, y]) => pixels.data[4 * (Math.floor(y * canvas.height) * canvas.width + Math.floor(x * canvas.width)) + 3]);
};
const said = panel => panel.querySelector('output').innerText;
const [left, right] = document.querySelectorAll('.panel');
const fetched = () => performance.getEntriesByType('resource').map(entry => entry.name).filter(name => !name.startsWith('data:'));
"""


def probe(body: str) -> str:
    return f"{TOOLS} return (async () => {{ {body} }})();"


@pytest.fixture(scope="module")
def runs():
    torch.manual_seed(0)
    named = []
    for method in ("dape-kerple", "dape1x3-kerple"):
        model = DapeForCausalLM(preset("tiny", method, hidden_size=32, num_hidden_layers=2)).eval()
        found = dape.inspect(model, list(TEXT.encode()))
        named.append(Named(f"run of {method}", found, list(TEXT)))
    return named


@pytest.fixture
def opened(runs, tmp_path):
    path = tmp_path / "index.html"
    path.write_text(page(runs), "utf-8")

    def look(body, **options):
        seen = visit(path, tmp_path, probe(body), **options)
        assert seen.console == []
        return seen.seen

    return look


def value_in(words: str) -> float:
    return float(words.split()[-1])


def test_two_runs_stand_side_by_side(opened):
    seen = opened("""
      const states = [await ready(left, 'run of dape-kerple/0/0/scores'), await ready(right, 'run of dape1x3-kerple/0/0/scores')];
      const boxes = [left, right].map(panel => panel.getBoundingClientRect());
      return {states, beside: boxes[0].right <= boxes[1].left && boxes[0].top === boxes[1].top,
        drawn: opacity(left, [.2, .8], [.8, .2]), fetched: fetched(),
        rows: left.querySelectorAll('tbody tr').length, wide: document.documentElement.scrollWidth > innerWidth};
    """)
    assert seen["states"] == ["run of dape-kerple/0/0/scores", "run of dape1x3-kerple/0/0/scores"]
    assert seen["beside"]
    assert seen["drawn"] == [255, 0]  # a pair that is visible, and one that is not
    assert (seen["rows"], seen["fetched"], seen["wide"]) == (4, [], False)


# Pixels as (query, key); the name of the map, and what its title begins with.
CHOICES = [
    ("scores", "S:", 9, 4),
    ("bias", "B:", 20, 3),
    ("processed", "f(S, B)", 7, 7),
    ("weights", "weights", 12, 2),
]


@pytest.mark.parametrize(("name", "title", "query", "key"), CHOICES)
def test_selectors_choose_and_the_hover_tells_pair_and_value(name, title, query, key, opened, runs):
    size = len(TEXT)
    x, y = (key + 0.5) / size, (query + 0.5) / size
    seen = opened(f"""
      choose(left, 'layer', '1'); choose(left, 'head', '2'); choose(left, 'map', '{title}');
      const state = await ready(left, 'run of dape-kerple/1/2/{name}');
      await ready(right, 'run of dape1x3-kerple/0/0/scores');
      choose(right, 'layer', '1'); choose(right, 'head', '2'); choose(right, 'map', '{title}');
      await ready(right, 'run of dape1x3-kerple/1/2/{name}');
      at(left, 'pointermove', {x}, {y});
      const words = [said(left), said(right)];
      at(left, 'pointermove', {y}, {x});
      return {{state, words, mirrored: said(left), now: left.querySelector('tr.now').innerText.split('\\t')[0]}};
    """)
    assert (seen["state"], seen["now"]) == (f"run of dape-kerple/1/2/{name}", "2")
    show = {"\n": "↵", "\t": "⇥", " ": "·"}
    pair = f"query {query} {show.get(TEXT[query], TEXT[query])} · key {key} {show.get(TEXT[key], TEXT[key])}"
    # Either panel tells of its own map.
    for run, words in zip(runs, seen["words"], strict=True):
        assert words.splitlines()[0] == pair
        values = run.inspection.map(1, 2, name)
        tolerance = {"weights": 2e-3}.get(name, 2e-3 * (math.fabs(values[query, key]) + 0.1))
        assert value_in(words) == pytest.approx(values[query, key], abs=tolerance)
    assert ("not visible" in seen["mirrored"]) == (query != key)


def test_the_wheel_zooms_both_panels_unless_told_not_to(opened):
    seen = opened("""
      await ready(left, 'run of dape-kerple/0/0/scores'); await ready(right, 'run of dape1x3-kerple/0/0/scores');
      const spans = () => panels.map(panel => panel.window.span), before = spans();
      at(left, 'wheel', .3, .6, {deltaY: -1});
      at(left, 'pointermove', .3, .6);
      const together = spans();
      document.getElementById('together').checked = false;
      at(left, 'wheel', .3, .6, {deltaY: -1});
      const alone = spans();
      left.querySelector('canvas').dispatchEvent(new MouseEvent('dblclick'));
      return {before, together, alone, reset: spans(), words: said(left)};
    """)
    size = len(TEXT)
    assert seen["before"] == [size, size]
    assert seen["together"] == pytest.approx([0.8 * size] * 2)
    assert seen["alone"] == pytest.approx([0.64 * size, 0.8 * size])
    assert seen["reset"] == pytest.approx([size, 0.8 * size])
    # What is under the pointer stays there.
    assert seen["words"].startswith(f"query {int(0.6 * size)} ")


def test_a_row_of_the_table_chooses_its_head(opened):
    seen = opened("""
      await ready(left, 'run of dape-kerple/0/0/scores');
      left.querySelectorAll('tbody tr')[3].click();
      return ready(left, 'run of dape-kerple/0/3/scores');
    """)
    assert seen == "run of dape-kerple/0/3/scores"


def test_on_a_phone_panels_stand_one_above_the_other(opened):
    seen = opened(
        """
      await ready(left, 'run of dape-kerple/0/0/scores');
      const boxes = [left, right].map(panel => panel.getBoundingClientRect());
      return {stacked: boxes[0].bottom <= boxes[1].top, wide: document.documentElement.scrollWidth > innerWidth,
        dark: getComputedStyle(document.body).backgroundColor};
    """,
        size=(500, 900),
        dark=True,
    )
    assert (seen["stacked"], seen["wide"]) == (True, False)
    assert seen["dark"] == "rgb(21, 23, 26)"
