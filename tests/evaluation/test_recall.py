"""Loss by recall: the slices against their definition, token by token, and the statistics against sums by hand."""

import json
import math

import numpy as np
import pytest

from dape.data import Tokens
from dape.evaluation import RecallBins, RecallSlices, losses_by_length, recall_lengths, recall_slices
from dape.evaluation.by_length import WindowLosses
from dape.evaluation.recall import NEVER, training_counts
from dape.evaluation.statistics import clustered_mean
from dape.evaluation.windows import Windows, same_targets


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
        recall_slices(tokens, made_up(tokens, [24, 48], 8), ngram=ngram)


@pytest.mark.parametrize("ngram", [1, 2, 4])
@pytest.mark.parametrize("batch_tokens", [7, 1 << 20])
def test_ngrams_are_counted_in_the_training_tokens(ngram: int, batch_tokens: int) -> None:
    train, other = documents(80, 40, vocabulary=3), documents(60, vocabulary=4, seed=1)
    grams = np.lib.stride_tricks.sliding_window_view(other.ids, ngram)[:20].reshape(4, 5, ngram)
    found = training_counts(train, grams, batch_tokens=batch_tokens)
    text = train.ids.tolist()
    for place in np.ndindex(4, 5):
        wanted = grams[place].tolist()
        assert found[place] == sum(text[n : n + ngram] == wanted for n in range(len(text)))
    assert found.max() > 1
    assert found.min() == 0


def test_a_training_text_shorter_than_an_ngram_has_none() -> None:
    assert training_counts(Tokens.of([np.array([1])]), np.array([[1, 2]])).tolist() == [0]


@pytest.mark.parametrize("most", [0, 2, 5, 10_000])
def test_frequent_ngrams_are_no_recall(tokens: Tokens, most: int) -> None:
    train = documents(900, vocabulary=7, seed=5)
    losses = made_up(tokens, LENGTHS, 8)
    windows = losses.windows
    rare = RecallBins.of(tokens, windows, LENGTHS, 8, ngram=3, train=train, max_training_count=most)
    everything = RecallBins.of(tokens, windows, LENGTHS, 8, ngram=3)
    text = train.ids.tolist()
    bins = len(LENGTHS) + 1
    for row, end in enumerate(windows.ends):
        for place in range(8):
            target = end - 8 + place
            gram = tokens.ids[target - 2 : target + 1].tolist()
            frequent = sum(text[n : n + 3] == gram for n in range(len(text))) > most
            expected = bins - 1 if frequent else everything.cell_index[row, place] % bins
            assert rare.cell_index[row, place] % bins == expected
    assert (rare.digest == everything.digest) == np.array_equal(rare.counts, everything.counts)
    with pytest.raises(ValueError, match="needs the training tokens"):
        RecallBins.of(tokens, windows, LENGTHS, 8, max_training_count=1)


def test_lengths_may_be_added_one_at_a_time(tokens: Tokens) -> None:
    losses, whole = sliced(tokens)
    bins = RecallBins.of(tokens, losses.windows, LENGTHS, 8, ngram=3)
    sums = {length: bins.sums(losses.losses[length]) for length in (64, 32)}
    part = RecallSlices.of(bins, sums, base=32)
    wanted = [record for record in whole.records() if record["eval_length"] in sums]
    assert sorted(part.records(), key=lambda r: r["eval_length"]) == wanted
    # A file of what is there so far, before the base was read.
    begun = RecallSlices.of_json(RecallSlices.of(bins, {64: sums[64]}, base=32).as_json())
    assert begun.loss(64, "new") == whole.loss(64, "new")
    assert all(math.isnan(value) for value in begun.change(64, "new"))


def made_up(tokens: Tokens, lengths: list[int], last: int, seed: int = 1) -> WindowLosses:
    windows = same_targets(tokens, max(lengths), last, 12)
    generator = np.random.default_rng(seed)
    shape = (len(windows), last)
    return WindowLosses(windows, last, {n: generator.random(shape, np.float32) for n in lengths})


LENGTHS = [16, 32, 64]


@pytest.fixture
def tokens() -> Tokens:
    return documents(200, 150, 300, vocabulary=6)


def sliced(tokens: Tokens, seed: int = 1) -> tuple[WindowLosses, RecallSlices]:
    losses = made_up(tokens, LENGTHS, 8, seed)
    return losses, recall_slices(tokens, losses, ngram=3, base=32)


def masks(tokens: Tokens, losses: WindowLosses, length: int) -> dict[str, np.ndarray]:
    needed = recall_lengths(tokens, losses.windows, max(LENGTHS), losses.last, ngram=3)
    hit = needed <= length
    return {"all": hit | True, "hit": hit, "new": hit & (needed > 32), "other": ~hit}


