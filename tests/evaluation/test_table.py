"""The table of results: written and read without loss, paired only on the same tokens, enough with pandas alone."""

import io

import numpy as np
import pandas as pd
import pytest

from dape.evaluation.table import (
    COLUMNS,
    change,
    difference,
    growth,
    join,
    make_table,
    mean,
    perplexities,
    read_table,
    recall_slices,
    write_table,
)

EFFECT = {"plain": 0.0, "ours": -0.5}


def rows(methods=tuple(EFFECT), seeds=(0, 1, 2), documents=13, checksum=1, **common):
    """Losses of 3 + effect + length / 1000, the same noise a document and a seed."""
    generator = np.random.default_rng(0)
    noise, of_seed = generator.normal(0, 0.1, documents), generator.normal(0, 0.01, 100)
    for method in methods:
        for seed in seeds:
            own = {"run": f"{method}-{seed}-{checksum}", "method": method, "seed": seed}
            own |= {"corpus": "text", "train_length": 64, **common}
            for document in range(documents):
                count = 16 * (1 + document % 3)
                row = {**own, "document": document, "count": count}
                yield {**row, "metric": "targets", "sum": checksum + document}
                for length in (64, 256):
                    loss = 3 + EFFECT[method] + length / 1000 + noise[document] + of_seed[seed]
                    row |= {"length": length, "metric": "loss"}
                    yield {**row, "sum": loss * count}
                    yield {**row, "slice": "recall<=256", "sum": loss, "count": 1}
                    yield {**row, "slice": "recall>256", "sum": loss * (count - 1), "count": count - 1}


def test_comes_back_as_it_was_and_a_stranger_reads_it_with_pandas(tmp_path):
    table = make_table(rows())
    path = write_table(table, tmp_path / "results.csv.gz")
    pd.testing.assert_frame_equal(read_table(path), table)
    again = write_table(read_table(path), tmp_path / "again.csv.gz")
    assert again.read_bytes() == path.read_bytes()
    # As the table's documentation says.
    stranger = pd.read_csv(path)
    losses = stranger.query("metric == 'loss' and slice == 'all' and length == 256")
    sums = losses.groupby("method")[["sum", "count"]].sum()
    ours = {method: mean(table, method, 256).value for method in EFFECT}
    assert (sums["sum"] / sums["count"]).to_dict() == pytest.approx(ours)
    assert perplexities(table).loc["ours", 64] == pytest.approx(np.exp(mean(table, "ours", 64).value))


def test_differences_are_paired():
    table = make_table(rows())
    found = difference(table, "ours", "plain", at=256)
    # Noise of documents and seeds, common to both, does not count.
    assert (found.value, found.seeds, found.documents) == (pytest.approx(-0.5), 3, 13)
    assert found.error < 1e-12
    assert change(table, "ours", 64, 256).value == pytest.approx(0.192)
    assert growth(table, "ours", "plain", 64, 256).value == pytest.approx(0, abs=1e-12)
    assert mean(table, "ours", 64).error > 0.01
    for name in ("recall<=256", "recall>256"):
        assert difference(table, "ours", "plain", at=64, slices=[name]).value == pytest.approx(-0.5)
    assert recall_slices(table, 256, 64) == ["recall<=256"]
    assert recall_slices(table, 128) == []


@pytest.mark.parametrize("other", [{"documents": 12}, {"checksum": 2}])
def test_other_tokens_are_never_paired(other):
    table = make_table([*rows(["plain"]), *rows(["ours"], **other)])
    with pytest.raises(ValueError, match="different target tokens"):
        difference(table, "ours", "plain", at=64)
    # Each by itself is fine.
    assert mean(table, "ours", 64).known


def test_seeds_of_both_count_and_rows_count_once():
    table = make_table([*rows(["plain"], seeds=[0, 1]), *rows(["ours"], seeds=[1, 2])])
    assert difference(table, "ours", "plain", at=64).seeds == 1
    assert not difference(make_table(rows(["ours"])), "ours", "plain", at=64).known
    assert len(join([table, table])) == len(join([make_table(), table])) == len(table)


def test_several_corpora_are_never_mixed():
    table = make_table([*rows(), *rows(corpus="books")])
    with pytest.raises(ValueError, match="several values of corpus"):
        difference(table, "ours", "plain", at=64)
    assert difference(table, "ours", "plain", at=64, corpus="books").seeds == 3


def test_what_holds_of_a_run_as_a_whole_has_no_document():
    own = {"method": "plain", "corpus": "text", "train_length": 64, "metric": "train_seconds"}
    table = make_table({**own, "run": str(s), "seed": s, "sum": 60.0 + s} for s in range(3))
    found = mean(table, "plain", 0, metric="train_seconds")
    assert (found.value, found.error) == (61, pytest.approx(1 / np.sqrt(3)))


def test_the_schema_is_documented():
    text = io.StringIO()
    make_table().to_csv(text, index=False)
    assert text.getvalue().strip().split(",") == list(COLUMNS)
    assert all(COLUMNS.values())
