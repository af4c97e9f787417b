"""Every form of a bias gives the same, whatever the program, the backend and autocast."""

import pytest
import torch

from dape.ops.score_attention import (
    DistanceBias,
    ScoreProgram,
    SeparableBias,
    Stage,
    TileBias,
    attention,
    attention_weights,
)
from dape.ops.score_attention.api import BACKENDS

HEADS, TOKENS, WIDTH = 2, 19, 4


def stage(inputs: int, outputs: int, rows: int = 1, slope: float = 0.1) -> Stage:
    return Stage(torch.randn(outputs, inputs, rows, 3), torch.randn(outputs), 1, slope=slope)


def programs() -> dict[str, ScoreProgram]:
    torch.manual_seed(0)
    pair = (stage(2 * HEADS, 5), stage(5, HEADS, slope=1.0))
    vector = torch.rand(HEADS) + 0.5
    return {
        "plain": ScoreProgram(),
        "pair": ScoreProgram(pair),
        "leak": ScoreProgram(pair, leak_future=True),
        "deep leak": ScoreProgram((pair[0], stage(5, 5), pair[1]), leak_future=True),
        "leak of earlier rows": ScoreProgram((stage(HEADS, HEADS, rows=2),), leak_future=True),
        "earlier rows": ScoreProgram((stage(2 * HEADS, HEADS, rows=3),)),
        "scores alone": ScoreProgram((stage(HEADS, HEADS),), residual="scores"),
        "bias alone": ScoreProgram((stage(HEADS, HEADS),), residual="bias"),
        "softcap": ScoreProgram(pair, softcap=2.0),
        "sink": ScoreProgram(pair, sink=vector),
        "length scale": ScoreProgram(pair, length_scale=vector, length_offset=vector),
        "after the softmax": ScoreProgram(post=(stage(HEADS, HEADS),)),
    }


def forms(dtype: torch.dtype) -> dict[str, tuple[object, torch.Tensor]]:
    """A bias in its form, and dense."""
    dense = torch.randn(1, HEADS, TOKENS, TOKENS, dtype=dtype)
    row, column = torch.randn(2, 1, HEADS, TOKENS, dtype=dtype)
    values = torch.randn(HEADS, 2 * TOKENS - 1, dtype=dtype)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return {
        "tile": (TileBias(lambda rows, num_keys: dense[:, :, rows, :num_keys]), dense),
        "separable": (SeparableBias(row, column), row[..., None] + column[:, :, None]),
        "distance": (DistanceBias(values, 1 - TOKENS), values[:, distance + TOKENS - 1][None]),
    }


def test_what_leaks_says_so_in_every_form_of_the_bias():
    """A later key changes earlier rows, and only with leak_future."""
    for name, leaks in (("pair", False), ("leak", True)):
        program = programs()[name]
        q, k, v = torch.randn(3, 1, HEADS, TOKENS, WIDTH)
        changed = k.clone()
        changed[:, :, -1] += 3
        for bias, _ in forms(torch.float32).values():
            one, other = (attention(q, x, v, program, bias=bias) for x in (k, changed))
            assert bool((one - other)[:, :, -2].abs().max() > 1e-4) == leaks


@pytest.mark.parametrize("backend", ["auto", *(name for name in BACKENDS if name != "triton")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_bias_finer_than_the_queries_is_not_rounded(backend, dtype, tokens):
    q = torch.randn(1, HEADS, tokens, WIDTH, dtype=dtype)
    k, v = torch.randn(2, 1, HEADS, TOKENS, WIDTH, dtype=dtype)
    bias = DistanceBias(100 * torch.randn(HEADS, TOKENS))
    exact = attention(q.double(), k.double(), v.double(), bias=DistanceBias(bias.values.double()))
    try:
        found = attention(q, k, v, bias=bias, backend=backend)
    except ValueError as error:
        assert backend != "auto"
        assert "round the bias" in str(error)  # noqa: PT017 (the reason is the point)
        return
    assert (found - exact).abs().max() <= torch.finfo(dtype).eps * v.abs().max()


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_autocast_changes_nothing(name, backend):
    """The op computes in the dtype of its arguments, and so does the bias that it evaluates; gradients as well."""
    program = programs()[name]
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, HEADS, TOKENS, WIDTH).unbind())
    weight = torch.randn(WIDTH, WIDTH)
    bias = TileBias(lambda rows, num_keys: (q[:, :, rows] @ weight) @ k[:, :, :num_keys].mT, batch=2)
    out = attention(q, k, v, program, bias=bias, backend=backend)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    weights = attention_weights(q, k, program, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = attention(q, k, v, program, bias=bias, backend=backend)
        assert torch.equal(again, out)
        assert torch.equal(attention_weights(q, k, program, bias=bias), weights)
    for grad, other in zip(grads, torch.autograd.grad(again.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, other)


def test_a_backward_pass_under_autocast_changes_nothing():
    """In the kernel, whose derivative is its own; elsewhere products of autograd are cast, as PyTorch says."""
    program = programs()["pair"]
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, HEADS, TOKENS, WIDTH).unbind())
    bias = DistanceBias(torch.randn(HEADS, TOKENS))
    out = attention(q, k, v, program, bias=bias, backend="cpu")
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for grad, other in zip(grads, again, strict=True):
        torch.testing.assert_close(grad, other)
