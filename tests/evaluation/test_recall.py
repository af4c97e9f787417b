"""Slices by recall against their definition, token by token."""

import numpy as np
import pandas as pd
import pytest

from dape.data import Tokens
from dape.evaluation import measure, recall_lengths, targets_by_recall
from dape.evaluation.metrics import rows_of
from dape.evaluation.recall import NEVER
from dape.evaluation.windows import Windows, same_targets

LENGTHS = [16, 32, 64]


def documents(*lengths: int, vocabulary: int = 5, seed: int = 0) -> Tokens:
    generator = np.random.default_rng(seed)
    return Tokens.of([generator.integers(0, vocabulary, n) for n in lengths])


def is_hit(ids: list[int], target: int, ngram: int) -> bool:
    """The definition: the n-gram that ends with ids[target] also ends at an earlier place of this input."""
    if target < ngram:
        return False
    wanted = ids[target - ngram + 1 : target + 1]
    return any(ids[end - ngram + 1 : end + 1] == wanted for end in range(ngram - 1, target))


@pytest.mark.parametrize("ngram", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [2, 5, 40_000])
def test_hits_are_those_of_the_definition_at_every_length(ngram: int, vocabulary: int) -> None:
    tokens = documents(60, 35, 90, vocabulary=vocabulary)
    longest, last = 30, 7
    windows = same_targets(tokens, longest, last, 8)
    found = recall_lengths(tokens, windows, longest, last, ngram=ngram)
    assert found.shape == (len(windows), last)
    for length in range(last, longest + 1):
        for row, ids in enumerate(windows.ids(tokens, length).tolist()):
            for place in range(last):
                target = length + 1 - last + place
                assert (found[row, place] <= length) == is_hit(ids, target, ngram), (length, row, place)


def test_large_ids_do_not_collide() -> None:
    # As numbers to base 2³², these 4-grams would overflow 64 bits.
    one, other = [4_000_000_000, 1, 2, 3], [4_000_000_001, 1, 2, 3]
    tokens = Tokens.of([np.array([*one, 9, *other, 9, *one], dtype=np.int64)])
    windows = Windows(np.array([len(tokens)]), np.array([0]))
    # The first 4-gram came 10 tokens before the last one, so its first token is 13 inputs before the last target.
    assert recall_lengths(tokens, windows, 13, 1, ngram=4).tolist() == [[13]]
    short = Windows(np.array([9]), np.array([0]))
    assert recall_lengths(tokens, short, 8, 1, ngram=4).tolist() == [[NEVER]]


def test_windows_in_parts_are_the_same() -> None:
    tokens = documents(400, 300)
    windows = same_targets(tokens, 64, 8, 20)
    whole = recall_lengths(tokens, windows, 64, 8, ngram=3)
    assert np.array_equal(recall_lengths(tokens, windows, 64, 8, ngram=3, batch_tokens=100), whole)


@pytest.mark.parametrize("ngram", [0, 49])
def test_impossible_ngrams_say_why(ngram: int) -> None:
    tokens = documents(100)
    with pytest.raises(ValueError, match=rf"ngram={ngram}: the longest input has n-grams of 1 to 48 tokens"):
        targets_by_recall(tokens, same_targets(tokens, 48, 8, 12), [24, 48], 8, ngram=ngram)


def test_every_target_is_in_one_slice() -> None:
    tokens = documents(200, 150, 300, vocabulary=6)
    windows = same_targets(tokens, 64, 8, 12)
    slices = targets_by_recall(tokens, windows, LENGTHS, 8, ngram=2)
    assert (sum(chosen.astype(int) for chosen in slices.values()) == 1).all()
    needed = recall_lengths(tokens, windows, 64, 8, ngram=2)
    assert (slices["recall of 2-grams<=32"] == ((needed > 16) & (needed <= 32))).all()
    # A slice without tokens has no rows.
    values = np.ones((len(windows), 8, 1))
    empty = {"all": np.ones_like(needed, bool), "none": np.zeros_like(needed, bool)}
    assert set(rows_of(values, ["loss"], windows, empty)["slice"]) == {"all"}


def test_a_model_that_copies_gains_on_hits_alone() -> None:
    """A lookup of the last occurrence as a model: certain of what followed it, and at chance otherwise."""
    import torch

    class Copies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.config = type("Config", (), {"vocab_size": 50})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*ids.shape, 50)
            for row, line in enumerate(ids.tolist()):
                for place in range(1, len(line)):
                    pair = line[place - 1 : place + 1]
                    for end in range(place - 1, 0, -1):
                        if line[end - 1 : end + 1] == pair:
                            logits[row, place, line[end + 1]] = 20.0
                            break
            return logits

    generator = np.random.default_rng(3)
    words = [generator.permutation(50)[:12] for _ in range(4)]
    texts = [np.concatenate([words[i] for i in generator.integers(0, 4, 12)]) for _ in range(3)]
    tokens = Tokens.of(texts)
    windows = same_targets(tokens, 96, 8, 6)
    slices = targets_by_recall(tokens, windows, [24, 96], 8)
    rows = pd.concat(measure(Copies(), tokens, windows, [24, 96], last=8, slices=slices))
    sums = rows.groupby(["length", "slice"])[["sum", "count"]].sum()
    loss = sums["sum"] / sums["count"]
    assert sums.loc[(96, "recall<=96"), "count"] > 0
    assert loss[96, "recall<=96"] < loss[24, "recall<=96"] - 1
    assert loss[96, "recall<=24"] < loss[96, "recall>96"] - 1