def by_hand(values: np.ndarray, mask: np.ndarray, where: np.ndarray) -> tuple[float, float]:
    return clustered_mean((values * mask).sum(1), mask.sum(1), where)


def test_losses_changes_and_differences_are_those_of_the_tokens(tokens: Tokens) -> None:
    (first, one), (second, two) = sliced(tokens, 1), sliced(tokens, 2)
    where = first.windows.documents
    seen = 0
    for record in two.records(reference=one):
        length, name = record["eval_length"], record["slice"]
        mask = masks(tokens, first, length)[name]
        seen += 1
        assert record["tokens"] == mask.sum()
        assert record["share"] == pytest.approx(mask.mean())
        now, before, theirs = second.losses[length], second.losses[32], first.losses[length]
        assert (record["nll"], record["nll_se"]) == pytest.approx(by_hand(now, mask, where))
        assert (record["change"], record["change_se"]) == pytest.approx(by_hand(now - before, mask, where))
        expected = by_hand(now - theirs, mask, where)
        assert (record["difference"], record["difference_se"]) == pytest.approx(expected)
        contribution, error = clustered_mean(((now - theirs) * mask).sum(1), np.full(len(where), 8), where)
        assert (record["contribution"], record["contribution_se"]) == pytest.approx((contribution, error))
    # all, hit and other at each length; new where more is seen than at the base.
    assert seen == 3 * 3 + 1


def test_hits_and_others_make_up_the_whole(tokens: Tokens) -> None:
    (_, one), (_, two) = sliced(tokens, 1), sliced(tokens, 2)
    records = {(r["eval_length"], r["slice"]): r for r in two.records(reference=one)}
    for length in LENGTHS:
        whole, hit, other = (records[length, name] for name in ("all", "hit", "other"))
        assert hit["tokens"] + other["tokens"] == whole["tokens"]
        assert hit["contribution"] + other["contribution"] == pytest.approx(whole["difference"])


def test_the_base_is_the_shortest_length_unless_told(tokens: Tokens) -> None:
    losses = made_up(tokens, LENGTHS, 8)
    assert recall_slices(tokens, losses).base == 16
    with pytest.raises(ValueError, match="base=48 is not one of the lengths 16, 32, 64"):
        recall_slices(tokens, losses, base=48)


def test_a_slice_without_tokens_has_no_loss() -> None:
    # No token twice, so nothing to recall.
    tokens = Tokens.of([np.arange(0, 200), np.arange(200, 400)])
    losses = made_up(tokens, LENGTHS, 8)
    (hit,) = [
        r for r in recall_slices(tokens, losses).records() if (r["eval_length"], r["slice"]) == (64, "hit")
    ]
    assert hit["tokens"] == 0
    assert math.isnan(hit["nll"])
    assert math.isnan(hit["nll_se"])


def test_one_document_has_no_standard_error() -> None:
    tokens = documents(300)
    records = recall_slices(tokens, made_up(tokens, LENGTHS, 8)).records()
    assert all(math.isnan(record["nll_se"]) for record in records)
    assert not math.isnan(records[0]["nll"])


def test_a_file_keeps_every_digit(tokens: Tokens) -> None:
    _, slices = sliced(tokens)
    again = RecallSlices.of_json(json.loads(json.dumps(slices.as_json())))
    assert again.records() == slices.records()
    assert again.difference(slices, 64, "hit") == (0.0, 0.0)


def test_other_targets_are_not_paired(tokens: Tokens) -> None:
    _, slices = sliced(tokens)
    shifted = made_up(tokens, LENGTHS, 8)
    windows = Windows(shifted.windows.ends - 1, shifted.windows.documents)
    other = recall_slices(tokens, WindowLosses(windows, 8, shifted.losses), base=32)
    text = documents(200, 150, 300, vocabulary=6, seed=9)
    with pytest.raises(ValueError, match="different target tokens"):
        slices.records(reference=recall_slices(text, shifted, base=32))
    with pytest.raises(ValueError, match="different target tokens"):
        slices.records(reference=other)


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
    losses = losses_by_length(Copies(), tokens, [24, 96], last=8, windows=6)
    records = {(r["eval_length"], r["slice"]): r for r in recall_slices(tokens, losses, ngram=3).records()}
    assert records[96, "new"]["tokens"] > 0
    assert records[96, "new"]["change"] < -1
    assert records[96, "hit"]["nll"] < records[96, "other"]["nll"] - 1
