"""Records, CSV, tables, plots and figures say the same."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from sample import LENGTHS, METHODS, TRAIN_LENGTH, sample_results

from dape.report import RECORD_FIELDS, build, curves, load_results, plot, print_tables, save_results, views
from dape.report.results import over_seeds
from dape.report.table import chosen_lengths


def printed(results, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_tables(results, console)
    return console.export_text()


def test_csv_holds_the_records(tmp_path: Path) -> None:
    results = sample_results()
    paths = build(results, tmp_path)
    with open(paths.csv, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(RECORD_FIELDS)
    read = [
        {name: type(record[name])(row[name]) for name in record}
        for row, record in zip(rows, results["records"], strict=True)
    ]
    assert read == results["records"]
    assert load_results(paths.results) == results


def test_same_results_make_the_same_files(tmp_path: Path) -> None:
    first, second = (build(sample_results(), tmp_path / name) for name in ("a", "b"))
    for one, other in zip(
        (first.results, first.csv, *first.figures, first.page),
        (second.results, second.csv, *second.figures, second.page),
        strict=True,
    ):
        assert one.read_bytes() == other.read_bytes(), one.name
    assert {path.suffix for path in first.figures} == {".svg", ".pdf", ".png"}
    assert {path.read_bytes()[:4] for path in first.figures} == {b"<?xm", b"%PDF", b"\x89PNG"}


def test_curves_are_means_over_seeds() -> None:
    results = sample_results()
    for curve in curves(results, "equal-time"):
        for point in curve.points:
            rows = [
                r
                for r in results["records"]
                if (r["method"], r["view"], r["eval_length"])
                == (curve.method, "equal-time", point.eval_length)
            ]
            values = [row["nll"] for row in rows]
            assert len(values) == 2
            assert point.nll.value == pytest.approx(sum(values) / 2)
            between = abs(values[0] - values[1]) / 2  # the standard error of a mean of two
            assert point.nll.error == pytest.approx(math.hypot(rows[0]["nll_se"], between))
    assert over_seeds([1.5], [0.25]) == (curves(results, "equal-step")[0].points[0].nll.__class__)(1.5, 0.25)


def test_table_fits_80_columns_and_tells_failures() -> None:
    text = printed(sample_results())
    assert max(map(len, text.splitlines())) <= 80
    for curve in curves(sample_results(), "equal-step"):
        for point in curve.points:
            assert f"{point.ppl:.2f}" in text
    assert "failed: fire, seed 1, equal steps: the loss is <nan>" in text
    assert text.count("Perplexity at") == 2


def test_a_view_of_its_own_needs_no_other() -> None:
    results = sample_results()
    results["records"] = [record for record in results["records"] if record["view"] == "equal-step"]
    assert views(results) == ["equal-step"]
    assert "equal training time" not in printed(results).split("failed:")[0]


@pytest.mark.parametrize(
    ("start", "end", "style"), [(1.0, 1.005, "32m"), (1.0, 1.05, "33m"), (1.0, 1.5, "31m"), (1.0, 0.9, "32m")]
)
def test_colour_tells_the_change(start: float, end: float, style: str) -> None:
    results = copy.deepcopy(sample_results())
    results["settings"]["methods"] = ["rope"]
    results["failures"] = []
    for kind in ("records", "changes"):
        results[kind] = [
            row for row in results[kind] if row["method"] == "rope" and row["eval_length"] in (64, 1024)
        ]
    for row in results["changes"]:
        row |= {"change": 0.0 if row["eval_length"] == 64 else end - start, "change_se": 0.001}
    console = Console(width=80, force_terminal=True, color_system="standard", file=io.StringIO(), record=True)
    print_tables(results, console)
    line = next(
        line for line in console.export_text(styles=True).splitlines() if f"{end - start:+.3f}" in line
    )
    assert f"{style}{end - start:+.3f}" in line


def test_many_lengths_keep_the_ends() -> None:
    lengths = [2**n for n in range(6, 15)]
    chosen = chosen_lengths(lengths)
    assert (chosen[0], chosen[-1]) == (lengths[0], lengths[-1])
    assert sorted(set(chosen)) == chosen


SNAPSHOT = """\
perplexity  (lower is better; trained at length 64 = 1×; both axes logarithmic)
   22.6 |                                                 .o    o rope
        |                                              ...
        |                                          ....
        |                                       ...
        |                                    ..o
     13 |                                 ...
        |                              ...
        |                          o...
        |                       ...
        |                    ...
    7.5 |                 ...
        |             .o..
        |          ...                                          # alibi
        |       ...                                             x kerple
        |  x...........x...........x...........x...........x    ^ dape-kerple
   4.32 |  v...........v...........v...........v...........v    v dape1x3-kerple
        +-----------------------------------------------------
          64          128         256         512        1024
          1×          2×          4×          8×          16×
"""


def test_terminal_plot() -> None:
    lines = plot(curves(sample_results(), "equal-step"), TRAIN_LENGTH).plain.splitlines()
    assert "\n".join(lines) == SNAPSHOT.rstrip("\n")
    assert max(map(len, lines)) <= 80


def test_terminal_plot_of_flat_and_infinite_curves() -> None:
    results = sample_results()
    results["records"] = [
        record | {"nll": 1000.0 if record["method"] == "rope" else 1.5} for record in results["records"]
    ]
    lines = plot(curves(results, "equal-step"), TRAIN_LENGTH).plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("o" in line.split("|")[-1][:50] for line in lines[1:-3]) == 0
    assert all(any(method in line for line in lines) for method in METHODS)


def test_results_without_records_still_have_a_page(tmp_path: Path) -> None:
    results = sample_results() | {"records": [], "pairs": [], "changes": []}
    paths = build(results, tmp_path)
    assert paths.figures == ()
    assert "No run was evaluated" in paths.page.read_text()
    assert "nothing to plot" in plot([], TRAIN_LENGTH).plain


def test_unknown_errors_are_null(tmp_path: Path) -> None:
    results = sample_results()
    for record in results["records"]:
        record["nll_se"] = math.nan
    paths = build(results, tmp_path)
    assert json.loads(paths.results.read_text())["records"][0]["nll_se"] is None
    assert "NaN" not in paths.results.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no comparison"),
        ('{"settings": {}, "failures": [], "records": [{}]}', "lacks method"),
    ],
)
def test_damaged_results_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_results(tmp_path / "results.json")
    with pytest.raises(FileNotFoundError, match="dape compare"):
        load_results(tmp_path / "none.json")


def test_save_and_load(tmp_path: Path) -> None:
    save_results(sample_results(), tmp_path / "results.json")
    assert load_results(tmp_path / "results.json") == sample_results()
    assert sorted({record["eval_length"] for record in sample_results()["records"]}) == list(LENGTHS)
