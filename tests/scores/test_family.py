"""Score processors and encodings against the formulas that others published, written anew."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dape import Positions, all_methods, attention, parse_method
from dape.ops.score_attention import fold
from dape.ops.score_attention.api import make_problem
from dape.positions import RoPE
from dape.scores import (
    Differential,
    KeyConv,
    KeyShift,
    MultiTokenAttention,
    Normalised,
    PlainScores,
    ScoreConv,
    TalkingHeads,
)

T, H, D = 12, 4, 5


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, H, T, D, dtype=torch.float64, generator=generator)


def jittered(processor):
    """The processor with parameters off their start."""
    processor = processor.double()
    with torch.no_grad():
        for parameter in processor.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return processor


def built(name):
    return parse_method(name).build_position(num_heads=H, head_dim=D, hidden_size=7)


def masked(logits):
    return logits.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)


def both_backends(q, k, v, processor, expected, **options):
    for backend in ("reference", "tiled"):
        out = attention(q, k, v, processor, scale=0.4, backend=backend, **options)
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


def test_talking_heads():
    """Shazeer et al. 2020: logits across heads by one matrix, weights by another."""
    q, k, v = inputs()
    processor = jittered(TalkingHeads(H))
    before, after = (conv.weight[:, :, 0, 0] for conv in (processor.before, processor.after))
    logits = torch.einsum("bhqd,bhkd,gh->bgqk", q, k * 0.4, before)
    weights = torch.einsum("bhqk,gh->bgqk", masked(logits).softmax(-1), after)
    both_backends(q, k, v, processor, weights @ v)


@pytest.mark.parametrize("convolve_after", [False, True])
def test_multi_token_attention(convolve_after):
    """Golovneva et al. 2025: Softmax(Mask₋∞(Conv2d(Mask₀(QKᵀ)))), then heads mixed in groups."""
    q, k, v = inputs()
    sizes = {"kernel_size": 3, "query_kernel_size": 4}
    processor = jittered(MultiTokenAttention(H, **sizes, convolve_after=convolve_after))
    hidden = torch.ones(T, T).triu(1).bool()

    def conv(x, module):
        return F.conv2d(F.pad(x, (1, 1, 3, 0)), module.weight, groups=H)

    scores = (q @ k.mT * 0.4).masked_fill(hidden, 0.0)
    weights = masked(conv(scores, processor.conv)).softmax(-1)
    if convolve_after:
        weights = conv(weights, processor.conv_after).masked_fill(hidden, 0.0)
    mix = processor.mix.weight[:, :, 0, 0]
    groups = zip(weights.split(2, 1), mix.split(2), strict=True)
    mixed = torch.cat([torch.einsum("bhqk,gh->bgqk", part, matrix) for part, matrix in groups], 1)
    both_backends(q, k, v, processor, mixed @ v)


def test_a_linear_convolution_of_each_head_is_a_convolution_of_the_keys():
    q, k, v = inputs()
    processor = jittered(KeyConv(H, kernel_size=3, padding="causal"))
    taps = processor.conv.weight[:, 0, 0]
    padded = F.pad(k, (0, 0, 2, 0))
    keys = sum(taps[None, :, t, None, None] * padded[:, :, t : t + T] for t in range(3))
    both_backends(q, k, v, processor, masked(q @ keys.mT * 0.4).softmax(-1) @ v)


@pytest.mark.parametrize("shifted", [{}, {"keys": False}, {"values": False}])
def test_key_shift(shifted):
    """Xu et al. 2024: softmax(Q(a K + b K₋₁)ᵀ)(c V + d V₋₁), where the token before the first has zeros."""
    q, k, v = inputs()
    processor = jittered(KeyShift(H, **shifted))

    def mixed(x, own, earlier):
        return own.view(H, 1, 1) * x + earlier.view(H, 1, 1) * F.pad(x, (0, 0, 1, 0))[:, :, :-1]

    if processor.keys is not None:
        k = mixed(k, *processor.keys.weight.flatten(1).flip(1).unbind(1))
    if processor.values is not None:
        v = mixed(v, *processor.values.weight.flatten(1).unbind(1))
    both_backends(*inputs(), processor, masked(q @ k.mT * 0.4).softmax(-1) @ v)


@pytest.mark.parametrize("name", ["keyshift", "keyshift[values=false]", "keyconv1x3[padding=causal]"])
def test_linear_stages_of_single_heads_are_folded_into_keys_and_values(name, monkeypatch):
    """Attention with the stages equals attention without, on convolved keys and values, with all gradients."""
    monkeypatch.setattr(fold, "MANY_QUERIES", 2)
    pair, options = name.split("[")[0], name[len(name.split("[")[0]) :]
    processor = jittered(parse_method(f"{pair}-kerple{options}").build_scores(H))
    q, k, v = (x.requires_grad_() for x in inputs())
    k, v = k[:, :2].detach().requires_grad_(), v[:, :2].detach().requires_grad_()
    bias, results = torch.randn(1, H, T, T, dtype=torch.float64), []
    problem = make_problem(q, k, v, processor, bias=bias)
    assert fold.folded(problem).program.is_plain
    for backend in ("reference", "tiled"):
        out = attention(q, k, v, processor, bias=bias, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), [q, k, v, *processor.parameters()])
        results.append((out, *grads))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_keys_are_shifted_before_they_are_rotated():
    """softmax((R q)(R(a k + b k₋₁))ᵀ) in the model's layer and in the one that takes q, k and v."""
    from dape import ScoreAttention
    from dape.conformance import HEADS, HIDDEN, Layer, tokens

    method = parse_method("keyshift-rope[values=false]")
    layer, x = Layer(method), tokens()
    attention_layer, rope, count = layer.attention, layer.encoding, x.shape[1]
    at = torch.arange(count)[None]

    def heads(projection):
        return projection(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)

    q, k, v = (heads(getattr(attention_layer, name)) for name in ("query", "key", "value"))
    earlier, own = attention_layer.scores.keys.weight.view(HEADS, 2).unbind(1)
    repeated, values = (y.repeat_interleave(HEADS // k.shape[1], 1) for y in (k, v))
    moved = F.pad(repeated, (0, 0, 1, 0))[:, :, :-1]
    shifted = own.view(-1, 1, 1) * repeated + earlier.view(-1, 1, 1) * moved
    scores = rope.rotate(q, at) @ rope.rotate(shifted, at).mT * attention_layer.scale
    hidden = torch.ones(count, count).triu(1).bool()
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    got = layer(x, Positions.of(count))
    torch.testing.assert_close(got, attention_layer.out(expected.transpose(1, 2).flatten(2)))
    ours = ScoreAttention(method.name, num_heads=HEADS, head_dim=HIDDEN // HEADS).double()
    ours.scores.load_state_dict(attention_layer.scores.state_dict())
    torch.testing.assert_close(ours(q, k, v), expected)


def test_key_shift_starts_with_pairs_that_sum_to_one():
    drawn, still = KeyShift(H), KeyShift(H, zero_init=True)
    for pair in (drawn.keys, drawn.values):
        torch.testing.assert_close(pair.weight.sum(-1), torch.ones(H, 1, 1))
    q, k, v = (x.float() for x in inputs())
    torch.testing.assert_close(attention(q, k, v, still), attention(q, k, v))


def test_groups_of_heads_are_convolutions_of_their_own():
    q, k, v = inputs()
    bias = torch.randn(1, H, T, T, dtype=torch.float64)
    grouped = jittered(ScoreConv(H, 8, groups=2))
    parts = []
    for n in range(2):
        part = ScoreConv(2, 4).double()
        heads, width = slice(2 * n, 2 * n + 2), slice(4 * n, 4 * n + 4)
        with torch.no_grad():
            for name, rows in (("expand", width), ("project", heads)):
                for key, value in getattr(part, name).named_parameters():
                    value.copy_(getattr(grouped, name).get_parameter(key)[rows])
        parts.append(attention(q[:, heads], k[:, heads], v[:, heads], part, bias=bias[:, heads], scale=0.4))
    both_backends(q, k, v, grouped, torch.cat(parts, 1), bias=bias)


def test_a_sink_is_one_more_key_with_a_value_of_zero():
    q, k, v = inputs()
    processor = jittered(Normalised(PlainScores(), H, "sink"))
    column = processor.sink_root.square().log().view(1, H, 1, 1).expand(2, H, T, 1)
    weights = torch.cat([masked(q @ k.mT * 0.4), column], -1).softmax(-1)
    both_backends(q, k, v, processor, weights[..., :-1] @ v)


def test_ssmax():
    """Nakanishi 2025: zᵢ ↦ n^(s·zᵢ) / Σ n^(s·zⱼ)."""
    q, k, v = inputs()
    processor = jittered(Normalised(PlainScores(), H, "ssmax"))
    z, out = q @ k.mT * 0.4, torch.zeros_like(v)
    for i in range(T):
        powers = torch.tensor(float(i + 1), dtype=torch.float64) ** (
            processor.length_scale.view(1, H, 1) * z[:, :, i, : i + 1]
        )
        out[:, :, i] = torch.einsum("bhk,bhkd->bhd", powers / powers.sum(-1, keepdim=True), v[:, :, : i + 1])
    both_backends(q, k, v, processor, out)
    # It starts as the softmax at its length.
    start = Normalised(PlainScores(), H, "ssmax", length=T).double().weights(z)
    torch.testing.assert_close(start[:, :, -1], z[:, :, -1].softmax(-1), rtol=1e-6, atol=1e-6)


def test_scores_grow_with_the_logarithm_of_the_length_in_evaluation():
    """Puvvada et al. 2025, appendix D: attention logits times log_a(a + n), at inference alone."""
    q, k, v = inputs()
    processor = parse_method("nope[length=64,normaliser=logn]").build_scores(H).double()
    # Built in float32.
    processor.reset_parameters()
    factor = torch.log(64.0 + torch.arange(1, T + 1, dtype=torch.float64)) / math.log(64)
    scores = q @ k.mT * 0.4
    both_backends(q, k, v, processor, masked(scores).softmax(-1) @ v)
    both_backends(q, k, v, processor.eval(), masked(scores * factor[:, None]).softmax(-1) @ v)


def test_differential_attention():
    """Ye et al. 2024: (softmax(Q₁ K₁ᵀ) − λ softmax(Q₂ K₂ᵀ)) V, V twice as wide, λ = e^(a · b) − e^(c · d) + start."""
    q, k, v = inputs()
    processor = parse_method("diff-nope").build_scores(H, layer=2).double()
    assert isinstance(processor, Differential)
    a, b, c, d = processor.vectors
    factor = (a * b).sum().exp() - (c * d).sum().exp() + 0.8 - 0.6 * math.exp(-0.3 * 2)
    weights = masked(q @ k.mT * 0.4).softmax(-1)
    pairs = [
        (weights[:, m] - factor * weights[:, m + 1]) @ torch.cat([v[:, m], v[:, m + 1]], -1)
        for m in range(0, H, 2)
    ]
    both_backends(q, k, v, processor, torch.stack([half for x in pairs for half in x.split(D, -1)], 1))
    with pytest.raises(ValueError, match="an even number, got num_heads=3"):
        Differential(3)


@pytest.mark.parametrize("name", ["nope", "diff-nope", "diff-nope[normaliser=ssmax,start=0.8]"])
def test_outputs_of_heads_are_normalised_in_pairs_if_differential(name):
    """Ye et al. 2024: RMSNorm of a head, which is as wide as two of ours if differential, times 1 − λ_init."""
    from dape.models import Attention, Context

    scores = parse_method(name).build_scores(H, layer=1)
    start = 0.8 if "start" in name else 0.8 - 0.6 * math.exp(-0.3)
    layer = Attention(H * D, H, scores=scores, head_norm=True, layer=1).double()
    x = torch.randn(2, T, H * D, dtype=torch.float64)
    nope = parse_method("nope").build_position(num_heads=H, head_dim=D, hidden_size=H * D)
    q, k, v, *_ = layer.inputs(x, nope, Context(Positions.of(T)))
    size = 1 if name == "nope" else 2
    pairs = attention(q, k, v, scores).transpose(1, 2).unflatten(2, (-1, size)).flatten(3)
    normed = pairs / (pairs.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 - start)
    torch.testing.assert_close(layer(x, nope, Context(Positions.of(T))), layer.out(normed.flatten(2)))


def test_selective_rope():
    """Movahedi et al. 2025: the rotation by R₁ … R_t, angles from the hidden states, each head's part of length 1."""
    q, k, v = (y[..., :4] for y in inputs())
    x = torch.randn(2, T, 3 * H, dtype=torch.float64)
    method = parse_method("selective-rope[base=100,bias=true,gate=true,rank=3,silu=true]")
    encoding = method.build_position(num_heads=H, head_dim=4, hidden_size=3 * H).double()
    torch.nn.init.normal_(encoding.offset)
    unit = torch.cat([part / part.square().sum(-1, keepdim=True).sqrt() for part in x.split(3, -1)], -1)
    projected = (unit @ encoding.down.weight.T @ encoding.up.weight.T).view(2, T, H, 2)
    gate = torch.sigmoid(unit @ encoding.gate.weight.T + encoding.gate.bias)
    turned, angle = [torch.zeros_like(q), torch.zeros_like(k)], torch.zeros(2, H, 2, dtype=torch.float64)
    for t in range(T):
        taps = (encoding.taps[lag, :, 0] * projected[:, t - lag] for lag in range(min(4, t + 1)))
        step = (F.silu(sum(taps)) + encoding.offset[:, 0].exp()) * gate[:, t, :, None]
        angle = angle + step * torch.tensor([1.0, 0.1], dtype=torch.float64)
        turn = torch.polar(torch.ones_like(angle), angle)
        for rotated, given in zip(turned, (q, k), strict=True):
            product = torch.complex(given[:, :, t, :2], given[:, :, t, 2:]) * turn
            rotated[:, :, t] = torch.cat([product.real, product.imag], -1)
    ours = encoding.turn(q, k, Positions.of(T), encoding.token_state(x))
    torch.testing.assert_close(list(ours), turned)
    both_backends(*ours, v, PlainScores(), masked(turned[0] @ turned[1].mT * 0.4).softmax(-1) @ v)


def test_pope():
    """Gopalakrishnan et al. 2025, eq. 6: Σ_c μ(q_c) μ(k_c) cos((s − t) θ_c + δ_c), μ the softplus; δ of a head, within [−2π, 0]."""
    q, k, v = inputs()
    encoding = built("pope").double()
    assert encoding.shift.numel() == H * D
    torch.nn.init.uniform_(encoding.shift, -3 * math.pi, math.pi)
    delta = encoding.shift.view(H, 1, 1, D).clamp(min=-2 * math.pi).clamp(max=0)
    theta = 10000.0 ** -(torch.arange(D, dtype=torch.float64) / D)
    at = torch.arange(T, dtype=torch.float64)
    angle = (at[None, :, None] - at[:, None, None]) * theta + delta
    k = k[:, ::2].repeat_interleave(2, 1)
    scores = torch.einsum("bhtc,bhsc,htsc->bhts", F.softplus(q), F.softplus(k), angle.cos())
    positions = torch.arange(T)[None]
    # Two heads share a key.
    turned = encoding.rotate(q, positions), encoding.rotate_keys(k[:, ::2], positions)
    v = v[:, ::2]
    both_backends(*turned, v, PlainScores(), masked(scores * 0.4).softmax(-1) @ v.repeat_interleave(2, 1))


@pytest.mark.parametrize("group", [None, 3])
def test_far_distances_are_grouped_or_capped(group):
    """Jin et al. 2024: beyond the near window, positions divided by the group; Su 2023: distances capped."""
    q, k, v = (x[..., :4] for x in inputs())
    options = f",group={group}" if group else ""
    method = parse_method(f"selfextend[near=5{options}]")
    encoding = method.build_position(num_heads=H, head_dim=4, hidden_size=16)
    rope, positions = RoPE(4), Positions.of(T)
    scores = torch.zeros(2, H, T, T, dtype=torch.float64)
    for i in range(T):
        for j in range(i + 1):
            far = 5 if group is None else i // group + 5 - 5 // group - j // group
            distance = torch.tensor([[i - j if i - j < 5 else far]])
            turned = rope.rotate(q[:, :, [i]], distance)
            scores[:, :, i, j] = (turned * k[:, :, [j]]).sum((-1, -2)) * 0.4
    turned = [encoding.rotate(x, positions.queries) for x in (q, k)]
    bias = encoding.bias(*turned, positions, scale=0.4)
    both_backends(*turned, v, PlainScores(), masked(scores).softmax(-1) @ v, bias=bias)


def test_stick_breaking():
    """Tan et al. 2024: Aᵢⱼ = βᵢⱼ Π (1 − βᵢₗ) over j < l ≤ i, β the sigmoid of the logits."""
    q, k, v = inputs()
    beta, out = torch.sigmoid(q @ k.mT * 0.4), torch.zeros_like(v)
    for i in range(T):
        left = torch.ones(2, H, dtype=torch.float64)
        for j in range(i, -1, -1):
            out[:, :, i] += (left * beta[:, :, i, j])[..., None] * v[:, :, j]
            left = left * (1 - beta[:, :, i, j])
    processor = parse_method("stickbreaking").build_scores(H)
    both_backends(q, k, v, processor, out)
    with pytest.raises(ValueError, match="it needs causal=True"):
        attention(q, k, v, processor, causal=False)


def entmax_by_bisection(logits):
    """α-entmax for α = 1.5: ((α − 1) z − τ)₊^(1 / (α − 1)), τ by bisection so that it sums to 1."""
    half = logits / 2
    low, high = half.amax(-1, keepdim=True) - 1, half.amax(-1, keepdim=True)
    for _ in range(60):
        middle = (low + high) / 2
        above = (half - middle).clamp(min=0).square().sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (half - low).clamp(min=0).square()


@pytest.mark.parametrize("name", ["entmax", "asentmax"])
def test_entmax(name):
    q, k, v = (10 * x for x in inputs())
    processor = jittered(parse_method(f"nope[normaliser={name}]").build_scores(H))
    logits = q @ k.mT * 0.004
    if name == "asentmax":
        assert isinstance(processor, Normalised)
        count = torch.arange(2, T + 2, dtype=torch.float64)
        beta, gamma = F.softplus(processor.length_scale), 2 * torch.tanh(processor.length_power)
        logits = logits * (1 + beta.view(H, 1, 1) * count.log()[:, None] ** gamma.view(H, 1, 1))
    weights = entmax_by_bisection(masked(logits))
    assert (weights == 0).sum() > (masked(logits) == -torch.inf).sum()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, T, dtype=torch.float64))
    for backend in ("reference", "tiled"):
        out = attention(q, k, v, processor, scale=0.004, backend=backend)
        torch.testing.assert_close(out, weights @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normaliser", ["sink", "ssmax"])
@pytest.mark.parametrize(
    "name", [m.name for m in all_methods() if m.position == "nope" and m.kernel not in ((1, 5), (1, 7))]
)
def test_every_normaliser_can_start_as_the_softmax_and_leaves_it(normaliser, name):
    options = "zero_init=true" if name.startswith(("dape", "keyshift")) else ""
    plain = parse_method(f"{name}[{options}]" if options else name).build_scores(H, width=4)
    ours = parse_method(f"{name}[normaliser={normaliser},zero_init=true]").build_scores(H, width=4)
    # What does not start as the identity is drawn.
    ours.processor.load_state_dict(plain.state_dict())
    scores = torch.randn(1, H, T, T)
    torch.testing.assert_close(ours.weights(scores), plain.weights(scores), rtol=1e-6, atol=1e-7)
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        # A little of every weight is lost to a sink; SSMax makes them sharper or flatter.
        ours.weights(scores).square().sum().backward()
        optimizer.step()
    assert ours.weights(scores).square().sum() < 0.99 * plain.weights(scores).square().sum()
    for (name, now), then in zip(ours.named_parameters(), before, strict=True):
        assert not (("sink" in name or "length" in name) and torch.equal(now, then))


def fox_bias(encoding, x):
    """Lin et al. 2025: Dᵢⱼ = Σ over l = j + 1 … i of log σ(w · xₗ + b)."""
    gates = F.logsigmoid(torch.einsum("bti,hi->bht", x, encoding.weight) + encoding.offset[:, None])
    bias = torch.zeros(*gates.shape, gates.shape[-1], dtype=x.dtype)
    for i in range(x.shape[1]):
        for j in range(i + 1):
            bias[:, :, i, j] = gates[:, :, j + 1 : i + 1].sum(-1)
    return bias


def test_forgetting_transformer():
    q, k, v = inputs()
    x = torch.randn(2, T, 7, dtype=torch.float64)
    encoding = built("fox").double()
    bias = encoding.bias(q, k, Positions.of(T), scale=0.4, state=encoding.token_state(x))
    weights = masked(q @ k.mT * 0.4 + fox_bias(encoding, x)).softmax(-1)
    both_backends(q, k, v, None, weights @ v, bias=bias)
    # It starts with the forgetting times given.
    encoding = built("fox[shortest=2,longest=50]")
    nn.init.zeros_(encoding.weight)
    steps = encoding.token_state(torch.zeros(1, 1, 7))[0, :, 0, 0]
    torch.testing.assert_close(-1 / steps[[0, -1]], torch.tensor([2.0, 50.0]), rtol=1e-4, atol=1e-4)


def test_data_dependent_alibi_starts_as_alibi():
    q, k, _ = inputs()
    alibi, learned = built("alibi"), built("data-alibi").double()
    positions, x = Positions.of(T), torch.randn(2, T, 7, dtype=torch.float64)
    bias = learned.bias(q, k, positions, scale=0.4, state=learned.token_state(x)).tiles().tile(slice(0, T), T)
    expected = alibi.bias(q, k, positions, scale=0.4).dense(T, T)
    below = torch.ones(T, T).tril().bool()
    expected = expected[..., below].expand(2, -1, -1).to(bias)
    torch.testing.assert_close(bias[..., below], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "dape1x3-kerple",
        "dape1x3-kerple[zero_init=true,depth=3]",
        "mta-kerple",
        "talking-rope",
        "kerple[normaliser=sink]",
    ],
)
def test_a_reset_gives_the_start_back(name):
    processor = parse_method(name).build_scores(H)
    torch.manual_seed(3)
    expected = parse_method(name).build_scores(H).state_dict()
    for parameter in processor.parameters():
        nn.init.constant_(parameter, 7.0)
    torch.manual_seed(3)
    processor.reset_parameters()
    for key, value in processor.state_dict().items():
        assert torch.equal(value, expected[key]), key
    assert not any((value == 7).all() for value in processor.state_dict().values())
