"""The page of `dape inspect` in headless Chromium: it draws, its selectors and the hover tell what the maps hold."""

import base64
import math
import re
import zlib

import numpy as np
import pytest
import torch
from browser import visit

import dape
from dape.data.tokenizers import ByteTokenizer, token_texts
from dape.inspection.figure import shade
from dape.inspection.maps import copied_from
from dape.inspection.page import Named, encoded, write_maps_page
from dape.models import DapeForCausalLM, preset

TEXT = "def f(x):\n\treturn </script>"

# What a person does: choose, point, turn the wheel; each step waits until the panel says it is ready.
TOOLS = """
const ready = async (panel, words) => {
  const there = () => words ? panel.dataset.ready === words : panel.dataset.ready;
  for (let i = 0; i < 200 && !there(); i++) await new Promise(done => setTimeout(done, 10));
  return panel.dataset.ready;
};
const choose = (panel, name, text) => {
  const select = panel.querySelector(`select[name=${name}]`);
  select.value = [...select.options].find(option => option.textContent.startsWith(text)).value;
  select.dispatchEvent(new Event('change'));
};
const at = (panel, kind, x, y, more = {}) => {
  const canvas = panel.querySelector('.view canvas'), box = canvas.getBoundingClientRect();
  const place = {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true, cancelable: true, ...more};
  canvas.dispatchEvent(kind === 'wheel' ? new WheelEvent(kind, place) : new PointerEvent(kind, place));
};
const opacity = (panel, ...places) => {
  const canvas = panel.querySelector('.view canvas'), pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return places.map(([x, y]) => pixels.data[4 * (Math.floor(y * canvas.height) * canvas.width + Math.floor(x * canvas.width)) + 3]);
};
const said = panel => panel.querySelector('output').innerText;
const [left, right] = document.querySelectorAll('.panel');
const fetched = () => [...document.querySelectorAll('script[src], link, img')].map(e => e.getAttribute('src'));
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
    path = write_maps_page(runs, tmp_path)

    def look(body, **options):
        seen = visit(path, tmp_path, probe(body), **options)
        assert seen.console == []
        return seen.seen

    return look


def test_a_character_of_several_bytes_is_one_text():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("don’t é")
    assert token_texts(tokenizer.decode, ids) == ["d", "o", "n", "’", "", "", "t", " ", "é", ""]
    assert token_texts(tokenizer.decode, ids[:4]) == ["d", "o", "n", "\ufffd"]


def tolerance(name: str, values: np.ndarray, query: int, key: int) -> float:
    """Half of the last of three digits shown, and half of a step of the 4095 that a map's range has."""
    value = float(values[query, key])
    drawn = shade(name, values)
    step = float(np.nanmax(drawn) - np.nanmin(drawn)) / 4094 / 2
    return (
        5e-3 * math.fabs(value)
        + 1e-6
        + (math.fabs(value) * math.log(10) * step if name == "weights" else step)
    )


def value_in(words: str) -> float:
    return float(words.split()[-1])


