"""results.csv: the records, a line each, all digits kept."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from dape.files import write_atomically
from dape.report.results import RECORD_FIELDS, Results


def write_csv(results: Results, path: Path) -> None:
    """One line a record, in the order of RECORD_FIELDS; empty where a number is not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, RECORD_FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(results["records"])
    write_atomically(path, text.getvalue())
