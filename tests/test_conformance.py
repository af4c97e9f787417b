"""Every position encoding × every kernel × every direction has the properties that make the method exact."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from dape import (
    POSITIONS,
    Method,
    Places,
    PositionEncoding,
    ScoreProcessor,
    Visible,
    parse_method,
    randomized_positions,
)
from dape.models import Attention

HIDDEN, HEADS, KEY_VALUE_HEADS, TOKENS = 16, 4, 2, 9
KERNELS = (None, 1, 2, 3, 5)
METHODS = [parse_method(f"dape1x{k}-{name}" if k else name) for name in POSITIONS for k in KERNELS]


@dataclass(frozen=True)
class DeepMethod(Method):
    """A method whose scores go through three convolutions."""

    @property
    def name(self) -> str:
        return f"{super().name}-depth3"

    def build_scores(self, num_heads: int, **options: object) -> ScoreProcessor:
        return super().build_scores(num_heads, depth=3, **options)


METHODS += [parse_method(name) for name in ("dape3x3-kerple", "dape2x4-nope", "dape3x1-fire", "dape2x3-cope")]
METHODS += [DeepMethod("kerple", 3), DeepMethod("rope", 2), DeepMethod("fire", 3, 2)]
CAUSAL = [pytest.param(method, True, id=method.name) for method in METHODS]
# Rows that need no earlier queries can be computed from a cache of keys and values.
CACHED = [pytest.param(method, True, id=method.name) for method in METHODS if method.query_kernel_size == 1]
BIDIRECTIONAL = [
    pytest.param(method, False, id=f"{method.name}-both")
    for method in METHODS
    if POSITIONS[method.position].direction == "both"
]


@dataclass
class Cache:
    """Keys and values of earlier calls, in the order they came."""

    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        self.parts.append((key_states, value_states))
        return tuple(torch.cat(parts, 2) for parts in zip(*self.parts, strict=True))


class Model(torch.nn.Module):
    """One attention layer with its encoding, from embeddings to output."""

    def __init__(self, method, dtype=torch.float64, backend="auto") -> None:
        super().__init__()
        self.encoding: PositionEncoding = method.build_position(
            num_heads=HEADS, head_width=HIDDEN // HEADS, hidden_size=HIDDEN
        )
        scores = method.build_scores(HEADS, **({"width": 6} if method.kernel_size else {}))
        self.attention = Attention(
            HIDDEN, HEADS, scores=scores, num_key_value_heads=KEY_VALUE_HEADS, backend=backend
        )
        # Encodings that start at zero would hide mistakes.
        for parameter in self.encoding.parameters():
            torch.nn.init.uniform_(parameter, 0.1, 1.0)
        self.to(dtype)

    def forward(self, x: Tensor, places: Places, cache: Cache | None = None) -> Tensor:
        return self.attention(self.encoding.embed(x, places.queries), self.encoding, places, cache)


def tokens(batch: int = 1, count: int = TOKENS, dtype=torch.float64) -> Tensor:
    return torch.randn(batch, count, HIDDEN, dtype=dtype)


def in_chunks(model: Model, x: Tensor, positions: Tensor, sizes: list[int], *, consecutive: bool) -> Tensor:
    """The output of a causal model that is fed `sizes` tokens at a time."""
    cache, outputs, seen = Cache(), [], 0
    for size in sizes:
        rows = slice(seen, seen + size)
        places = Places(positions[:, rows], positions[:, : rows.stop], consecutive=consecutive)
        outputs.append(model(x[:, rows], places, cache))
        seen += size
    return torch.cat(outputs, 1)


@pytest.mark.parametrize(("method", "causal"), CAUSAL)
def test_nothing_leaks_from_the_future(method, causal):
    model, x = Model(method), tokens()
    before = model(x, Places.of(TOKENS))
    for t in range(1, TOKENS):
        changed = x.clone()
        changed[:, t] += torch.randn(HIDDEN, dtype=x.dtype)
        after = model(changed, Places.of(TOKENS))
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=0)
        assert not torch.equal(after[:, t:], before[:, t:])


@pytest.mark.parametrize(("method", "causal"), CAUSAL)
def test_a_row_does_not_depend_on_what_follows_it(method, causal):
    model, x = Model(method), tokens()
    whole = model(x, Places.of(TOKENS))
    for count in (1, 2, 5, 8):
        part = model(x[:, :count], Places.of(count))
        torch.testing.assert_close(part, whole[:, :count], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
@pytest.mark.parametrize(("method", "causal"), CACHED)
def test_prefill_equals_decoding_equals_any_chunking(method, causal, dtype, tolerance):
    model, x = Model(method, dtype), tokens(2, dtype=dtype)
    places = Places.of(TOKENS)
    whole = model(x, places)
    for sizes in ([1] * TOKENS, [4, 1, 1, 3], [2, 7]):
        chunked = in_chunks(model, x, places.queries, sizes, consecutive=True)
        torch.testing.assert_close(chunked, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("method", "causal"), CAUSAL + BIDIRECTIONAL)
def test_a_left_padded_batch_equals_each_row_alone(method, causal):
    model, x = Model(method), tokens(3)
    padding = torch.tensor([[0], [2], [5]])
    positions = (torch.arange(TOKENS) - padding).clamp(min=0)
    together = model(x, Places(positions, positions, causal, Visible(first=padding)))
    for row, hidden in enumerate(padding[:, 0].tolist()):
        alone = model(x[row : row + 1, hidden:], Places.of(TOKENS - hidden, causal=causal))
        torch.testing.assert_close(together[row : row + 1, hidden:], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("method", "causal"), CAUSAL + BIDIRECTIONAL)
def test_a_right_padded_batch_equals_each_row_alone(method, causal):
    model, x = Model(method), tokens(2)
    lengths = torch.tensor([[TOKENS], [6]])
    positions = torch.arange(TOKENS)[None]
    together = model(x, Places(positions, positions, causal, Visible(last=lengths - 1)))
    for row, length in enumerate(lengths[:, 0].tolist()):
        alone = model(x[row : row + 1, :length], Places.of(length, causal=causal))
        torch.testing.assert_close(together[row : row + 1, :length], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("method", "causal"), CAUSAL + BIDIRECTIONAL)
def test_positions_are_data(method, causal):
    """Told explicitly, consecutive positions give what the promise of them gives; relative encodings ignore a shift."""
    model, x = Model(method), tokens(2)
    places = Places.of(TOKENS, causal=causal)
    promised = model(x, places)
    told = model(x, replace(places, consecutive=False))
    torch.testing.assert_close(told, promised, rtol=1e-10, atol=1e-10)
    shifted = model(
        x, replace(places, queries=places.queries + 1000, keys=places.keys + 1000, consecutive=False)
    )
    if method.position in ("sinusoidal", "fire"):
        assert not torch.allclose(shifted, promised)
    else:
        torch.testing.assert_close(shifted, promised, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("method", "causal"), CAUSAL + BIDIRECTIONAL)
def test_randomized_positions(method, causal):
    """Positions may differ by batch entry; each entry gives what it gives alone, decoded or not."""
    model, x = Model(method), tokens(2)
    positions = randomized_positions(TOKENS, 500, batch=2, generator=torch.Generator().manual_seed(1))
    together = model(x, Places(positions, positions, causal))
    for row in range(2):
        entry = positions[row : row + 1]
        alone = model(x[row : row + 1], Places(entry, entry, causal))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-10, atol=1e-10)
        if causal and method.query_kernel_size == 1:
            decoded = in_chunks(model, x[row : row + 1], entry, [3] + [1] * (TOKENS - 3), consecutive=False)
            torch.testing.assert_close(decoded, alone, rtol=1e-10, atol=1e-10)
    if method.position not in ("nope", "cope"):
        assert not torch.allclose(together, model(x, Places.of(TOKENS, causal=causal)))


@pytest.mark.parametrize(("method", "causal"), CAUSAL)
def test_a_state_dict_carries_everything(method, causal):
    model, other, x = Model(method), Model(method), tokens()
    other.load_state_dict(model.state_dict())
    places = Places.of(TOKENS)
    torch.testing.assert_close(other(x, places), model(x, places), rtol=0, atol=0)


@pytest.mark.parametrize(("method", "causal"), CAUSAL + BIDIRECTIONAL)
def test_gradients_are_those_of_finite_differences(method, causal):
    model = Model(method, backend="tiled")
    names, parameters = zip(*model.named_parameters(), strict=True)
    x = tokens(1, 4).requires_grad_()

    def output(x, *values):
        return torch.func.functional_call(
            model, dict(zip(names, values, strict=True)), (x, Places.of(4, causal=causal))
        )

    assert torch.autograd.gradcheck(output, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize(("method", "causal"), CAUSAL + BIDIRECTIONAL)
def test_backends_agree_on_whole_layers(method, causal):
    model, x = Model(method), tokens(2)
    places = Places.of(TOKENS, causal=causal)
    outputs = {}
    for backend in ("reference", "tiled"):
        model.attention.backend = backend
        outputs[backend] = model(x, places)
    torch.testing.assert_close(outputs["tiled"], outputs["reference"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("method", "causal"), CAUSAL)
def test_tiles_of_queries_equal_the_whole(method, causal, monkeypatch):
    """A bias evaluated by tiles, three rows at a time, forward and backward."""
    model, x = Model(method), tokens(2).requires_grad_()
    places = replace(Places.of(TOKENS), consecutive=False)
    whole = model(x, places)
    whole_grads = torch.autograd.grad(whole.square().sum(), [x, *model.parameters()], allow_unused=True)
    monkeypatch.setattr("dape.ops.score_attention.api.TILE_NUMBERS", 3 * 2 * HEADS * TOKENS)
    monkeypatch.setattr("dape.ops.score_attention.tiled_stack.MOST_ROWS", 3)
    monkeypatch.setattr("dape.ops.score_attention.tiled_stack.FEWEST_COLUMNS", 2)
    tiled = model(x, places)
    tiled_grads = torch.autograd.grad(tiled.square().sum(), [x, *model.parameters()], allow_unused=True)
    torch.testing.assert_close(tiled, whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(tiled_grads, whole_grads, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, encoding in POSITIONS.items() if encoding.additive])
def test_distances_stay_exact_in_half_precision(name, dtype):
    """100,000 tokens apart, neighbours still differ by what float32 says, though the model is in half precision."""
    method = parse_method(name)
    exact, half = Model(method, torch.float32), Model(method, torch.float32)
    half.load_state_dict(exact.state_dict())
    half.to(dtype)
    exact.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    positions = torch.tensor([[0, 1, 2, 49_999, 99_998, 99_999, 100_000]])
    places = Places(positions[:, -1:], positions)
    q, k = torch.randn(1, HEADS, 1, 4).to(dtype), torch.randn(1, KEY_VALUE_HEADS, 7, 4).to(dtype)

    def bias(model, q, k):
        return model.encoding.bias(q, k, places, scale=0.5).tile(slice(0, 1), 7)

    got, expected = bias(half, q, k), bias(exact, q.float(), k.float())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