def test_it_opens_on_the_head_that_the_processor_changes_most(runs, tmp_path):
    """As the command gives them with two lengths: every run's short input, which changes nothing, then its long one."""
    maps = dape.inspect(DapeForCausalLM(preset("tiny", "kerple")).eval(), list(b"short"), layers=[0])
    short = Named("plain", maps, list("short"))
    path = write_maps_page([short, runs[0], short._replace(name="other"), runs[1]], tmp_path)
    strongest = max(runs, key=lambda run: max(float(found.change.max()) for found in run.inspection.layers))
    layer, head = strongest.inspection.most_changed()
    states = [f"run of {method}/{layer}/{head}/weights" for method in ("dape-kerple", "dape1x3-kerple")]
    seen, console = visit(
        path,
        tmp_path,
        probe(f"""
      const states = [await ready(left, '{states[0]}'), await ready(right, '{states[1]}')];
      const boxes = [left, right].map(panel => panel.getBoundingClientRect());
      return {{states, beside: boxes[0].right <= boxes[1].left && boxes[0].top === boxes[1].top,
        drawn: opacity(left, [.2, .8], [.8, .2]), fetched: fetched(),
        named: [...left.querySelector('select[name=run]').options].map(option => option.textContent),
        scales: [left, right].map(panel => panel.querySelector('.scale').innerText),
        thumbs: left.querySelectorAll('.thumbs canvas').length, now: left.querySelector('.thumbs .now').title,
        wide: document.documentElement.scrollWidth > innerWidth}};
    """),
    )[1:]
    assert console == []
    assert seen["states"] == states
    assert seen["beside"]
    assert seen["drawn"] == [255, 0]  # a pair that is visible, and one that is not
    # Tiles of what is shown, and of nothing else.
    assert sorted(seen["fetched"]) == [f"tiles/{run}-{layer}-{head}-weights.js" for run in (1, 3)]
    long = [f"{method}, {len(TEXT)} tokens" for method in ("dape-kerple", "dape1x3-kerple")]
    assert seen["named"] == ["kerple, 5 tokens (plain)", long[0], "kerple, 5 tokens (other)", long[1]]
    assert seen["scales"][0] == seen["scales"][1]
    assert seen["thumbs"] == 8
    assert seen["now"].startswith(f"layer {layer}, head {head}:")
    assert not seen["wide"]


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
      choose(right, 'layer', '1'); choose(right, 'head', '2'); choose(right, 'map', '{title}');
      await ready(right, 'run of dape1x3-kerple/1/2/{name}');
      at(left, 'pointermove', {x}, {y});
      const words = [said(left), said(right)];
      const marked = kind => [...document.querySelectorAll('#text .' + kind)].map(span => span.textContent).join('');
      const marks = [marked('query'), marked('key'), document.querySelector('#text').textContent];
      at(left, 'pointermove', {y}, {x});
      return {{state, words, marks, mirrored: said(left), now: left.querySelector('.thumbs .now').title}};
    """)
    assert seen["state"] == f"run of dape-kerple/1/2/{name}"
    assert seen["now"].startswith("layer 1, head 2:")
    assert seen["marks"] == [TEXT[query], TEXT[key], TEXT]
    show = {"\n": "↵", "\t": "⇥", " ": "·"}
    pair = f"query {query} {show.get(TEXT[query], TEXT[query])} · key {key} {show.get(TEXT[key], TEXT[key])}"
    # Either panel tells of its own map.
    for run, words in zip(runs, seen["words"], strict=True):
        assert words.splitlines()[0] == pair
        values = run.inspection.map(1, 2, name)
        assert value_in(words) == pytest.approx(values[query, key], abs=tolerance(name, values, query, key))
    assert ("not visible" in seen["mirrored"]) == (query != key)


def test_the_wheel_zooms_both_panels_unless_told_not_to(opened):
    seen = opened("""
      await ready(left); await ready(right);
      const spans = () => panels.map(panel => panel.window.span), before = spans();
      at(left, 'wheel', .3, .6, {deltaY: -1});
      at(left, 'pointermove', .3, .6);
      const together = spans();
      document.getElementById('together').checked = false;
      at(left, 'wheel', .3, .6, {deltaY: -1});
      const alone = spans();
      left.querySelectorAll('.thumbs button')[7].click();
      const chosen = await ready(left, 'run of dape-kerple/1/3/weights');
      left.querySelector('.view canvas').dispatchEvent(new MouseEvent('dblclick'));
      return {before, together, alone, chosen, reset: spans(), words: said(left)};
    """)
    size = len(TEXT)
    assert seen["before"] == [size, size]
    assert seen["together"] == pytest.approx([0.8 * size] * 2)
    assert seen["alone"] == pytest.approx([0.64 * size, 0.8 * size])
    assert seen["reset"] == pytest.approx([size, 0.8 * size])
    assert seen["chosen"] == "run of dape-kerple/1/3/weights"
    # What is under the pointer stays there.
    assert seen["words"].startswith(f"query {int(0.6 * size)} ")


def test_kernels_are_those_of_all_heads_though_some_are_shown(tmp_path):
    model = DapeForCausalLM(preset("tiny", "dape1x3-kerple", hidden_size=32, num_hidden_layers=1)).eval()
    run = Named("run", dape.inspect(model, list(TEXT.encode()), heads=[1, 2]), list(TEXT))
    body = "await ready(left); return left.querySelector('details').textContent;"
    words = visit(write_maps_page([run], tmp_path), tmp_path, probe(body)).seen
    assert "columns: scores of 4 heads, then their bias, 3 taps each" in words


def test_both_sides_tell_of_the_opening_pair_though_one_tile_is_slow(runs, tmp_path):
    path = write_maps_page(runs, tmp_path)
    for tile in (tmp_path / "tiles").glob("0-*.js"):
        tile.write_text(f"setTimeout(() => {{ {tile.read_text()} }}, 500)")
    left, right = visit(path, tmp_path, probe("await ready(left); return [said(left), said(right)];")).seen
    assert left.splitlines()[0] == right.splitlines()[0]


def test_a_tile_that_is_missing_is_told(runs, tmp_path):
    path = write_maps_page(runs, tmp_path)
    for tile in (tmp_path / "tiles").iterdir():
        tile.unlink()
    body = "await new Promise(done => setTimeout(done, 300)); return said(left);"
    assert "is not beside this page" in visit(path, tmp_path, probe(body)).seen


def test_what_a_window_hides_is_told_from_the_least_value():
    values = np.where(np.tri(4) - np.tri(4, k=-2) > 0, 1.0, np.nan)
    _, tile = encoded(values)
    raw = zlib.decompress(base64.b64decode(tile))
    high, low = raw[:10], raw[10:]
    numbers = [16 * h + (low[i // 2] >> 4 if i % 2 == 0 else low[i // 2] & 15) for i, h in enumerate(high)]
    assert [number > 0 for number in numbers] == np.isfinite(values)[np.tril_indices(4)].tolist()


LOOKS = {(1280, False): "rgb(251, 251, 250)", (390, True): "rgb(21, 23, 26)"}


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_it_fits_a_desk_and_a_phone_in_light_and_dark(width, dark, opened):
    seen = opened(
        """
      await ready(left); await ready(right);
      document.querySelectorAll('details').forEach(e => e.open = true);
      const boxes = [left, right].map(panel => panel.getBoundingClientRect());
      return {stacked: boxes[0].bottom <= boxes[1].top, wide: document.documentElement.scrollWidth > innerWidth,
        ground: getComputedStyle(document.body).backgroundColor, kernels: left.querySelectorAll('.kernel').length};
    """,
        size=(width, 900),
        dark=dark,
    )
    assert seen == {"stacked": width == 390, "wide": False, "ground": LOOKS[width, dark], "kernels": 2}


def test_a_token_tells_its_loss_under_both_models_and_what_it_repeats(runs, tmp_path):
    text = "one two three. one two four"
    named = []
    torch.manual_seed(0)
    for run in runs:
        model = DapeForCausalLM(
            preset("tiny", run.inspection.method, hidden_size=32, num_hidden_layers=1)
        ).eval()
        named.append(Named(run.name, dape.inspect(model, list(text.encode())), list(text)))
    place = 20
    body = f"""
      await ready(left); await ready(right);
      const spans = [...document.getElementById('text').children];
      const query = spans.findIndex(e => e.className.includes('query')), opened = document.getElementById('told').innerText;
      spans[{place}].dispatchEvent(new PointerEvent('pointerover', {{bubbles: true}}));
      const words = document.getElementById('told').innerText, source = spans.findIndex(e => e.className.includes('source'));
      const shade = document.getElementById('shade');
      const colours = () => spans.map(e => e.style.background).join();
      const found = [colours()];
      for (const value of ['loss', 'gain']) {{
        shade.value = value; shade.dispatchEvent(new Event('change')); found.push(colours());
      }}
      return {{words, source, query, opened, different: new Set(found).size}};
    """
    visited = visit(write_maps_page(named, tmp_path), tmp_path, probe(body))
    assert visited.console == []
    # It opens on the row before the repeated token that the right model predicts better by most.
    left, right = (run.inspection for run in named)
    gains = np.where(np.array(left.copied) < 0, 0, left.losses - right.losses)
    assert gains.max() > 0
    assert visited.seen["query"] == gains.argmax() - 1
    assert visited.seen["opened"].startswith("next")
    assert visited.seen["source"] == place - 15
    assert visited.seen["different"] == 3
    for run in named:
        told = re.search(rf"([0-9.]+) \({run.inspection.method}", visited.seen["words"])
        assert told is not None
        assert float(told[1]) == pytest.approx(run.inspection.losses[place], abs=0.006)
    assert f"repeats token {place - 15}, 15 back" in visited.seen["words"]


def test_a_repeated_token_is_the_latest_after_the_longest_common_run():
    assert copied_from([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]) == [-1, -1, -1, -1, -1, -1, -1, -1, -1, 2]
    assert copied_from([5] * 5) == [-1, -1, -1, 2, 3]


def test_losses_are_those_of_the_model():
    model = DapeForCausalLM(preset("tiny", "dape1x3-kerple", hidden_size=32, num_hidden_layers=1)).eval()
    ids = torch.randint(256, (1, 300))
    losses = dape.inspect(model, ids[0], resolution=8).losses
    assert np.isnan(losses[0])
    assert losses[1:].mean() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
