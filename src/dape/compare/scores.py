"""The loss of every window at every length, kept in a file, so that runs can be paired without evaluating again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dape.evaluate import LengthScore
from dape.files import write_atomically


def save_scores(path: Path, evaluation: dict[str, Any], scores: list[LengthScore]) -> None:
    first = scores[0]
    content = {
        "evaluation": evaluation,
        "last": first.last,
        "documents": first.documents.tolist(),
        "ends": first.ends.tolist(),
        "windows": {str(score.eval_length): score.windows.tolist() for score in scores},
    }
    write_atomically(path, json.dumps(content))


def load_scores(path: Path) -> list[LengthScore]:
    """The scores, equal to those that were saved, every digit."""
    content = json.loads(path.read_text("utf-8"))
    documents, ends = np.array(content["documents"]), np.array(content["ends"])
    return [
        LengthScore.of(int(length), np.array(windows), documents, ends, content["last"])
        for length, windows in content["windows"].items()
    ]


def evaluated(path: Path, evaluation: dict[str, Any]) -> bool:
    """Whether the file is there and holds what this evaluation asks for."""
    try:
        return json.loads(path.read_text("utf-8"))["evaluation"] == evaluation
    except (FileNotFoundError, ValueError, KeyError):
        return False
