"""The score processors: the paper's module as a drop-in, its special cases, its proposition."""

import pytest
import torch
from torch import nn

from dape import ScoreConv, Visible, attention


def scores_and_bias(batch=2, heads=3, tokens=8, dtype=torch.float64):
    return torch.randn(batch, heads, tokens, tokens, dtype=dtype), torch.randn(
        1, heads, tokens, tokens, dtype=dtype
    )


def paper_module(conv: ScoreConv, scores, bias, kernel_size):
    """What the paper publishes: lower triangle, two padded convolutions, a residual; cut off at the tensor's edge."""
    both = torch.cat([scores, bias.expand_as(scores)], 1).tril()
    pad = (0, kernel_size // 2)
    hidden = nn.functional.leaky_relu(
        nn.functional.conv2d(both, conv.expand.weight, conv.expand.bias, padding=pad)
    )
    return scores + bias + nn.functional.conv2d(hidden, conv.project.weight, conv.project.bias, padding=pad)


@pytest.mark.parametrize("kernel_size", [1, 3, 5, 7])
def test_it_is_the_papers_module_but_for_the_last_rows(kernel_size):
    scores, bias = scores_and_bias(tokens=12)
    conv = ScoreConv(3, width=8, kernel_size=kernel_size).double()
    ours = conv(scores, bias)
    theirs = paper_module(conv, scores, bias, kernel_size).masked_fill(
        torch.ones(12, 12).triu(1).bool(), -torch.inf
    )
    rows = 12 - kernel_size // 2
    torch.testing.assert_close(ours[:, :, :rows], theirs[:, :, :rows])
    if kernel_size > 1:
        assert not torch.allclose(ours[:, :, rows:], theirs[:, :, rows:])


def test_weights_have_the_documented_names_and_shapes():
    conv = ScoreConv(4, width=10, kernel_size=5)
    shapes = {name: tuple(p.shape) for name, p in conv.named_parameters()}
    assert shapes == {
        "expand.weight": (10, 8, 1, 5),
        "expand.bias": (10,),
        "project.weight": (4, 10, 1, 5),
        "project.bias": (4,),
    }
    deep = ScoreConv(4, width=10, kernel_size=5, query_kernel_size=2, depth=4)
    assert {name: tuple(p.shape) for name, p in deep.named_parameters() if name.endswith("weight")} == {
        "expand.weight": (10, 8, 2, 5),
        "middle.0.weight": (10, 10, 2, 5),
        "middle.1.weight": (10, 10, 2, 5),
        "project.weight": (4, 10, 2, 5),
    }
    assert ScoreConv(4, bias_channels=False).expand.weight.shape == (32, 4, 1, 3)


def test_kernel_one_is_an_mlp_over_heads():
    scores, bias = scores_and_bias()
    conv = ScoreConv(3, width=7, kernel_size=1).double()
    first, second = nn.Linear(6, 7).double(), nn.Linear(7, 3).double()
    first.load_state_dict({"weight": conv.expand.weight[:, :, 0, 0], "bias": conv.expand.bias})
    second.load_state_dict({"weight": conv.project.weight[:, :, 0, 0], "bias": conv.project.bias})
    pixels = torch.cat([scores, bias.expand_as(scores)], 1).movedim(1, -1)
    mlp = second(nn.functional.leaky_relu(first(pixels))).movedim(-1, 1)
    visible = torch.ones(8, 8).tril().bool()
    torch.testing.assert_close(conv(scores, bias)[..., visible], (scores + bias + mlp)[..., visible])


@pytest.mark.parametrize("kernel_size", [2, 4, 6])
def test_even_kernels_keep_the_key_axis_and_reach_further_left(kernel_size):
    conv = ScoreConv(1, width=1, kernel_size=kernel_size, bias_channels=False).double()
    assert conv.left == kernel_size // 2
    with torch.no_grad():
        for part in (conv.expand, conv.project):
            part.weight.fill_(1.0)
            part.bias.zero_()
    scores = torch.zeros(1, 1, 1, 30, dtype=torch.float64)
    scores[..., 15] = 1.0
    refined = conv(scores, causal=False) - scores
    reached = refined[0, 0, 0].nonzero()[:, 0]
    # A pixel is read by keys up to `left` to its right and k − 1 − left to its left, twice.
    assert (reached.min(), reached.max()) == (15 - 2 * (kernel_size - 1 - conv.left), 15 + 2 * conv.left)
    assert refined.shape == scores.shape


def test_square_kernels_read_earlier_queries_alone():
    conv = ScoreConv(2, kernel_size=3, query_kernel_size=3, bias_channels=False).double()
    assert conv.program().earlier_rows == 4
    scores = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    changed = scores.clone()
    changed[:, :, 5] += 1.0
    moved = (conv(changed, causal=False) - conv(scores, causal=False)).abs().amax((0, 1, 3))
    assert moved.nonzero()[:, 0].tolist() == [5, 6, 7, 8, 9]


def test_a_square_kernel_whose_earlier_rows_are_zero_is_the_papers():
    scores, bias = scores_and_bias()
    square, flat = ScoreConv(3, query_kernel_size=3).double(), ScoreConv(3).double()
    with torch.no_grad():
        for name in ("expand", "project"):
            square.get_parameter(f"{name}.weight")[:, :, :2] = 0.0
    flat.load_state_dict(
        {name: x[:, :, 2:] if x.dim() == 4 else x for name, x in square.state_dict().items()}
    )
    torch.testing.assert_close(square(scores, bias), flat(scores, bias))


def test_causal_padding_reads_nothing_to_the_right():
    conv = ScoreConv(2, kernel_size=4, padding="causal", bias_channels=False).double()
    scores = torch.randn(1, 2, 1, 10, dtype=torch.float64)
    changed = scores.clone()
    changed[..., 6] += 1.0
    difference = (conv(changed, causal=False) - conv(scores, causal=False)).abs().amax((0, 1, 2))
    assert (difference[:6] == 0).all()
    assert (difference[6:] > 0).any()


def test_both_residual_forms():
    scores, bias = scores_and_bias()
    full = ScoreConv(3).double()
    short = ScoreConv(3, residual="scores").double()
    short.load_state_dict(full.state_dict())
    visible = torch.ones(8, 8).tril().bool()
    difference = (full(scores, bias) - short(scores, bias))[..., visible]
    torch.testing.assert_close(difference, bias.expand_as(scores)[..., visible])


def test_zero_init_is_plain_attention():
    q, k, v = torch.randn(3, 2, 4, 10, 8)
    bias = torch.randn(1, 4, 10, 10)
    conv = ScoreConv(4, zero_init=True)
    torch.testing.assert_close(attention(q, k, v, conv, bias=bias), attention(q, k, v, bias=bias))
    assert conv.project.weight.requires_grad


def test_leaking_reads_the_future_and_not_leaking_does_not():
    scores, bias = scores_and_bias(tokens=10)
    honest = ScoreConv(3).double()
    cheat = ScoreConv(3, leak_future=True).double()
    cheat.load_state_dict(honest.state_dict())
    future = scores.clone()
    future[..., 4, 5] += 1.0  # query 4 must not see key 5
    assert torch.equal(honest(scores, bias), honest(future, bias))
    moved = (cheat(scores, bias) - cheat(future, bias)).nan_to_num()
    assert moved[:, :, 4, :5].abs().max() > 0
    assert (cheat(scores, bias)[0, 0] == -torch.inf).equal(torch.ones(10, 10).triu(1).bool())


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_attend_is_softmax_of_the_processed_scores(backend):
    q, k, v = torch.randn(3, 2, 3, 9, 5, dtype=torch.float64)
    bias = torch.randn(1, 3, 9, 9, dtype=torch.float64)
    conv = ScoreConv(3, kernel_size=5).double()
    weights = torch.softmax(conv(q @ k.transpose(-1, -2) * 0.3, bias), -1)
    out = attention(q, k, v, conv, bias=bias, scale=0.3, backend=backend)
    torch.testing.assert_close(out, weights @ v)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_the_proposition_by_construction(backend):
    """One head, no positions, a 1×2 kernel with weights [−1, 1] and W_KᵀW_Q = −I: attention copies the follower.

    The token after an earlier occurrence of the query's token gets the score −x_N·(x_j − x_{j−1}) > 0.
    """
    vocabulary, sharpness = 12, 50.0
    prompt = torch.tensor([3, 7, 1, 4, 0, 8, 5, 2, 6, 3])
    x = torch.eye(vocabulary, dtype=torch.float64)[prompt][None, None]
    conv = ScoreConv(1, width=1, kernel_size=2, bias_channels=False).double()
    with torch.no_grad():
        conv.expand.weight.copy_(sharpness * torch.tensor([[[[-1.0, 1.0]]]]))
        conv.expand.bias.zero_()
        # The second convolution hands the first one's result on: its tap at the key itself is 1.
        conv.project.weight.copy_(torch.tensor([[[[0.0, 1.0]]]]))
        conv.project.bias.zero_()
    # q = x, k = −x: W_KᵀW_Q = −I.
    copied = attention(x, -x, x, conv, scale=1.0, backend=backend)[0, 0, -1].detach()
    assert int(copied.argmax()) == 7
    assert float(copied[7]) > 0.99


REFUSALS = {
    "no heads": (lambda: ScoreConv(0), "num_heads=0"),
    "no width": (lambda: ScoreConv(2, 0), "width=0"),
    "no kernel": (lambda: ScoreConv(2, kernel_size=0), "kernel_size=0"),
    "no query": (lambda: ScoreConv(2, query_kernel_size=0), "query_kernel_size=0"),
    "half a key": (
        lambda: ScoreConv(2, kernel_size=2.5),
        "kernel_size=2.5 must be a whole number, at least 1",
    ),
    "no depth": (lambda: ScoreConv(2, depth=1), "depth=1 must be a whole number, at least 2"),
    "half a depth": (lambda: ScoreConv(2, depth=2.5), "depth=2.5 must be a whole number, at least 2"),
    "padding": (lambda: ScoreConv(2, padding="valid"), 'padding="valid"'),
    "residual": (lambda: ScoreConv(2, residual="bias"), 'residual="bias"'),
    "heads": (
        lambda: ScoreConv(2)(torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 4, 4)),
        "reads 4 channels, but the scores have 3 heads",
    ),
    "bias missing": (lambda: ScoreConv(2)(torch.zeros(1, 2, 4, 4)), "bias=None.*bias_channels=False"),
    "groups": (lambda: ScoreConv(4, groups=3), "groups=3 does not divide num_heads=4"),
    "groups of the width": (lambda: ScoreConv(6, 32, groups=3), "groups=3 does not divide width=32"),
    "bias shape": (
        lambda: ScoreConv(2)(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 5)),
        r"bias has shape \(1, 2, 4, 5\)",
    ),
    "scores shape": (lambda: ScoreConv(2)(torch.zeros(2, 4, 4)), r"scores have shape \(2, 4, 4\)"),
    "holes": (lambda: Visible.from_padding(torch.tensor([[1, 0, 1]])), "has holes"),
    "mask shape": (lambda: Visible.from_padding(torch.ones(3)), r"\[batch, keys\]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_with_its_values(case):
    build, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        build()
