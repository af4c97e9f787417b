"""One claim about made-up results, judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import made_up

from dape.lab import rules
from dape.lab.claims import Claim, Verdict, judge
from dape.lab.evidence import Evidence
from dape.lab.folders import load_folder
from dape.lab.paper import Paper
from dape.lab.selection import Data, Pick

A, B, C = "dape1x3-kerple", "kerple", "rope"
GOOD, SAME, BAD = (2.0, 1.9, 1.8), (2.2, 2.2, 2.2), (2.4, 2.6, 3.0)
AB = {"a": A, "b": B}


def judged(
    tmp_path: Path, results: dict[str, Any] | None, helper: str, *, scale: str = "", **arguments: Any
) -> Verdict:
    """The verdict on one claim about one experiment, decided by a helper of dape.lab.claims."""
    made_up.write(tmp_path, "made_up", "trial", results)

    def decide(data: Data) -> Evidence:
        return getattr(rules, helper)(data, **{name: picked(value) for name, value in arguments.items()})

    claim = Claim("it", "It does.", "trial", decide, "4", scale)
    return judge(claim, load_folder(tmp_path / "made_up" / "trial"), Paper())


def picked(value: Any) -> Any:
    """Tables of tests write a Pick as a dict."""
    if isinstance(value, dict):
        return Pick(**value)
    return [picked(item) for item in value] if isinstance(value, list) else value


def losses(
    values: dict[str, tuple[float, ...]], train_length: int = 64, corpus: str = "latex"
) -> made_up.Losses:
    """Method (or method/variant) → losses at 1×, 2×, 4× … the training length."""
    return {
        (corpus, train_length, *[*name.split("/"), ""][:2]): {
            train_length * 2**place: loss for place, loss in enumerate(row)
        }
        for name, row in values.items()
    }
