"""The score processors: the paper's module as a drop-in, its special cases, its proposition."""

import pytest
import torch

from dape import ScoreConv, attention


def test_weights_have_the_documented_names_and_shapes():
    conv = ScoreConv(4, width=10, kernel_size=5)
    shapes = {name: tuple(p.shape) for name, p in conv.named_parameters()}
    first, last = {"expand.weight": (10, 8, 1, 5), "expand.bias": (10,)}, {"project.weight": (4, 10, 1, 5)}
    assert shapes == {**first, **last, "project.bias": (4,)}
    deep = dict(ScoreConv(4, width=10, kernel_size=5, query_kernel_size=2, depth=4).named_parameters())
    assert {deep[f"middle.{n}.weight"].shape for n in (0, 1)} == {(10, 10, 2, 5)}
    assert ScoreConv(4, bias_channels=False).expand.weight.shape == (32, 4, 1, 3)
    # Kernels of even size reach further to the left.
    for size in (2, 4, 6):
        assert ScoreConv(1, kernel_size=size).left == size // 2
        assert ScoreConv(1, kernel_size=size, padding="causal").left == size - 1


def test_zero_init_is_plain_attention():
    q, k, v = torch.randn(3, 2, 4, 10, 8)
    bias = torch.randn(1, 4, 10, 10)
    conv = ScoreConv(4, zero_init=True)
    torch.testing.assert_close(attention(q, k, v, conv, bias=bias), attention(q, k, v, bias=bias))
    assert conv.project.weight.requires_grad


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
    "half a key": (lambda: ScoreConv(2, kernel_size=2.5), "kernel_size=2.5 must be a whole number, at"),
    "no depth": (lambda: ScoreConv(2, depth=1), "depth=1 must be a whole number, at least 2"),
    "half a depth": (lambda: ScoreConv(2, depth=2.5), "depth=2.5 must be a whole number, at least 2"),
    "padding": (lambda: ScoreConv(2, padding="valid"), 'padding="valid"'),
    "residual": (lambda: ScoreConv(2, residual="bias"), 'residual="bias"'),
    "heads": (lambda: ScoreConv(2)(torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 4, 4)), "reads 4 channels"),
    "bias missing": (lambda: ScoreConv(2)(torch.zeros(1, 2, 4, 4)), "bias=None.*bias_channels=False"),
    "groups": (lambda: ScoreConv(4, groups=3), "groups=3 does not divide num_heads=4"),
    "groups of the width": (lambda: ScoreConv(6, 32, groups=3), "groups=3 does not divide width=32"),
    "bias shape": (
        lambda: ScoreConv(2)(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 5)),
        r"bias has shape \(1, 2, 4, 5\)",
    ),
    "scores shape": (lambda: ScoreConv(2)(torch.zeros(2, 4, 4)), r"scores have shape \(2, 4, 4\)"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_with_its_values(case):
    build, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        build()
