"""`build`: every file that a comparison leaves behind, from its results."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from dape.report.figures import write_figures
from dape.report.page import write_page
from dape.report.results import Results, finite, save_results
from dape.report.spreadsheet import write_csv


class Paths(NamedTuple):
    results: Path
    csv: Path
    figures: tuple[Path, ...]
    page: Path


def build(results: Results, folder: Path) -> Paths:
    """Write results.json, results.csv, figures and report.html into the folder; returns their paths.

    The files replace earlier ones one by one, each whole. Results without a single record have no figures.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = finite(results)
    paths = Paths(
        folder / "results.json",
        folder / "results.csv",
        tuple(write_figures(results, folder / "figures")) if results["records"] else (),
        folder / "report.html",
    )
    save_results(results, paths.results)
    write_csv(results, paths.csv)
    write_page(results, paths.page)
    return paths
