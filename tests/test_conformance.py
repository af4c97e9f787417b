"""Every position encoding × every score processor × every direction has the properties that make a method exact."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dape import POSITIONS, SCORES, Positions, ScoreProcessor, ScoreProgram, Stage, conformance, parse_method
from dape.conformance import HEADS, KEY_VALUE_HEADS, TOKENS, Layer, failures, properties, same, tokens
from dape.methods import all_methods
from dape.positions import randomized_positions

# Beside the methods that are listed: even kernels, and options that change the program's shape.
FURTHER = ["dape1x2-kerple", "dape1x2-rope", "dape2x4-nope", "dape3x1-fire", "dape2x3-cope", "mta3x4-fox"]
OPTIONS = [
    "dape1x3-{}[depth=3]", "dape1x3-{}[groups=2]", "dape2x2-{}[depth=3,groups=4]",
    "dape1x3-{}[padding=causal]", "dape1x3-{}[residual=scores]", "dape1x3-{}[negative_slope=1]",
    "{}[normaliser=sink]", "{}[normaliser=ssmax]", "dape1x3-{}[normaliser=sink]",
    "mta2x3-{}[normaliser=ssmax]", "mta2x3-{}[mix_before=true,convolve_after=true]",
    "keyconv1x3-{}[groups=1]", "talking-{}[before=false]", "talking-{}[after=false]"
]  # fmt: skip
ENCODINGS = ("kerple", "rope", "fire", "fox")
LISTED = [method.name for method in all_methods()]
# Every encoding with the convolution, every form of bias alone, every shape of program with three forms of bias.
REPRESENTATIVES = [f"dape1x3-{name}" for name in POSITIONS]
REPRESENTATIVES += ["nope", "rope", "kerple", "fire", "fox", "cope", "transformer-xl"]
REPRESENTATIVES += [f"{name}-{encoding}" for name in SCORES if name != "plain" for encoding in ENCODINGS[::3]]
REPRESENTATIVES += [*FURTHER, "mta-rope", "rope[fraction=0.5]", "dape1x3-rope[scaling=linear,factor=4]"]
REPRESENTATIVES += [pattern.format(ENCODINGS[n % len(ENCODINGS)]) for n, pattern in enumerate(OPTIONS)]
REPRESENTATIVES += [f"dape1x3-{name}[bias_channels=false]" for name in ("kerple", "fox")]
REPRESENTATIVES += [
    "stickbreaking", "nope[normaliser=entmax]", "dape1x3-kerple[normaliser=asentmax]", "keyshift-rope",
    "keyshift-selective-rope", "rope-id", "pope", "selfextend[near=3]", "selfextend[near=4,group=2]",
    "selective-rope[bias=true,gate=true,silu=true]", "selective-rope[window=3]", "kerple[window=4]",
    "dape1x3-rope[window=4]", "keyshift-rope[window=3]"
]  # fmt: skip
# Everything else is `slow`.
PRODUCT = [*LISTED, *(pattern.format(name) for pattern in OPTIONS for name in ENCODINGS)]
PRODUCT += [f"dape1x3-{name}[bias_channels=false]" for name in POSITIONS if POSITIONS[name].additive]


def cases():
    for name in dict.fromkeys([*REPRESENTATIVES, *PRODUCT]):
        method = parse_method(name)
        marks = () if name in REPRESENTATIVES else pytest.mark.slow
        for prop, check, causal in properties(method):
            yield pytest.param(method, check, causal, id=f"{name}-{prop}", marks=marks)


@pytest.mark.parametrize(("method", "check", "causal"), list(cases()))
def test_every_method_has_every_property(method, check, causal):
    check(method, causal)


BY_LENGTH = [
    conformance.a_left_padded_batch_equals_each_row_alone,
    conformance.a_right_padded_batch_equals_each_row_alone,
    conformance.packed_documents_equal_each_alone,
    conformance.positions_may_differ_by_batch_entry,
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("check", BY_LENGTH, ids=lambda check: check.__name__)
def test_rotations_by_length_read_the_length_of_each_document(check, causal, monkeypatch):
    # Chunks are rotated by other lengths than the whole.
    monkeypatch.setattr(conformance, "in_chunks", lambda layer, x, at, *_, **__: layer(x, Positions(at, at)))
    check(parse_method("rope[scaling=dynamic,factor=4,original_length=3]"), causal)


COMPILED = ["dape1x3-kerple", "mta-fox"]
BUILT = [
    *COMPILED,
    "dape3x3-rope",
    *["rope", "cope", "talking-fire", "keyshift-rope", "stickbreaking", "diff-alibi", "dape1x3-t5[depth=3]"],
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of inductor itself
@pytest.mark.parametrize(
    ("compiler", "backend", "name"),
    [("aot_eager", "auto", name) for name in COMPILED]
    + [pytest.param("aot_eager", "auto", "dape3x3-rope", marks=pytest.mark.slow)]
    + [
        pytest.param("inductor", backend, name, marks=pytest.mark.slow)
        for backend in ("auto", "tiled")
        for name in BUILT
    ],
)
def test_a_compiled_layer_gives_the_same_outputs_gradients_and_decoding(compiler, backend, name):
    layer, x = Layer(parse_method(name), torch.float32, backend), tokens(2, dtype=torch.float32)
    positions, leaves = Positions.of(TOKENS), [x.requires_grad_(), *layer.parameters()]
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=compiler, dynamic=True)
    outputs = [call(x, positions) for call in (layer, compiled)]
    same(*outputs, 1e-5)
    wanted, found = (torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) for out in outputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        decoded = conformance.in_chunks(compiled, x, positions.queries, [4, 1, 4], consecutive=True)
    same(decoded, outputs[0], 1e-5)


class Widened(ScoreProcessor):
    """A newcomer's processor: linear layers that start as the identity, over three queries, before and after."""

    summary = "a newcomer's"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.mix = nn.Linear(num_heads, num_heads, bias=False)
        nn.init.eye_(self.mix.weight)
        self.taps = nn.Parameter(torch.zeros(num_heads, 1, 3, 3))

    def program(self) -> ScoreProgram:
        mix = Stage(self.mix.weight[:, :, None, None])
        return ScoreProgram((mix, Stage(self.taps, left=1, groups=self.taps.shape[0])), (mix,))


