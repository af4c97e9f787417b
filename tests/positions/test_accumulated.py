"""Biases that add up over the tokens: after 65,536 of them they are as exact as at the start."""

import pytest
import torch

import dape
from dape.ops.score_attention import SeparableBias
from dape.ops.score_attention.types import EVERYTHING
from dape.positions import DataAlibi, FoX, Positions

DTYPES = (torch.float32, torch.float64)
TOKENS, QUERIES, HEADS = 65_536, 24, 2


@pytest.fixture(scope="module", params=[FoX, DataAlibi])
def call(request):
    """q, k, v, the encoding and its state at the end of a long text; its sums are many thousands."""
    torch.manual_seed(0)
    encoding = request.param(HEADS, 8)
    with torch.no_grad():
        encoding.offset.fill_(-0.5)
        state = encoding.token_state(torch.randn(1, TOKENS, 8))
    q = torch.randn(1, HEADS, QUERIES, 8)
    k, v = torch.randn(2, 1, HEADS, TOKENS, 8)
    return encoding, state, q, k, v


def bias_of(encoding, state, q, k) -> SeparableBias:
    keys = torch.arange(k.shape[2])[None]
    positions = Positions(keys[:, -q.shape[2] :], keys, causal=True, visible=EVERYTHING, consecutive=True)
    return encoding.bias(q, k, positions, scale=1.0, state=state)


@pytest.mark.parametrize("backend", ["reference", "tiled", "cpu"])
@pytest.mark.parametrize("scores", ["plain", "conv"])
def test_attention_at_65536_tokens(call, backend: str, scores: str) -> None:
    encoding, state, q, k, v = call
    torch.manual_seed(1)
    processor = None if scores == "plain" else dape.ScoreConv(HEADS, kernel_size=3)
    bias = bias_of(encoding, state, q, k)
    total = state[..., 0].double().cumsum(-1)
    exact = total[:, :, -QUERIES:, None] - total[:, :, None]
    tiles = {
        dtype: dape.TileBias(lambda rows, n, dtype=dtype: exact[:, :, rows, :n].to(dtype), 1)
        for dtype in DTYPES
    }
    assert total.abs().max() > 2_000

    def output(dtype, bias, backend):
        program = None if processor is None else processor.to(dtype).program()
        with torch.no_grad():
            return dape.attention(q.to(dtype), k.to(dtype), v.to(dtype), program, bias=bias, backend=backend)

    wanted = output(torch.float64, tiles[torch.float64], "reference")
    # What float32 loses if the bias itself is exact.
    lost = (output(torch.float32, tiles[torch.float32], "reference") - wanted).abs().max()
    assert (output(torch.float32, bias, backend) - wanted).abs().max() <= 2 * lost


def test_gradients_keep_the_dtype_of_the_state(call) -> None:
    encoding, state, q, k, v = call
    given = state[:, :, -64:].clone().requires_grad_()
    bias = bias_of(encoding, given, q, k[:, :, -64:])
    dape.attention(q, k[:, :, -64:], v[:, :, -64:], bias=bias, backend="cpu").sum().backward()
    assert given.grad is not None
    assert given.grad.dtype == torch.float32
    double = state[:, :, -64:].double().requires_grad_()
    total = double[..., 0].cumsum(-1)
    exact = total[:, :, -QUERIES:, None] - total[:, :, None]
    dape.attention(q.double(), k[:, :, -64:].double(), v[:, :, -64:].double(), bias=exact).sum().backward()
    torch.testing.assert_close(given.grad, double.grad.float(), rtol=1e-4, atol=1e-5)
