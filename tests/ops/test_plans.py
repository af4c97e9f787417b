"""Plans: what is decided once for a signature, and what must show at once when it changes."""

import sys

import pytest
import torch
from op_cases import needs_kernel

import dape
from dape.models.attention import Attention, Context
from dape.ops.score_attention.plans import PLANS

pytestmark = needs_kernel


def call(conv, queries=1, keys=40, *, heads=4, **options):
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, heads, n, 8, generator=generator) for n in (queries, keys, keys))
    bias = dape.DistanceBias(torch.randn(heads, keys, generator=generator))
    return dape.attention(q, k, v, conv, **{"bias": bias, **options})


def python_calls(function, events=("call", "c_call")):
    """Number of calls of functions, of Python and of C, that a call makes."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in events

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@torch.no_grad()
def test_a_step_of_decoding_makes_few_calls():
    conv = dape.ScoreConv(4)
    call(conv, keys=40)
    before = len(PLANS.known)
    assert python_calls(lambda: call(conv, keys=41)) <= 88  # of which the arguments take 15
    assert len(PLANS.known) == before


def test_a_layer_makes_few_calls_of_python():
    layer, encoding = Attention(128, 4, scores=dape.ScoreConv(4)), dape.POSITIONS["kerple"](4)
    x, context = torch.randn(2, 32, 128), Context(dape.Positions.of(32))
    own, q = dape.ScoreAttention(num_heads=4, head_dim=32), torch.randn(2, 4, 32, 32)
    for step, most in ((lambda: layer(x, encoding, context), 90), (lambda: own(q, q, q), 75)):
        step()
        assert python_calls(step, ("call",)) <= most + 1  # the step itself


LAYOUTS = {
    "as made": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "room behind": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "features apart": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_step_reads_each_layout_and_length(layout):
    conv, arrange = dape.ScoreConv(4), LAYOUTS[layout]
    for queries, keys in ((1, 40), (1, 41), (1, 700), (3, 41), (3, 9)):
        q, k, v = (arrange(torch.randn(2, heads, n, 8)) for heads, n in ((4, queries), (2, keys), (2, keys)))
        table = torch.randn(4, 2 * keys)
        for bias in (
            None,
            dape.DistanceBias(table, 0),
            dape.DistanceBias(table[:, 1:], -2),
            dape.DistanceBias(table.T.contiguous().T),
        ):
            program = None if bias is None else conv
            for _ in range(2):
                out = dape.attention(q, k, v, program, bias=bias)
                exact = dape.attention(q, k, v, program, bias=bias, backend="reference")
                torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)


CHANGES = {
    "left": lambda conv: setattr(conv, "left", 2),
    "slope": lambda conv: setattr(conv, "negative_slope", 0.5),
    "residual": lambda conv: setattr(conv, "residual", "scores"),
    "weights": lambda conv: torch.nn.init.normal_(conv.expand.weight),
    "parameter": lambda conv: setattr(conv.expand, "bias", torch.nn.Parameter(torch.ones(32))),
    "hook": lambda conv: conv.expand.register_forward_hook(lambda module, inputs, out: (2 * out[0], out[1])),
    "kernel": lambda conv: setattr(conv, "expand", dape.ScoreConv(4, kernel_size=5).expand),
}


@pytest.mark.parametrize("queries", [1, 12])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_of_a_module_shows_in_the_next_call(change, queries):
    conv = dape.ScoreConv(4)
    before = [call(conv, queries) for _ in range(2)]
    assert torch.equal(*before)
    CHANGES[change](conv)
    after, expected = call(conv, queries), call(conv, queries, backend="reference")
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after, before[0], rtol=1e-3, atol=1e-4)


WRONG = {
    "too few distances": {"bias": dape.DistanceBias(torch.zeros(4, 39))},
    "distances from 1 on": {"bias": dape.DistanceBias(torch.zeros(4, 40), 1)},
    "another number of heads": {"bias": dape.DistanceBias(torch.zeros(3, 40))},
    "another dtype": {"bias": dape.DistanceBias(torch.zeros(4, 40, dtype=torch.float64))},
    "no bias": {"bias": None},
    "an infinite scale": {"scale": float("inf")},
    "dropout of 1": {"dropout": 1.0},
    "bounds of three rows": {"visible": dape.Visible(torch.zeros(3, 1, dtype=torch.long))},
    "bounds that are no integers": {"visible": dape.Visible(torch.zeros(2, 1))},
    "an unknown backend": {"backend": "lunar"},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_is_refused_after_a_right_one(wrong):
    conv = dape.ScoreConv(4)
    for visible in (None, dape.Visible(torch.zeros(2, 1, dtype=torch.long))):
        call(conv, visible=visible)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)):
            call(conv, **WRONG[wrong])


@pytest.mark.parametrize(
    "method", ["kerple", "dape1x3-kerple", "dape3x3-kerple", "talking-kerple", "dape-kerple[normaliser=sink]"]
)
def test_planned_calls_equal_the_reference(method):
    """Every form of visibility, with gradients and without, a second time with other lengths."""
    scores = dape.parse_method(method).build_scores(4)
    for visible in (
        None,
        dape.Visible(torch.tensor([[0], [3]])),
        dape.Visible(last=torch.tensor([[30], [9]])),
    ):
        for queries, keys in ((1, 33), (1, 40), (12, 40), (12, 33)):
            results = []
            for backend in ("auto", "reference"):
                options = {"visible": visible, "backend": backend}
                with torch.no_grad():
                    bare = call(scores, queries, keys, **options)
                out = call(scores, queries, keys, **options)
                wanted = list(scores.parameters())
                gradients = torch.autograd.grad(out.square().sum(), wanted) if wanted else ()
                results.append((bare, out.detach(), *gradients))
            for found, expected in zip(*results, strict=True):
                torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("queries", [1, 12])
@torch.no_grad()
def test_calls_alike_give_the_same_in_every_dtype_of_the_program_and_the_bias(queries):
    conv, (q, k, v) = dape.ScoreConv(4).bfloat16(), torch.randn(3, 1, 4, 40, 8).bfloat16()
    for values in (torch.randn(4, 40), torch.randn(4, 40).bfloat16()):
        bias = dape.DistanceBias(values)
        first, second = (dape.attention(q[:, :, -queries:], k, v, conv, bias=bias) for _ in range(2))
        assert torch.equal(first, second)
