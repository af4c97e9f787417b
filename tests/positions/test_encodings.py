"""Each encoding is the formula of its paper, and says so when it cannot be built."""

import inspect
import math
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F

from dape import Positions, randomized_positions
from dape.ops.score_attention import DistanceBias, TileBias
from dape.positions import (
    FIRE,
    POSITIONS,
    CoPE,
    Kerple,
    KerplePower,
    PositionEncoding,
    RoPE,
    Sandwich,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    build_position,
)
from docs import draw_encodings


def number(x: torch.Tensor) -> float:
    return float(x.detach())


def test_kerple_is_its_formula_and_stays_positive():
    kerple = Kerple(3)
    with torch.no_grad():
        kerple.raw_height.copy_(torch.tensor([1.0, -5.0, 0.0]))
        kerple.raw_rate.copy_(torch.tensor([0.5, 0.0, -2.0]))
    bias = kerple.at(torch.tensor([0, 7]), causal=True)
    assert torch.equal(bias[:, 0], torch.zeros(3))
    for head, (height, rate) in enumerate([(1.01, 0.51), (5.01, 0.01), (0.01, 2.01)]):
        assert number(bias[head, 1]) == pytest.approx(-height * math.log1p(rate * 7), rel=1e-5)


def test_kerple_starts_as_published():
    kerple = Kerple(20_000)
    for raw, top in ((kerple.raw_height, 2.0), (kerple.raw_rate, 1.0)):
        assert 0 <= number(raw.min()) < 0.01 * top
        assert 0.99 * top < number(raw.max()) <= top
        assert number(raw.mean()) == pytest.approx(top / 2, rel=0.02)


