"""The definition itself: what must hold of it, against formulas written here, and every refusal of a bad call."""

import itertools
import math
import re

import pytest
import torch
from op_cases import BIASES, PROGRAMS, VISIBILITIES, Case, build, replace

from dape.bench.listing import listing_attention
from dape.ops.score_attention import (
    DistanceBias,
    ScoreProgram,
    SeparableBias,
    Stage,
    TileBias,
    Visible,
    attention,
    conv_program,
    reference,
)
from dape.ops.score_attention.api import make_problem

BACKENDS = ["reference", "tiled"]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def problem(call):
    given = {"bias": call.bias, "visible": call.visible, "causal": call.causal, "scale": 0.5}
    return make_problem(call.q, call.k, call.v, call.program, **given)


def by_words(call):
    """The weights, pixel by pixel: what a pixel reads is what the definition says that it reads."""
    (batch, heads, queries, _), keys, program = call.q.shape, call.k.shape[2], call.program
    scores = call.q @ call.k.repeat_interleave(heads // call.k.shape[1], 1).mT * 0.5
    if program.softcap:
        scores = program.softcap * torch.tanh(scores / program.softcap)
    bias = problem(call).dense_bias()
    bias = torch.zeros_like(scores) if bias is None else bias.expand_as(scores)
    first, last = (
        x.expand(batch, queries).tolist()
        for x in call.visible.bounds(queries, keys, causal=call.causal, device=call.q.device)
    )

    def channels(b, i, j):
        """What the first stage reads of a pixel, in its order."""
        if not program.pre or program.pre[0].inputs == heads:
            return scores[b, :, i, j]
        groups = program.pre[0].groups
        parts = (x[b, :, i, j].view(groups, -1) for x in (scores, bias))
        return torch.cat(list(parts), 1).flatten()

    def pixel(stages, image, layer, b, i, j):
        """All channels of map `layer` at query i, key j, where it may be read; 0 is the image."""
        if first[b][i] > last[b][i] or j < first[b][i]:
            return None
        if j > last[b][i] and (layer == 0 or not call.causal):
            return None
        if layer == 0:
            return image(b, i, j)
        stage = stages[layer - 1]
        total = torch.zeros(stage.outputs, dtype=torch.float64) if stage.offset is None else stage.offset
        kernel = itertools.product(range(stage.query_kernel_size), range(stage.kernel_size))
        for above, tap in kernel:
            row, column = i - above, j + tap - stage.left
            # An earlier row is there if the row sees the key where that row's token stands.
            if row < 0 or (above and row + keys - queries < first[b][i]):
                continue
            source = pixel(stages, image, layer - 1, b, row, column)
            if source is not None:
                weight = stage.weight[:, :, stage.query_kernel_size - 1 - above, tap]
                mixed = weight.view(stage.groups, -1, weight.shape[1]) @ source.view(stage.groups, -1, 1)
                total = total + mixed.flatten()
        return torch.where(total > 0, total, stage.slope * total)

    weights = torch.zeros_like(scores)
    for b, i in itertools.product(range(batch), range(queries)):
        shown = range(max(0, first[b][i]), last[b][i] + 1)
        if not shown:
            continue
        logits = []
        for j in shown:
            s, d = scores[b, :, i, j], bias[b, :, i, j]
            if program.pre:
                residual = {"scores+bias": s + d, "scores": s, "bias": d, "none": 0 * s}[program.residual]
                s, d = residual, pixel(program.pre, channels, len(program.pre), b, i, j)
            logits.append(s + d)
        row = torch.stack(logits, -1)
        if program.length_scale is not None:
            power = 1.0 if program.length_power is None else program.length_power
            offset = 0.0 if program.length_offset is None else program.length_offset
            factor = offset + program.length_scale * math.log(len(shown) + program.length_shift) ** power
            row = row * factor[:, None]
        denominator = row.exp().sum(-1, keepdim=True)
        if program.sink is not None:
            denominator = denominator + program.sink.exp()[:, None]
        weights[b, :, i, shown.start : shown.stop] = row.exp() / denominator
    if not program.post:
        return weights
    mixed = torch.zeros_like(weights)
    for b, i in itertools.product(range(batch), range(queries)):
        for j in range(max(0, first[b][i]), last[b][i] + 1):
            mixed[b, :, i, j] = pixel(
                program.post, lambda b, i, j: weights[b, :, i, j], len(program.post), b, i, j
            )
    return mixed


TINY = Case(heads=4, groups=2, width=3, head_dim=2, queries=5, keys=6, bias="separable")
DEFINED = [
    TINY.but(
        heads=2, groups=1, width=2, keys=keys, query_kernel=rows, kernel=kernel, depth=depth, bias="dense"
    )
    for rows, kernel, depth, keys in ((3, 3, 2, 6), (2, 2, 3, 5), (1, 3, 3, 7))
]
DEFINED += [TINY.but(program=name) for name in PROGRAMS if name != "talking"]
DEFINED += [
    TINY.but(program="talking", bias="none"),
    TINY.but(kernel=1),
    TINY.but(kernel=1, residual="scores"),
]


@pytest.mark.parametrize("visible", VISIBILITIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", DEFINED, ids=str)
@torch.no_grad()
def test_the_definition_is_its_words(case, causal, visible):
    call = build(case.but(causal=causal, visible=visible))
    close(reference.weights(problem(call)), by_words(call))


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_listing_up_to_its_edge(kernel, backend):
    call = build(Case(queries=20, keys=20, kernel=kernel, bias="dense"))
    rows = slice(0, 20 - kernel // 2)
    listing = listing_attention(call.q, call.k, call.v, call.program, call.bias)
    close(call.attend(backend)[:, :, rows], listing[:, :, rows])
    if kernel > 1:
        assert not torch.allclose(call.attend(backend)[:, :, -1], listing[:, :, -1])


@pytest.mark.parametrize("bias", BIASES)
def test_rows_that_see_nothing_are_zero_with_zero_gradients(bias):
    call = build(Case(bias=bias))
    call.visible = Visible(first=torch.full((1, 1), 4))
    out = call.attend("reference")
    assert not out[:, :, :4].any()
    (grad,) = torch.autograd.grad(out.sum(), call.q)
    assert not grad[:, :, :4].any()
    assert grad.isfinite().all()


def test_reference_differentiates_twice():
    call = build(Case(batch=1, heads=2, groups=2, queries=4, keys=4, head_dim=2, width=3))
    # Away from zero LeakyReLU is smooth.
    inputs = (call.q, call.k, call.v)
    attend = lambda q, k, v: attention(  # noqa: E731 (a name for a line)
        q, k, v, call.program, bias=call.bias, backend="reference"
    )
    assert torch.autograd.gradcheck(attend, inputs)
    assert torch.autograd.gradgradcheck(attend, inputs)


Q = torch.zeros(2, 4, 6, 8)
CONV = conv_program(torch.zeros(5, 8, 1, 3), torch.zeros(5), torch.zeros(4, 5, 1, 3), torch.zeros(4), 1)
BIAS = torch.zeros(1, 4, 6, 6)


def staged(index, **changes):
    """The program with another stage at `index`."""
    stages = list(CONV.pre)
    stages[index] = replace(stages[index], **changes)
    return replace(CONV, pre=tuple(stages))


WRONG = {
    "q of three dimensions": ({"q": Q[0]}, ValueError, "q has shape .4, 6, 8., expected .batch, heads"),
    "integers": ({"k": Q.long()}, TypeError, "k has dtype torch.int64, expected a floating"),
    "mixed dtypes": ({"v": Q.double()}, TypeError, "different dtypes: torch.float32, torch.float32, torch.float64"),
    "mixed devices": ({"k": Q.to("meta")}, ValueError, "different devices: cpu, meta, cpu"),
    "k unlike v": ({"v": Q[:, :, :5]}, ValueError, "k has shape .2, 4, 6, 8. and v .2, 4, 5, 8."),
    "batches": ({"k": Q[:1], "v": Q[:1]}, ValueError, "q has batch size 2 and k 1"),
    "head widths": ({"k": Q[..., :4], "v": Q[..., :4]}, ValueError, "q has head_dim 8 and k 4"),
    "heads": ({"k": Q[:, :3], "v": Q[:, :3]}, ValueError, "3 key/value heads do not divide 4 query heads"),
    "no features": ({"q": Q[..., :0], "k": Q[..., :0], "v": Q[..., :0]}, ValueError, "head_dim must be at least 1"),
    "no keys": ({"k": Q[:, :, :0], "v": Q[:, :, :0]}, ValueError, "no keys to attend to"),
    "fewer keys than queries": ({"k": Q[:, :, :5], "v": Q[:, :, :5]}, ValueError, "a key for every query"),
    "bias shape": ({"bias": BIAS[:, :, :5]}, ValueError, "bias has shape .1, 4, 5, 6., expected .1 or 2, 4, 6, 6"),
    "bias dtype": ({"bias": BIAS.double()}, TypeError, "bias has dtype torch.float64 but q has torch.float32"),
    "bias device": ({"bias": BIAS.to("meta")}, ValueError, "bias is on meta, q on cpu"),
    "bias by distance, heads": ({"bias": DistanceBias(torch.zeros(3, 6))}, ValueError, "bias.values has"),
    "bias by distance, too short": (
        {"bias": DistanceBias(torch.zeros(4, 5))}, ValueError, "covers distances 0 to 4, but the tokens are 0 to 5"),
    "bias by distance, one-sided": (
        {"bias": DistanceBias(torch.zeros(4, 6)), "causal": False}, ValueError, "covers distances 0 to 5, .* -5 to 5"),
    "tile bias batch": (
        {"bias": TileBias(lambda rows, n: BIAS, batch=3)}, ValueError, "batch=3, expected 1 or 2"),
    "tile bias shape": ({"bias": TileBias(lambda rows, n: BIAS[..., :2])}, ValueError, "tile bias gave"),
    "bias of another type": ({"bias": [1.0]}, TypeError, "bias is a list, expected None, a tensor"),
    "program of another type": ({"program": torch.nn.Conv2d(8, 4, 1)}, TypeError, "program is a Conv2d"),
    "program of other heads": (
        {"program": staged(0, weight=torch.zeros(5, 6, 1, 3))}, ValueError,
        r"pre.0. reads 6 channels, but the scores have 4 heads: build it with num_heads=4"),
    "outputs of other heads": (
        {"program": staged(1, weight=torch.zeros(8, 5, 1, 3), offset=None)}, ValueError,
        "last stage of pre gives 8 channels, expected the 4 heads"),
    "bias channels without a bias": ({"bias": None}, ValueError, "bias=None: build it with bias_channels=False"),
    "channels between stages": (
        {"program": staged(1, weight=torch.zeros(4, 7, 1, 3))}, ValueError, r"pre.1. reads 7 channels, but gets 5"),
    "weight of three dimensions": (
        {"program": staged(1, weight=torch.zeros(4, 5, 3))}, ValueError, r"pre.1..weight has shape .4, 5, 3., expected"),
    "offset": ({"program": staged(1, offset=torch.zeros(5))}, ValueError, r"pre.1..offset has shape .5"),
    "program dtype": ({"program": CONV.to(torch.float64)}, TypeError, "pre.0.weight has dtype"),
    "left": ({"program": staged(0, left=3)}, ValueError, r"pre.0..left=3 is outside its kernel of 3 keys"),
    "slope": ({"program": staged(0, slope=-0.1)}, ValueError, r"pre.0..slope=-0.1 must be finite and not negative"),
    "groups of outputs": (
        {"program": staged(0, groups=2, weight=torch.zeros(5, 4, 1, 3))}, ValueError, "groups=2, which does not divide its 5 outputs"),
    "groups of heads": (
        {"program": replace(CONV, pre=(Stage(torch.zeros(6, 1, 1, 1), groups=8), CONV.pre[1]))}, ValueError, "groups=8"),
    "residual": ({"program": replace(CONV, residual="all")}, ValueError, 'residual="all", expected one of'),
    "residual alone": ({"program": ScoreProgram(residual="none")}, ValueError, "would drop the scores"),
    "post": (
        {"program": ScoreProgram(post=(Stage(torch.zeros(4, 8, 1, 1)),))}, ValueError, r"post.0. reads 8 channels, but gets 4"),
    "a leak after the softmax": (
        {"program": replace(CONV, post=(Stage(torch.zeros(4, 4, 1, 1)),), leak_future=True)}, ValueError, "before the softmax alone"),
    "sink": ({"program": ScoreProgram(sink=torch.zeros(3))}, ValueError, "sink has shape .3,., expected .4 heads"),
    "length scale": (
        {"program": ScoreProgram(length_scale=torch.zeros(4, 1))}, ValueError, "length_scale has shape .4, 1., expected .4 heads"),
    "soft cap": ({"program": ScoreProgram(softcap=0.0)}, ValueError, "softcap=0.0 must be positive"),
    "queries before a kernel's": (
        {"program": ScoreProgram((Stage(torch.zeros(4, 1, 2, 1), groups=4),)), "k": Q[:, :, :5], "v": Q[:, :, :5],
         "bias": None, "causal": False}, ValueError, "needs a key for every query, got 6 queries and 5 keys"),
    "separable bias": (
        {"bias": SeparableBias(torch.zeros(1, 4, 5), torch.zeros(1, 4, 6))}, ValueError, "bias.row has shape .1, 4, 5., expected"),
    "visible as a mask": (
        {"visible": torch.ones(2, 6, dtype=torch.bool)}, TypeError, "visible is a Tensor, expected a dape.Visible"),
    "visible of floats": ({"visible": Visible(first=torch.zeros(1, 1))}, TypeError, "visible.first holds key indices"),
    "visible of booleans": (
        {"visible": Visible(last=torch.ones(1, 1, dtype=torch.bool))}, TypeError, "visible.last holds key indices"),
    "visible shape": (
        {"visible": Visible(last=torch.ones(3, 1, dtype=torch.long))}, ValueError,
        "visible.last has shape .3, 1., expected .1 or 2, 1 or 6."),
    "scale": ({"scale": float("nan")}, ValueError, "scale=nan is not finite"),
    "dropout": ({"dropout": 1.0}, ValueError, "dropout=1.0 is not a probability"),
    "unknown backend": ({"backend": "fast"}, ValueError, 'unknown backend "fast": choose "auto" or one of'),
    "backend that cannot": ({"backend": "sdpa"}, ValueError, 'backend="sdpa" cannot run this call: it supports plain scores only'),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_refused_with_a_sentence(change, error, sentence):
    call = {"q": Q, "k": Q, "v": Q, "program": CONV, "bias": BIAS} | change
    with pytest.raises(error, match=re.compile(sentence)):
        attention(**call)


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "jvp of vmap": lambda f, x: TRANSFORMS["jvp"](torch.func.vmap(f), x[None]),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x[None]),
}


def forward_mode(f, x):
    with torch.autograd.forward_ad.dual_level():
        out = f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


# PyTorch's own, in the forward mode and under vmap.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["q", "w1", "bias"])
@pytest.mark.parametrize("transform", [*TRANSFORMS.values(), forward_mode], ids=[*TRANSFORMS, "dual"])
def test_function_transforms_are_right_or_refused(transform, name):
    """PyTorch would return zero tangents, in silence, from a derivative that is written for backward()."""
    call = build(Case(), torch.float32)
    fixed = {key: leaf.detach() for key, leaf in call.leaves.items()}

    def attend(x, backend):
        given = {**fixed, name: x}
        conv = conv_program(*(given[key] for key in ("w1", "b1", "w2", "b2")), call.program.pre[0].left)
        bias = DistanceBias(given["bias"], call.bias.lowest)
        return attention(given["q"], given["k"], given["v"], conv, bias=bias, backend=backend)

    expected = transform(lambda x: attend(x, "reference"), fixed[name])
    assert expected.abs().max() > 0
    torch.testing.assert_close(transform(lambda x: attend(x, "auto"), fixed[name]), expected)
    for backend in ("tiled", "cpu"):
        with pytest.raises(ValueError, match=f'backend="{backend}" cannot run this call: '):
            transform(lambda x, backend=backend: attend(x, backend), fixed[name])
