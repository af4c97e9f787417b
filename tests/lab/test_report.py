"""Records, CSV, tables, plots and figures say the same."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from sample import METHODS, sample_results

from dape.cli.compare import show_comparison
from dape.lab.compare import Comparison
from dape.lab.curves import curves, views
from dape.lab.records import Results, load_results
from dape.lab.report.comparison import _ticks, page
from dape.lab.stats import Estimate, over_seeds
from dape.lab.tables import chosen


def printed(results: Results, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), highlight=False)
    show_comparison(Comparison(results), console)
    return console.export_text()


def only(results: Results, **about) -> Results:
    """The results with the runs alone that are about all of this."""
    rows = [
        row
        for row in results["rows"]
        if all(results["runs"][row["run"]][name] == value for name, value in about.items())
    ]
    kept = sorted({row["run"] for row in rows})
    place = {number: index for index, number in enumerate(kept)}
    runs = [results["runs"][number] for number in kept]
    return Results({**results.content, "runs": runs, "rows": [{**r, "run": place[r["run"]]} for r in rows]})


def test_csv_and_json_hold_the_rows(tmp_path: Path) -> None:
    results = sample_results()
    Comparison(results).save(tmp_path)
    with open(tmp_path / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["value"]) for row in rows] == results.frame["value"].tolist()
    assert [row["method"] for row in rows] == results.frame["method"].tolist()
    assert load_results(tmp_path / "results.json").content == results.content


def test_same_results_make_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Comparison(sample_results()).save(tmp_path / name)
    names = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    figures = [tmp_path / "a" / name for name in names if name.parent.name == "figures"]
    assert {path.suffix for path in figures} == {".svg", ".pdf", ".png"}
    assert {path.read_bytes()[:4] for path in figures} == {b"<?xm", b"%PDF", b"\x89PNG"}
    assert {"report.html", "results.csv", "results.json", "table.tex"} <= {str(name) for name in names}


def test_curves_are_means_over_seeds() -> None:
    results = sample_results()
    for curve in curves(results, "equal-time"):
        for point in curve.points:
            rows = [
                r
                for r in results.lines("loss")
                if (r["method"], r["view"], r["eval_length"])
                == (curve.method, "equal-time", point.eval_length)
            ]
            values = [row["value"] for row in rows]
            assert len(values) == 2
            assert point.loss.value == pytest.approx(sum(values) / 2)
            between = abs(values[0] - values[1]) / 2  # the standard error of a mean of two
            assert point.loss.error == pytest.approx(math.hypot(rows[0]["error"], between))
    assert over_seeds([1.5], [0.25]) == Estimate(1.5, 0.25)


def test_table_fits_80_columns_and_tells_failures() -> None:
    text = printed(sample_results())
    assert max(map(len, text.splitlines())) <= 80
    for curve in curves(sample_results(), "equal-step"):
        for point in curve.points:
            assert f"{point.ppl:.2f}" in text
    assert "failed: fire, seed 1, equal steps: the loss is <nan>" in text
    assert text.count("Perplexity at") == 2
    assert text.index("At 16× the training length dape1x3-kerple has") < text.index("Perplexity at")


def test_a_view_of_its_own_needs_no_other() -> None:
    results = only(sample_results(), view="equal-step")
    assert views(results) == ["equal-step"]
    assert "equal training time" not in printed(results).split("failed:")[0]


@pytest.mark.parametrize(
    ("start", "end", "style"), [(1.0, 1.005, "32m"), (1.0, 1.05, "33m"), (1.0, 1.5, "31m"), (1.0, 0.9, "32m")]
)
def test_colour_tells_the_change(start: float, end: float, style: str) -> None:
    results = only(sample_results(), method="rope")
    results.content |= {"failures": [], "settings": {**results.settings, "methods": ["rope"]}}
    results.content["rows"] = [row for row in results["rows"] if row["eval_length"] in (64, 1024)]
    for row in results["rows"]:
        if row["metric"] == "change":
            row |= {"value": 0.0 if row["eval_length"] == 64 else end - start, "error": 0.001}
    console = Console(width=80, force_terminal=True, color_system="standard", file=io.StringIO(), record=True)
    show_comparison(Comparison(results), console)
    shown = f"{end - start:+.3f}".replace("-", "−")
    line = next(line for line in console.export_text(styles=True).splitlines() if shown in line)
    assert f"{style}{shown}" in line


def test_many_lengths_keep_the_ends() -> None:
    lengths = [2**n for n in range(6, 15)]
    picked = chosen(len(lengths), 5)
    assert (picked[0], picked[-1]) == (0, len(lengths) - 1)
    assert sorted(set(picked)) == picked


def test_results_without_rows_still_have_a_page(tmp_path: Path) -> None:
    results = Results({**sample_results().content, "runs": [], "rows": []})
    Comparison(results).save(tmp_path)
    assert not (tmp_path / "figures").exists()
    assert "No run was evaluated" in (tmp_path / "report.html").read_text("utf-8")


def test_unknown_errors_are_left_out(tmp_path: Path) -> None:
    results = sample_results()
    for row in results["rows"]:
        row["error"] = math.nan
    path = results.save(tmp_path / "results.json")
    assert "error" not in json.loads(path.read_text())["rows"][0]
    assert "NaN" not in path.read_text()
    assert load_results(path).frame["error"].isna().all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "holds a list, not an object"),
        ('{"settings": {}, "failures": [], "records": [{}]}', "holds no results"),
        ('{"runs": [], "rows": [{"metric": "loss", "run": 0}]}', "row 0 lacks its metric or its run"),
    ],
)
def test_damaged_results_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_results(tmp_path / "results.json")
    with pytest.raises(FileNotFoundError, match="dape compare"):
        load_results(tmp_path / "none.json")


def test_bars_are_paired_and_the_legend_says_so() -> None:
    """Errors of losses are mostly of which documents are hard, alike for all: bars are of differences."""
    results = sample_results()
    drawn = Comparison(results).plot()
    said = drawn.legends[0].get_title().get_text()
    assert said == "bars: one standard error\nof the difference to\nkerple"
    heights = {}
    for container in drawn.axes[0].containers:
        (segments,) = container[2]
        low, high = (end[1] for end in segments.get_segments()[0])
        heights[container.get_label()] = math.log(high / low) / 2
    assert heights["kerple"] == 0
    seeds = over_seeds([METHODS["alibi"][0] - METHODS["kerple"][0]] * 2, [0.008, 0.008])
    assert heights["alibi"] == pytest.approx(seeds.error, rel=0.3)


def test_verdicts_name_the_evidence() -> None:
    results = Results({**sample_results().content, "documents": {"stdlib": [0, 0, 1, 2]}})
    assert Comparison(results).verdict() == (
        "At 16× the training length dape1x3-kerple has 10.6 % lower perplexity than kerple "
        "(loss −0.112 ± 0.009 nats; 2 seeds, 3 documents)."
    )


def test_every_text_of_the_page_is_escaped() -> None:
    results, evil = sample_results(), "<script>alert(1)</script>"
    for failure in results.content["failures"]:
        failure |= {"seed": evil, "error": evil}
    results.content["command"] = evil
    results.content["settings"]["corpus"] = evil
    assert evil not in page(results)


@pytest.mark.parametrize("values", [[6.40, 6.41], [6.4, 6.6], [6.6, 23.6], [3.0, 30_000.0]])
def test_the_axis_of_perplexities_is_labelled_within_its_range(values):
    assert sum(values[0] <= tick <= values[1] for tick in _ticks(values)) >= 2
