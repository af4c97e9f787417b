"""Tables of a comparison: a value stands under the length it was measured at."""

from __future__ import annotations

import made_up
import pytest

from dape.lab.curves import derive, difference_table, loss_table, recall_table
from dape.lab.records import STEP, Results
from dape.lab.tables import OURS, Cell, Row, Table

LENGTHS = (64, 128, 256)


def compared(methods: dict[str, dict[int, float]]) -> Results:
    """Losses by length; methods may lack lengths, as those of merged comparisons do."""
    trained = {("text", 64, method, ""): losses for method, losses in methods.items()}
    results = Results(made_up.language(trained))
    results.content["settings"]["baseline"] = "kerple"
    derive(results, "kerple")
    return results


def test_a_method_without_a_length_has_an_empty_cell_there() -> None:
    """Its later values stood one column to the left."""
    full = dict(zip(LENGTHS, (2.0, 2.0, 2.0), strict=True))
    results = compared({"kerple": full, "alibi": {64: 2.1, 256: 2.3}})
    for made in (difference_table(results, STEP), loss_table(results, STEP)):
        assert made is not None
        row = next(row for row in made.rows if row.label == "alibi")
        at = dict(zip((head.split("\n")[-1] for head in made.heads), row.cells, strict=True))
        assert at["128"].text == "–"
    cells = difference_table(results, STEP).rows[-1].cells
    assert [cell.text for cell in cells] == ["+0.100", "–", "+0.300"]


def test_a_slice_without_tokens_at_a_length_has_an_empty_cell_there() -> None:
    full = dict(zip(LENGTHS, (2.0, 2.0, 2.0), strict=True))
    results = compared({"kerple": full, "alibi": dict.fromkeys(LENGTHS, 2.5)})
    number = next(i for i, run in enumerate(results["runs"]) if run["method"] == "alibi")
    for slice, lengths in (("hit", LENGTHS[1:]), ("other", LENGTHS)):
        for n in lengths:
            shared = {"run": number, "slice": slice, "eval_length": n, "count": n}
            results.content["rows"].append({**shared, "metric": "loss", "value": 2.0})
            results.content["rows"].append(
                {**shared, "metric": "difference", "value": n / 1000, "error": 0.01}
            )
    made = recall_table(results, STEP)
    assert made is not None
    assert [head.split("\n")[1] for head in made.heads] == [
        "64 other",
        "128 hit 128 other",
        "256 hit 256 other",
    ]
    seen, others = ([cell.text for cell in row.cells] for row in made.rows)
    assert seen == ["–", "+0.128", "+0.256"]
    assert others == ["+0.064", "+0.128", "+0.256"]


def test_a_row_with_too_few_cells_is_refused() -> None:
    with pytest.raises(ValueError, match='row "rope" has 1 cells, but there are 2 columns'):
        Table("Loss", ("64", "128"), (Row("rope", OURS, (Cell("2.1"),)),))
