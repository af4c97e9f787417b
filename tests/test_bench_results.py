"""The README's times are what `dape bench attention` wrote into results/bench."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_table_shows_the_measurements():
    records = json.loads((ROOT / "results" / "bench" / "attention.json").read_text("utf-8"))
    times = {(r["backend"], r["pass"]): f"{r['milliseconds']:,.0f}" for r in records if r["length"] == 2048}
    measured = {
        backend: f"{times[backend, 'forward']} / {times[backend, 'forward+backward']}" for backend, _ in times
    }
    table = (ROOT / "README.md").read_text("utf-8").split("| backend |")[1].split("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", table, re.MULTILINE))
    assert {backend: text for backend, text in shown.items() if text} == measured
