"""Square kernels and deeper stacks: the definition against loops over its words, the tiled backend against both."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from op_cases import BIASES, VISIBILITIES, Case, assert_as_exact, assert_equal, build, replace

from dape.ops.score_attention import DistanceBias, Visible, attention, native, tiled_stack
from dape.ops.score_attention.api import choose
from dape.ops.score_attention.reference import logits, softmax_visible
from dape.ops.score_attention.types import Problem

# Kernel over queries, kernel over keys, padding, depth.
STACKS = [(3, 3, "same", 2), (2, 2, "causal", 2), (4, 1, "same", 2), (1, 3, "same", 3), (1, 4, "same", 4), (2, 3, "causal", 3)]  # fmt: skip
SHAPES = [(11, 11), (9, 13), (1, 6), (1, 1), (22, 25)]


def stack(number: int, **changes) -> Case:
    query_kernel, kernel, padding, depth = STACKS[number % len(STACKS)]
    return Case(query_kernel=query_kernel, kernel=kernel, padding=padding, depth=depth, **changes)


def problem(call, dropout=0.0):
    return Problem(call.q, call.k, call.v, call.conv, call.bias, call.visible, call.causal, 0.5, dropout)


def by_words(call):
    """The logits, pixel by pixel: what a pixel reads is what the definition says that it reads."""
    (batch, _, queries, _), keys, conv = call.q.shape, call.k.shape[2], call.conv
    scores = call.q @ call.k.mT * 0.5
    bias = problem(call).dense_bias()
    image = scores if bias is None else torch.cat([scores, bias.expand_as(scores)], 1)
    first, last = (
        x.expand(batch, queries).tolist()
        for x in call.visible.bounds(queries, keys, causal=call.causal, device=call.q.device)
    )
    out = torch.full_like(scores, -torch.inf)

    for b in range(batch):

        def pixel(layer, i, j, b=b):
            """All channels of map `layer` at query i, key j, where it may be read; 0 is the image."""
            if first[b][i] > last[b][i] or j < first[b][i]:
                return None
            if j > last[b][i] and (layer == 0 or not call.causal):
                return None
            if layer == 0:
                return image[b, :, i, j]
            total = conv.layers[layer - 1][1]
            for above, tap in itertools.product(range(conv.query_kernel_size), range(conv.kernel_size)):
                row, column = i - above, j + tap - conv.left
                # An earlier row is there if the row sees the key where that row's token stands.
                if row < 0 or (above and row + keys - queries < first[b][i]):
                    continue
                source = pixel(layer - 1, row, column)
                if source is not None:
                    weight = conv.layers[layer - 1][0][:, :, conv.query_kernel_size - 1 - above, tap]
                    total = total + weight @ source
            return total if layer == conv.depth else F.leaky_relu(total, conv.negative_slope)

        for i, j in itertools.product(range(queries), range(keys)):
            if first[b][i] <= j <= last[b][i]:
                plain = scores[b, :, i, j] + (0 if bias is None else bias[b % bias.shape[0], :, i, j])
                out[b, :, i, j] = plain + pixel(conv.depth, i, j)
    return out


SMALL = {"heads": 2, "groups": 1, "head_width": 2, "width": 2}


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
        torch.testing.assert_close(logits(problem(call)), by_words(call), rtol=1e-11, atol=1e-11)


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


@pytest.mark.parametrize("rows", [2, 64], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("case", list(table()), ids=lambda case: f"{case.query_kernel}x{case.kernel}-{case.depth}-{case.bias}-{case.causal}-{case.visible}")  # fmt: skip
def test_tiles_equal_the_definition(case, rows, monkeypatch):
    monkeypatch.setattr(tiled_stack, "MOST_ROWS", rows)
    if rows == 2:
        monkeypatch.setattr(tiled_stack, "PIXELS", 1)
        monkeypatch.setattr(tiled_stack, "FEWEST_COLUMNS", 3)
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
            *(x[:, :, :stop] for x in (call.q, call.k, call.v)), call.conv,
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
        out = attention(*around, call.conv, bias=bias, visible=visible, backend=backend)
        torch.testing.assert_close(out[:, :, 5:14], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("number", range(len(STACKS)))
def test_chunks_that_bring_their_earlier_queries_equal_the_whole(number, backend):
    call = build(stack(number, queries=20, keys=20))
    whole, reach = call.attend(backend), call.conv.earlier_rows

    def chunk(start, stop):
        return attention(
            call.q[:, :, start:stop], call.k[:, :, :stop], call.v[:, :, :stop], call.conv,
            bias=call.bias, backend=backend,
        )  # fmt: skip

    for start, stop in ((10, 13), (13, 20)):
        rows = chunk(start - reach, stop)[:, :, reach:]
        torch.testing.assert_close(rows, whole[:, :, start:stop], rtol=1e-11, atol=1e-11)
        assert torch.allclose(chunk(start, stop), whole[:, :, start:stop]) == (reach == 0)


def test_dropout_is_the_same_in_both_passes(monkeypatch):
    monkeypatch.setattr(tiled_stack, "MOST_ROWS", 5)
    call = build(stack(0, queries=12, keys=12, head_width=12))
    weights = softmax_visible(logits(problem(call)))
    identity = torch.eye(12, dtype=torch.float64).expand_as(call.v)
    torch.manual_seed(5)
    dropped = tiled_stack.attend(replace(problem(call, dropout=0.4), v=identity)).detach()
    mask = dropped / weights.detach().clamp(min=1e-300)
    assert set(mask[weights > 0].round(decimals=6).tolist()) == {0.0, round(1 / 0.6, 6)}
    torch.manual_seed(5)
    out = tiled_stack.attend(problem(call, dropout=0.4))
    # Whatever is drawn in between, the backward pass draws what the forward pass drew.
    torch.manual_seed(6)
    leaves = list(call.leaves.values())
    ours = torch.autograd.grad(out.square().sum(), leaves)
    truth = torch.autograd.grad(((weights * mask) @ call.v).square().sum(), leaves)
    assert_equal(dict(enumerate(ours)), dict(enumerate(truth)))


def test_auto_takes_the_backend_that_can_and_the_others_say_why(monkeypatch):
    monkeypatch.setattr(native, "PROBLEM", None)
    call = build(stack(0), torch.float32)
    assert choose(problem(call)).__name__.endswith(".tiled")
    sentence = (
        r'backend="cpu" cannot run this call: .*two convolutions of 1×k, not 2 of 3×3; tiled and reference do'
    )
    with pytest.raises(ValueError, match=sentence):
        call.attend("cpu")


WRONG = {
    "kernels that differ": (
        {"project_weight": torch.zeros(3, 5, 2, 3)}, r"project_weight has shape .3, 5, 2, 3., expected .3, 5, 3, 3."),
    "middle": (
        {"middle": ((torch.zeros(5, 4, 3, 3), torch.zeros(5)),)},
        r"conv.middle_weight has shape .5, 4, 3, 3., expected .5, 5, 3, 3."),
}  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG)
def test_a_wrong_stack_is_refused(change, sentence):
    call = build(stack(0), torch.float32)
    call.conv = replace(call.conv, **change)
    with pytest.raises(ValueError, match=sentence):
        call.attend("auto")


def test_more_queries_than_keys_are_refused():
    call = build(stack(0, causal=False, queries=7, keys=5))
    with pytest.raises(
        ValueError, match="over 3 queries needs a key for every query, got 7 queries and 5 keys"
    ):
        call.attend("auto")
