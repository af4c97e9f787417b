"""The README's times and memory are what `dape bench attention` wrote into results/bench."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "README.md").read_text("utf-8").split("| backend |")[1].split("\n\n")[0]


def records(name: str) -> list[dict]:
    return json.loads((ROOT / "results" / "bench" / name).read_text("utf-8"))


def test_the_table_shows_the_times():
    times = {
        (r["backend"], r["pass"]): f"{r['milliseconds']:,.0f}"
        for r in records("attention.json")
        if r["length"] == 2048
    }
    measured = {
        backend: f"{times[backend, 'forward']} / {times[backend, 'forward+backward']}" for backend, _ in times
    }
    shown = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", TABLE, re.MULTILINE))
    assert {backend: text for backend, text in shown.items() if text} == measured


def test_the_table_shows_the_memory():
    measured = {
        (r["backend"], r["length"]): f"{r['peak_extra_mb']:,.0f}"
        for r in [*records("attention.json"), *records("memory.json")]
        if r["pass"] == "forward+backward"
    }
    shown = re.findall(r"^\| `(\w+)` \|.* ([\d,]+) MB at (\d+) tokens", TABLE, re.MULTILINE)
    assert {backend for backend, _, _ in shown} == {"cpu", "tiled", "listing"}
    for backend, megabytes, length in shown:
        assert megabytes == measured[backend, int(length)]