@pytest.mark.parametrize("position", ENCODINGS)
def test_a_registered_processor_has_every_property(position, monkeypatch):
    monkeypatch.setitem(SCORES, "widened", Widened)
    assert failures(parse_method(f"widened-{position}")) == {}


class Cheating(ScoreProcessor):
    """Reads the future."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.ones(num_heads, 1, 1, 3))

    def program(self) -> ScoreProgram:
        stage = Stage(self.taps, left=1, groups=self.taps.shape[0])
        return ScoreProgram((stage,), leak_future=True)


def test_a_processor_that_cheats_is_caught(monkeypatch):
    monkeypatch.setitem(SCORES, "cheating", Cheating)
    found = failures(parse_method("cheating-kerple"))
    assert {"nothing_leaks_from_the_future", "prefill_equals_decoding_equals_any_chunking"} <= set(found)


@pytest.mark.parametrize("name", [name for name, encoding in POSITIONS.items() if not encoding.absolute])
def test_relative_encodings_ignore_a_shift(name):
    layer, x = Layer(parse_method(name)), tokens(2)
    positions = replace(Positions.of(TOKENS), consecutive=False)
    shifted = replace(positions, queries=positions.queries + 1000, keys=positions.keys + 1000)
    same(layer(x, shifted), layer(x, positions), 1e-9)


@pytest.mark.parametrize(
    "name", [n for n in POSITIONS if n not in ("nope", "cope", "fox", "data-alibi", "selective-rope")]
)
def test_positions_matter(name):
    layer, x = Layer(parse_method(name)), tokens(2)
    positions = randomized_positions(TOKENS, 500, batch=2, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(layer(x, Positions(positions, positions)), layer(x, Positions.of(TOKENS)))


TILED = [*POSITIONS, *(f"{name}-kerple" for name in ("dape1x3", "dape3x3", "mta", "talking")), "mta-fox"]


@pytest.mark.parametrize("name", TILED)
def test_tiles_of_queries_equal_the_whole(name, monkeypatch):
    """A bias evaluated by tiles, three rows at a time, forward and backward."""
    layer, x = Layer(parse_method(name)), tokens(2).requires_grad_()
    positions = replace(Positions.of(TOKENS), consecutive=False)
    whole = layer(x, positions)
    whole_grads = torch.autograd.grad(whole.square().sum(), [x, *layer.parameters()], allow_unused=True)
    monkeypatch.setattr("dape.ops.score_attention.by_tiles.TILE_NUMBERS", 3 * 2 * HEADS * TOKENS)
    monkeypatch.setattr("dape.ops.score_attention.tiled.MOST_ROWS", 3)
    monkeypatch.setattr("dape.ops.score_attention.tiled.FEWEST_COLUMNS", 2)
    tiled = layer(x, positions)
    tiled_grads = torch.autograd.grad(tiled.square().sum(), [x, *layer.parameters()], allow_unused=True)
    same(tiled, whole)
    torch.testing.assert_close(tiled_grads, whole_grads, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    [name for name, encoding in POSITIONS.items() if encoding.additive and name not in ("fox", "data-alibi")],
)
def test_distances_stay_exact_in_half_precision(name, dtype):
    """100,000 tokens apart, neighbours still differ by what float32 says, though the model is in half precision."""
    method = parse_method(name)
    exact, half = Layer(method, torch.float32), Layer(method, torch.float32)
    half.load_state_dict(exact.state_dict())
    half.to(dtype)
    exact.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    keys = torch.tensor([[0, 1, 2, 49_999, 99_998, 99_999, 100_000]])
    positions = Positions(keys[:, -1:], keys)
    q, k = torch.randn(1, HEADS, 1, 4).to(dtype), torch.randn(1, KEY_VALUE_HEADS, 7, 4).to(dtype)

    def bias(model, q, k):
        return model.encoding.bias(q, k, positions, scale=0.5).tile(slice(0, 1), 7)

    got, expected = bias(half, q, k), bias(exact, q.float(), k.float())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
