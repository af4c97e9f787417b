"""Every score program: the definition against loops over its words, the tiled backend against both."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from op_cases import BIASES, PROGRAMS, VISIBILITIES, Case, assert_as_exact, assert_equal, build, replace

import dape
from dape.ops.score_attention import PLAIN, DistanceBias, Visible, attention, native, reference, tiled_program
from dape.ops.score_attention.api import choose
from dape.ops.score_attention.types import Problem

# Kernel over queries, kernel over keys, padding, depth.
STACKS = [(3, 3, "same", 2), (2, 2, "causal", 2), (4, 1, "same", 2), (1, 3, "same", 3), (1, 4, "same", 4), (2, 3, "causal", 3)]  # fmt: skip
SHAPES = [(11, 11), (9, 13), (1, 6), (1, 1), (22, 25)]


def stack(number: int, **changes) -> Case:
    query_kernel, kernel, padding, depth = STACKS[number % len(STACKS)]
    return Case(query_kernel=query_kernel, kernel=kernel, padding=padding, depth=depth, **changes)


def problem(call, dropout=0.0):
    return Problem(
        call.q, call.k, call.v, call.program or PLAIN, call.bias, call.visible, call.causal, 0.5, dropout
    )


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
            factor = program.length_scale[:, None] * math.log(len(shown))
            row = row * (factor if program.length_offset is None else factor + program.length_offset[:, None])
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


SMALL = {"heads": 2, "groups": 1, "head_dim": 2, "width": 2}


@pytest.mark.parametrize("visible", [*VISIBILITIES, "documents"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("query_kernel", "kernel", "depth", "keys"), [(3, 3, 2, 6), (2, 2, 3, 5), (1, 3, 3, 7)]
)
def test_the_definition_is_its_words(query_kernel, kernel, depth, keys, causal, visible):
    case = Case(queries=5, keys=keys, query_kernel=query_kernel, kernel=kernel, depth=depth, bias="dense",
                causal=causal, visible=visible, **SMALL)  # fmt: skip
    call = build(case)
    with torch.no_grad():
        torch.testing.assert_close(reference.weights(problem(call)), by_words(call), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("visible", [*VISIBILITIES, "documents"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_definition_of_every_program_is_its_words(program, causal, visible):
    bias = "none" if program == "talking" else "separable"
    case = Case(program=program, batch=2, heads=4, groups=2, head_dim=2, width=3, queries=5, keys=6,
                bias=bias, causal=causal, visible=visible)  # fmt: skip
    call = build(case)
    with torch.no_grad():
        torch.testing.assert_close(reference.weights(problem(call)), by_words(call), rtol=1e-11, atol=1e-11)


def table():
    shapes, residuals = itertools.cycle(SHAPES), itertools.cycle(["scores+bias", "scores", "scores"])
    options = itertools.product(BIASES, (True, False), [*VISIBILITIES, "documents"])
    for number, (bias, causal, visible) in enumerate(options):
        queries, keys = next(shapes)
        yield stack(number, queries=queries, keys=keys, bias=bias, causal=causal, visible=visible,
                    residual=next(residuals))  # fmt: skip
    yield stack(0, heads=6, groups=2, queries=9, keys=20)
    yield stack(3, heads=4, groups=1, bias="none", queries=20, keys=20)
    yield stack(5, leak=True, queries=9, keys=12, visible="left padding")
    yield stack(4, leak=True, bias="dense", visible="rows that see nothing")
    yield stack(0, leak=True, causal=False, queries=9, keys=9)
    yield stack(3, causal=False, queries=20, keys=5)
    yield stack(0, batch=0)
    options = itertools.product(PROGRAMS, (True, False), [*VISIBILITIES, "documents"])
    biases = itertools.cycle(BIASES)
    for program, causal, visible in options:
        queries, keys = next(shapes)
        yield Case(program=program, heads=4, groups=2, queries=queries, keys=keys, bias=next(biases), causal=causal,
                   visible=visible)  # fmt: skip


@pytest.mark.parametrize("rows", [2, 64], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("case", list(table()), ids=lambda case: f"{case.program or (case.query_kernel, case.kernel, case.depth)}-{case.bias}-{case.causal}-{case.visible}")  # fmt: skip
def test_tiles_equal_the_definition(case, rows, monkeypatch):
    monkeypatch.setattr(tiled_program, "MOST_ROWS", rows)
    if rows == 2:
        monkeypatch.setattr(tiled_program, "PIXELS", 1)
        monkeypatch.setattr(tiled_program, "FEWEST_COLUMNS", 3)
    call = build(case)
    assert_equal(call.results("tiled"), call.results("reference"))


@pytest.mark.parametrize("case", [stack(0, queries=40, keys=40), stack(3, queries=40, keys=40, bias="dense")])
def test_float32_is_as_exact_as_the_definition(case):
    assert_as_exact(case, "tiled")


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("number", range(len(STACKS)))
def test_a_row_depends_on_nothing_after_it(number, backend):
    call = build(stack(number, queries=12, keys=12, bias="dense"))
    whole = call.attend(backend)
    for stop in (1, 2, 7):
        part = attention(
            *(x[:, :, :stop] for x in (call.q, call.k, call.v)), call.program,
            bias=call.bias[:, :, :stop, :stop], backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(part, whole[:, :, :stop], rtol=1e-11, atol=1e-11)
    grads = torch.autograd.grad(whole[:, :, 5].square().sum(), [call.q, call.k, call.v, call.bias])
    assert not any(grad[:, :, 6:].any() for grad in grads)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("number", range(len(STACKS)))
def test_padding_and_neighbours_in_a_row_change_nothing(number, backend):
    """A document behind padding or another document, and padding after it, gives what it gives alone."""
    call = build(stack(number, batch=1, queries=9, keys=9))
    alone = call.attend(backend)
    around = [F.pad(x, (0, 0, 5, 3), value=7.0) for x in (call.q, call.k, call.v)]
    bias = DistanceBias(F.pad(call.bias.values, (0, 8), value=3.0), call.bias.lowest)
    place = torch.arange(17)[None]
    for visible in (
        Visible.from_padding(((place >= 5) & (place < 14)).long()),
        Visible(first=torch.where(place < 5, 0, torch.where(place < 14, 5, 14))),
    ):
        out = attention(*around, call.program, bias=bias, visible=visible, backend=backend)
        torch.testing.assert_close(out[:, :, 5:14], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("number", range(len(STACKS)))
def test_chunks_that_bring_their_earlier_queries_equal_the_whole(number, backend):
    call = build(stack(number, queries=20, keys=20))
    whole, reach = call.attend(backend), call.program.earlier_rows

    def chunk(start, stop):
        return attention(
            call.q[:, :, start:stop], call.k[:, :, :stop], call.v[:, :, :stop], call.program,
            bias=call.bias, backend=backend,
        )  # fmt: skip

    for start, stop in ((10, 13), (13, 20)):
        rows = chunk(start - reach, stop)[:, :, reach:]
        torch.testing.assert_close(rows, whole[:, :, start:stop], rtol=1e-11, atol=1e-11)
        assert torch.allclose(chunk(start, stop), whole[:, :, start:stop]) == (reach == 0)


def test_dropout_is_the_same_in_both_passes(monkeypatch):
    monkeypatch.setattr(tiled_program, "MOST_ROWS", 5)
    call = build(stack(0, queries=12, keys=12, head_dim=12))
    weights = reference.weights(problem(call))
    identity = torch.eye(12, dtype=torch.float64).expand_as(call.v)
    torch.manual_seed(5)
    dropped = tiled_program.attend(replace(problem(call, dropout=0.4), v=identity)).detach()
    mask = dropped / weights.detach().clamp(min=1e-300)
    assert set(mask[weights > 0].round(decimals=6).tolist()) == {0.0, round(1 / 0.6, 6)}
    torch.manual_seed(5)
    out = tiled_program.attend(problem(call, dropout=0.4))
    # Whatever is drawn in between, the backward pass draws what the forward pass drew.
    torch.manual_seed(6)
    leaves = list(call.leaves.values())
    ours = torch.autograd.grad(out.square().sum(), leaves)
    truth = torch.autograd.grad(((weights * mask) @ call.v).square().sum(), leaves)
    assert_equal(dict(enumerate(ours)), dict(enumerate(truth)))


def test_auto_takes_the_backend_that_can_and_the_others_say_why(monkeypatch):
    monkeypatch.setattr(native, "PROBLEM", None)
    call = build(stack(0), torch.float32)
    assert choose(problem(call)).__name__.endswith(".cpu")
    monkeypatch.setattr(native, "PROBLEM", native.NOT_BUILT)
    assert choose(problem(call)).__name__.endswith(".tiled")
    sentence = 'backend="sdpa" cannot run this call: it supports plain scores only'
    with pytest.raises(ValueError, match=sentence):
        call.attend("sdpa")


def test_more_queries_than_keys_are_refused():
    call = build(stack(0, causal=False, queries=7, keys=5))
    with pytest.raises(
        ValueError, match="several queries needs a key for every query, got 7 queries and 5 keys"
    ):
        call.attend("auto")


@pytest.mark.parametrize("sizes", [(2, 0), (0, 3)], ids=["no queries", "no batch entries"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_call_without_numbers_has_gradients_of_zero(sizes, dense):
    batch, queries = sizes
    q = torch.randn(batch, 4, queries, 8)
    k, v = (torch.randn(batch, 4, 5, 8, requires_grad=True) for _ in range(2))
    processor = dape.ScoreConv(4)
    bias = torch.randn(1, 4, queries, 5) if dense else dape.DistanceBias(torch.randn(4, 5))
    out = dape.attention(q, k, v, processor, bias=bias)
    assert out.shape == q.shape
    for gradient in torch.autograd.grad(out.sum(), [k, v, *processor.parameters()]):
        assert not gradient.any()
