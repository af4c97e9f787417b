"""Evaluation by length: which tokens are targets, that the numbers are right, that memory is bounded."""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from dape.data import Tokens
from dape.evaluation import evaluator as evaluator_module
from dape.evaluation import losses_by_length, measure, sliding_window
from dape.evaluation.evaluator import evaluating
from dape.evaluation.metrics import KEY, WINDOW, rows_by_position
from dape.evaluation.statistics import mean_over_documents
from dape.evaluation.windows import same_targets
from dape.models import DapeForCausalLM, preset

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}


def documents(*lengths: int, seed: int = 0) -> Tokens:
    generator = np.random.default_rng(seed)
    return Tokens.of([generator.integers(0, 64, n) for n in lengths])


def dape(method: str = "dape1x3-kerple", seed: int = 0) -> DapeForCausalLM:
    torch.manual_seed(seed)
    model = DapeForCausalLM(preset("tiny", method, **SIZES))
    with torch.no_grad():
        # Large weights, so that a wrong context would show in the losses.
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def gpt2(kind: type[GPT2LMHeadModel] = GPT2LMHeadModel) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return kind(GPT2Config(**sizes, initializer_range=0.3))


MODELS = {"dape": dape, "rope": lambda: dape("rope"), "gpt2": gpt2}


def naive(model: torch.nn.Module, ids: np.ndarray, last: int) -> np.ndarray:
    """Losses of the last tokens of one window, all logits at once."""
    window = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.eval()(window[:, :-1]).logits[0]
    return F.cross_entropy(logits, window[0, 1:], reduction="none")[-last:].double().numpy()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("room", [evaluator_module.LOGITS, 64 * 40])
def test_agrees_with_a_full_forward(name, room, monkeypatch):
    monkeypatch.setattr(evaluator_module, "LOGITS", room)
    model, tokens = MODELS[name](), documents(200, 90, 300)
    found = losses_by_length(model, tokens, [16, 64, 33], last=16, windows=7, batch_tokens=150)
    assert list(found.losses) == [16, 64, 33]
    ends, where = found.windows.ends, found.windows.documents
    for length, losses in found.losses.items():
        expected = np.stack([naive(model, tokens.ids[end - length - 1 : end], 16) for end in ends])
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
        assert found.at(length).value == pytest.approx(losses.mean())
    change = mean_over_documents((found.losses[64] - found.losses[16]).mean(1), np.ones(7), where)
    assert found.change(16, 64).value == pytest.approx(change.value)
    assert found.change(16, 64).error == pytest.approx(change.error, rel=1e-4)


