"""The numbers that a paper prints (printed.json), as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dape.evaluation.table import ALL


def printed_losses(path: Path) -> pd.DataFrame:
    """Printed perplexities (125M parameters) as a table of results."""
    content: dict[str, Any] = (
        json.loads(path.read_text("utf-8")) if path.exists() else {"tables": [], "sentences": []}
    )
    rows = []
    for table in content["tables"]:
        if table["quantity"] == "perplexity" and table["size"] == "125m":
            for row in table["rows"]:
                about = (row.get("corpus", table.get("corpus")), row["method"], table["train_length"])
                rows += [(*about, n, v) for n, v in zip(table["columns"], row["values"], strict=True)]
    for one in content["sentences"]:
        if one["quantity"] == "perplexity" and one["size"] == "125m" and "variant" not in one:
            rows.append((one["corpus"], one["method"], one["train_length"], one["eval_length"], one["value"]))
    names = ["corpus", "method", "train_length", "length", "sum"]
    frame = pd.DataFrame(rows, columns=names).drop_duplicates(names[:-1])
    losses = np.log(frame["sum"].astype(float))
    return frame.assign(run="printed", seed=0, document=0, slice=ALL, metric="loss", count=1, sum=losses)


def printed_accuracies(path: Path) -> dict[tuple[str, str], float]:
    """Accuracies in percent by task and method."""
    content = json.loads(path.read_text("utf-8"))
    [found] = [one for one in content["tables"] if one["quantity"] == "accuracy"]
    return {
        (row["task"], method): value
        for row in found["rows"]
        for method, value in zip(found["columns"], row["values"], strict=True)
    }
