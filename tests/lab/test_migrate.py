"""Results of earlier versions, brought into the present schema: every number is what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dape.cli import main
from dape.lab.records import load_results

TRAINED = {
    "method": "kerple",
    "seed": 0,
    "view": "equal-step",
    "steps": 5,
    "train_length": 8,
    "train_seconds": 1.5,
}
LOSS = {"eval_length": 16, "nll": 2.5, "nll_se": 0.1, "ppl": 12.18}
OLD = {
    "language": {
        "kind": "language",
        "complete": True,
        "failures": [{"cell": "rope, seed 0", "method": "rope", "error": "no"}],
        "documents": {"latex": [0, 1]},
        "records": [{**TRAINED, **LOSS, "corpus": "latex", "variant": "", "windows": [2.4, 2.6]}],
    },
    "comparison": {
        "settings": {"corpus": "my/texts", "last": 4},
        "failures": [],
        "records": [{**TRAINED, **LOSS, "tokens": 8}],
        "pairs": [],
        "changes": [
            {"view": "equal-step", "method": "kerple", "seed": 0, "from_length": 8, "eval_length": 16}
            | {"change": 0.2, "change_se": 0.01}
        ],
    },
    "timing": {
        "kind": "timing",
        "records": [
            {"method": "kerple", "size": "tiny", "length": 8, "batch": 2, "milliseconds": 2.5, "spread": 0.2}
            | {"ratio": 1.0, "ratio_spread": 0.0, "ratio_to": "kerple", "rounds": 4}
        ],
    },
}


@pytest.mark.parametrize("form", OLD)
def test_numbers_stay_and_a_second_time_changes_nothing(form: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(OLD[form]))
    with pytest.raises(ValueError, match="dape migrate"):
        load_results(path)
    assert main(["migrate", str(tmp_path)]) == 0
    results = load_results(path)
    assert results.frame["value"].iloc[0] == 2.5
    assert results["runs"][0]["method"] == "kerple"
    if form == "language":
        assert results["rows"][0]["windows"] == [2.4, 2.6]
        assert results["failures"][0]["label"] == "rope, seed 0"
    if form == "comparison":
        change = results.lines("change")[0]
        assert (change["value"], change["error"], change["against"], change["corpus"]) == (
            0.2,
            0.01,
            "8",
            "texts",
        )
    before = path.read_bytes()
    assert main(["migrate", str(path)]) == 0
    assert path.read_bytes() == before
    assert "up to date" in capsys.readouterr().out


def test_what_holds_no_results_is_said(tmp_path: Path, capsys) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert main(["migrate", str(tmp_path / "results.json")]) == 2
    assert "holds no results of an earlier version" in capsys.readouterr().err
