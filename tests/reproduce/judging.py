"""One claim about made-up results, judged."""

from __future__ import annotations

from pathlib import Path

import made_up

from dape.reproduce.claims import Verdict, ledger

A, B, C = "dape1x3-kerple", "kerple", "rope"
GOOD, SAME, BAD = (2.0, 1.9, 1.8), (2.2, 2.2, 2.2), (2.4, 2.6, 3.0)
AB = {"a": A, "b": B}


def judged(tmp_path: Path, results: dict | None, rule: str, **arguments) -> Verdict:
    """The verdict on one claim about one experiment."""
    made_up.write(tmp_path, "made_up", "trial", results)
    claim = {"id": "it", "section": "4", "text": "It does.", "experiment": "trial", "rule": rule, **arguments}
    made_up.write_claims(tmp_path, "made_up", [claim])
    (verdict,) = ledger(tmp_path)
    return verdict


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