def test_rope_id_turns_half_of_the_features_twice_or_more_in_training():
    """Wertheimer et al. 2026: from one turn in 32 tokens to two in a training window of 512; the rest stays."""
    rope_id = build_position("rope-id", num_heads=1, head_dim=16, hidden_size=16, original_length=512)
    x = torch.randn(1, 1, 1, 16, dtype=torch.float64)
    for pair, tokens in enumerate([32, 64, 128, 256]):
        back, half = (rope_id.rotate(x, torch.tensor([[n]])) for n in (tokens, tokens // 2))
        features = [pair, pair + 4]
        torch.testing.assert_close(back[..., features], x[..., features])
        torch.testing.assert_close(half[..., features], -x[..., features])
    torch.testing.assert_close(half[..., 8:], x[..., 8:])


def test_kerple_power_has_a_gradient_at_distance_zero():
    power = KerplePower(2)
    bias = power.at(torch.arange(4), causal=True)
    bias.sum().backward()
    assert power.raw_power.grad is not None
    assert torch.isfinite(power.raw_power.grad).all()
    assert torch.equal(bias[:, 0], torch.zeros(2))


def test_sandwich_is_an_inner_product_of_sinusoids():
    sandwich = Sandwich(4, width=16)
    positions = torch.arange(20)
    embedded = Sinusoidal(16).embed(torch.zeros(1, 20, 16, dtype=torch.float64), positions[None])[0]
    product = embedded @ embedded.T
    bias = sandwich.at(positions[:, None] - positions, causal=True)
    for head in range(4):
        torch.testing.assert_close(bias[head], product / (8 * (head + 1) / 4))


def mlp(fire, x):
    """FIRE's network as it is defined, [..., 1] → [..., H]."""
    w1, b1, w2, b2 = fire.mlp.parameters()
    return F.linear(F.linear(x, w1, b1).relu(), w2, b2)


def test_fire_is_its_formula():
    fire = FIRE(2, threshold=4.0)
    positions = Positions.of(9)
    bias = fire.bias(torch.empty(1, 2, 9, 4), torch.empty(1, 2, 9, 4), positions, scale=1.0)
    assert isinstance(bias, TileBias)
    tile = bias.tile(slice(0, 9), 9)
    for i, j in ((2, 1), (8, 0), (5, 5)):
        relative = math.log1p(0.1 * (i - j)) / (math.log1p(0.1 * max(4.0, i)) + 1e-6)
        expected = mlp(fire, torch.tensor([relative]))
        torch.testing.assert_close(tile[0, :, i, j], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["drawn", "no slope", "one knot", "far knots"])
def test_the_network_of_fire_by_pieces_is_its_mlp(kind):
    torch.manual_seed(1)
    fire = FIRE(3, width=8).double()
    w1, b1, *_ = fire.mlp.parameters()
    with torch.no_grad():
        if kind == "no slope":
            w1[:4] = 0.0
        if kind == "one knot":
            b1.copy_(-0.5 * w1[:, 0])
        if kind == "far knots":
            b1.mul_(1e9)
    x = torch.rand(2, 7, 5, dtype=torch.float64, requires_grad=True)
    leaves = [x, *fire.mlp.parameters()]
    grad = torch.randn(3, 2, 7, 5, dtype=torch.float64)
    found, wanted = fire.evaluate(x, *fire.pieces(x.device)), mlp(fire, x[..., None]).movedim(-1, 0)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(out, leaves, grad) for out in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_cope_counts_gated_keys():
    """With equal scores every gate is ½, so a key d positions back is at position (d + 1)/2, read by interpolation."""
    cope = CoPE(2, num_positions=4)
    with torch.no_grad():
        cope.embeddings.copy_(torch.tensor([[0.0, 10.0, 20.0, 30.0], [0.0, 0.0, 0.0, 0.0]]))
    q, k = torch.tensor([1.0, 0.0]).expand(1, 1, 9, 2), torch.zeros(1, 1, 9, 2)
    bias = cope.bias(q, k, Positions.of(9), scale=1.0)
    assert isinstance(bias, TileBias)
    last = bias.tile(slice(8, 9), 9)[0, 0, 0]
    expected = [10 * min(3.0, (d + 1) / 2) for d in range(8, -1, -1)]
    torch.testing.assert_close(last, torch.tensor(expected))
    # If asked, it divides by the root of the width.
    plain, scaled = CoPE(4), CoPE(4, scaled=True)
    for cope in (plain, scaled):
        torch.nn.init.constant_(cope.embeddings, 0.5)
    q, k = torch.randn(2, 1, 3, 6, 4)
    tiles = [cope.bias(q, k, Positions.of(6), scale=0.5).tile(slice(0, 6), 6) for cope in (plain, scaled)]
    torch.testing.assert_close(tiles[1], tiles[0] * 0.5)


def test_transformer_xl_is_its_formula():
    encoding = TransformerXL(2, 4)
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    bias = encoding.bias(q, k, Positions.of(5), scale=0.5)
    assert isinstance(bias, TileBias)
    tile = bias.tile(slice(0, 5), 5)
    sinusoid = Sinusoidal(8).embed(torch.zeros(1, 5, 8), torch.arange(5)[None])[0]
    relative = F.linear(sinusoid, encoding.distance_key.weight).view(5, 2, 4)
    for i, j in ((4, 0), (3, 2), (1, 1)):
        expected = 0.5 * (
            (encoding.key_bias * k[0, :, j]).sum(-1)
            + ((q[0, :, i] + encoding.distance_bias) * relative[i - j]).sum(-1)
        )
        torch.testing.assert_close(tile[0, :, i, j], expected)


def test_encodings_by_distance_hand_out_a_vector():
    for name in ("alibi", "kerple", "kerple-power", "sandwich", "t5"):
        encoding = build_position(name, num_heads=4, head_dim=8, hidden_size=32)
        q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 10, 8)
        positions = Positions(torch.arange(7, 10)[None], torch.arange(10)[None], consecutive=True)
        bias = encoding.bias(q, k, positions, scale=1.0)
        assert isinstance(bias, DistanceBias)
        assert bias.values.shape == (4, 10)


def test_randomized_positions_are_sorted_distinct_and_reproducible():
    seeds = [torch.Generator().manual_seed(3) for _ in range(2)]
    draw = [randomized_positions(40, 2048, batch=5, generator=seed) for seed in seeds]
    assert torch.equal(*draw)
    assert draw[0].shape == (5, 40)
    assert (draw[0].diff() > 0).all()
    assert draw[0].min() >= 0
    assert draw[0].max() < 2048
    assert torch.equal(randomized_positions(8, 8), torch.arange(8)[None])


REFUSALS = {
    "no rope": (lambda: RoPE(0), "head_dim=0 must be a whole number, at least 1"),
    "no sinusoids": (lambda: Sinusoidal(0), "hidden_size=0 must be a whole number, at least 1"),
    "no count": (lambda: CoPE(0), "head_dim=0 must be a whole number, at least 1"),
    "odd rope": (lambda: RoPE(5), "head_dim=5 is odd"),
    "unknown scaling": (lambda: RoPE(4, scaling="magic"), 'unknown scaling "magic".*linear, ntk, dynamic'),
    "factor without scaling": (lambda: RoPE(4, factor=2.0), "factor=2.0 has no effect"),
    "shrinking": (lambda: RoPE(4, scaling="linear", factor=0.5), "factor=0.5 would shrink"),
    "yarn without a length": (lambda: RoPE(4, scaling="yarn", factor=2.0), 'scaling="yarn" needs'),
    "an option of another scaling": (
        lambda: RoPE(4, scaling="ntk", factor=2.0, slow=2.0),
        'slow goes with scaling="yarn" or "llama3": got 2.0 and "ntk"',
    ),
    "divisors": (
        lambda: RoPE(4, scaling="longrope", original_length=8, short=[1.0], long=[1.0, 2.0]),
        "short has 1 numbers, expected head_dim / 2 = 2",
    ),
    "odd sinusoids": (lambda: Sinusoidal(7), "hidden_size=7 is odd"),
    "odd sandwich": (lambda: Sandwich(2, width=3), "width=3 must be even"),
    "buckets": (lambda: T5Bias(2, 4, num_buckets=6), "num_buckets=6"),
    "bucket range": (lambda: T5Bias(2, 4, max_distance=10), "max_distance=10 must exceed"),
    "one position": (lambda: CoPE(4, num_positions=1), "num_positions=1"),
    "too few positions": (lambda: randomized_positions(10, 9), "cannot draw 10 different positions below"),
    "unknown option": (
        lambda: build_position("rope", num_heads=2, head_dim=4, hidden_size=8, speed=3),
        '"rope" has no option speed; its options: base, scaling',
    ),
    "a size as option": (
        lambda: build_position("alibi", num_heads=2, head_dim=4, hidden_size=8, depth=3),
        '"alibi" has no option depth; its options: none',
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name in POSITIONS if "num_heads" in inspect.signature(POSITIONS[name]).parameters]
)
def test_no_heads_are_refused(name):
    with pytest.raises(ValueError, match="num_heads=0 must be a whole number, at least 1"):
        build_position(name, num_heads=0, head_dim=4, hidden_size=8)


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_options_are_refused_with_their_values(case):
    build, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        build()


def test_an_encoding_with_a_bias_has_channels_for_it():
    """Whether there is one follows from the class: nobody has to say so, or can forget it."""

    class Given(PositionEncoding):
        def bias(self, q, k, positions, *, scale, state=None):
            return DistanceBias(torch.zeros(q.shape[1], positions.num_keys), 0)

    class Rotated(PositionEncoding):
        def rotate(self, x, positions):
            return x

    assert Given.additive
    assert not Rotated.additive


@pytest.mark.parametrize("name", POSITIONS)
def test_the_picture_shows_what_is_added_to_the_past(name):
    values = draw_encodings.added(name, 12)
    past = torch.ones(12, 12, dtype=torch.bool).tril()
    assert values.shape == (4, 12, 12)
    assert not values[:, past].isnan().any()
    assert values[:, ~past].isnan().all()
    assert (values[:, past].std() > 1e-6) == (name != "nope")


def test_encodings_are_drawn_into_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for names, file in ((["kerple", "kerple-power", "two.svg"], "two.svg"), (["alibi"], "alibi.svg")):
        monkeypatch.setattr(sys, "argv", ["draw_encodings", *names])
        runpy.run_path(draw_encodings.__file__, run_name="__main__")
        written = (tmp_path / file).read_text("utf-8").replace("<!-- ", "")
        assert all(f"{name}, head 3" in written for name in names if name != file)
