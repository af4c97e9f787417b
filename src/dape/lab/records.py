"""Results: the schema of runs and rows, as a JSON file and as a pandas frame.

A file has common entries (settings, environment, command …), a list of runs, and a list of rows. A run is one training,
or one timing, of a method; a row is one measurement of it. `Results.frame` joins the two: one line for each method,
variant, seed, corpus, lengths, view and metric.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dape.files import plain, read_json, write_atomically

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 2
# Columns of a run. Those that do not apply are left out of the file and empty in the frame.
RUN = {
    "method": "name of the method",
    "variant": "what sets the run apart from others of its method; may be empty",
    "seed": "of initial weights and data order",
    "corpus": "the text that was trained on, or the generated task",
    "train_length": "tokens in a training window",
    "view": "equal-step or equal-time",
    "steps": "optimizer steps",
    "batch_size": "windows in a step",
    "layers": "number of layers, where runs differ by it",
    "size": "preset of the model, for timings",
    "train_seconds": "time spent in training steps; of language models, their number times the median, so without pauses",
    "seconds_per_step": "median time of a step",
    "test_seconds": "time spent in tests, for generated tasks",
    "train_loss": "mean loss of the last 50 steps",
    "parameters": "number of parameters",
    "name": "of the run, where runs are known by it",
    "settings": "everything that decides the run, where the file's own settings do not",
    "environment": "machine, versions and commit of the run, where runs of several commands share a file",
}
# Columns of a row.
ROW = {
    "run": "index of the run",
    "metric": "what was measured: loss, change, difference, accuracy, milliseconds …, named where it is measured",
    "eval_length": "tokens of input at the evaluation",
    "layer": "of an attention map",
    "head": "of an attention map",
    "against": "what a difference or ratio is to: a method, or a length",
    "value": "what was measured; loss in nats per token, accuracy as a share",
    "error": "standard error of the value; empty if unknown",
    "count": "windows, samples or rounds behind the value",
    "slice": "the tokens that the value is of: hit (of recall), new (hits that training's length lacks), other; empty: all",
    "windows": "by which runs are paired: the value for each window; of a slice, or of answers, its sum for each document or sample",
    "tokens": "tokens of the slice in each document, or answers asked for in each sample",
}
# Views in the order in which they are shown.
STEP, TIME = "equal-step", "equal-time"
VIEWS = {STEP: "equal steps", TIME: "equal training time"}
KNOWN = ("kind", "settings", "environment", "command", "failures", "missing", "documents", "runs", "rows")


class Results:
    """Results of one experiment. `content` is the JSON object of the file."""

    def __init__(self, content: dict[str, Any]) -> None:
        empty: dict[str, Any] = {"schema": SCHEMA, "kind": "language", "settings": {}, "environment": {}}
        empty |= {"failures": [], "missing": [], "documents": {}, "runs": [], "rows": []}
        self.content: dict[str, Any] = {**empty, **content}

    def __getitem__(self, name: str) -> Any:
        return self.content[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.content.get(name, default)

    @property
    def kind(self) -> str:
        return self.content["kind"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.content["settings"]

    @property
    def complete(self) -> bool:
        return not self.content["missing"] and not self.content["failures"]

    def add(self, run: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Append a run with its rows."""
        number = len(self.content["runs"])
        self.content["runs"].append(run)
        self.content["rows"] += [{"run": number, **row} for row in rows]
        self.__dict__.pop("frame", None)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per row, with the columns of its run; rows of slices of the tokens are in `slices`."""
        return self._joined([row for row in self.content["rows"] if not row.get("slice")]).drop(
            columns=["slice", "tokens"]
        )

    @property
    def slices(self) -> pd.DataFrame:
        """The same for the rows of slices."""
        return self._joined([row for row in self.content["rows"] if row.get("slice")])

    def _joined(self, rows: list[dict[str, Any]]) -> pd.DataFrame:
        import pandas as pd

        runs = pd.DataFrame(self.content["runs"], columns=list(RUN))
        table = pd.DataFrame(rows, columns=list(ROW))
        runs["variant"] = [run.get("variant") or "" for run in self.content["runs"]]
        for name in ("value", "error"):
            table[name] = table[name].astype("float64")
        joined = table.merge(runs, left_on="run", right_index=True, how="left", sort=False)
        return joined[[*RUN, *(name for name in ROW if name != "run")]]

    def lines(self, metric: str | None = None, slice: str = "") -> list[dict[str, Any]]:
        """The frame as dictionaries without empty columns: of all tokens or of a slice, of one metric or of all."""
        runs = self.content["runs"]
        return [
            {"variant": "", **runs[row["run"]], **row}
            for row in self.content["rows"]
            if row.get("slice", "") == slice and (metric is None or row["metric"] == metric)
        ]

    def save(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, dump(self.content))
        return path

    def save_csv(self, path: Path) -> None:
        """Write the frame without the windows, with all digits."""
        table = self.frame.drop(columns=["windows", "settings", "environment"]).dropna(axis=1, how="all")
        write_atomically(path, table.to_csv(index=False, lineterminator="\n"))


def load_results(path: Path) -> Results:
    """Load the results in a file; raises if it holds none."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: `dape compare`, `tasks` and `reproduce` write such files"
        )
    content = read_json(path)
    if "rows" not in content:
        raise ValueError(f"{path} holds no results")
    for index, row in enumerate(content["rows"]):
        if row.get("metric") is None or not 0 <= row.get("run", -1) < len(content["runs"]):
            raise ValueError(f"{path}: row {index} lacks its metric or its run")
    return Results(content)


def find_results(path: Path) -> Results | None:
    """The results in the file, or None if there is no such file."""
    return load_results(path) if path.exists() else None


def dump(content: dict[str, Any]) -> str:
    """JSON with one line per run and row, for readable diffs."""
    lines = []
    for name, value in plain(content).items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            entries = [{key: entry for key, entry in row.items() if entry is not None} for row in value]
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in entries)
            lines.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def listed(value: Any) -> list[Any]:
    """The values of an entry that holds one value or a list of them."""
    return list(value) if isinstance(value, list | tuple) else [value]


def digits(value: float, decimals: int = 6) -> float:
    """Round for a file; NaN and infinity are unchanged."""
    return round(value, decimals) if math.isfinite(value) else value
