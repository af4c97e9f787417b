"""From the records of a comparison to tables, plots, figures and a page to send around. Needs `dape[lab]`."""

from dape.report.build import Paths, build
from dape.report.results import RECORD_FIELDS, Curve, curves, load_results, save_results, views
from dape.report.table import print_tables
from dape.report.terminal import plot

__all__ = [
    "RECORD_FIELDS",
    "Curve",
    "Paths",
    "build",
    "curves",
    "load_results",
    "plot",
    "print_tables",
    "save_results",
    "views",
]
