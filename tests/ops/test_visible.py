"""Ways to say who sees whom, each against the mask that it stands for; and mistakes about masks and positions."""

import pytest
import torch

import dape
from dape.ops.score_attention.types import shown_by
from dape.positions import POSITIONS, Positions, build_position


def test_a_mask_of_runs_is_an_interval():
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril().triu(-2)
    mask[1, :, 3] = False
    for given in (mask, mask[:, 0]):
        visible = dape.Visible.from_mask(given)
        assert torch.equal(visible.mask(7, 7, causal=False, device="cpu"), mask)
    padding = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 0]])
    shown = dape.Visible.from_padding(padding).mask(3, 3, causal=False, device="cpu")
    assert torch.equal(shown[:, 0, 0], padding.bool())


HOLES, FLAT = torch.tensor([[1, 0, 1]]), torch.ones(3, 3, dtype=torch.bool)
MASK, OFFSETS = torch.full((1, 1, 5, 5), -torch.inf).triu(1), (-3.0, -0.5, 1.0, torch.inf, torch.nan)
REFUSED = [
    (dape.Visible.from_padding, torch.ones(3), "padding mask has shape .batch, keys., got .3"),
    (dape.Visible.from_padding, HOLES, "holes"),
    (dape.Visible.from_mask, torch.zeros(1, 3, 3), "must be boolean, got torch.float32"),
    (dape.Visible.from_mask, FLAT, "expected .batch, queries, keys."),
    (dape.Visible.from_mask, FLAT.expand(1, 2, 3, 3), "one for all heads"),
    (dape.Visible.from_mask, HOLES[None].bool(), "the mask has gaps"),
    *((shown_by, MASK.where(MASK < 0, offset), "pass offsets of the scores as a bias") for offset in OFFSETS),
    *(
        (dape.Visible.packed, torch.tensor(ends), "cu_seqlens")
        for ends in ([1, 4], [0, 4, 2], [0.0, 2.0], [0])
    ),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_masks_and_lengths_that_are_none(make, given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(given)


HIDDEN = [-torch.inf, *(torch.finfo(x).min for x in (torch.float16, torch.float32)), -1e9, -1e4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_mask_of_numbers_hides_by_any_large_one(hidden, dtype):
    shown = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 5, 5).masked_fill(~shown, hidden).to(dtype)
    assert torch.equal(shown_by(mask), shown)
    assert torch.equal(shown_by(shown), shown)
    assert torch.equal(shown_by(shown.long()), shown)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (2, 6)])
def test_a_window_shows_the_keys_right_before(queries, keys):
    shown = dape.Visible.window(3, queries, keys).mask(queries, keys, causal=True, device="cpu")[0, 0]
    everything = torch.ones(keys, keys, dtype=torch.bool).tril().triu(-2)
    assert torch.equal(shown, everything[-queries:])
    with pytest.raises(ValueError, match="size=0"):
        dape.Visible.window(0, 3)


def test_packed_documents_are_those_of_the_documents_alone():
    torch.manual_seed(0)
    conv = dape.ScoreConv(2, 8, bias_channels=False)
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    together = dape.attention(q, k, v, conv, visible=dape.Visible.packed(torch.tensor([0, 4, 4, 9])))
    for start, stop in ((0, 4), (4, 9)):
        alone = dape.attention(*(x[:, :, start:stop] for x in (q, k, v)), conv)
        torch.testing.assert_close(together[:, :, start:stop], alone)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("head", [0, 1])
def test_a_float_mask_is_no_bias_for_a_program_that_reads_it(hidden, head):
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    mask = torch.zeros(1, 2, 5, 5)
    mask[:, head].masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(1), hidden)
    with pytest.raises(ValueError, match="bias holds numbers of −10,000 or less, as masks do"):
        dape.attention(q, k, v, dape.ScoreConv(2, 8), bias=mask)
    assert dape.attention(q, k, v, bias=mask).isfinite().all()


@pytest.mark.parametrize("name", [name for name, encoding in POSITIONS.items() if encoding.additive])
def test_positions_are_those_of_queries_and_keys(name):
    encoding = build_position(name, num_heads=2, head_dim=4, hidden_size=8)
    q, k, state = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5)
    with pytest.raises(ValueError, match=r"positions.queries has shape .1, 6., but q has 5 tokens"):
        encoding.bias(q, k, Positions.of(6), scale=0.5, state=state)
    right = torch.arange(5)[None]
    with pytest.raises(ValueError, match=r"positions.keys has shape .1, 4., but k has 5 tokens"):
        encoding.bias(q, k, Positions(right, right[:, :4]), scale=0.5, state=state)
    with pytest.raises(TypeError, match="integers"):
        encoding.bias(q, k, Positions(right.float(), right), scale=0.5, state=state)
