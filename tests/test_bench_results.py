"""The times and memory on our pages are what `dape bench attention` wrote into results/bench.

`python tests/test_bench_results.py` writes the tables of the guide anew.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "results" / "bench"


def by_processor() -> dict[str, dict[tuple[str, str, int], dict]]:
    """Records of results/bench/programs: of each processor, by backend, pass and length."""
    found: dict[str, dict[tuple[str, str, int], dict]] = {}
    for file in sorted((BENCH / "programs").glob("*.json")):
        for r in json.loads(file.read_text("utf-8")):
            found.setdefault(r["processor"], {})[r["backend"], r["pass"], r["length"]] = r
    return found


def programs() -> str:
    """Every processor, fastest first."""
    lines = ["| processor | ms | × SDPA | MB, 8192 tokens |", "|---|---|---|---|"]
    found = by_processor()
    for name in sorted(found, key=lambda name: found[name]["cpu", "forward+backward", 2048]["milliseconds"]):
        cells = [found[name]["cpu", step, 2048] for step in ("forward", "forward+backward")]
        times = " / ".join(f"{cell['milliseconds']:,.0f}" for cell in cells)
        ratios = " / ".join(f"{cell['ratio_to_sdpa']:.2f}" for cell in cells)
        memory = found[name]["cpu", "forward+backward", 8192]["peak_extra_mb"]
        lines.append(f"| `{name}` | {times} | {ratios} | {memory:.0f} |")
    return "\n".join(lines)


def trainable_bias() -> str:
    """Plain attention with a bias by distance, beside PyTorch's own."""
    found = by_processor()["plain"]
    lengths = sorted({length for _, step, length in found if step == "forward+backward" and length < 8192})
    lines = [
        "| tokens | ours, ms | SDPA with the bias | SDPA without a bias | faster than with | share of without |",
        "|---|---|---|---|---|---|",
    ]
    for length in lengths:
        ours, dense, plain = (
            found[backend, "forward+backward", length]["milliseconds"]
            for backend in ("cpu", "sdpa with bias", "sdpa")
        )
        lines.append(
            f"| {length} | {ours:,.0f} | {dense:,.0f} | {plain:,.0f} | {dense / ours:.1f} × | {ours / plain:.2f} |"
        )
    return "\n".join(lines)


PAGES = {
    "programs": ("docs/kernels.md", programs),
    "trainable-bias": ("docs/trainable_bias.md", trainable_bias),
}


def between(text: str, name: str) -> tuple[str, str, str]:
    before, rest = text.split(f"<!-- {name} -->\n")
    table, after = rest.split(f"<!-- /{name} -->")
    return before, table, after


@pytest.mark.parametrize("name", PAGES)
def test_the_guide_shows_the_records(name):
    page, table = PAGES[name]
    assert between((ROOT / page).read_text("utf-8"), name)[1] == table() + "\n"


def test_every_processor_keeps_memory_linear():
    """A call of 8192 tokens whose maps were kept would take gigabytes."""
    for name, cells in by_processor().items():
        assert cells["cpu", "forward+backward", 8192]["peak_extra_mb"] <= 250, name


if __name__ == "__main__":
    for name, (page, table) in PAGES.items():
        path = ROOT / page
        before, _, after = between(path.read_text("utf-8"), name)
        path.write_text(f"{before}<!-- {name} -->\n{table()}\n<!-- /{name} -->{after}", "utf-8")