class Recorder(torch.nn.Module):
    """A model that only remembers what it was asked."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), {"vocab_size": 1000})
        self.seen = []

    def forward(self, ids):
        self.seen += ids.tolist()
        return torch.zeros(*ids.shape, 1000)


def test_target_tokens_are_the_same_at_every_length():
    # Every id is unique, so an id says where it stands.
    tokens = Tokens.of([np.arange(0, 150), np.arange(150, 180), np.arange(180, 420)])
    targets = {}
    for length in (8, 20, 100):
        model = Recorder()
        # A batch size of one keeps inputs and windows in step.
        found = losses_by_length(model, tokens, [8, 20, 100], last=8, windows=9, batch_tokens=1)
        place = [8, 20, 100].index(length)
        inputs = model.seen[9 * place : 9 * place + 9]
        assert all(len(row) == length for row in inputs)
        targets[length] = [[*row[-7:], row[-1] + 1] for row in inputs]
        assert [row[-1] for row in targets[length]] == tokens.ids[found.windows.ends - 1].tolist()
    assert targets[8] == targets[20] == targets[100]
    flat = [token for row in targets[8] for token in row]
    assert len(flat) == len(set(flat)), "targets overlap"


def test_context_stays_inside_the_document():
    tokens = documents(40, 120, 77)
    windows = same_targets(tokens, 64, 16, 100)
    for end, document in zip(windows.ends, windows.documents, strict=True):
        assert tokens.documents[document] <= end - 65 < end <= tokens.documents[document + 1]
    # 120 − 65 tokens leave room for 4 windows of 16 targets, 77 for one.
    assert list(windows.documents) == [1, 1, 1, 1, 2]


def test_context_may_run_across_documents():
    tokens = documents(40, 50, 30)
    with pytest.raises(ValueError, match="needs a document of 65 tokens, but the longest has 50"):
        same_targets(tokens, 64, 16, 100)
    windows = same_targets(tokens, 64, 16, 100, context="stream")
    assert list(windows.ends) == [65, 81, 97, 113]
    assert list(windows.documents) == [1, 1, 2, 2]
    with pytest.raises(ValueError, match="needs 201 tokens, but the split has 120"):
        same_targets(tokens, 200, 16, 100, context="stream")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last": 33}, "last=33 must be between 1 and the shortest length, 32"),
        ({"last": 0}, "last=0"),
        ({"lengths": []}, "give at least one"),
        ({"lengths": [0]}, "each 1 or more"),
        ({"windows": 0}, "windows=0"),
        ({"context": "other"}, 'context="other"'),
    ],
)
def test_impossible_evaluations_say_why(change, message):
    options = {"lengths": [32, 64], **change}
    with pytest.raises(ValueError, match=message):
        losses_by_length(Recorder(), documents(2000), options.pop("lengths"), **options)


def test_windows_lie_evenly_and_a_quarter_of_the_shortest_length_or_256_is_predicted():
    ends = same_targets(documents(10_000), 100, 10, 11).ends
    assert (len(ends), ends[0]) == (11, 101)
    assert np.ptp(np.diff(ends)) <= 10
    for lengths, last in (([32, 64], 8), ([2, 64], 1), ([2048], 256)):
        assert losses_by_length(Recorder(), documents(4000), lengths, windows=1).last == last


def test_input_that_a_model_cannot_read_is_a_sentence():
    model = dape().train()
    with pytest.raises(ValueError, match=r"token \d+ is outside the model's vocabulary of 64"):
        losses_by_length(model, Tokens.of([np.arange(200)]), [16])
    assert model.training
    with pytest.raises(ValueError, match=r"input of 256 tokens .it has embeddings for 128 positions"):
        losses_by_length(gpt2(), documents(400), [64, 256])


@pytest.mark.parametrize("name", MODELS)
def test_loss_by_position(name):
    model, tokens = MODELS[name](), documents(200, 90, 300)
    windows = same_targets(tokens, 50, 50, 6)
    rows = rows_by_position(model, tokens, windows, 50)
    expected = np.stack([naive(model, tokens.ids[end - 51 : end], 50) for end in windows.ends])
    sums = rows.groupby("slice", sort=False)[["sum", "count"]].sum()
    names = ["input 1", "input 2–3", "input 4–7", "input 8–15", "input 16–31", "input 32–50"]
    assert (list(sums.index), sums["count"].sum()) == (names, 6 * 50)
    assert sums["sum"].iloc[-1] == pytest.approx(expected[:, 31:].sum(), rel=1e-5)


def test_rows_are_sums_by_document_and_of_the_window():
    model, tokens = dape(), documents(300, 90, 200)
    windows = same_targets(tokens, 64, 4, 9)
    how = {"last": 4, "metrics": ["loss", "accuracy"], "window": 16}
    rows = pd.concat(measure(model, tokens, windows, [32, 64], **how))
    losses = losses_by_length(model, tokens, [4, 8, 16, 32, 64], last=4, windows=9).losses
    known = rows.set_index(["length", "slice", "metric", "document"])["sum"].sort_index()
    for length in (32, 64):
        for document in set(windows.documents):
            expected = losses[length][windows.documents == document].sum()
            assert known[length, "all", "loss", document] == pytest.approx(expected, rel=1e-5)
    assert known.loc[[16], WINDOW].sum() == pytest.approx(losses[16].sum(), rel=1e-5)
    key = losses[8] - losses[16] > 0.5
    assert known.loc[64, KEY, "loss"].sum() == pytest.approx(losses[64][key].sum(), rel=1e-5)
    assert set(rows[rows["slice"] == WINDOW]["length"]) == {4, 8, 16, 64}


@pytest.mark.parametrize("stride", [1, 7, 16, 20])
def test_sliding_window_predicts_every_token_once_from_enough(stride):
    model, tokens, length = gpt2(), documents(65, 12, 1, 20, 21, 22), 20
    total, count = 0.0, 0
    for index in range(tokens.num_documents):
        ids = tokens.document(index)
        start = 0
        done = 1
        while done < len(ids):
            # The first window predicts all it can, each later one `stride` more, the last what is left.
            end = min(length + 1, len(ids)) if done == 1 else min(done + stride, len(ids))
            start = max(0, end - 1 - length)
            total += naive(model, ids[start:end], end - done).sum()
            count += end - done
            done = end
    rows = sliding_window(model, tokens, length, stride=stride)
    assert rows["count"].sum() == count == 64 + 11 + 19 + 20 + 21
    assert rows["sum"].sum() == pytest.approx(total, rel=1e-5)
    assert rows["document"].tolist() == [0, 1, 3, 4, 5]


def test_sliding_window_of_beginnings():
    model, tokens = gpt2(), documents(50, 15, 50)
    # A third of 100 each, 14 where there are no more.
    rows = sliding_window(model, tokens, 20, max_tokens=100)
    assert rows["count"].tolist() == [33, 14, 33]
    beginnings = Tokens.of([tokens.document(0)[:34], tokens.document(1), tokens.document(2)[:34]])
    pd.testing.assert_frame_equal(rows, sliding_window(model, beginnings, 20))
    # Never less than a window that has moved on once, and no more documents than needed.
    assert sliding_window(model, tokens, 20, max_tokens=40)["count"].sum() == 30
    with pytest.raises(ValueError, match="stride=21 is not between 1 and the length 20"):
        sliding_window(dape(), documents(50), 20, stride=21)


def test_sliding_windows_of_some_documents_are_spread_over_all(monkeypatch):
    """They were the first ones, in the order of the corpus."""
    tokens, read = documents(*[50] * 40), []
    whole = Tokens.document
    monkeypatch.setattr(Tokens, "document", lambda self, index: read.append(index) or whole(self, index))
    rows = sliding_window(gpt2(), tokens, 20, max_tokens=160)
    assert rows["count"].tolist() == [30] * 5
    assert read == [0, 10, 20, 29, 39]


def test_logits_exist_only_a_few_rows_at_a_time(monkeypatch):
    """No output layer call makes more logits than allowed, whatever the length."""
    monkeypatch.setattr(evaluator_module, "LOGITS", 64 * 8)
    model, sizes = dape(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    with evaluating(model) as evaluator:
        sizes.clear()
        evaluator.values(np.zeros((1, 400), np.int64), 399)
    assert max(sizes) <= 64 * 8
    assert sum(sizes) == 64 * 399


class Capped(GPT2LMHeadModel):
    """A model whose logits are more than its output layer."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * torch.tanh(output.logits / 2)
        return output


def test_models_that_change_their_logits_are_scored_by_their_logits():
    model, tokens = gpt2(Capped), documents(200)
    found = losses_by_length(model, tokens, [30], last=10, windows=3)
    expected = [naive(model, tokens.ids[end - 31 : end], 10) for end in found.windows.ends]
    np.testing.assert_allclose(found.losses[30], expected, atol=1e-5)
